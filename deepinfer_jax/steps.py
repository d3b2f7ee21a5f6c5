"""The compiled steps: every shape that will ever run, compiled before the first one does.

A step takes the weights, one packed buffer of host values and the cache, and returns the sampled
tokens and the cache. The cache is donated, so it is updated in place.
"""

import functools
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor, as_completed
from typing import Any

import jax
import jax.numpy as jnp

from deepinfer_jax.batch import StepBatch, StepShape, buffer_size, last_tokens
from deepinfer_jax.cache import KVCache
from deepinfer_jax.model import Model, Weights, forward, logits
from deepinfer_jax.sampling import sample

CompiledStep = Callable[[Weights, jax.Array, KVCache], tuple[jax.Array, KVCache]]

_COMPILE_THREADS = 2
"""XLA releases the interpreter while it compiles, but one program already uses several cores."""


def run_step(
    model: Model, shape: StepShape, weights: Weights, buffer: jax.Array, cache: KVCache
) -> tuple[jax.Array, KVCache]:
    """One step, not yet compiled.

    Args:
        buffer: int32, what `batch.pack` made for `shape`.
        cache: its arrays are written in place when the caller donates them.

    Returns:
        sampled tokens [num_samples] int32: one after every token for a decode step (arbitrary
        after padding), one after each row's last token for a prefill step. And the cache.
    """
    batch = StepBatch.unpack(buffer, shape)
    residual, cache = forward(model, weights, cache, batch)
    if shape.samples_every_token:
        token_index = jnp.arange(shape.num_tokens, dtype=jnp.int32)
    else:
        token_index = last_tokens(batch)
    return sample(logits(model, weights, residual, token_index), batch, token_index), cache


def compile_step(model: Model, shape: StepShape, weights: Any, cache: Any) -> CompiledStep:
    """Compile one shape for arrays like `weights` and `cache` (arrays or shapes with shardings)."""
    buffer = jax.ShapeDtypeStruct((buffer_size(shape),), jnp.int32)
    step = jax.jit(functools.partial(run_step, model, shape), donate_argnums=2)
    return step.lower(weights, buffer, cache).compile()


def compile_steps(
    model: Model,
    shapes: Iterable[StepShape],
    weights: Any,
    cache: Any,
    report: Callable[[int, int], None] | None = None,
) -> dict[StepShape, CompiledStep]:
    """Compile all shapes, two at a time; `report(done, total)` is called as they finish."""
    wanted = list(dict.fromkeys(shapes))
    compiled: dict[StepShape, CompiledStep] = {}
    with ThreadPoolExecutor(_COMPILE_THREADS) as pool:
        futures = {pool.submit(compile_step, model, s, weights, cache): s for s in wanted}
        for future in as_completed(futures):
            compiled[futures[future]] = future.result()
            if report is not None:
                report(len(compiled), len(wanted))
    return compiled
