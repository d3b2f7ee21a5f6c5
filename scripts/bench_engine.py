"""How much the engine adds to the compiled decode step.

For 1, 8 and 32 sequences, in turn on the same machine in one run: the compiled decode step alone
in a loop, waiting for each result, and the engine's whole decode step around it (plan, pack,
submit, collect, commit). Both run in the same bucket at nearly the same context. Rounds of the two
alternate, and the figure is the median over rounds of the quotient of their mean times, so a
machine whose speed drifts shifts both.

    python scripts/bench_engine.py [--model DIR] [--steps N] [--rounds N] [--json FILE]
"""

import argparse
import json
import random
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from serving.cluster import make_engine
from serving.config import ServingConfig, load_config
from serving.core.buckets import StepKind
from serving.core.request import Request, SamplingParams
from serving.core.step_plan import StepPlan
from serving.engine import packing
from serving.engine.engine import Engine, run_step
from serving.engine.jax_executor import JaxExecutor
from serving.loading import LoadedModel, load_model
from sharding.config_file import override

BATCH_SIZES = (1, 8, 32)
PROMPT_TOKENS = 32


def main() -> None:
    """Measures, prints a table and writes the figures."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="", help="checkpoint directory (default: the small one)")
    parser.add_argument("--steps", type=int, default=40, help="decode steps in a round")
    parser.add_argument("--rounds", type=int, default=7, help="rounds of each kind")
    parser.add_argument("--json", type=Path, help="write the figures there")
    args = parser.parse_args()
    config = override(load_config(), {"model.path": args.model}, source="--model")
    model = load_model(config, lambda line: print(line, file=sys.stderr))
    figures: dict[str, float] = {}
    print(f"{'sequences':>9} {'raw ms':>8} {'engine ms':>9} {'engine/raw':>10} {'tokens/s':>9}")
    for num_rows in BATCH_SIZES:
        raw_s, engine_s, ratio = measure(config, model, num_rows, args.steps, args.rounds)
        figures[f"engine_over_raw_{num_rows}"] = ratio
        figures[f"decode_tokens_per_s_{num_rows}"] = num_rows / engine_s
        print(
            f"{num_rows:9d} {raw_s * 1e3:8.3f} {engine_s * 1e3:9.3f} {ratio:10.3f} "
            f"{num_rows / engine_s:9.0f}"
        )
    if args.json:
        args.json.write_text(json.dumps(figures, indent=2) + "\n")


def measure(
    config: ServingConfig, model: LoadedModel, num_rows: int, num_steps: int, num_rounds: int
) -> tuple[float, float, float]:
    """Median seconds of a raw and of an engine decode step, and the median of their quotients."""
    executor: Any = model.executor
    engine = make_engine(config.engine, model.facts, random.Random(0))
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
    main()
