"""Goal: a step in parts computes what the whole step does, and needs the long KV of a layer only
from that layer's part on. Method: both over the same prompt; the blocks of each layer are kept
away from the cache until right before their part.
"""

import functools
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from deepinfer_jax.batch import Replay, StepShape, pack
from deepinfer_jax.cache import KVCache
from deepinfer_jax.config import ModelConfig
from deepinfer_jax.step_parts import PartedStep, compile_in_parts
from deepinfer_jax.steps import CompiledStep, compile_step
from deepinfer_jax.topology import Topology
from tests.deepinfer_jax import golden_model

# Of all prefill steps the one that does most between two parts: upper layers run fewer tokens.
SHAPE = StepShape(2, 80, 2, samples_every_token=False, replay=Replay(24))
CHEAP = {"xla_backend_optimization_level": 0}
LENGTH, CUT = 130, 64


def empty_cache() -> KVCache:
    return golden_model.layout(golden_model.load("noq")[0]).zeros()


@functools.cache
def in_parts() -> PartedStep:
    model, weights = golden_model.load("noq")
    step = compile_in_parts(model, SHAPE, weights, empty_cache(), compiler_options=CHEAP)
    assert isinstance(step, PartedStep)
    return step


def buffer_of(ids: np.ndarray, start: int, end: int) -> jax.Array:
    """A chunk behind a row of other company."""
    rows = [(ids[:1], 0, 2, [4]), (ids[start:end], start, 1, [3, 1])]
    arrays = golden_model.batch_arrays(SHAPE, rows)
    arrays["tail_starts"] = np.array([0, LENGTH - 20], np.int32)
    arrays |= {name: np.zeros(2, np.int32) for name in ("visible_starts", "entry_starts")}
    return jnp.asarray(pack(arrays, SHAPE))


def prompt(step: CompiledStep | PartedStep, **last: Any) -> tuple[Any, KVCache]:
    """The results of the last of two chunks of a prompt, and the cache after it."""
    _, weights = golden_model.load("noq")
    ids = np.load(Path(__file__).parents[1] / "golden" / "forward.npz")[f"ids_{LENGTH}"]
    _, cache = step(weights, buffer_of(ids, 0, CUT), empty_cache())
    out, cache = step(weights, buffer_of(ids, CUT, LENGTH), cache, **last)
    return np.asarray(out), cache


def test_parts_compute_what_the_whole_step_does() -> None:
    model, weights = golden_model.load("noq")
    parted = in_parts()
    assert [(p.as_text() or "").split(",")[0] for p in parted.programs] == [
        f"HloModule jit_{SHAPE.name}_part{number}" for number in range(4)
    ]
    words, cache = prompt(parted)
    expected, whole = prompt(
        compile_step(model, SHAPE, weights, empty_cache(), compiler_options=CHEAP)
    )
    np.testing.assert_array_equal(words, expected)
    # The programs are fused differently.
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4), cache, whole)


def test_long_kv_is_needed_for_its_own_part_and_no_sooner() -> None:
    model, _ = golden_model.load("noq")
    assert model.topology.part_of_group == (1, 2, 3)
    parted = in_parts()
    expected, _ = prompt(parted)
    kept: dict[int, Any] = {}
    calls: list[tuple[str, int]] = []

    def before(number: int, cache: KVCache, late: int = 0) -> KVCache:
        calls.append(("before", number))
        sources = list(cache.sources)
        for group, part in enumerate(model.topology.part_of_group):
            entries = sources[group].entries
            if number == 0:
                kept[group] = jnp.copy(entries[3])
                sources[group] = sources[group]._replace(entries=entries.at[3].set(7.0))
            if number == part + late:
                sources[group] = sources[group]._replace(entries=entries.at[3].set(kept[group]))
        return cache._replace(sources=tuple(sources))

    def after(number: int, marker: jax.Array) -> None:
        calls.append(("after", number))
        assert np.isfinite(marker)

    out, cache = prompt(parted, before=before, after=after)
    np.testing.assert_array_equal(out, expected)
    order = [(when, number) for number in range(4) for when in ("before", "after")]
    assert calls == order[:-1]
    # One part later is too late for the second row, whose context is in that block.
    _, other = prompt(parted, before=lambda n, c: before(n, c, late=1))
    rings = zip(cache.rings, other.rings, strict=True)
    differs = [bool(np.abs(np.asarray(a[1] - b[1])).max() > 1e-4) for a, b in rings]
    # The first layer that reads them does not show it in its own window, those above it do.
    first = model.topology.parts[1].start
    assert differs == [index > first for index in range(len(differs))]


def test_what_has_no_parts_is_compiled_whole() -> None:
    model, weights = golden_model.load("noq")
    cache = golden_model.layout(model).abstract()
    decode = StepShape(2, 2, 1, samples_every_token=True)
    assert isinstance(
        compile_in_parts(model, decode, weights, cache, compiler_options=CHEAP), CompiledStep
    )


def test_the_parts_of_the_released_model() -> None:
    topology = Topology.of(ModelConfig.released())
    parts = [(part.start, part.stop) for part in topology.parts]
    assert parts == [(0, 2), (2, 8), (8, 14), (14, 20), (20, 40)]
    assert topology.part_of_group == (1, 2, 3, 4)
