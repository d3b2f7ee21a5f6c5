"""Steps divided between the devices of a mesh.

The whole step is one `shard_map`: every device runs the step of its own rows on its own cache, as
if it were alone, and what it needs of other devices it asks for inside (`sharding/collectives.py`).
Arrays of all devices have one more leading dimension than those of one: the devices of
`StepGroups.rows`, in their order. Results are gathered, so that every device and every process has
all of them.
"""

from collections.abc import Callable
from typing import Any

import jax

from deepinfer_jax.cache import CacheLayout, KVCache, copy_slots
from deepinfer_jax.controls import Controls, set_counts
from deepinfer_jax.model import Model
from sharding.collectives import StepGroups
from sharding.mesh import mesh_of, per_device, specs_of, split_first


def whole_layout(layout: CacheLayout, groups: StepGroups) -> CacheLayout:
    """The layout of the caches of all devices, of which each has `layout`."""
    size = groups.rows.size
    return CacheLayout(
        layout.config,
        layout.precision,
        size * layout.num_blocks,
        size * layout.num_slots,
        layout.block_size,
        layout.has_draft,
    )


def divide_step(
    step: Callable[..., Any], model: Model, weights: Any, cache: Any, named: dict[str, Any]
) -> Callable[..., Any]:
    """A step of all devices from a step of one, for arrays like the given ones.

    Args:
        step: `(weights, buffer, cache, **named)` to results and cache, of one device.
        weights, cache, named: arrays, or shapes with shardings.

    Returns:
        the same for all devices: buffers are [devices, words], results [devices, ...].
    """
    rows = model.groups.rows
    own = split_first(rows)
    image_features: Any = named.get("image_features")

    def local(weights: Any, buffer: jax.Array, cache: KVCache, named: dict[str, Any]) -> Any:
        mine = dict(named)
        if image_features is not None:
            # Of all devices' tokens; images are few, so every device has all of them.
            size = image_features.shape[0] // rows.size
            features = named["image_features"]
            mine["image_features"] = jax.lax.dynamic_slice_in_dim(features, rows.index * size, size)
        if "engram_rows" in named:
            mine["engram_rows"] = named["engram_rows"][0]
        if "controls" in named:
            settings, masks, counts = named["controls"]
            mine["controls"] = Controls(settings[0], masks[0], counts)
        result, cache = step(weights, buffer[0], cache, **mine)
        return jax.tree.map(lambda a: rows.gather(a[None]), result), cache

    named_specs = {name: split_first() if name == "image_features" else own for name in named}
    cache_specs = specs_of(cache)
    run = per_device(
        local,
        mesh_of(weights),
        (specs_of(weights), own, cache_specs, named_specs),
        (split_first(), cache_specs),
    )
    return lambda weights, buffer, cache, **named: run(weights, buffer, cache, named)


def divide_slot_copies(cache: Any, groups: StepGroups) -> Callable[[KVCache, jax.Array], KVCache]:
    """`cache.copy_slots` for [devices, 2, N] int32 sources and destinations on each device."""
    specs = specs_of(cache)
    return per_device(
        lambda cache, slots: copy_slots(cache, slots[0, 0], slots[0, 1]),
        mesh_of(cache),
        (specs, split_first(groups.rows)),
        specs,
    )


def divide_set_counts(counts: Any, groups: StepGroups) -> Callable[..., jax.Array]:
    """`controls.set_counts` for edits [devices, ...] of the counts on each device."""
    own = split_first(groups.rows)
    return per_device(
        lambda counts, *edits: set_counts(counts, *(edit[0] for edit in edits)),
        mesh_of(counts),
        (own,) * 5,
        own,
    )
