"""Which running sequences generate their next token in the next decode step.

All that are ready do, if a bucket holds them; if none does, those that have waited longest do, so
that every sequence gets its turn. A sequence grows by one block when its next token starts one.

If the device drafts, a row also verifies drafts: as many as `verify_lengths` finds worth their
time, and as find room in free blocks. No sequence loses memory for another one's drafts.

A grammar cuts the drafts of its row, but blocks are claimed and the total is chosen as if it did
not: whether a draft is verified must not depend on what was drafted after it, and where the cut is
does. The rows that are saved go to the next best drafts, or to none.
"""

from bisect import bisect_left
from collections.abc import Mapping

import numpy as np

from serving.core.buckets import Bucket, BucketTable, StepKind
from serving.core.running_table import RunningTable
from serving.core.verify_lengths import StepCost, share_rows, survival_rates, total_rows


def choose_rows(table: RunningTable, buckets: BucketTable) -> np.ndarray:
    """The rows of the next decode step, ascending, with blocks claimed; empty if none can run.

    The token to feed need not be known yet. The table may lose sequences by preemption.
    """
    rows = table.generating_rows
    ends = table.num_scheduled[rows] + 1
    is_growing = ends > table.num_blocks[rows] * table.block_size
    if is_growing.any():
        # Before rows are chosen: one that waits for a block must not take another's turn.
        rows = _grow(table, rows, rows[is_growing])
        ends = table.num_scheduled[rows] + 1
    if not len(rows):
        return rows
    need = (len(rows), len(rows), table.blocks_of(int(ends.max())))
    if buckets.smallest(StepKind.DECODE, *need) is None:
        rows = _longest_waiting(table, buckets, rows, table.blocks_for(ends))
    return rows


class DecodeCosts:
    """What decode steps cost, and which buckets there are for them.

    Looked up once a step, so what was found is kept: only which bucket sizes bound a step counts.

    Args:
        step_ms: time of each decode bucket, as far as it was measured.
    """

    def __init__(self, buckets: BucketTable, step_ms: Mapping[Bucket, float]) -> None:
        self._buckets = buckets.of(StepKind.DECODE)
        self._step_ms = step_ms
        self._num_rows = sorted({bucket.num_rows for bucket in self._buckets})
        self._num_blocks = sorted({bucket.num_blocks for bucket in self._buckets})
        self._largest: dict[tuple[int, int], Bucket] = {}
        self._costs: dict[tuple[int, int], StepCost | None] = {}
        self._slope_ms = 0.0

    def largest(self, num_rows: int, num_blocks: int) -> Bucket:
        """The bucket with most tokens that holds so many rows, and contexts of so many blocks."""
        bound = self._bound(num_rows, num_blocks)
        if bound not in self._largest:
            fitting = self._fitting(num_rows, num_blocks)
            self._largest[bound] = max(fitting, key=lambda b: (b.num_tokens, b.num_blocks))
        return self._largest[bound]

    def cost(self, num_rows: int, num_blocks: int, slope_ms: float) -> StepCost | None:
        """Time by number of tokens; None if a bucket for such steps was not measured.

        Args:
            slope_ms: how much longer steps take, for each token of their bucket.
        """
        if slope_ms != self._slope_ms:
            self._costs.clear()
            self._slope_ms = slope_ms
        bound = self._bound(num_rows, num_blocks)
        if bound not in self._costs:
            self._costs[bound] = self._cost_of(self._fitting(num_rows, num_blocks))
        return self._costs[bound]

    def _bound(self, num_rows: int, num_blocks: int) -> tuple[int, int]:
        return bisect_left(self._num_rows, num_rows), bisect_left(self._num_blocks, num_blocks)

    def _fitting(self, num_rows: int, num_blocks: int) -> list[Bucket]:
        return [b for b in self._buckets if b.num_rows >= num_rows and b.num_blocks >= num_blocks]

    def _cost_of(self, buckets: list[Bucket]) -> StepCost | None:
        times: dict[int, float] = {}
        for bucket in buckets:
            if bucket not in self._step_ms:
                return None
            size = bucket.num_tokens
            times[size] = min(self._step_ms[bucket], times.get(size, np.inf))
        sizes = sorted(times)
        return StepCost(tuple(sizes), tuple(times[size] for size in sizes), self._slope_ms)


def choose_lengths(
    table: RunningTable, costs: DecodeCosts, rows: np.ndarray, slope_ms: float = 0.0
) -> np.ndarray:
    """Tokens of each of the rows in the next decode step, [N] int32: its last one and drafts.

    While a bucket that could be used was not measured, all drafts are verified.

    Args:
        rows: [N], what `choose_rows` gave; they may get free blocks.
        slope_ms: how much longer steps take, for each token of their bucket.
    """
    num_rows, drafts_max = len(rows), table.confidences.shape[1]
    if not drafts_max:
        return np.ones(num_rows, np.int32)
    ends = table.num_scheduled[rows] + 1
    largest = costs.largest(num_rows, table.blocks_of(int(ends.max())))
    # The last token of a sequence is never fed, so neither is a draft in its place.
    stop = np.minimum(table.length_limits[rows] - 1, largest.num_blocks * table.block_size)
    num_drafts = np.minimum(stop - ends, drafts_max)
    stops = ends + num_drafts
    growing = (stops > table.num_blocks[rows] * table.block_size).nonzero()[0]
    if len(growing) and not table.claim_all(rows[growing], stops[growing]):
        for index in growing.tolist():
            reach = table.claim_free(int(rows[index]), int(stops[index]))
            num_drafts[index] = min(num_drafts[index], reach - ends[index])
        stops = ends + num_drafts
    cost = costs.cost(num_rows, table.blocks_of(int(stops.max())), slope_ms)
    num_total = num_rows + int(num_drafts.sum())
    num_usable = np.minimum(num_drafts, table.num_usable_drafts[rows])
    if cost is None and num_total <= largest.num_tokens:
        return (1 + num_usable).astype(np.int32)
    rounds = table.num_rounds[rows]
    before = survival_rates(table.confidences_before.take(rows, axis=0), rounds > 1, num_drafts)
    total = min(total_rows(before, num_drafts, cost), largest.num_tokens)
    if total == num_total:
        return (1 + num_usable).astype(np.int32)
    newest = survival_rates(table.confidences.take(rows, axis=0), rounds > 0, num_usable)
    return share_rows(newest, num_usable, total)


def _grow(table: RunningTable, rows: np.ndarray, growing: np.ndarray) -> np.ndarray:
    """Claim blocks for the growing rows, first in rank first; the rows that can run after that."""
    if table.claim_all(growing, table.num_scheduled[growing] + 1):
        return rows
    for row in growing[np.argsort(table.ranks[growing])].tolist():
        # One before it may have preempted this one.
        if table.sequences[row] is not None:
            table.claim(row, int(table.num_scheduled[row]) + 1)
    is_running = table.sequence_ids[rows] >= 0
    is_backed = table.blocks_for(table.num_scheduled[rows] + 1) <= table.num_blocks[rows]
    return rows[is_running & is_backed]


def _longest_waiting(
    table: RunningTable, buckets: BucketTable, rows: np.ndarray, num_blocks: np.ndarray
) -> np.ndarray:
    """As many rows as one bucket holds, those first that were last served longest ago."""
    order = np.lexsort((table.ranks[rows], table.last_steps[rows]))
    widest = np.maximum.accumulate(num_blocks[order])
    # The need grows with the number of rows, so the largest number that fits can be bisected.
    # One always fits: the engine accepts no sequence longer than its widest buckets.
    fits, fits_not = 1, len(rows)
    while fits_not - fits > 1:
        middle = (fits + fits_not) // 2
        need = (middle, middle, int(widest[middle - 1]))
        if buckets.smallest(StepKind.DECODE, *need) is None:
            fits_not = middle
        else:
            fits = middle
    return np.sort(rows[order[:fits]])
