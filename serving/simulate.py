"""`python -m serving simulate`: a trace, a fleet and a policy in; figures out.

The input is read and checked as a whole before anything is simulated. The clock is handed in: it
measures how long the run took, and is the only thing here that differs from run to run.
"""

import importlib.util
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from serving.clock import Clock, s_of_ns
from serving.config import CONFIGS_DIR
from serving.cost_file import read_cost_file
from serving.sim.fleet import Fleet
from serving.sim.options import FleetOptions
from serving.sim.policies import POLICIES
from serving.sim.report import make_report, planned_bound
from serving.sim.traces import Trace, TraceError, read_trace
from serving.sim.workload import Workload, make_workload
from sharding.config_file import ConfigError, load, override, override_from_text

_HEADER = ("ms", "TTFT p50", "p90", "p99", "ITL p50", "p90", "p99")

DEFAULT_FLEET = CONFIGS_DIR / "fleet_h200.toml"


@dataclass(frozen=True, slots=True)
class SimulateOptions:
    """What the command line says.

    Attributes:
        trace: file to replay.
        config: fleet file; None for `DEFAULT_FLEET`.
        changes: texts such as `links.between_ms=2`, which change the file.
        costs: cost file (`scripts/fit_cost.py`) in place of the step times of the fleet file.
        workers: such as `64p64d`; None for those of the file.
        rate_rps: requests a second; None for those of the trace, or by `load`.
        load: the rate as a share of what the fleet could serve if balanced perfectly.
        duration_s: length of the run; None for all of the trace.
        report, plot: files to write; None for none.
    """

    trace: Path
    config: Path | None = None
    changes: tuple[str, ...] = ()
    costs: Path | None = None
    workers: str | None = None
    policy: str = "production"
    seed: int = 0
    rate_rps: float | None = None
    load: float | None = None
    duration_s: float | None = None
    report: Path | None = None
    plot: Path | None = None


def simulate(given: SimulateOptions, clock: Clock) -> dict[str, Any]:
    """Runs, writes what is to be written and returns the figures.

    Raises:
        ConfigError: an input that cannot be used, before the run; a file that cannot be written.
    """
    costs = () if given.costs is None else read_cost_file(given.costs).changes()
    options = fleet_options(given.config, (*costs, *given.changes), given.workers)
    if given.policy not in POLICIES:
        raise ConfigError(
            f"policy: received {given.policy!r}; expected one of {', '.join(POLICIES)}"
        )
    if given.plot is not None and importlib.util.find_spec("matplotlib") is None:
        raise ConfigError("--plot needs matplotlib: pip install 'deepinfer-jax[plot]'")
    for path in (given.report, given.plot):
        if path is not None and not path.absolute().parent.is_dir():
            raise ConfigError(f"{path}: there is no folder to write it to")
    trace = load_trace(given.trace)
    started_ns = clock.now_ns()
    try:
        workload = scaled_workload(
            options, trace, given.seed, given.rate_rps, given.load, given.duration_s
        )
        fleet = Fleet(options, workload, given.policy, given.seed)
    except ValueError as error:
        raise ConfigError(str(error)) from None
    record = fleet.run()
    report = {"policy": given.policy, "seed": given.seed, "workers": options.workers}
    report |= make_report(options, workload, record)
    report["wall_s"] = s_of_ns(clock.now_ns() - started_ns)
    _write(given, report)
    return report


def fleet_options(
    config: Path | None, changes: tuple[str, ...] = (), workers: str | None = None
) -> FleetOptions:
    """The fleet of a file, changed by `--set` and `--workers`.

    Raises:
        ConfigError: the file or a change cannot be used.
    """
    options = override_from_text(load(config or DEFAULT_FLEET, FleetOptions), changes)
    return options if workers is None else override(options, {"workers": workers})


def load_trace(path: Path) -> Trace:
    """Reads a trace file.

    Raises:
        ConfigError: it cannot be read, or a row of it is broken.
    """
    try:
        with path.open(encoding="utf-8") as lines:
            return read_trace(lines, str(path))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read: {error}") from None
    except TraceError as error:
        raise ConfigError(str(error)) from None


def scaled_workload(
    options: FleetOptions,
    trace: Trace,
    seed: int,
    rate_rps: float | None = None,
    load: float | None = None,
    duration_s: float | None = None,
) -> Workload:
    """The trace at a rate, or at a share `load` of what the fleet could serve at best.

    Raises:
        ValueError: a rate, load or length that cannot be, or both a rate and a load.
    """
    if load is not None:
        if rate_rps is not None:
            raise ValueError(f"rate {rate_rps} and load {load}: expected at most one of them")
        rate_rps = rate_of_load(options, trace, load)
    return make_workload(trace, np.random.default_rng(seed), rate_rps, duration_s)


def rate_of_load(options: FleetOptions, trace: Trace, load: float) -> float:
    """Requests a second that are a share `load` of what the fleet could serve at best.

    Raises:
        ValueError: the load is not above 0.
    """
    if not load > 0:
        raise ValueError(f"load: received {load}; expected a number above 0")
    # The trace itself, once, tells what the mean request is.
    return load * planned_bound(options, make_workload(trace, np.random.default_rng())).rps


def summary(report: dict[str, Any]) -> str:
    """The main figures for a person, some lines."""
    first, gaps = report["ttft_ms"], report["itl_ms"]
    lines = [
        f"{report['policy']} on {report['workers']}: {report['num_requests']:,} requests, "
        f"{report['offered_rps']:.1f}/s offered, {report['simulated_s']:.0f} s simulated in "
        f"{report['wall_s']:.0f} s",
        f"goodput {report['goodput_rps']:.1f}/s, {report['throughput_over_balanced']:.3f} of the "
        f"balanced bound {report['balanced_rps']:.1f}/s (prefill "
        f"{report['balanced_prefill_rps']:.1f}, decode {report['balanced_decode_rps']:.1f}); "
        f"{100 * report['kept']:.1f} % kept the service level",
        f"hit ratio {report['hit_ratio']:.3f} of at best {report['hit_ratio_best']:.3f}; "
        f"imbalance of prefill {report['prefill_imbalance']:.2f}, of decode "
        f"{report['decode_imbalance']:.2f}; {report['restarts']} restarts",
        " ".join(f"{name:>{12 if at == 0 else 9}}" for at, name in enumerate(_HEADER)),
    ]
    for name, ttft in first.items():
        values = [*ttft.values(), *gaps.get(name, {}).values()]
        lines.append(f"{name:>12} " + " ".join(f"{value:9.1f}" for value in values))
    lines.append(f"digest {report['digest']}")
    return "\n".join(lines)


def _write(given: SimulateOptions, report: dict[str, Any]) -> None:
    try:
        if given.report is not None:
            given.report.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
        if given.plot is not None:
            from serving.sim.plots import draw

            title = f"{given.policy}, {report['workers']}, {given.trace.name}"
            draw(report, title, given.plot)
    except (OSError, ValueError) as error:
        raise ConfigError(f"the result cannot be written: {error}") from None
