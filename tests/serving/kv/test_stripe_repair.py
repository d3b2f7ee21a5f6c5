"""Goal: what a plan names is made, byte for byte, at the rate that is allowed; the rest is left.

Method: a repair by hand over nodes in threads. Repairs of a running tier are in its own tests.
"""

import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from serving.kv.fragments import StripeCodec
from serving.kv.segment_index import Row
from serving.kv.stripe_calls import StripeCalls
from serving.kv.stripe_repair import RepairOptions, StripeRepair
from serving.kv.stripes import Coding, StripePlan
from serving.transport.driver import SystemClock
from tests.serving.kv.storage_parts import payload, running_nodes, wait_until
from tests.serving.kv.test_node_links import listening

CODING = Coding(3, 2)
STRIPE = "ab" * 16
PAYLOADS = [payload(n, 4000) for n in range(3)]
PLACES = {f"n{number:02d}": number for number in range(5)}
OPTIONS = RepairOptions(every_s=1000.0, settle_s=0.0)


def test_what_is_planned_is_made_as_it_was(tmp_path: Path) -> None:
    codec = StripeCodec(CODING)
    made = codec.encode_stripe(STRIPE, [Row.of(data) for data in PAYLOADS], PAYLOADS)
    data = {node: (made[n][0].encode(), made[n][1]) for node, n in PLACES.items()}
    plans: list[tuple[str, Mapping[str, int], StripePlan]] = []
    placed: list[tuple[str, Mapping[str, int]]] = []
    with running_nodes(tmp_path, 7) as nodes, listening(nodes) as listener:
        calls = StripeCalls(listener.links, CODING, SystemClock())
        calls.scatter(STRIPE, data, PLACES, 5, 20.0, 20.0)

        def note(stripe: str, places: Mapping[str, int]) -> None:
            placed.append((stripe, dict(places)))

        def repair_of(options: RepairOptions) -> StripeRepair:
            return StripeRepair(calls, codec, lambda: plans, note, SystemClock(), options)

        repair = repair_of(OPTIONS)
        left = {node: n for node, n in PLACES.items() if n not in (0, 4)}
        plans[:] = [(STRIPE, left, StripePlan(((0, "n05"), (4, "n06")), ("n00",), 3))]
        assert repair.run_once() == 2 and (repair.num_made, repair.num_missing) == (2, 1)
        assert placed == [(STRIPE, {"n05": 0, "n06": 4})]
        for node, number in (("n05", 0), ("n06", 4)):
            (file,) = nodes.files(node)
            assert file.read_bytes() == made[number][0].encode() + b"".join(made[number][1])
        wait_until(lambda: not nodes.files("n00"), "the one that is not needed is removed")
        # From a node that leaves: a copy, for which one source is enough.
        plans[:] = [(STRIPE, {"n01": 1}, StripePlan(((1, "n00"),), (), 1))]
        assert repair.run_once() == 1
        assert nodes.files("n00")[0].read_bytes() == nodes.files("n01")[0].read_bytes()
        # Too little to make anything of.
        plans[:] = [(STRIPE, {"n01": 1, "n02": 2}, StripePlan(((3, "n04"),), (), 1))]
        assert repair.run_once() == 0 and repair.num_missing == 1

        slow = repair_of(replace(OPTIONS, bytes_per_s=40_000))
        plans[:] = [(STRIPE, left, StripePlan(((0, "n05"),), (), 1))] * 5
        began = time.monotonic()
        # Four fragments of four kilobytes each time.
        assert slow.run_once() == 5 and time.monotonic() - began > 0.5
        plans.clear()
        slow.start()
        slow.close()
