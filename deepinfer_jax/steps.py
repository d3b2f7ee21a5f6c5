"""The compiled steps: every shape that will ever run, compiled before the first one does.

A step takes the weights, one packed buffer of host values and the cache, and returns one array of
results and the cache. The cache is donated, so it is updated in place. With room for drafts in the
cache, the steps are speculative: a decode step verifies waiting drafts, and every step drafts anew.
"""

import contextlib
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from deepinfer_jax import tiles
from deepinfer_jax.batch import (
    StepBatch,
    StepShape,
    buffer_size,
    feed_sampled,
    keep_sampled,
    last_tokens,
    start_at_lengths,
)
from deepinfer_jax.cache import DraftCache, KVCache, copy_slots
from deepinfer_jax.controls import Controls, adjusted
from deepinfer_jax.draft import DraftRows, draft, draft_module, fill_drafts
from deepinfer_jax.layers.hyper_connections import Residual
from deepinfer_jax.layers.primitives import Arithmetic, Probe, no_probe
from deepinfer_jax.mesh_steps import divide_slot_copies, divide_step
from deepinfer_jax.model import (
    Model,
    Passage,
    Weights,
    forward,
    leave,
    logits,
    run_layers,
    upper_batch,
)
from deepinfer_jax.reports import ReportedResult, emitted_after, report
from deepinfer_jax.sampling import accept, accept_equal, sample
from sharding.collectives import UNDIVIDED, StepGroups

CompiledStep = jax.stages.Compiled
"""Takes weights, buffer and cache, and by name whatever else it was compiled with; returns results
and the cache."""

Watch = Callable[[str], AbstractContextManager[None]]
"""Opened with the name of a program around its compilation."""


def no_watch(name: str) -> AbstractContextManager[None]:
    """Looks at nothing."""
    return contextlib.nullcontext()


_COMPILE_THREADS = 2
"""XLA releases the interpreter while it compiles, but one program already uses several cores."""


def run_step(
    model: Model,
    shape: StepShape,
    weights: Weights,
    buffer: jax.Array,
    cache: KVCache,
    image_features: jax.Array | None = None,
    engram_rows: jax.Array | None = None,
    controls: Controls | None = None,
    passage: Passage | None = None,
) -> tuple[jax.Array | ReportedResult, KVCache]:
    """One step, not yet compiled.

    Args:
        buffer: int32, what `batch.pack` made for `shape`.
        cache: its arrays are written in place when the caller donates them.
        image_features, engram_rows: what `model.forward` takes.
        controls: None if no row may have any; with them the result is a `ReportedResult`.
        passage: what the layers before the last part of the topology left, where they have run
            already (`step_parts.py`); None runs all.

    Returns:
        sampled tokens [num_samples] int32: one after every token for a decode step (arbitrary
        after padding), one after each row's last token for a prefill step. And the cache.
    """
    batch = feed_sampled(StepBatch.unpack(buffer, shape), cache.sampled)
    residual, cache = _layers(
        model, shape, weights, cache, batch, image_features, engram_rows, passage=passage
    )
    batch = upper_batch(batch, shape.replay)
    if shape.samples_every_token:
        token_index = jnp.arange(shape.num_tokens, dtype=jnp.int32)
    else:
        token_index = last_tokens(batch)
    target = _logits(model, shape, weights, residual, batch, token_index)
    adapted = target
    if controls is not None:
        adapted = adjusted(target, batch, token_index, shape, controls)
    tokens = _sample(model, shape, adapted, batch, token_index)
    newest = tokens[last_tokens(batch)] if shape.samples_every_token else tokens
    cache = cache._replace(sampled=keep_sampled(batch, newest, cache.sampled))
    if controls is None:
        return tokens, cache
    more = (model, weights, residual, batch, shape, controls)
    return report(tokens, tokens, target, *more), cache


class SpeculativeResult(NamedTuple):
    """What a speculative step found, for R rows and N drafts, on the host.

    Attributes:
        tokens: [R, N + 1] int32, the accepted drafts, the token that follows them, then -1. A
            padding row has nothing but -1.
        drafts: [R, N] int32, proposed for the positions after those.
        confidences: [R, N] float32, the estimated chance that a draft is accepted if all before
            it are.
    """

    tokens: np.ndarray
    drafts: np.ndarray
    confidences: np.ndarray

    @classmethod
    def unpack(cls, words: np.ndarray) -> "SpeculativeResult":
        """The result whose columns a step put side by side in `words` [R, 3 N + 1] int32."""
        num_drafts = words.shape[1] // 3
        tokens, drafts, confidences = np.split(words, [num_drafts + 1, 2 * num_drafts + 1], axis=1)
        return cls(tokens, drafts, np.ascontiguousarray(confidences).view(np.float32))


def run_speculative_step(
    model: Model,
    shape: StepShape,
    weights: Weights,
    buffer: jax.Array,
    cache: KVCache,
    image_features: jax.Array | None = None,
    engram_rows: jax.Array | None = None,
    controls: Controls | None = None,
    probe: Probe = no_probe,
    passage: Passage | None = None,
) -> tuple[jax.Array | ReportedResult, KVCache]:
    """One step of a model that drafts, not yet compiled.

    A prefill step samples after each row's last token. In a decode step a row is its last known
    token and some of the drafts that wait in its slot, which the device puts there itself; those
    are verified. Both then draft for the positions after the sampled token.

    Args:
        buffer: int32, what `batch.pack` made for `shape`. A decode row has 1 to N + 1 tokens, of
            which only the first id counts.
        cache: with `draft`; its arrays are written in place when the caller donates them.
        image_features, engram_rows, controls, passage: as for `run_step`.

    Returns:
        [R, 3 N + 1] int32 for `SpeculativeResult.unpack`, and the cache. Rejected tokens leave
        nothing behind that is read before it is overwritten.

    Raises:
        ValueError: the cache has no room for drafts, or the weights have no draft module.
    """
    if cache.draft is None:
        raise ValueError("the cache has no room for drafts; lay it out with has_draft")
    draft_module(weights.parameters)
    batch, waiting = StepBatch.unpack(buffer, shape), cache.draft
    if shape.samples_every_token:
        batch = feed_sampled(start_at_lengths(batch, waiting.lengths), cache.sampled)
        batch = fill_drafts(batch, waiting)
    residual, cache = _layers(
        model, shape, weights, cache, batch, image_features, engram_rows, probe, passage
    )
    batch = upper_batch(batch, shape.replay)
    if shape.samples_every_token:
        token_index = jnp.arange(shape.num_tokens, dtype=jnp.int32)
    else:
        token_index = last_tokens(batch)
    judged = target = _logits(model, shape, weights, residual, batch, token_index)
    if controls is not None:
        judged = adjusted(target, batch, token_index, shape, controls)
    if shape.samples_every_token:
        accepted, following = _accept(model, shape, judged, batch, token_index, waiting)
        num_kept, emitted = accepted + 1, emitted_after(batch, accepted, following)
    else:
        emitted = following = _sample(model, shape, judged, batch, token_index)
        accepted, num_kept = jnp.zeros_like(following), batch.num_tokens
    probe("logits", target)
    assert cache.draft is not None
    arithmetic = Arithmetic(model.config, model.precision, groups=model.groups)
    rows = DraftRows.of(batch, following, num_kept)
    confidences, drafted = draft(
        arithmetic, model.draft, weights.parameters, cache.draft, rows, probe
    )
    tokens = _emitted(waiting.tokens[batch.slots], accepted, following, rows.is_real)
    words = jax.lax.bitcast_convert_type(confidences, jnp.int32)
    results = jnp.concatenate([tokens, drafted.tokens[batch.slots], words], axis=1)
    cache = _remember(cache._replace(draft=drafted), batch, following, num_kept)
    if controls is None:
        return results, cache
    more = (model, weights, residual, batch, shape, controls)
    return report(results, emitted, target, *more), cache


def _layers(
    model: Model,
    shape: StepShape,
    weights: Weights,
    cache: KVCache,
    batch: StepBatch,
    image_features: jax.Array | None,
    engram_rows: jax.Array | None,
    probe: Probe = no_probe,
    passage: Passage | None = None,
) -> tuple[Residual, KVCache]:
    """The layers that are left, over all tokens at once or in tiles.

    Raises ValueError for a replay in tiles.
    """
    if passage is not None:
        last = model.topology.parts[-1]
        passage, cache = run_layers(
            model, weights, cache, batch, passage, last, probe, engram_rows, shape.replay
        )
        return leave(model, weights, cache, batch, passage, probe, shape.replay)
    if not model.tile_tokens:
        return forward(
            model, weights, cache, batch, probe, image_features, engram_rows, shape.replay
        )
    if shape.replay is not None:
        raise ValueError(f"{shape.name} replays; steps in tiles run every token in every layer")
    return tiles.forward(model, weights, cache, batch, image_features, engram_rows)


def _logits(
    model: Model,
    shape: StepShape,
    weights: Weights,
    residual: Residual,
    batch: StepBatch,
    token_index: jax.Array,
) -> jax.Array:
    def some(index: jax.Array) -> jax.Array:
        return logits(model, weights, residual, index)

    if not model.tile_tokens:
        return some(token_index)
    return tiles.map_tiles(some, token_index, model.tile_tokens, shape.num_sampled(batch))


def _sample(
    model: Model, shape: StepShape, adapted: jax.Array, batch: StepBatch, token_index: jax.Array
) -> jax.Array:
    def some(arrays: tuple[jax.Array, jax.Array]) -> jax.Array:
        return sample(arrays[0], batch, arrays[1])

    arrays = (adapted, token_index)
    if not model.tile_tokens:
        return some(arrays)
    return tiles.map_tiles(some, arrays, model.tile_tokens, shape.num_sampled(batch))


def _accept(
    model: Model,
    shape: StepShape,
    judged: jax.Array,
    batch: StepBatch,
    token_index: jax.Array,
    waiting: DraftCache,
) -> tuple[jax.Array, jax.Array]:
    if not model.draft.is_coupled:
        return accept(judged, batch, waiting)
    return accept_equal(_sample(model, shape, judged, batch, token_index), batch, waiting)


def _remember(
    cache: KVCache, batch: StepBatch, following: jax.Array, num_kept: jax.Array
) -> KVCache:
    """The cache that knows where its sequences stand: for the next step to go on from there."""
    assert cache.draft is not None
    lengths = keep_sampled(batch, batch.starts + num_kept, cache.draft.lengths)
    return cache._replace(
        draft=cache.draft._replace(lengths=lengths),
        sampled=keep_sampled(batch, following, cache.sampled),
    )


def _emitted(
    drafts: jax.Array, num_accepted: jax.Array, following: jax.Array, is_real: jax.Array
) -> jax.Array:
    """[R, N + 1] int32: `num_accepted` of the `drafts` [R, N], the token `following`, then -1."""
    number = jnp.arange(drafts.shape[1] + 1)[None, :]
    tokens = jnp.where(number == num_accepted[:, None], following[:, None], -1)
    tokens = jnp.where(number < num_accepted[:, None], jnp.pad(drafts, ((0, 0), (0, 1))), tokens)
    return jnp.where(is_real[:, None], tokens, -1)


def compile_step(
    model: Model,
    shape: StepShape,
    weights: Any,
    cache: Any,
    image_features: Any = None,
    engram_row_shape: tuple[int, ...] | None = None,
    token_counts: Any = None,
    compiler_options: dict[str, Any] | None = None,
) -> CompiledStep:
    """Compile one shape for arrays like `weights` and `cache` (arrays or shapes with shardings).

    A prefill step also takes `image_features` like the given ones, unless those are None, and
    every step takes `engram_rows` if their shape per token is given (`HostEngram.row_shape`), and
    `controls` if `token_counts` like those in them are given. If the model is divided, weights and
    cache are those of a whole mesh, and the step is for all of its devices (`divide_step`).
    """
    groups = model.groups
    lead = () if groups.is_one_device else (groups.rows.size,)
    buffer = jax.ShapeDtypeStruct((*lead, buffer_size(shape)), jnp.int32)
    more = abstract_arguments(shape, image_features, engram_row_shape, token_counts, lead)
    run = run_step if cache.draft is None else run_speculative_step

    def step(*arrays: Any, **named: Any) -> Any:
        return run(model, shape, *arrays, **named)

    if not groups.is_one_device:
        step = divide_step(step, model, weights, cache, more)
    # What the program is called in traces.
    step.__name__ = shape.name
    lowered = jax.jit(step, donate_argnums=2).lower(weights, buffer, cache, **more)
    return lowered.compile(compiler_options)


def abstract_arguments(
    shape: StepShape,
    image_features: Any = None,
    engram_row_shape: tuple[int, ...] | None = None,
    token_counts: Any = None,
    lead: tuple[int, ...] = (),
) -> dict[str, Any]:
    """What a step takes by name; the arguments are those of `compile_step`, `lead` the dimensions
    that devices add.
    """
    more: dict[str, Any] = {}
    if image_features is not None and not shape.samples_every_token:
        more["image_features"] = image_features
    if engram_row_shape is not None:
        rows_shape = (*lead, shape.num_tokens, *engram_row_shape)
        more["engram_rows"] = jax.ShapeDtypeStruct(rows_shape, jnp.uint8)
    if token_counts is not None:
        more["controls"] = Controls.abstract(shape, token_counts, lead)
    return more


def compile_slot_copies(
    cache: KVCache, num_copies: int, groups: StepGroups = UNDIVIDED
) -> Callable[[KVCache, jax.Array], KVCache]:
    """Compile `cache.copy_slots` for [2, `num_copies`] int32 sources and destinations.

    The cache is donated. Where it is divided, all devices have copies of their own.
    """
    shape = (2, num_copies)
    copies: Callable[[KVCache, jax.Array], KVCache]
    if groups.is_one_device:
        copies = lambda cache, slots: copy_slots(cache, slots[0], slots[1])  # noqa: E731
    else:
        shape, copies = (groups.rows.size, *shape), divide_slot_copies(cache, groups)
    slots = jax.ShapeDtypeStruct(shape, jnp.int32)
    return jax.jit(copies, donate_argnums=0).lower(cache, slots).compile()


def compile_programs(
    programs: Mapping[str, Callable[[], Any]],
    report: Callable[[int, int], None] | None = None,
    watch: Watch = no_watch,
) -> dict[str, Any]:
    """Compile programs of all kinds, two at a time; `report(done, total)` as they finish.

    `programs` says by name what compiles each. That and `watch` are called on other threads.
    """

    def compile_one(name: str, make: Callable[[], Any]) -> Any:
        with watch(name):
            return make()

    compiled: dict[str, Any] = {}
    with ThreadPoolExecutor(_COMPILE_THREADS) as pool:
        futures = {pool.submit(compile_one, *program): program[0] for program in programs.items()}
        for future in as_completed(futures):
            compiled[futures[future]] = future.result()
            if report is not None:
                report(len(compiled), len(programs))
    return compiled
