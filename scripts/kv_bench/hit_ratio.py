"""Hit ratio on the Mooncake traces against the size of the cache, for each policy, with a plot."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from scripts.kv_bench.policies import POLICIES, hit_ratio
from serving.sim.traces import Trace
from serving.simulate import load_trace

SIZES = (1000, 2000, 4000, 8000, 16_000, 32_000, 64_000)
ENDLESS = 10**9
TRACES = ("conversation", "synthetic")

Curves = dict[str, dict[str, float]]
"""Per policy the hit ratio by the size in blocks, as text; `endless` is without a limit."""


def figures(traces: Path | None, plot: Path | None) -> dict[str, Any]:
    """`hit_ratio_NAME` for both traces of the folder `traces`; nothing without one."""
    if traces is None:
        return {}
    found: dict[str, Any] = {}
    for name in TRACES:
        trace = load_trace(traces / f"{name}_trace.jsonl")
        found[f"hit_ratio_{name}"] = curves(trace)
        print(_table(name, found[f"hit_ratio_{name}"]), flush=True)
    if plot is not None:
        draw({name: found[f"hit_ratio_{name}"] for name in TRACES}, plot)
    return found


def curves(trace: Trace, sizes: Iterable[int] = SIZES) -> Curves:
    """Every policy at every size, and the endless cache, which is the same for all."""
    prompts: list[Sequence[int]] = [row.blocks for row in trace.rows]
    endless = hit_ratio(prompts, POLICIES["lru"](ENDLESS))
    # Found by other means, from where each block comes first.
    assert abs(endless - trace.best_hit_ratio()) < 1e-12, (endless, trace.best_hit_ratio())
    found: Curves = {}
    for policy, make in POLICIES.items():
        found[policy] = {str(size): hit_ratio(prompts, make(size)) for size in sizes}
        found[policy]["endless"] = endless
    return found


def _table(name: str, found: Curves) -> str:
    sizes = list(found["lru"])
    lines = [f"{name:12}" + "".join(f"{size:>9}" for size in sizes)]
    for policy, ratios in found.items():
        lines.append(f"{policy:12}" + "".join(f"{ratios[size]:9.4f}" for size in sizes))
    return "\n".join(lines)


def draw(found: dict[str, Curves], path: Path) -> None:
    """Writes the picture; the ending of `path` chooses the format."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 4), layout="constrained")
    for axes, (name, policies) in zip(
        figure.subplots(1, len(found), squeeze=False)[0], found.items(), strict=True
    ):
        for policy, ratios in policies.items():
            sizes = [size for size in ratios if size != "endless"]
            axes.plot([int(size) for size in sizes], [ratios[s] for s in sizes], "o-", label=policy)
        endless = policies["lru"]["endless"]
        axes.axhline(endless, linestyle="--", color="grey", label=f"endless: {endless:.3f}")
        axes.set(title=f"Mooncake {name}", xlabel="blocks of 512 tokens", ylabel="hit ratio")
        axes.set_xscale("log")
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)
        axes.legend()
    figure.savefig(path)
