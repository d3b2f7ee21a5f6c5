"""The golden checkpoint with its draft module: one prefill and one decode program per cache format,
shared by several test files, and a look at what a sequence leaves in the cache.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from deepinfer_jax import checkpoint
from deepinfer_jax.batch import StepShape, pack
from deepinfer_jax.cache import CacheLayout, KVCache
from deepinfer_jax.controls import Controls
from deepinfer_jax.model import Model, Weights
from deepinfer_jax.reports import ReportedResult
from deepinfer_jax.steps import SpeculativeResult, run_speculative_step
from tests.deepinfer_jax import golden_model

PREFILL = StepShape(num_rows=3, num_tokens=80, num_blocks=1, samples_every_token=False)
DECODE = StepShape(num_rows=3, num_tokens=14, num_blocks=1, samples_every_token=True)
NUM_DRAFTS = 5
NUM_SLOTS = 4
VOCAB_SIZE = 320

PROBED = ("features", "main_x", "raw_hidden", "base_logits", "draft_logits", "scores", "logits")

Row = tuple[np.ndarray, int, int, list[int]]
"""Token ids, start, slot, blocks."""


class Step(NamedTuple):
    """What came of one step."""

    result: SpeculativeResult
    report: ReportedResult
    seen: dict[str, np.ndarray]
    cache: KVCache


@functools.cache
def load(cache_format: str) -> tuple[Model, Weights]:
    """Model and weights in float32, with the draft module."""
    model, weights = golden_model.load(cache_format)
    parameters = checkpoint.load(
        golden_model.DIRECTORY, model.config, parts=frozenset({"text", "draft"})
    )
    return model, weights._replace(parameters=parameters)


def layout(cache_format: str) -> CacheLayout:
    """A small cache with room for drafts."""
    model, _ = load(cache_format)
    return CacheLayout(
        model.config, model.precision, num_blocks=5, num_slots=NUM_SLOTS, has_draft=True
    )


@functools.cache
def _program(cache_format: str, shape: StepShape) -> Any:
    model, _ = load(cache_format)

    @jax.jit
    def run(weights: Weights, buffer: jax.Array, cache: KVCache, controls: Controls) -> Any:
        seen: dict[str, Any] = {}
        report, cache = run_speculative_step(
            model, shape, weights, buffer, cache, controls=controls, probe=seen.__setitem__
        )
        return report, {name: seen[name] for name in PROBED}, cache

    return run


def run(
    cache_format: str,
    shape: StepShape,
    rows: list[Row],
    cache: KVCache,
    controls: Controls | None = None,
    **columns: list[float],
) -> Step:
    """One step; `columns` are sampling settings of the rows, greedy by default.

    `controls` are those of `no_controls` by default, which ask for nothing.
    """
    arrays = golden_model.batch_arrays(shape, rows)
    for name, values in columns.items():
        arrays[name][: len(values)] = values
    _, weights = load(cache_format)
    program = _program(cache_format, shape)
    used = no_controls(shape) if controls is None else controls
    report, seen, cache = program(weights, jnp.asarray(pack(arrays, shape)), cache, used)
    report = jax.tree.map(np.asarray, report)
    return Step(
        SpeculativeResult.unpack(report.values), report, jax.tree.map(np.asarray, seen), cache
    )


def no_controls(shape: StepShape) -> Controls:
    """Controls that ask for nothing, filled with what would show if they were looked at."""
    counts = jnp.full((NUM_SLOTS, VOCAB_SIZE), 9, jnp.uint16)
    zeros = Controls.abstract(shape, counts)
    settings, masks = (jnp.zeros(a.shape, a.dtype) for a in (zeros.settings, zeros.masks))
    return Controls(settings, masks, counts)


def emitted(result: SpeculativeResult, row: int) -> list[int]:
    """The tokens that a row added to its text."""
    tokens = [int(token) for token in result.tokens[row]]
    length = tokens.index(-1) if -1 in tokens else len(tokens)
    assert min(tokens[:length], default=0) >= 0 and set(tokens[length:]) <= {-1}
    return tokens[:length]


def with_drafts(cache: KVCache, slot: int, tokens: list[int]) -> KVCache:
    """The cache with other tokens waiting in a slot; only greedy rows may be verified then."""
    assert cache.draft is not None
    waiting = cache.draft.tokens.at[slot].set(jnp.asarray(tokens))
    return cache._replace(draft=cache.draft._replace(tokens=waiting))


def live(
    cache_format: str, cache: KVCache, slot: int, blocks: list[int], length: int
) -> dict[str, list[bytes]]:
    """Everything that a sequence of `length` processed tokens can still be asked for."""
    model, _ = load(cache_format)
    c, host = model.config, jax.tree.map(np.asarray, cache)
    window = np.arange(max(0, length - c.sliding_window), length)

    def ring(leaf: np.ndarray, positions: np.ndarray) -> bytes:
        return leaf[slot, positions % leaf.shape[1]].tobytes()

    found = {
        "windows": [ring(a, window) for a in jax.tree.leaves((host.rings, host.draft.rings))],
        "classes": [ring(host.classes, window[-(c.engram_max_ngram_size - 1) :])],
        "drafts": [a[slot].tobytes() for a in host.draft[1:]],
    }
    for layer, source in zip(c.kv_source_layer_ids, host.sources, strict=True):
        ratio = c.compress_ratios[layer]
        found[f"entries_{layer}"] = [
            a[blocks].reshape(-1, *a.shape[2:])[: length // ratio].tobytes()
            for a in jax.tree.leaves((source.entries, source.index_keys))
        ]
        if source.partial is not None:
            unfinished = np.arange(length - length % ratio, length)
            found[f"partial_{layer}"] = [ring(source.partial, unfinished)]
    return found
