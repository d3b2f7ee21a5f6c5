"""A compiled step in several programs, so that long KV can arrive while it runs.

The layers are cut before each layer that owns long KV (`Topology.parts`). A part reads the long KV
of its first layer and of no other, so blocks that come from outside the device need to be there
for their layer's part and no sooner: while a part computes, what the next one reads is copied.

What passes between two parts stays on the device: the residual streams, the token classes and the
features of the draft module. Each part takes and gives back what is its own of the cache.
"""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from deepinfer_jax.batch import StepBatch, StepShape, buffer_size, feed_sampled
from deepinfer_jax.cache import KVCache
from deepinfer_jax.model import Model, Passage, Weights, enter, run_layers
from deepinfer_jax.steps import (
    CompiledStep,
    abstract_arguments,
    compile_step,
    run_speculative_step,
    run_step,
)
from deepinfer_jax.topology import Topology

BeforePart = Callable[[int, KVCache], KVCache]
"""Called with the number of a part and the cache right before the part is dispatched."""

AfterPart = Callable[[int, jax.Array], None]
"""Called with the number of a part and a number that it has computed, when it is dispatched."""


class PartResult(NamedTuple):
    """What a part leaves for the next one.

    Attributes:
        passage: what passes on.
        marker: [] an arbitrary value of it; once it is there the part is over.
    """

    passage: Passage
    marker: jax.Array


class PartedStep:
    """A step that is called like a `CompiledStep`."""

    def __init__(self, topology: Topology, programs: tuple[CompiledStep, ...]) -> None:
        self.programs = programs
        self._topology = topology

    def __call__(
        self,
        weights: Weights,
        buffer: jax.Array,
        cache: KVCache,
        *,
        before: BeforePart | None = None,
        after: AfterPart | None = None,
        image_features: jax.Array | None = None,
        engram_rows: jax.Array | None = None,
        **more: Any,
    ) -> tuple[Any, KVCache]:
        """Dispatch all parts; the results and the cache."""
        rows = {} if engram_rows is None else {"engram_rows": engram_rows}
        first = {} if image_features is None else {"image_features": image_features}
        passage: Passage | None = None
        for number, program in enumerate(self.programs):
            if before is not None:
                cache = before(number, cache)
            own = cache_of_part(cache, self._topology, number)
            if number == len(self.programs) - 1:
                result, own = program(weights, buffer, own, passage=passage, **rows, **more)
                return result, with_part(cache, own)
            named = first if passage is None else {"passage": passage}
            (passage, marker), own = program(weights, buffer, own, **rows, **named)
            cache = with_part(cache, own)
            if after is not None:
                after(number, marker)
        raise AssertionError("a step has parts")


def texts_of(step: CompiledStep | PartedStep) -> Iterator[str]:
    """The programs of a compiled step in the notation of XLA."""
    programs = step.programs if isinstance(step, PartedStep) else (step,)
    return (program.as_text() or "" for program in programs)


def cache_of_part(cache: KVCache, topology: Topology, number: int) -> KVCache:
    """What a part reads and writes of a cache; None stands for everything else."""
    parts = topology.parts
    part = parts[number]
    owners = [layer.layer_index for layer in topology.layers if layer.makes_entries]
    absent: Any = None
    return KVCache(
        rings=tuple(ring if index in part else None for index, ring in enumerate(cache.rings)),
        sources=tuple(
            source if owner in part else absent
            for owner, source in zip(owners, cache.sources, strict=True)
        ),
        classes=cache.classes if number == 0 else absent,
        sampled=cache.sampled,
        draft=cache.draft if number == len(parts) - 1 else None,
    )


def with_part(cache: KVCache, part: KVCache) -> KVCache:
    """The cache with what a part gave back."""

    def pick(old: Any, new: Any) -> Any:
        return old if new is None else new

    return KVCache(
        rings=tuple(map(pick, cache.rings, part.rings)),
        sources=tuple(map(pick, cache.sources, part.sources)),
        classes=pick(cache.classes, part.classes),
        sampled=part.sampled,
        draft=pick(cache.draft, part.draft),
    )


def run_part(
    model: Model,
    shape: StepShape,
    number: int,
    weights: Weights,
    buffer: jax.Array,
    cache: KVCache,
    passage: Passage | None = None,
    image_features: jax.Array | None = None,
    engram_rows: jax.Array | None = None,
) -> tuple[PartResult, KVCache]:
    """One part but the last, not yet compiled; `passage` is that of the part before."""
    batch = feed_sampled(StepBatch.unpack(buffer, shape), cache.sampled)
    if passage is None:
        passage, cache = enter(model, weights, cache, batch, image_features=image_features)
    passage, cache = run_layers(
        model,
        weights,
        cache,
        batch,
        passage,
        model.topology.parts[number],
        engram_rows=engram_rows,
        replay=shape.replay,
    )
    return PartResult(passage, passage.residual.streams.reshape(-1)[0]), cache


def compile_in_parts(
    model: Model,
    shape: StepShape,
    weights: Any,
    cache: Any,
    image_features: Any = None,
    engram_row_shape: tuple[int, ...] | None = None,
    token_counts: Any = None,
    compiler_options: dict[str, Any] | None = None,
) -> CompiledStep | PartedStep:
    """Compile a prefill step in parts, and what has no parts whole; see `compile_step`.

    Steps in tiles run all layers for each tile and have none either, nor have steps that are
    divided between devices.
    """
    num_parts = len(model.topology.parts)
    arguments = (image_features, engram_row_shape, token_counts)
    is_whole = shape.samples_every_token or model.tile_tokens or not model.groups.is_one_device
    if is_whole or num_parts == 1:
        return compile_step(model, shape, weights, cache, *arguments, compiler_options)
    more = abstract_arguments(shape, *arguments)
    controls = {name: more.pop(name) for name in ("controls",) if name in more}
    programs: list[CompiledStep] = []
    for number in range(num_parts):
        is_last = number == num_parts - 1
        own = cache_of_part(cache, model.topology, number)
        named = {**more, **controls} if is_last else more
        program = _compile_part(model, shape, number, weights, own, named, compiler_options)
        programs.append(program)
        if is_last:
            break
        (passage, _), _ = program.out_info
        (placed, _), _ = program.output_shardings
        more.pop("image_features", None)
        more["passage"] = jax.tree.map(
            lambda value, sharding: jax.ShapeDtypeStruct(
                value.shape, value.dtype, sharding=sharding
            ),
            passage,
            placed,
        )
    return PartedStep(model.topology, tuple(programs))


def _compile_part(
    model: Model,
    shape: StepShape,
    number: int,
    weights: Any,
    cache: Any,
    named: dict[str, Any],
    compiler_options: dict[str, Any] | None,
) -> CompiledStep:
    def part(*arrays: Any, **more: Any) -> Any:
        if number < len(model.topology.parts) - 1:
            return run_part(model, shape, number, *arrays, **more)
        run = run_step if cache.draft is None else run_speculative_step
        return run(model, shape, *arrays, **more)

    part.__name__ = f"{shape.name}_part{number}"
    buffer = jax.ShapeDtypeStruct((buffer_size(shape),), jnp.int32)
    lowered = jax.jit(part, donate_argnums=2).lower(weights, buffer, cache, **named)
    return lowered.compile(compiler_options)
