"""Goal: requests pass through the fleet as they should, with failures and without, the same way
for the same seed.
Method: a single request against times by hand; a busy small fleet under every policy, with links,
stores and failures turned on one by one.
"""

from dataclasses import replace

import numpy as np
import pytest

from serving.sim.fleet import Fleet, FleetRecord
from serving.sim.options import (
    FailureOptions,
    FleetOptions,
    LinkOptions,
    StoreOptions,
)
from serving.sim.policies import POLICIES
from serving.sim.report import digest
from serving.sim.traces import read_trace
from serving.sim.workload import Workload, make_workload
from tests.serving.sim.small_fleet import FLEET, small_trace, small_workload


def run(
    options: FleetOptions = FLEET,
    workload: Workload | None = None,
    policy: str = "production",
    seed: int = 1,
) -> FleetRecord:
    return Fleet(options, workload or small_workload(), policy, seed).run()


def alone(num_images: int = 0) -> Workload:
    lines = [
        "TIMESTAMP,NumImages,ContextTokens,GeneratedTokens",
        f"2023-01-01 00:00:00,{num_images},10000,36",
    ]
    return make_workload(read_trace(lines, "one"), np.random.default_rng(1))


STEADY = replace(FLEET, decode=replace(FLEET.decode, tokens_spread=0.0))


def test_a_request_alone() -> None:
    record = run(STEADY, alone())
    p, d, links = STEADY.prefill, STEADY.decode, STEADY.links
    work_ms = p.token_ms * 10_000 + p.pair_ms * 10_000**2 / 2
    # It does not fit into one step of 200 ms.
    assert p.step_ms < work_ms + p.base_ms < 2 * p.step_ms
    assert record.first_ns[0] == pytest.approx((work_ms + 2 * p.base_ms) * 1e6, abs=10)
    num_bytes = 10_001 * links.kv_bytes_per_token + links.state_bytes
    transfer_ns = num_bytes / links.machine_gb_s
    # 35 tokens at 3.5 a step, with the context growing as they come.
    context = 10_001 * 10 + 3.5 * 45
    decode_ms = 10 * (d.base_ms + d.row_ms) + context * d.context_ms
    expected = record.first_ns[0] + transfer_ns + decode_ms * 1e6
    assert record.finish_ns[0] == pytest.approx(expected, abs=20)


def test_links_between_and_images_take_their_time() -> None:
    plain = run(STEADY, alone())
    far = replace(STEADY, links=LinkOptions(between_gb_s=1.0, between_ms=7.0))
    delay = run(far, alone()).finish_ns[0] - plain.finish_ns[0]
    num_bytes = 10_001 * far.links.kv_bytes_per_token + far.links.state_bytes
    assert delay == pytest.approx(7e6 + num_bytes - num_bytes / 50, rel=1e-6)
    seeing = replace(STEADY, workers="8p8d1v")
    waited = run(seeing, alone(num_images=3)).first_ns[0] - plain.first_ns[0]
    assert waited == pytest.approx(3 * seeing.vision.image_tokens * seeing.vision.token_ms * 1e6)


def test_a_stored_prefix_is_fetched_and_not_computed() -> None:
    line = '{"timestamp": %d, "input_length": 4096, "output_length": 1, "hash_ids": %s}'
    blocks = list(range(8))
    trace = read_trace([line % (0, blocks), line % (9000, blocks)], "two")
    options = replace(STEADY, store=StoreOptions(fetch_ms=3.0, host_tokens=0))
    workload = make_workload(trace, np.random.default_rng(1))
    record = run(options, workload)
    assert record.depths.tolist() == [0, 8]
    took_ms = (record.first_ns - workload.arrivals_ns) / 1e6
    links, p = options.links, options.prefill
    fetched_ms = 3.0 + (4095 * links.kv_bytes_per_token + links.state_bytes) / 50 / 1e6
    computed_ms = p.base_ms + p.token_ms + p.pair_ms * 4095.5
    assert took_ms[1] == pytest.approx(fetched_ms + computed_ms, abs=1e-4)
    # From host memory there is nothing to fetch, if the request comes to the same worker.
    here = run(replace(STEADY, workers="1p1d"), workload)
    took_ms = (here.first_ns - workload.arrivals_ns) / 1e6
    assert took_ms[1] == pytest.approx(computed_ms, abs=1e-4)


@pytest.mark.parametrize("policy", POLICIES)
def test_every_policy_serves_everything(policy: str) -> None:
    workload = small_workload()
    record = run(policy=policy, workload=workload)
    assert (record.first_ns > workload.arrivals_ns).all()
    assert (record.finish_ns >= record.first_ns).all()
    assert set(record.prefill_workers.tolist()) == set(range(8))
    assert (record.attempts == 1).all()
    best = workload.trace.best_depths[workload.rows]
    assert (record.depths <= best).all()
    assert digest(record) == digest(run(policy=policy, workload=small_workload()))


def test_another_seed_is_another_run() -> None:
    assert digest(run()) != digest(run(seed=2))


def test_an_endless_store_that_is_written_at_once_has_every_hit() -> None:
    workload = small_workload()
    record = run(replace(FLEET, store=StoreOptions(visible="dispatched")), workload)
    np.testing.assert_array_equal(record.depths, workload.trace.best_depths[workload.rows])
    whole = make_workload(small_trace(), np.random.default_rng(1))
    record = run(replace(FLEET, store=StoreOptions(visible="dispatched")), whole)
    assert record.depths.sum() / sum(len(row.blocks) for row in whole.trace.rows) == (
        whole.trace.best_hit_ratio()
    )


def test_a_bounded_store_has_fewer_hits() -> None:
    workload = small_workload()
    endless = run(workload=workload).depths.sum()
    small = run(replace(FLEET, store=StoreOptions(tokens_max=512 * 400)), workload).depths.sum()
    assert 0 < small < endless


def test_more_requests_than_decode_room_wait_and_are_served() -> None:
    tight = replace(FLEET, decode=replace(FLEET.decode, requests_max=2))
    workload = small_workload()
    waited = run(tight, workload).first_ns - run(workload=workload).first_ns
    assert waited.max() > 1e9


def test_what_dies_is_served_elsewhere() -> None:
    failures = FailureOptions(prefill_mean_s=10.0, decode_mean_s=10.0, repair_s=3.0, detect_ms=200)
    options = replace(FLEET, failures=failures)
    workload = small_workload()
    record = run(options, workload)
    assert (record.attempts > 1).sum() > 5
    assert (record.finish_ns >= record.first_ns).all()
    assert (record.first_ns > workload.arrivals_ns).all()
    assert digest(record) == digest(run(options, workload))


def test_a_cut_network_holds_contexts_back() -> None:
    failures = FailureOptions(network_mean_s=1e-3, network_s=40.0)
    plain, cut = run(STEADY, alone()), run(replace(STEADY, failures=failures), alone())
    np.testing.assert_array_equal(plain.first_ns, cut.first_ns)
    assert cut.finish_ns[0] - plain.finish_ns[0] > 30e9


def test_a_silent_store_has_nothing_and_keeps_nothing() -> None:
    workload = small_workload()
    failures = FailureOptions(store_mean_s=1e-3, store_s=1e4)
    assert not run(replace(FLEET, failures=failures), workload).depths.any()


@pytest.mark.parametrize("seed", range(8))
def test_everything_is_served_although_all_workers_keep_dying(seed: int) -> None:
    failures = FailureOptions(prefill_mean_s=3.0, decode_mean_s=3.0, repair_s=1.0, detect_ms=500)
    options = replace(FLEET, workers="2p2d", failures=failures)
    workload = small_workload(10.0, 10.0, seed)
    record = run(options, workload, seed=seed)
    assert (record.finish_ns >= record.first_ns).all()
    assert record.attempts.max() > 1


@pytest.mark.parametrize(
    ("options", "workload", "expected"),
    [
        (replace(FLEET, decode=replace(FLEET.decode, context_max=9_000)), None, "context_max: rec"),
        (FLEET, alone(num_images=1), "workers: received '8p8d'; expected vision workers too"),
    ],
)
def test_what_cannot_be_served_is_refused(
    options: FleetOptions, workload: Workload | None, expected: str
) -> None:
    with pytest.raises(ValueError, match=expected):
        Fleet(options, workload or small_workload())
