"""A picture of a run: goodput, waiting, and how evenly the pools were loaded, over time."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any


def draw(report: Mapping[str, Any], title: str, path: Path) -> None:
    """Writes the picture; the ending of `path` chooses the format (png, svg, pdf).

    Args:
        report: of `report.make_report`.

    Raises:
        ImportError: matplotlib, an optional dependency, is not installed.
        ValueError: the ending names no format.
        OSError: the file cannot be written.
    """
    # Not through pyplot, which keeps state and looks for a display.
    from matplotlib.figure import Figure

    over = report["over_time"]
    time_s = over["time_s"]
    figure = Figure(figsize=(9, 8), layout="constrained")
    figure.suptitle(title)
    rates, waits, loads, running = figure.subplots(4, 1, sharex=True)
    rates.plot(time_s, over["goodput_rps"], label="goodput")
    rates.axhline(report["balanced_rps"], linestyle="--", color="grey", label="balanced bound")
    rates.set_ylabel("requests / s")
    rates.legend()
    waits.plot(time_s, over["ttft_mean_s"])
    waits.set_ylabel("mean TTFT, s")
    loads.plot(time_s, over["prefill_busy_mean"], label="mean worker")
    loads.fill_between(
        time_s, over["prefill_busy_least"], over["prefill_busy_most"], alpha=0.3, label="all"
    )
    loads.set_ylabel("prefill busy")
    loads.legend()
    running.plot(time_s, over["decode_running"])
    running.set_ylabel("decoding / unit")
    running.set_xlabel("time, s")
    for axes in (rates, waits, loads, running):
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)
    figure.savefig(path)
