"""Engram tables in host memory: rows are fetched ahead of a step and sent along with it.

The tables are most of a model's bytes and hardly any of its traffic (two layers read 24 rows of
264 bytes for a token), so they may stay where the checkpoint is mapped, and devices hold none of
them. Which rows a step reads follows from token ids alone. So the host keeps for every state slot
the same ring of token classes as the device does, and before a step is dispatched:

1. finds the n-gram of each token, from the step's own tokens and the ring;
2. hashes it to table rows (`EngramTables.rows`);
3. reads those rows and packs them, codes and scales side by side, into one array for the device.

None of this waits for the device, so while one step runs the rows of the next are being fetched.

*Why threads and advice*: rows that are not in memory come from a disk, one page fault each, and a
disk answers many of them in the time of one. Unless told that reads are random, the system reads
128 KiB around each: thirty times as much (measured: 527 MB instead of 17 MB for 4,096 rows).
"""

import dataclasses
import mmap
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from deepinfer_jax.config import ModelConfig
from deepinfer_jax.engram_tables import EngramTables
from deepinfer_jax.layers.engram import IMAGE_CLASS
from deepinfer_jax.parameters import Parameters
from pallas_kernels.scaled_array import FP8_ROW32, ScaledArray

_FETCH_THREADS = 16
_ROWS_PER_TASK = 2048
"""Rows that one thread reads at a time: half a megabyte, so that a small step needs one only."""


class HostEngram:
    """The tables of a model and the recent tokens of every state slot.

    Attributes:
        row_shape: [L, K, bytes], what one token of a step reads: for L tables K rows each.
    """

    def __init__(
        self,
        config: ModelConfig,
        constants: EngramTables,
        tables: Sequence[ScaledArray],
        ring_shape: tuple[int, ...],
    ) -> None:
        """Keeps `tables` as they are, mapped files included; one per Engram layer, in order.

        `ring_shape` is that of the classes in the cache, [num_slots, ring_length].

        Raises:
            ValueError: another number of tables than Engram layers, or another format or height.
        """
        widths = (config.engram_head_dim, config.engram_head_dim // FP8_ROW32.block[1])
        heights = [table.shape[0] for table in tables]
        if heights != list(config.engram_num_embeddings):
            raise ValueError(
                f"the Engram tables have {heights} rows; expected "
                f"{list(config.engram_num_embeddings)} (engram_num_embeddings)"
            )
        self._image_token_id = config.image_token_id
        self._constants = constants
        self._rings = np.zeros(ring_shape, np.int32)
        # Bytes, because numpy copies rows of bytes at the speed of memory.
        self._leaves = [
            (np.asarray(table.codes).view(np.uint8), np.asarray(table.scale).view(np.uint8))
            for table in tables
        ]
        for leaf in (leaf for leaves in self._leaves for leaf in leaves):
            _expect_random_reads(leaf)
        self.row_shape = (len(tables), constants.moduli.shape[1], sum(widths))
        self._code_width = widths[0]
        self._threads = ThreadPoolExecutor(_FETCH_THREADS, thread_name_prefix="engram")

    def fetch(
        self, token_ids: np.ndarray, starts: np.ndarray, num_tokens: np.ndarray, slots: np.ndarray
    ) -> np.ndarray:
        """Rows for the tokens of the next step, whose token ids the rings then remember.

        Args:
            token_ids: [T] int32, rows of the step one after another, padded; a negative id is an
                image token.
            starts, num_tokens, slots: [R] int32 as in `StepBatch`, padding rows with 0 tokens.

        Returns:
            [T, L, K, bytes] uint8 for `layers.engram.unpack_rows`; zeros for padding.
        """
        classes = self._ngrams(token_ids, starts, num_tokens, slots)
        out = np.zeros((len(token_ids), *self.row_shape), np.uint8)
        rows = self._constants.rows(classes)
        tokens_per_task = max(1, _ROWS_PER_TASK // max(1, rows.shape[2]))
        tasks = [
            (table, slice(first, min(first + tokens_per_task, len(rows))))
            for table in range(rows.shape[1])
            for first in range(0, len(rows), tokens_per_task)
        ]

        def read(task: tuple[int, slice]) -> None:
            table, tokens = task
            codes, scale = self._leaves[table]
            wanted = rows[tokens, table]
            out[tokens, table, :, : self._code_width] = np.take(codes, wanted, axis=0)
            out[tokens, table, :, self._code_width :] = np.take(scale, wanted, axis=0)

        if len(tasks) <= rows.shape[1]:
            for task in tasks:
                read(task)
        else:
            # Consumed, so that an error of a thread is raised here.
            list(self._threads.map(read, tasks))
        return out

    def copy_slots(self, pairs: np.ndarray) -> None:
        """What `cache.copy_slots` does to the cache: `pairs` [N, 2] of source and destination."""
        self._rings[pairs[:, 1]] = self._rings[pairs[:, 0]]

    def set_classes(self, slots: np.ndarray, classes: np.ndarray) -> None:
        """Give slots [N] int32 other classes [N, ring length] int32, as the cache has them."""
        self._rings[slots] = classes

    def _ngrams(
        self, token_ids: np.ndarray, starts: np.ndarray, num_tokens: np.ndarray, slots: np.ndarray
    ) -> np.ndarray:
        """[num_real, N] classes, nearest first, as `layers.engram.ngram_classes` finds them."""
        order = self._constants.multipliers.shape[1]
        row = np.repeat(np.arange(len(starts)), num_tokens)
        token = np.arange(len(row))
        offset = token - (np.cumsum(num_tokens) - num_tokens)[row]
        position, slot = starts[row] + offset, slots[row]
        ids = token_ids[: len(row)]
        is_image = (ids < 0) | (ids == self._image_token_id)
        classes = np.where(is_image, IMAGE_CLASS, self._constants.token_classes[ids])
        distance = np.arange(order)
        at = position[:, None] - distance
        length = self._rings.shape[1]
        found = np.where(
            distance <= offset[:, None],
            classes[np.maximum(token[:, None] - distance, 0)],
            self._rings[slot[:, None], at % length],
        )
        unbroken = np.logical_and.accumulate((at >= 0) & (found != IMAGE_CLASS), axis=1)
        # A chunk longer than the ring writes some places twice, and the last write stays.
        self._rings[slot, position % length] = classes
        return np.where(unbroken, found, self._constants.pad_class)


def _expect_random_reads(array: np.ndarray) -> None:
    """Keep the system from reading ahead in `array`, if that is part of a mapped file."""
    owner: object = array
    while isinstance(owner, np.ndarray):
        owner = owner.base
    if isinstance(owner, mmap.mmap):
        begin = array.ctypes.data - np.frombuffer(owner, np.uint8).ctypes.data
        inside = begin % mmap.PAGESIZE
        owner.madvise(mmap.MADV_RANDOM, begin - inside, array.nbytes + inside)


def detach_tables(parameters: Parameters) -> tuple[Parameters, list[ScaledArray]]:
    """The parameters without their Engram tables, and those in the order of the layers."""
    layers, tables = [], []
    for layer in parameters.layers:
        if layer.engram is not None:
            assert isinstance(layer.engram.embed, ScaledArray), layer.engram.embed
            tables.append(layer.engram.embed)
            engram = dataclasses.replace(layer.engram, embed=None)
            layer = dataclasses.replace(layer, engram=engram)
        layers.append(layer)
    return dataclasses.replace(parameters, layers=tuple(layers)), tables
