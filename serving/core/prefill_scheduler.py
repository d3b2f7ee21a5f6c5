"""Which prompts start, and which of their tokens the next prefill step computes.

Starting: prompts start in the order of the queue (`waiting_queue.py`: by priority, then by
admission) as slots and blocks allow. One that does not fit yet may be overtaken by later ones, but
only `OVERTAKES_MAX` times; one that was preempted is not overtaken at all, since the pool was too
full already.

Chunks: several prompts share the tokens of one step. One half goes to the prompts in that same
order, the rest to those with the fewest tokens left. So a short prompt does not wait for a
long one, and a stream of short ones does not stop a long one.

A chunk also ends where the state of the sequence is to be kept for others (`core/prefix.py`).

An image is computed whole: no chunk ends inside one. So that it cannot wait for ever, the oldest
prompt may exceed its half by the image it has come to.

With a `PrefillBudget` a step is also kept within a predicted time, which bounds how long the tokens
of others wait for it. The halves are halves of the time then, so that a long context, whose tokens
cost more, gets fewer of them.
"""

from dataclasses import dataclass

import numpy as np

from serving.core.buckets import Bucket, BucketTable, StepKind
from serving.core.cost import PrefillCost, num_pairs
from serving.core.image_layout import next_stop, whole_images_end
from serving.core.prefix_transfer import PrefixTransfers
from serving.core.request import RequestImage
from serving.core.running_table import RunningTable
from serving.core.sequence import Sequence, lowest_rank
from serving.core.waiting_queue import WaitingQueue

OVERTAKES_MAX = 16
"""How often a waiting sequence may see a later one start; then room is kept for it."""

_SCAN_MAX = 64
"""Waiting sequences looked at per step, so that a long queue does not slow planning."""


def start_waiting(
    waiting: WaitingQueue[Sequence], table: RunningTable, transfers: PrefixTransfers | None = None
) -> None:
    """Give rows to the waiting sequences that fit beside those already running.

    What `transfers` has staged of their prompts is written to the device first.

    A sequence fits if, after the prompts being computed got all their blocks, and after each
    decoding sequence that may still grow got one more, enough are left for all its tokens. For the
    first in line, running sequences of a lower priority give way if that is enough.
    """
    _make_room(waiting, table)
    num_free_blocks = None
    overtaken: list[Sequence] = []
    started: list[Sequence] = []
    for position, sequence in enumerate(waiting):
        if not table.slots.num_free or position == _SCAN_MAX:
            break
        if num_free_blocks is None:
            num_free_blocks = table.blocks.num_free - num_promised_blocks(table)
        if transfers is not None and transfers.has_staged(sequence):
            num_there = max(table.num_usable_blocks(sequence), transfers.num_present_of(sequence))
            is_fitting = _num_needed_blocks(table, sequence, num_there) <= num_free_blocks
            if is_fitting and not transfers.bring(sequence):
                continue
        num_usable = table.num_usable_blocks(sequence)
        num_needed = _num_needed_blocks(table, sequence, num_usable)
        if num_needed <= num_free_blocks:
            num_free_blocks -= num_needed
            table.enter(sequence, num_usable)
            started.append(sequence)
            for earlier in overtaken:
                earlier.num_overtakes += 1
        elif sequence.num_preemptions or sequence.num_overtakes >= OVERTAKES_MAX:
            break
        else:
            overtaken.append(sequence)
    for sequence in started:
        waiting.remove(sequence)
    waiting.count_starts(started)


def _make_room(waiting: WaitingQueue[Sequence], table: RunningTable) -> None:
    """Preempt what has a lower priority than the first in line and the same owner, if that makes
    room for it.

    *Why the same owner*: a tenant that calls its requests urgent must not stop those of others. One
    that was promoted keeps its priority here: it goes first, but at nobody's cost.
    """
    first = next(iter(waiting))
    floor = lowest_rank(first.request.priority + 1)
    # What is on its way back may be enough.
    while not table.is_retiring:
        behind = (table.own_ranks >= floor).nonzero()[0]
        behind = behind[table.owners[behind] == first.request.cache_owner]
        if not len(behind):
            return
        needed = _num_needed_blocks(table, first, table.num_usable_blocks(first))
        num_free = table.blocks.num_free - num_promised_blocks(table)
        if table.slots.num_free and needed <= num_free:
            return
        num_free = table.blocks.num_free - num_promised_blocks(table, behind)
        if needed > num_free + int(table.num_blocks[behind].sum()):
            return
        table.preempt_last(behind)
        # The room is for nobody else.
        first.num_overtakes = OVERTAKES_MAX


def _num_needed_blocks(table: RunningTable, sequence: Sequence, num_usable: int) -> int:
    """Free blocks that a waiting sequence takes, of whose prefix `num_usable` blocks are there."""
    num_stored = min(sequence.num_tokens + 1, sequence.length_limit - 1)
    num_needed = -(-num_stored // table.block_size)
    if num_usable:
        num_needed -= table.num_held_blocks(sequence, num_usable)
    return num_needed


def num_promised_blocks(table: RunningTable, without: np.ndarray | None = None) -> int:
    """Free blocks that running sequences, but for the rows `without` [N], will soon need."""
    prefilling, decoding = table.prefilling_rows, table.decoding_rows
    if without is not None:
        prefilling = np.setdiff1d(prefilling, without, assume_unique=True)
        decoding = np.setdiff1d(decoding, without, assume_unique=True)
    rows = prefilling
    num_stored = np.minimum(table.num_tokens[rows] + 1, table.length_limits[rows] - 1)
    num_promised = int((table.blocks_for(num_stored) - table.num_blocks[rows]).sum())
    rows = decoding
    # The last token of a sequence is never fed, so its KV needs no room.
    num_final = table.blocks_for(table.length_limits[rows] - 1)
    return num_promised + int((num_final > table.num_blocks[rows]).sum())


@dataclass(slots=True)
class _Chunk:
    """Tokens `start` to `start + num_tokens - 1` of the sequence at `row`.

    `num_least` are the fewest tokens that cut no image, `num_most` those up to where the chunk
    must end.
    """

    row: int
    start: int
    num_remaining: int
    num_least: int
    num_most: int
    images: tuple[RequestImage, ...]
    num_tokens: int = 0

    def whole(self, num_tokens: int) -> int:
        """The most tokens up to `num_tokens` that cut no image."""
        return max(whole_images_end(self.images, self.start + num_tokens) - self.start, 0)


@dataclass(frozen=True, slots=True)
class PrefillBudget:
    """The time that a prefill step may take, as `cost` predicts it.

    Padding counts like tokens. The smallest compiled step that reaches the context of the oldest
    prompt may always be filled, and an image that it has come to always be computed, so that
    prompts advance.

    Raises:
        ValueError: the time is not above 0.
    """

    time_ms: float
    cost: PrefillCost

    def __post_init__(self) -> None:
        if not self.time_ms > 0:
            raise ValueError(f"time_ms is {self.time_ms}; expected more than 0")


class _ChunkBatch:
    """Counts the chunks of one step, always such that some bucket holds them."""

    def __init__(
        self, buckets: BucketTable, block_size: int, budget: PrefillBudget | None = None
    ) -> None:
        self._buckets = buckets.of(StepKind.PREFILL)
        self._block_size = block_size
        self._budget = budget
        self.num_tokens = 0
        self._num_pairs = 0.0
        self._num_rows = 0
        self._num_blocks = 1
        # Tokens that are always in time.
        self._num_granted = 0

    def extend(self, chunk: _Chunk, num_tokens_max: int, num_least: int = 0) -> None:
        """Add up to `num_tokens_max` more of the chunk's remaining tokens.

        Fewer, if buckets do not allow as many, or so as not to cut an image, or to keep within the
        time, which the first `num_least` tokens need not.
        """
        num_rows = self._num_rows + (chunk.num_tokens == 0)
        stop = chunk.start + chunk.num_tokens
        num_wanted = min(num_tokens_max, chunk.num_most - chunk.num_tokens)
        num_added = 0
        for bucket in self._buckets:
            if bucket.num_rows >= num_rows and bucket.num_blocks >= self._num_blocks:
                room = bucket.num_tokens - self.num_tokens
                reach = bucket.num_blocks * self._block_size - stop
                num_fitting = min(num_wanted, room, reach)
                if num_fitting > 0 and not self._num_granted:
                    self._num_granted = bucket.num_tokens
                in_time = max(self._num_in_time(bucket, stop, num_fitting), num_least)
                num_added = max(num_added, min(num_fitting, in_time))
        num_added = chunk.whole(chunk.num_tokens + num_added) - chunk.num_tokens
        if num_added <= 0:
            return
        self._num_rows = num_rows
        self._num_pairs += num_pairs(num_added, stop)
        chunk.num_tokens += num_added
        self.num_tokens += num_added
        self._num_blocks = max(self._num_blocks, -(-(stop + num_added) // self._block_size))

    def _num_in_time(self, bucket: Bucket, start: int, num_tokens: int) -> int:
        """How many tokens from `start` on, up to `num_tokens`, the bucket leaves time for."""
        if self._budget is None or bucket.num_tokens <= self._num_granted:
            return num_tokens
        cost = self._budget.cost
        spent_ms = cost.total_ms(bucket.num_tokens, self._num_pairs)
        rest_ms = self._budget.time_ms - spent_ms
        return cost.num_tokens_within(rest_ms, start, num_tokens, is_padding=True)


def choose_chunks(
    table: RunningTable,
    buckets: BucketTable,
    shortest_first: bool,
    budget: PrefillBudget | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """The rows of the next prefill step and their token counts, with blocks claimed for them.

    Args:
        table: may lose sequences by preemption.
        shortest_first: for buckets with a single row, where prompts cannot share a step: whether
            this step goes to the shortest rest rather than to the oldest prompt. Alternate it.
        budget: the time that the step may take; None for as long as its buckets take.

    Returns:
        ([N] rows, [N] int32 tokens of each), oldest sequence first; empty if nothing can run.
    """
    by_age = _backed_chunks(table)
    batch = _ChunkBatch(buckets, table.block_size, budget)
    largest = buckets.largest(StepKind.PREFILL)
    if largest.num_rows > 1 or not shortest_first:
        _fill_by_age(batch, by_age, largest, budget)
    for chunk in sorted(by_age, key=lambda chunk: chunk.num_remaining):
        batch.extend(chunk, largest.num_tokens)
    # The list by age again: older chunks get their blocks first.
    chunks = [chunk for chunk in by_age if chunk.num_tokens]
    for chunk in chunks:
        num_blocks = int(table.num_blocks[chunk.row]) + table.blocks.num_free
        room = num_blocks * table.block_size - chunk.start
        chunk.num_tokens = chunk.whole(min(chunk.num_tokens, room))
        claimed = table.claim(chunk.row, chunk.start + chunk.num_tokens)
        assert claimed, f"row {chunk.row} was refused {chunk.num_tokens} tokens that fit"
    return (
        np.array([chunk.row for chunk in chunks], np.int64),
        np.array([chunk.num_tokens for chunk in chunks], np.int32),
    )


def _backed_chunks(table: RunningTable) -> list[_Chunk]:
    """The prompts with tokens left and blocks for the fewest they can go on with, first in rank
    first.

    Blocks are claimed before tokens are shared out, so that no prompt that waits for a block
    takes another's share.
    """
    rows = table.prefilling_rows
    rows = rows[table.num_scheduled[rows] < table.num_tokens[rows]]
    rows = rows[np.argsort(table.ranks[rows])]
    backed: list[_Chunk] = []
    for row in rows.tolist():
        start = int(table.num_scheduled[row])
        sequence = table.sequences[int(row)]
        if sequence is None:
            continue  # One before it has preempted this one.
        images = sequence.request.images
        stop = next_stop(images, start)
        if table.claim(row, stop):
            num_tokens = int(table.num_tokens[row])
            end = min((cut for cut in table.cuts[row].tolist() if cut > start), default=num_tokens)
            backed.append(_Chunk(row, start, num_tokens - start, stop - start, end - start, images))
    return backed


def _fill_by_age(
    batch: _ChunkBatch, by_age: list[_Chunk], largest: Bucket, budget: PrefillBudget | None
) -> None:
    """Give the first half of the step in order of age, leaving a row for the other half."""
    num_tokens_max = -(-largest.num_tokens // 2)
    rest_ms = 0.0 if budget is None else (budget.time_ms - budget.cost.base_ms) / 2
    for chunk in by_age[: max(largest.num_rows - 1, 1)]:
        room = num_tokens_max - batch.num_tokens
        if budget is not None:
            room = budget.cost.num_tokens_within(rest_ms, chunk.start, room)
        # So that the oldest advances whatever it costs.
        num_least = 0 if batch.num_tokens else chunk.num_least
        if max(room, num_least) <= 0:
            return
        batch.extend(chunk, max(room, num_least), num_least)
        if budget is not None:
            rest_ms -= budget.cost.chunk_ms(chunk.num_tokens, chunk.start)
