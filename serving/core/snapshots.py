"""Which steps copy a sequence's state aside, and what becomes of the copies.

A copy is planned together with the step that ends at a block boundary, or may pass it, and is made
right after it. Only when the step is settled is it known whether the sequence still runs and did
pass the boundary; then the copy becomes the snapshot of a prefix, or its slot is free again.

A state may be copied when up to `ROLLBACK_MAX` tokens (of `deepinfer_jax/cache.py`) have been
computed behind the boundary: its rings are so much longer than what is read, because rows may be
taken back. One step passes a boundary by fewer.
"""

from collections import deque

import msgspec
import numpy as np

from serving.core.running_table import RunningTable
from serving.core.step_plan import no_copies


class _Copy(msgspec.Struct, frozen=True, gc=False):
    """`slot` will hold the state of the sequence at `row` as it is after `num_blocks` blocks."""

    step_index: int
    row: int
    num_blocks: int
    slot: int
    is_tail: bool


class SnapshotCopies:
    """The copies of steps in flight."""

    def __init__(self, table: RunningTable) -> None:
        self._table = table
        self._copies: deque[_Copy] = deque()

    def plan(
        self,
        step_index: int,
        rows: np.ndarray,
        starts: np.ndarray,
        ends: np.ndarray,
        is_prefill: bool,
    ) -> np.ndarray:
        """The copies to make after a step that brings the rows [N] to at most `ends` [N] tokens.

        Args:
            starts: [N], tokens that the rows have at least before the step.

        Returns:
            [M, 2] int32, (row, snapshot slot). None for a boundary whose state is kept already as
            far as that is known, nor when all slots wait for a step in flight.
        """
        table = self._table
        if not table.prefixes.num_snapshots:
            return no_copies()
        if is_prefill:
            is_wanted = (table.cuts[rows] == ends[:, None]).any(axis=1)
        else:
            is_wanted = ends - ends % table.block_size > starts
        if not is_wanted.any():
            return no_copies()
        pairs: list[tuple[int, int]] = []
        boundaries = ends[is_wanted] // table.block_size
        for row, num_blocks in zip(rows[is_wanted].tolist(), boundaries.tolist(), strict=True):
            slot = table.prefixes.reserve_slot()
            if slot is None:
                break
            self._copies.append(_Copy(step_index, row, num_blocks, slot, not is_prefill))
            pairs.append((row, slot))
        return np.array(pairs, np.int32).reshape(-1, 2)

    def settle(self, step_index: int) -> None:
        """All steps up to this one are over, and the rows that go on are counted as computed."""
        while self._copies and self._copies[0].step_index <= step_index:
            self._keep(self._copies.popleft())

    def _keep(self, copy: _Copy) -> None:
        table = self._table
        # A row has no other sequence before the steps that contain the last one are over.
        sequence = table.sequences[copy.row]
        boundary = copy.num_blocks * table.block_size
        if (
            sequence is None
            or table.num_computed[copy.row] < boundary
            or table.num_computed_before[copy.row] >= boundary
        ):
            table.prefixes.return_slot(copy.slot)
            return
        sequence.extend_keys(copy.num_blocks, table.block_size)
        key = sequence.prefix_keys[copy.num_blocks - 1]
        tail_start = sequence.tail_start if boundary > sequence.tail_start else None
        if not table.prefixes.keep_snapshot(key, copy.slot, tail_start):
            return
        if copy.is_tail:
            if sequence.tail_key is not None:
                table.prefixes.drop_unused_snapshot(sequence.tail_key)
            sequence.tail_key = key
        elif table.kept is not None:
            table.kept.append((sequence, copy.num_blocks))
