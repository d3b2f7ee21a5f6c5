"""Goal: a step divided between devices samples what one device samples. Method: chunks of prompts,
then single tokens, on eight CPU devices at once and for each device's rows alone.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from deepinfer_jax.batch import StepShape, pack
from deepinfer_jax.controls import set_counts
from deepinfer_jax.mesh_steps import divide_set_counts, divide_slot_copies, whole_layout
from sharding.collectives import Group, StepGroups
from sharding.plan import load_plan
from tests.deepinfer_jax import golden_model, short_model

pytestmark = pytest.mark.multi_device

SHAPE = StepShape(num_rows=2, num_tokens=24, num_blocks=1, samples_every_token=True)
PROMPT_STEPS = 2


def test_every_device_samples_for_its_own_rows(rng: np.random.Generator) -> None:
    many, one = short_model.load(load_plan("cpu8")), short_model.load(load_plan("single"))
    step, step_of_one = many.compiled(SHAPE), one.compiled(SHAPE)
    cache, caches = many.zeros(), [one.zeros() for _ in range(8)]
    given = cache.rings[0]
    lengths = np.zeros((8, 2), int)
    for number in range(5):
        rows: list[list[Any]] = []
        for device in range(8):
            # The last device has nothing to do at first, and one row later.
            some = [] if device == 7 and number < 2 else range(1 if device == 7 else 2)
            sizes = (3 + device, 11) if number < PROMPT_STEPS else (1, 1)
            rows.append([])
            for row in some:
                ids = rng.integers(3, 300, sizes[row])
                rows[-1].append((ids, int(lengths[device, row]), 1 + row, [2 + row]))
                lengths[device, row] += sizes[row]
        buffers = [pack(golden_model.batch_arrays(SHAPE, some), SHAPE) for some in rows]
        tokens, cache = step(many.weights, np.stack(buffers), cache)
        received = np.asarray(tokens)
        for device, buffer in enumerate(buffers):
            alone, caches[device] = step_of_one(one.weights, buffer, caches[device])
            num_tokens = sum(len(ids) for ids, *_ in rows[device])
            expected = np.asarray(alone)[:num_tokens]
            np.testing.assert_array_equal(received[device, :num_tokens], expected)
    assert given.codes.is_deleted(), "the cache is donated"


def test_copies_of_slots_stay_on_their_device() -> None:
    model = short_model.load(load_plan("cpu8"))
    groups, num_slots = model.model.groups, model.layout.num_slots
    cache = model.zeros()
    numbers = jnp.arange(8 * num_slots, dtype=jnp.int32)
    cache = cache._replace(
        classes=jax.device_put(
            jnp.broadcast_to(numbers[:, None], cache.classes.shape), cache.classes.sharding
        )
    )
    pairs = np.zeros((8, 2, 2), np.int32)
    pairs[2] = [[1, 0], [3, 0]]
    pairs[5] = [[3, 2], [2, 1]]
    copied = jax.jit(divide_slot_copies(cache, groups))(cache, pairs)
    expected = np.arange(8 * num_slots).reshape(8, num_slots)
    expected[2, 3] = expected[2, 1]
    expected[5, 2], expected[5, 1] = expected[5, 3], expected[5, 2]
    received = np.asarray(copied.classes[:, 0]).reshape(8, num_slots)
    np.testing.assert_array_equal(received, expected)


def test_counts_of_tokens_stay_on_their_device(rng: np.random.Generator) -> None:
    plan = load_plan("cpu8")
    model = short_model.load(plan)
    counts = rng.integers(0, 9, (8 * 3, 10)).astype(np.uint16)
    placed = model.mesh.place(counts, ("slots", None))
    cleared = rng.integers(0, 4, (8, 3)).astype(np.int32)
    slots = rng.integers(0, 4, (8, 2)).astype(np.int32)
    tokens = np.tile(np.array([4, 7], np.int32), (8, 1))
    edits = (cleared, slots, tokens, tokens + 90)
    edited = jax.jit(divide_set_counts(placed, model.model.groups))(placed, *edits)
    for device in range(8):
        own = jnp.asarray(counts[3 * device : 3 * device + 3])
        expected = set_counts(own, *(edit[device] for edit in edits))
        np.testing.assert_array_equal(edited[3 * device : 3 * device + 3], expected)


def test_the_whole_layout_has_the_pools_of_all_devices() -> None:
    layout = short_model.load(load_plan("single"), num_blocks=5, num_slots=3).layout
    whole = whole_layout(layout, StepGroups(rows=Group(("expert",), 8)))
    assert (whole.num_blocks, whole.num_slots) == (40, 24)
    assert whole_layout(layout, StepGroups()) == layout
