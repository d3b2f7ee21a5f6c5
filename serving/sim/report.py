"""Figures of a simulated run, as plain numbers.

The unit of the goodput is requests a second that kept the service level: the first token in the
time that is allowed for the length of their prompt, and the mean time between their tokens within
its limit. What came later than the run's length counts, as long as the request arrived within it.
"""

import hashlib
from collections.abc import Mapping
from typing import Any

import numpy as np

from serving.core.balance_prefill import CLASS_BOUNDS, NUM_CLASSES
from serving.sim.balanced import BalancedBound
from serving.sim.fleet import NUM_WINDOWS, FleetRecord
from serving.sim.options import FleetOptions
from serving.sim.workload import Workload

CLASS_NAMES = ("under_16k", "16k_to_64k", "64k_to_256k", "from_256k")
PERCENTILES = (50, 90, 99)


def digest(record: FleetRecord) -> str:
    """32 hex digits that change with any time, worker or cache hit of any request."""
    total = hashlib.sha256()
    for column, dtype in (
        (record.first_ns, "<i8"),
        (record.finish_ns, "<i8"),
        (record.prefill_workers, "<i4"),
        (record.decode_workers, "<i4"),
        (record.depths, "<i4"),
        (record.attempts, "<i4"),
    ):
        total.update(np.ascontiguousarray(column, dtype).tobytes())
    return total.hexdigest()[:32]


def planned_bound(options: FleetOptions, workload: Workload) -> BalancedBound:
    """The bound if every prefix that came before is found; known before a run."""
    return _bound(options, workload, workload.trace.best_depths[workload.rows])


def make_report(options: FleetOptions, workload: Workload, record: FleetRecord) -> dict[str, Any]:
    """All figures of a run.

    Times are in milliseconds. `balanced_rps` is the rate at which the fleet would do the work of
    this run, cache hits as they were, if it were spread with no variance and no idleness, and
    `throughput_over_balanced` the goodput over that. Imbalances are the load of the slowest worker
    over the mean one: of prefill the mean over windows of the run, of decode over steps of a unit.
    """
    columns = _Columns(workload)
    ttft_ms = (record.first_ns - workload.arrivals_ns) / 1e6
    num_gaps = columns.num_output - 1
    itl_ms = (record.finish_ns - record.first_ns) / 1e6 / np.maximum(num_gaps, 1)
    is_first_right = ttft_ms <= np.array(options.target.ttft_ms)[columns.classes]
    is_kept = is_first_right & (itl_ms <= options.target.itl_ms)
    bound = _bound(options, workload, record.depths)
    goodput = float(is_kept.sum()) / workload.duration_s
    num_blocks = max(int(columns.num_blocks.sum()), 1)
    best = workload.trace.best_depths[workload.rows]
    end_s = float(record.finish_ns.max()) / 1e9
    return {
        "digest": digest(record),
        "num_requests": len(workload),
        "offered_rps": workload.rate_rps,
        "completed_rps": len(workload) / max(end_s, workload.duration_s),
        "goodput_rps": goodput,
        "kept": float(is_kept.mean()),
        "balanced_rps": bound.rps,
        "balanced_prefill_rps": bound.prefill_rps,
        "balanced_decode_rps": bound.decode_rps,
        "throughput_over_balanced": goodput / bound.rps,
        "ttft_ms": _by_class(ttft_ms, columns.classes),
        "itl_ms": _by_class(itl_ms[num_gaps > 0], columns.classes[num_gaps > 0]),
        "hit_ratio": int(record.depths.sum()) / num_blocks,
        "hit_ratio_best": int(best.sum()) / num_blocks,
        "prefill_imbalance": _prefill_imbalance(record),
        "decode_imbalance": float(record.decode_imbalance.mean()),
        "prefill_busy": _prefill_busy(record, workload),
        "restarts": int((record.attempts - 1).sum()),
        "simulated_s": end_s,
        "over_time": _over_time(record, workload, is_kept),
    }


class _Columns:
    """Lengths of the requests of a workload, [M] int64 each."""

    def __init__(self, workload: Workload) -> None:
        trace, rows = workload.trace, workload.rows
        self.num_prompt = np.array([row.num_prompt for row in trace.rows])[rows]
        self.num_output = np.array([row.num_output for row in trace.rows])[rows]
        self.num_blocks = np.array([len(row.blocks) for row in trace.rows])[rows]
        self.classes = np.searchsorted(CLASS_BOUNDS, self.num_prompt, "right")


def _bound(options: FleetOptions, workload: Workload, depths: np.ndarray) -> BalancedBound:
    columns = _Columns(workload)
    num_cached = np.minimum(depths * workload.trace.block_tokens, columns.num_prompt - 1)
    return BalancedBound.of(options, columns.num_prompt, num_cached, columns.num_output)


def _by_class(times_ms: np.ndarray, classes: np.ndarray) -> dict[str, dict[str, float]]:
    """Percentiles over all requests and over those of each class that has any."""
    found: dict[str, dict[str, float]] = {}
    groups = {"all": np.ones(len(classes), bool)}
    groups |= {CLASS_NAMES[which]: classes == which for which in range(NUM_CLASSES)}
    for name, is_in in groups.items():
        if is_in.any():
            values = np.percentile(times_ms[is_in], PERCENTILES)
            found[name] = {f"p{p}": float(v) for p, v in zip(PERCENTILES, values, strict=True)}
    return found


def _prefill_imbalance(record: FleetRecord) -> float:
    busy = record.prefill_busy_ms[:NUM_WINDOWS]
    used = busy[busy.sum(axis=1) > 0]
    return float((used.max(axis=1) / used.mean(axis=1)).mean()) if len(used) else 1.0


def _prefill_busy(record: FleetRecord, workload: Workload) -> float:
    """The share of the run in which a prefill worker had chunks, mean over workers."""
    return (
        float(record.prefill_busy_ms[:NUM_WINDOWS].mean())
        * NUM_WINDOWS
        / (workload.duration_s * 1e3)
    )


def _over_time(
    record: FleetRecord, workload: Workload, is_kept: np.ndarray
) -> Mapping[str, list[float]]:
    """One value per window of the run."""
    window_s = workload.duration_s / NUM_WINDOWS
    windows = np.minimum(workload.arrivals_ns / 1e9 / window_s, NUM_WINDOWS - 1).astype(np.int64)
    kept = np.bincount(windows, is_kept, NUM_WINDOWS) / window_s
    ttft_s = (record.first_ns - workload.arrivals_ns) / 1e9
    count = np.maximum(np.bincount(windows, minlength=NUM_WINDOWS), 1)
    busy = record.prefill_busy_ms[:NUM_WINDOWS] / (window_s * 1e3)
    return {
        "time_s": [(at + 0.5) * window_s for at in range(NUM_WINDOWS)],
        "goodput_rps": kept.tolist(),
        "ttft_mean_s": (np.bincount(windows, ttft_s, NUM_WINDOWS) / count).tolist(),
        "prefill_busy_mean": busy.mean(axis=1).tolist(),
        "prefill_busy_most": busy.max(axis=1).tolist(),
        "prefill_busy_least": busy.min(axis=1).tolist(),
        "decode_running": record.decode_running[:NUM_WINDOWS].tolist(),
    }
