"""Which running sequences generate their next token in the next decode step.

All that are ready do, if a bucket holds them; if none does, those that have waited longest do, so
that every sequence gets its turn. A sequence grows by one block when its next token starts one.

If the device drafts, a row also verifies drafts: as many as `verify_lengths` finds worth their
time, and as find room in free blocks. No sequence loses memory for another one's drafts.

A grammar cuts the drafts of its row, but blocks are claimed and the total is chosen as if it did
not: whether a draft is verified must not depend on what was drafted after it, and where the cut is
does. The rows that are saved go to the next best drafts, or to none.
"""

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
    num_blocks = table.blocks_for(table.num_scheduled[rows] + 1)
    is_growing = num_blocks > table.num_blocks[rows]
    if is_growing.any():
        # Before rows are chosen: one that waits for a block must not take another's turn.
        rows = _grow(table, rows, rows[is_growing])
        num_blocks = table.blocks_for(table.num_scheduled[rows] + 1)
    if not len(rows):
        return rows
    need = (len(rows), len(rows), int(num_blocks.max()))
    if buckets.smallest(StepKind.DECODE, *need) is None:
        rows = _longest_waiting(table, buckets, rows, num_blocks)
    return rows


def choose_lengths(
    table: RunningTable,
    buckets: BucketTable,
    rows: np.ndarray,
    step_ms: Mapping[Bucket, float],
    slope_ms: float = 0.0,
) -> np.ndarray:
    """Tokens of each of the rows in the next decode step, [N] int32: its last one and drafts.

    Args:
        rows: [N], what `choose_rows` gave; they may get free blocks.
        step_ms: time of each decode bucket; while one is not known all drafts are verified.
        slope_ms: how much longer steps take, for each token of their bucket.
    """
    num_rows, drafts_max = len(rows), table.confidences.shape[1]
    if not drafts_max:
        return np.ones(num_rows, np.int32)
    ends = table.num_scheduled[rows] + 1
    fitting = [
        bucket
        for bucket in buckets.of(StepKind.DECODE)
        if min(bucket.num_rows, bucket.num_tokens) >= num_rows
        and bucket.num_blocks >= table.blocks_for(ends).max()
    ]
    largest = max(fitting, key=lambda bucket: (bucket.num_tokens, bucket.num_blocks))
    # The last token of a sequence is never fed, so neither is a draft in its place.
    stop = np.minimum(table.length_limits[rows] - 1, largest.num_blocks * table.block_size)
    num_drafts = np.minimum(drafts_max, stop - ends)
    num_blocks = table.blocks_for(ends + num_drafts)
    growing = np.flatnonzero(num_blocks > table.num_blocks[rows])
    if len(growing) and not table.claim_all(rows[growing], (ends + num_drafts)[growing]):
        for index in growing.tolist():
            reach = table.claim_free(int(rows[index]), int(ends[index] + num_drafts[index]))
            num_drafts[index] = min(num_drafts[index], reach - ends[index])
        num_blocks = table.blocks_for(ends + num_drafts)
    width = num_blocks.max()
    cost = _step_cost([b for b in fitting if b.num_blocks >= width], step_ms, slope_ms)
    num_total = num_rows + int(num_drafts.sum())
    num_usable = np.minimum(num_drafts, table.num_usable_drafts[rows])
    if cost is None and num_total <= largest.num_tokens:
        return (1 + num_usable).astype(np.int32)
    rounds = table.num_rounds[rows]
    before = survival_rates(table.confidences_before[rows], rounds > 1, num_drafts)
    total = min(total_rows(before, num_drafts, cost), largest.num_tokens)
    if total == num_total:
        return (1 + num_usable).astype(np.int32)
    newest = survival_rates(table.confidences[rows], rounds > 0, num_usable)
    return share_rows(newest, num_usable, total)


def _step_cost(
    buckets: list[Bucket], step_ms: Mapping[Bucket, float], slope_ms: float
) -> StepCost | None:
    """Time by number of tokens; None if a bucket was not measured."""
    times: dict[int, float] = {}
    for bucket in buckets:
        if bucket not in step_ms:
            return None
        size = bucket.num_tokens
        times[size] = min(step_ms[bucket], times.get(size, np.inf))
    sizes = sorted(times)
    return StepCost(tuple(sizes), tuple(times[size] for size in sizes), slope_ms)


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
