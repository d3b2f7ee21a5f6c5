"""What a cache holds, as bytes, for keeping it outside the device and bringing it back.

A block has one *layer group* per layer that owns long KV: its entries and index keys. The blocks
of a group travel together, as one array [N, group bytes], and are scattered by one operation. A
state is one row of bytes: windows, unfinished compression groups and token classes of one slot,
everything that `cache.copy_slots` copies.

Bytes mean the same only under the same layout; `description` spells it out, for fingerprints.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from deepinfer_jax.cache import CacheLayout, KVCache, SourceCache


@dataclass(frozen=True, slots=True)
class ByteSizes:
    """Bytes of one block in each layer group, and of one state."""

    groups: tuple[int, ...]
    state: int


def description(layout: CacheLayout) -> str:
    """Names, shapes and types of everything that a block and a state consist of, in their order."""
    cache = layout.abstract()
    parts = {"blocks": [_group(source) for source in cache.sources], "state": _state(cache)}
    leaves, _ = jax.tree_util.tree_flatten_with_path(parts)
    lines = [
        f"{jax.tree_util.keystr(path)} {leaf.shape[1:]} {leaf.dtype.name}" for path, leaf in leaves
    ]
    precision = layout.precision
    lines.append(f"block {layout.block_size} computed in {np.dtype(precision.compute_dtype).name}")
    for name in ("entries", "index", "window"):
        form = getattr(precision.cache_format, name)
        lines.append(f"{name} {'unquantised' if form is None else form.name}")
    return "\n".join(lines)


def byte_sizes(cache: KVCache) -> ByteSizes:
    """The sizes for a cache of arrays or shapes."""
    groups = tuple(_row_bytes(_group(source)) for source in cache.sources)
    return ByteSizes(groups, _row_bytes(_state(cache)))


class PendingRead:
    """Blocks and states on their way to the host."""

    def __init__(
        self,
        calls: list[list[jax.Array]],
        states: list[jax.Array],
        num_blocks: int,
        sizes: ByteSizes,
    ) -> None:
        self._calls = calls
        self._states = states
        self._num_blocks = num_blocks
        self._sizes = sizes

    def wait(self) -> tuple[tuple[np.ndarray, ...], np.ndarray]:
        """Per layer group [N, bytes] uint8, and the states [M, bytes] uint8."""
        groups = tuple(
            np.concatenate(
                [np.zeros((0, size), np.uint8), *(np.asarray(call[g]) for call in self._calls)]
            )[: self._num_blocks]
            for g, size in enumerate(self._sizes.groups)
        )
        states = np.zeros((len(self._states), self._sizes.state), np.uint8)
        for index, state in enumerate(self._states):
            states[index] = state
        return groups, states


class CacheTransfers:
    """Compiled reads and writes of blocks and states of one cache.

    Blocks are read `num_blocks` at a time. Those to be written travel all at once, one array for
    each layer group, in one of several compiled sizes. What is missing is filled up with block 0,
    which belongs to padding. Every call only dispatches. What is read is a copy, which later steps
    do not change; arrays that are written are donated.

    Args:
        cache: arrays, whose shapes and shardings all later ones have.
        num_written_max: the most blocks of one write; `num_blocks` if that is more.
    """

    def __init__(self, cache: KVCache, num_blocks: int, num_written_max: int = 0) -> None:
        self.num_blocks = num_blocks
        self.sizes = byte_sizes(cache)
        self.write_sizes = sizes_up_to(num_blocks, num_written_max)
        blocks = _numbers(num_blocks)
        slot = jax.ShapeDtypeStruct((), jnp.int32)
        groups = [_group(source) for source in cache.sources]
        self._read_blocks = jax.jit(_read_groups).lower(groups, blocks).compile()
        self._read_state = jax.jit(_read_row).lower(_state(cache), slot).compile()
        self._write_groups = [
            {
                count: _compile_write(group, _numbers(count), (count, size))
                for count in self.write_sizes
            }
            for group, size in zip(groups, self.sizes.groups, strict=True)
        ]
        self._write_state = _compile_write(_state(cache), _numbers(1), (1, self.sizes.state))
        rings, partials, classes, _ = _state(cache)
        start = _row_bytes((rings, partials))
        self._classes_place = start, _row_bytes(classes), classes.shape[1]

    def read(self, cache: KVCache, blocks: np.ndarray, slots: np.ndarray) -> "PendingRead":
        """Begin to copy blocks [N] int32 and the states of slots [M] int32 to the host."""
        calls = [self.read_blocks(cache, some) for some, _ in self._calls(blocks)]
        states = [self.read_state(cache, slot) for slot in slots.tolist()]
        jax.tree.map(lambda array: array.copy_to_host_async(), (calls, states))
        return PendingRead(calls, states, len(blocks), self.sizes)

    @property
    def copies_wait(self) -> bool:
        """Whether a copy to the device begins when all that was dispatched before it is over.

        A GPU's runtime orders them so, because programs may still use the memory that a copy goes
        to. On a CPU whoever asks for a copy makes it at once.
        """
        return jax.default_backend() != "cpu"

    def put(self, group: int, data: np.ndarray) -> jax.Array:
        """Begin to copy blocks [K, group bytes] uint8 of a layer group to the device, as one array.

        In a trace of the profiler it is called `kv_swap_in`, with the group.

        Raises:
            ValueError: more blocks than one write may have.
        """
        with jax.profiler.TraceAnnotation("kv_swap_in", group=group):
            return jax.device_put(self._padded(data))

    def write_group(self, cache: KVCache, group: int, blocks: np.ndarray, data: Any) -> KVCache:
        """The cache with other content in the blocks [K] int32 of a layer group.

        Args:
            data: what `put` gave for them.
        """
        source = cache.sources[group]
        places = jax.device_put(self._padded(blocks))
        write = self._write_groups[group][len(places)]
        entries, index_keys = write(_group(source), places, data)
        sources = list(cache.sources)
        sources[group] = SourceCache(entries, index_keys, source.partial)
        return cache._replace(sources=tuple(sources))

    def write_states(self, cache: KVCache, slots: np.ndarray, states: np.ndarray) -> KVCache:
        """The cache with `states` [L, state bytes] uint8 in the slots [L] int32."""
        for slot, state in zip(slots.tolist(), states, strict=True):
            cache = self.write_state(cache, slot, state[None])
        return cache

    def classes(self, states: np.ndarray) -> np.ndarray:
        """[L, ring length] int32, the token classes in states [L, bytes] uint8."""
        start, size, length = self._classes_place
        return states[:, start : start + size].copy().view(np.int32).reshape(-1, length)

    def _calls(self, blocks: np.ndarray) -> Iterator[tuple[np.ndarray, int]]:
        """Parts of `blocks` [N] of the compiled length, the last filled up, and their starts."""
        for first in range(0, len(blocks), self.num_blocks):
            some = np.zeros(self.num_blocks, np.int32)
            part = blocks[first : first + self.num_blocks]
            some[: len(part)] = part
            yield some, first

    def read_blocks(self, cache: KVCache, blocks: np.ndarray) -> list[jax.Array]:
        """Per layer group the bytes [N, group bytes] uint8 of blocks [N] int32."""
        return self._read_blocks([_group(source) for source in cache.sources], blocks)

    def read_state(self, cache: KVCache, slot: int) -> jax.Array:
        """The bytes [state bytes] uint8 of a slot."""
        return self._read_state(_state(cache), np.int32(slot))

    def write_state(self, cache: KVCache, slot: int, data: Any) -> KVCache:
        """The cache with `data` [1, state bytes] uint8 as the state in a slot."""
        where = jax.device_put(np.array([slot], np.int32))
        state = self._write_state(_state(cache), where, jax.device_put(data))
        rings, partials, classes, draft_rings = state
        draft = cache.draft
        return cache._replace(
            rings=rings,
            sources=tuple(
                source._replace(partial=partial)
                for source, partial in zip(cache.sources, partials, strict=True)
            ),
            classes=classes,
            draft=None if draft is None else draft._replace(rings=draft_rings),
        )

    def _padded(self, rows: np.ndarray) -> np.ndarray:
        """`rows` [K, ...] and zeros up to a compiled size."""
        size = next((size for size in self.write_sizes if size >= len(rows)), None)
        if size is None:
            raise ValueError(
                f"{len(rows)} blocks are to be written; expected at most {self.write_sizes[-1]}"
            )
        padded = np.zeros((size, *rows.shape[1:]), rows.dtype)
        padded[: len(rows)] = rows
        return padded


def sizes_up_to(least: int, most: int) -> tuple[int, ...]:
    """Ascending sizes from `least` to at least `most`, so dense that a third is padding at most."""
    sizes = [least]
    while sizes[-1] < most:
        # 2 and 3 times powers of two, in turn.
        sizes.append(sizes[-1] * 3 // 2 if len(sizes) % 2 else sizes[-2] * 2)
    return tuple(sizes)


def _numbers(count: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((count,), jnp.int32)


def _group(source: SourceCache) -> tuple[Any, Any]:
    return source.entries, source.index_keys


def _state(cache: KVCache) -> tuple[Any, ...]:
    draft_rings = () if cache.draft is None else cache.draft.rings
    return cache.rings, tuple(s.partial for s in cache.sources), cache.classes, draft_rings


def _row_bytes(tree: Any) -> int:
    leaves = jax.tree.leaves(tree)
    return sum(int(np.prod(leaf.shape[1:])) * leaf.dtype.itemsize for leaf in leaves)


def _read_groups(groups: list[Any], blocks: jax.Array) -> list[jax.Array]:
    return [_to_bytes(jax.tree.map(lambda leaf: leaf[blocks], group)) for group in groups]


def _read_row(state: Any, slot: jax.Array) -> jax.Array:
    return _to_bytes(jax.tree.map(lambda leaf: leaf[slot][None], state))[0]


def _compile_write(tree: Any, rows: Any, shape: tuple[int, int]) -> Callable[..., Any]:
    data = jax.ShapeDtypeStruct(shape, jnp.uint8)
    return jax.jit(_write_rows, donate_argnums=0).lower(tree, rows, data).compile()


def _write_rows(tree: Any, rows: jax.Array, data: jax.Array) -> Any:
    values = _from_bytes(data, tree)
    return jax.tree.map(lambda leaf, value: leaf.at[rows].set(value), tree, values)


def _to_bytes(rows: Any) -> jax.Array:
    """[N, bytes] uint8 of a tree of arrays [N, ...], leaf after leaf."""
    columns = [
        jax.lax.bitcast_convert_type(leaf, jnp.uint8).reshape(leaf.shape[0], -1)
        for leaf in jax.tree.leaves(rows)
    ]
    return jnp.concatenate(columns, axis=1)


def _from_bytes(data: jax.Array, like: Any) -> Any:
    """A tree of arrays [N, ...] with the types of `like`, from [N, bytes] uint8."""
    leaves, structure = jax.tree.flatten(like)
    values: list[jax.Array] = []
    start = 0
    for leaf in leaves:
        size = _row_bytes(leaf)
        shape = (data.shape[0], *leaf.shape[1:])
        column = data[:, start : start + size]
        if leaf.dtype.itemsize > 1:
            shape = (*shape, leaf.dtype.itemsize)
        values.append(jax.lax.bitcast_convert_type(column.reshape(shape), leaf.dtype))
        start += size
    return jax.tree.unflatten(structure, values)
