"""Goal: a read is over with the first answers that are enough, and a write when enough is on disks.

Method: nodes in threads, of which some have ended and nobody knows it yet.
"""

import time
from pathlib import Path

from serving.kv import storage_wire
from serving.kv.fragments import StripeCodec
from serving.kv.segment_index import Row
from serving.kv.stripe_calls import Scattered, StripeCalls
from serving.kv.stripes import Coding
from serving.transport.driver import SystemClock
from tests.serving.kv.storage_parts import payload, running_nodes
from tests.serving.kv.test_node_links import listening

CODING = Coding(3, 2)
STRIPE = "ab" * 16
PAYLOADS = [payload(n, 400) for n in range(4)]
PLACES = {f"n{number:02d}": number for number in range(5)}


def test_reads_and_writes_of_many_nodes(tmp_path: Path) -> None:
    codec = StripeCodec(CODING)
    made = codec.encode_stripe(STRIPE, [Row.of(data) for data in PAYLOADS], PAYLOADS)
    data = {node: (made[n][0].encode(), made[n][1]) for node, n in PLACES.items()}
    with running_nodes(tmp_path, 5) as nodes, listening(nodes) as listener:
        calls = StripeCalls(listener.links, CODING, SystemClock())
        assert calls.scatter(STRIPE, data, PLACES, 5, 20.0, 20.0) == Scattered(PLACES, {})
        gathered = calls.gather({STRIPE: [1, 3]}, {STRIPE: PLACES}, 20.0)
        for number in (1, 3):
            pieces = gathered.pieces[STRIPE, number]
            assert len(pieces) == 3 and codec.decode(pieces) == PAYLOADS[number]
        # Whoever claims another fragment than the one it was given is not believed.
        other = {**PLACES, "n00": 1, "n01": 0}
        gathered = calls.gather({STRIPE: [1]}, {STRIPE: other}, 20.0)
        assert set(gathered.pieces[STRIPE, 1]) == {2, 3, 4}
        whole = calls.copy(STRIPE, PLACES, 5, 20.0)
        assert {n: (head, pieces) for n, (head, pieces) in whole.items()} == dict(enumerate(made))
        file = nodes.files("n02")[0]
        damaged = file.read_bytes()[:-1] + b"?"
        file.write_bytes(damaged)
        assert set(calls.copy(STRIPE, PLACES, 5, 20.0)) == {0, 1, 3, 4}
        gathered = calls.gather({STRIPE: [3]}, {STRIPE: {"n02": 2, "n03": 3, "n04": 4}}, 20.0)
        assert gathered.damaged == {("n02", STRIPE)} and set(gathered.pieces[STRIPE, 3]) == {3, 4}
        nodes.stop("n00")
        began = time.monotonic()
        assert len(calls.gather({STRIPE: [0]}, {STRIPE: PLACES}, 20.0).pieces[STRIPE, 0]) == 3
        done = calls.scatter(STRIPE, data, PLACES, 4, 20.0, 0.1)
        assert set(done.placed) == set(PLACES) - {"n00"} and set(done.refused) == {"n00"}
        answers = calls.ask(PLACES, lambda: storage_wire.Check(0), 2.0)
        assert set(answers) == set(PLACES) - {"n00"}
        assert time.monotonic() - began < 15
