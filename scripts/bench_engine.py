"""What the engine adds to the compiled steps, and what its ways of running them are worth.

Four parts, each with two things in turn on the same machine in one run, and one of times:

- `raw`: for 1, 8 and 32 sequences, the compiled decode step alone in a loop, waiting for each
  result, and the engine's whole decode step around it (plan, pack, submit, collect, commit), in the
  same bucket at nearly the same context: `engine_over_raw_N`.
- `drafts`: tokens per second with drafts over without, at 1, 8 and 32 sequences
  (`dspark_speedup_N`), and with as many drafts verified as are worth their time over always all
  (`scheduled_over_fixed_32`).
- `invariance`: time per token of batch invariant steps over that of others, at 1, 8 and 32
  sequences: `batch_invariant_cost_N`; `batch_invariant_cost` is the one for 32.
- `grammar`: host time of a constrained token: `grammar_us_per_token`.
- `host`: time of the host per decode step of a pretended device, with five drafts a sequence:
  `host_ms_256` and `host_ms_1024`.

A quotient is the median over alternating rounds of the quotients of their times, so a machine whose
speed drifts shifts both. `--json FILE` is written after each part, beside it a table with the
ending `.md`; figures of parts that did not run stay as the file had them.

    python scripts/bench_engine.py [--model DIR] [--parts P ...] [--rounds N] [--json FILE]
"""

import argparse
import functools
import json
import os
import platform
import random
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from scripts import bench_grammar, bench_host
from scripts.bench_pairs import Way, speed_ratio
from scripts.tiny_model.evaluation import make_cases
from scripts.tiny_model.prompts import Codec
from serving.cluster import make_engine
from serving.config import DEFAULT_MODEL_DIR, ServingConfig, load_config
from serving.core.buckets import StepKind
from serving.core.request import Request, SamplingParams
from serving.core.step_plan import StepPlan
from serving.engine import packing
from serving.engine.engine import Engine, run_step
from serving.engine.jax_executor import JaxExecutor
from serving.loading import LoadedModel, load_model
from sharding.config_file import ConfigError, override

BATCH_SIZES = (1, 8, 32)
PROMPT_TOKENS = 32
HOST_STEPS = 300
PARTS = ("raw", "drafts", "invariance", "grammar", "host")

Figures = dict[str, float]


def main() -> int:
    """Measures, prints tables and writes the figures; 2 for input that cannot be used."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--model", type=Path, default=DEFAULT_MODEL_DIR, help="checkpoint directory"
    )
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--steps", type=int, default=40, help="decode steps in a round of raw")
    parser.add_argument("--rounds", type=int, default=7, help="rounds of each kind")
    parser.add_argument("--json", type=Path, help="write the figures there, and a table beside it")
    args = parser.parse_args()
    try:
        measure_parts(args)
    except ConfigError as error:
        print(f"bench_engine: {error}", file=sys.stderr)
        return 2
    return 0


def measure_parts(args: argparse.Namespace) -> None:
    """Runs the parts asked for and writes what is known after each.

    Raises:
        ConfigError: the checkpoint or the file of figures cannot be used.
    """
    if not args.model.is_dir():
        raise ConfigError(f"{args.model}: no such directory; expected a checkpoint directory")
    config = override(load_config(), {"model.path": str(args.model)}, source="--model")
    figures = read_figures(args.json) if args.json else {}
    plain = functools.cache(lambda: load(config))
    parts: dict[str, Callable[[], Figures]] = {
        "raw": lambda: measure_raw(plain(), args.steps, args.rounds),
        "drafts": lambda: measure_drafts(plain(), args.rounds),
        "invariance": lambda: measure_invariance(plain(), args.rounds),
        "grammar": lambda: bench_grammar.grammar_figures(args.model),
        "host": lambda: bench_host.host_figures(HOST_STEPS),
    }
    for part in PARTS:
        if part in args.parts:
            figures |= parts[part]()
            if args.json:
                write_figures(args.json, figures, args.model.name)


def read_figures(path: Path) -> Figures:
    """What an earlier run wrote, nothing if there is no such file.

    Raises:
        ConfigError: it is no file of figures, or nothing can be written there.
    """
    if not path.parent.is_dir():
        raise ConfigError(f"{path.parent}: no such directory; --json is to be written there")
    if not path.exists():
        return {}
    try:
        figures = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, OSError) as error:
        raise ConfigError(f"{path}: cannot be read as JSON: {error}") from None
    if not isinstance(figures, dict):
        raise ConfigError(f"{path}: is not an object of figures; expected another --json")
    return figures


def write_figures(path: Path, figures: Figures, model_name: str) -> None:
    """Writes the figures as JSON and, with the ending `.md`, as a table."""
    path.write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")
    lines = [
        "# Engine: what it adds to the compiled steps, and what its options are worth",
        "",
        f"`python scripts/bench_engine.py`, last on {os.cpu_count()} cores ({platform.machine()}), "
        f"{jax.default_backend()}, jax {jax.__version__},",
        f"checkpoint `{model_name}`. Its docstring says what each figure is.",
        "",
        "| figure | value |",
        "| :-- | --: |",
        *(f"| `{name}` | {value:.3f} |" for name, value in figures.items()),
    ]
    path.with_suffix(".md").write_text("\n".join(lines) + "\n", encoding="utf-8")


def load(config: ServingConfig, **options: bool) -> Way:
    """The model with changes to its engine options; says on stderr how far it is."""
    changes = {f"engine.{name}": value for name, value in options.items()}
    used = override(config, changes, source="bench_engine")
    return Way(used, load_model(used, lambda line: print(line, file=sys.stderr)))


def measure_raw(way: Way, num_steps: int, num_rounds: int) -> Figures:
    """The engine's step over the compiled one, and tokens per second."""
    figures: Figures = {}
    print(f"{'sequences':>9} {'raw ms':>8} {'engine ms':>9} {'engine/raw':>10} {'tokens/s':>9}")
    for num_rows in BATCH_SIZES:
        raw_s, engine_s, ratio = measure(way.config, way.model, num_rows, num_steps, num_rounds)
        figures[f"engine_over_raw_{num_rows}"] = ratio
        figures[f"decode_tokens_per_s_{num_rows}"] = num_rows / engine_s
        print(
            f"{num_rows:9d} {raw_s * 1e3:8.3f} {engine_s * 1e3:9.3f} {ratio:10.3f} "
            f"{num_rows / engine_s:9.0f}"
        )
    return figures


def measure_drafts(plain: Way, num_rounds: int) -> Figures:
    """What drafts are worth, and what choosing how many of them to verify."""
    drafting = load(plain.config, has_drafts=True)
    figures = {
        f"dspark_speedup_{n}": speed_ratio(drafting, plain, n, _prompts(plain, n), num_rounds)
        for n in BATCH_SIZES
    }
    most = BATCH_SIZES[-1]
    fixed = drafting.without_costs()
    ratio = speed_ratio(drafting, fixed, most, _prompts(plain, most), num_rounds)
    figures[f"scheduled_over_fixed_{most}"] = ratio
    _print_figures(figures)
    return figures


def measure_invariance(plain: Way, num_rounds: int) -> Figures:
    """How much longer batch invariant steps take."""
    invariant = load(plain.config, batch_invariant=True)
    figures = {
        f"batch_invariant_cost_{n}": speed_ratio(
            plain, invariant, n, _prompts(plain, n), num_rounds
        )
        for n in BATCH_SIZES
    }
    figures["batch_invariant_cost"] = figures[f"batch_invariant_cost_{BATCH_SIZES[-1]}"]
    _print_figures(figures)
    return figures


def _prompts(way: Way, num_running: int) -> list[list[int]]:
    """Questions of all kinds, enough for a batch to be renewed once."""
    directory = way.config.model.directory
    cases = make_cases(Codec(directory / "tokenizer.json"), 7, num_running)
    random.Random(0).shuffle(cases)
    return [list(case.prompt) for case in cases[: max(2 * num_running, 4)]]


def _print_figures(figures: Figures) -> None:
    for name, value in figures.items():
        print(f"{name:<26} {value:7.3f}")


def measure(
    config: ServingConfig, model: LoadedModel, num_rows: int, num_steps: int, num_rounds: int
) -> tuple[float, float, float]:
    """Median seconds of a raw and of an engine decode step, and the median of their quotients."""
    executor: Any = model.executor
    engine = make_engine(config.engine, model.facts, random.Random(0))
    assert isinstance(engine, Engine)
    rng = np.random.default_rng(0)
    # One step more before and after each round, so that every timed step decodes all rows.
    num_tokens = (num_rounds + 1) * (num_steps + 2)
    sampling = SamplingParams(max_tokens=num_tokens, temperature=0.0, ignore_eos=True)
    for i in range(num_rows):
        prompt = rng.integers(3, model.facts.vocab_size // 2, PROMPT_TOKENS)
        engine.admit(Request(f"row {i}", tuple(int(t) for t in prompt), sampling))
    plan = _run_until_all_decode(engine, executor, num_rows)
    raw, whole = [], []
    for _ in range(num_rounds):
        raw.append(_time_raw(executor, plan, num_steps))
        whole.append(_time_engine(engine, executor, num_steps))
    for i in range(num_rows):
        engine.abort(f"row {i}")
    while engine.status().num_steps_in_flight:
        engine.commit(executor.collect())
    quotients = [e / r for e, r in zip(whole, raw, strict=True)]
    return statistics.median(raw), statistics.median(whole), statistics.median(quotients)


def _run_until_all_decode(engine: Engine, executor: Any, num_rows: int) -> StepPlan:
    """Prefills every row and gives the plan of the first full decode step, already committed."""
    while True:
        plan = engine.plan()
        assert plan is not None, "all requests ended before they all decoded"
        executor.submit(plan)
        engine.commit(executor.collect())
        if plan.kind is StepKind.DECODE and plan.num_rows == num_rows:
            return plan


def _time_raw(executor: JaxExecutor, plan: StepPlan, num_steps: int) -> float:
    """Seconds of one compiled step with the host values of `plan`, waiting for its result.

    It overwrites positions that the running sequences passed long ago; their text is not used, and
    the time of a step does not depend on it.
    """
    step = executor.compiled(plan.kind, plan.bucket)
    buffer = jnp.asarray(packing.pack(plan).buffer)
    seconds = 0.0
    for i in range(num_steps + 1):
        started = time.perf_counter()
        result, executor.cache = step(
            executor.weights,
            buffer,
            executor.cache,
            controls=executor.no_controls(plan.kind, plan.bucket),
        )
        result.values.block_until_ready()
        seconds += (time.perf_counter() - started) * (i > 0)
    return seconds / num_steps


def _time_engine(engine: Engine, executor: JaxExecutor, num_steps: int) -> float:
    """Seconds of one step through the engine."""
    seconds = 0.0
    for i in range(num_steps + 1):
        started = time.perf_counter()
        run_step(engine, executor)
        seconds += (time.perf_counter() - started) * (i > 0)
    return seconds / num_steps


if __name__ == "__main__":
    sys.exit(main())
