"""Which running sequences generate their next token in the next decode step.

All that are ready do, if a bucket holds them; if none does, those that have waited longest do, so
that every sequence gets its turn. A sequence grows by one block when its next token starts one.
"""

import numpy as np

from serving.core.buckets import BucketTable, StepKind
from serving.core.running_table import RunningTable


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


def _grow(table: RunningTable, rows: np.ndarray, growing: np.ndarray) -> np.ndarray:
    """Claim blocks for the growing rows, oldest first; the rows that can run after that."""
    for row in growing[np.argsort(table.sequence_ids[growing])].tolist():
        # An older one may have preempted this one.
        if table.sequences[row] is not None:
            table.claim(row, int(table.num_scheduled[row]) + 1)
    is_running = table.sequence_ids[rows] >= 0
    is_backed = table.blocks_for(table.num_scheduled[rows] + 1) <= table.num_blocks[rows]
    return rows[is_running & is_backed]


def _longest_waiting(
    table: RunningTable, buckets: BucketTable, rows: np.ndarray, num_blocks: np.ndarray
) -> np.ndarray:
    """As many rows as one bucket holds, those first that were last served longest ago."""
    order = np.lexsort((table.sequence_ids[rows], table.last_steps[rows]))
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
