"""Goal: the figures say what happened.
Method: a run of the small fleet, its figures counted a second time; a record changed by one unit.
"""

from dataclasses import replace

import numpy as np
import pytest

from serving.sim.fleet import NUM_WINDOWS, Fleet
from serving.sim.options import TargetOptions
from serving.sim.report import digest, make_report, planned_bound
from tests.serving.sim.small_fleet import FLEET, small_workload


def test_figures_of_a_run() -> None:
    options = replace(FLEET, target=TargetOptions((400.0, 4000.0, 9000.0, 9000.0), 8.0))
    workload = small_workload()
    record = Fleet(options, workload).run()
    report = make_report(options, workload, record)
    rows = [workload.trace.rows[row] for row in workload.rows]
    kept, classes, hits = 0, [0, 0], 0
    for at, row in enumerate(rows):
        which = int(row.num_prompt >= 16 * 1024)
        classes[which] += 1
        ttft_ms = (record.first_ns[at] - workload.arrivals_ns[at]) / 1e6
        itl_ms = (record.finish_ns[at] - record.first_ns[at]) / 1e6 / max(row.num_output - 1, 1)
        kept += ttft_ms <= (400, 4000)[which] and itl_ms <= 8
        hits += record.depths[at]
    assert 0.1 < report["kept"] < 0.99
    assert report["kept"] == pytest.approx(kept / len(rows))
    assert report["goodput_rps"] == pytest.approx(kept / workload.duration_s)
    assert report["hit_ratio"] == pytest.approx(hits / sum(len(row.blocks) for row in rows))
    assert report["hit_ratio"] <= report["hit_ratio_best"]
    over = report["throughput_over_balanced"]
    assert over == pytest.approx(report["goodput_rps"] / report["balanced_rps"])
    assert set(report["ttft_ms"]) == {"all", "under_16k", "16k_to_64k"}
    ttft_ms = (record.first_ns - workload.arrivals_ns) / 1e6
    assert report["ttft_ms"]["all"]["p90"] == pytest.approx(np.percentile(ttft_ms, 90))
    assert report["prefill_imbalance"] > 1 and report["decode_imbalance"] > 1
    assert report["simulated_s"] == record.finish_ns.max() / 1e9
    assert all(len(values) == NUM_WINDOWS for values in report["over_time"].values())
    assert np.sum(report["over_time"]["goodput_rps"]) * workload.duration_s / 60 == (
        pytest.approx(kept)
    )
    assert 0.3 < report["prefill_busy"] <= 1


def test_no_run_beats_the_bound() -> None:
    # Far more than can be served, and no limit on waiting.
    options = replace(FLEET, target=TargetOptions((1e9,) * 4, 1e9))
    workload = small_workload(rate_rps=200.0)
    report = make_report(options, workload, Fleet(options, workload).run())
    assert report["kept"] == 1
    assert 0.5 < report["completed_rps"] / report["balanced_rps"] < 1
    planned = planned_bound(options, workload)
    # Prefixes of prompts that are still being computed are not found.
    assert planned.rps > report["balanced_rps"]


def test_the_digest_sees_every_column() -> None:
    record = Fleet(FLEET, small_workload(duration_s=5.0)).run()
    digests = {digest(record)}
    for name in ("first_ns", "finish_ns", "prefill_workers", "decode_workers", "depths"):
        column = getattr(record, name).copy()
        column[-1] += 1
        digests.add(digest(replace(record, **{name: column})))
    assert len(digests) == 6
