"""The sequences that hold KV memory, as numpy columns indexed by row.

A row of the table *is* a state slot: both belong to one sequence for the same time, so one number
names both. Planning a step gathers columns at the step's rows; nothing walks sequence objects.

Memory is taken by age. A sequence that needs a block when none is free preempts the youngest one,
if that is younger than itself: the victim gives everything back, waits at the head of the queue
and later computes its prompt and output again. With no younger one it sits the step out and keeps
what it has. So the oldest sequence always advances, and since any accepted sequence fits the pool
alone, all of them end.

*Why preemption and not a reservation of the worst case*: most sequences end long before
`max_tokens`, and a reservation would leave most of the pool empty. Tokens do not change by it:
each depends only on the tokens before it, the seed and its position.

A sequence that leaves while a step that uses its memory is still in flight keeps the memory until
that step is settled; `is_retiring` says so.
"""

import numpy as np

from serving.core.blocks import BlockPool, StateSlotPool
from serving.core.sequence import Sequence, SequenceStatus

_NO_SEQUENCE = -1
_NO_TOKEN = -1
_EMPTY, _PREFILL, _DECODE = 0, 1, 2


class RunningTable:
    """Columns of the sequences that hold memory, with the pools that the memory comes from.

    Columns have one entry per row; those of empty rows have no meaning, except `sequence_ids`.

    Attributes:
        sequence_ids: [S] int64, -1 where no sequence runs.
        num_tokens: [S] int32, tokens known, prompt and output.
        num_scheduled: [S] int32, tokens whose KV is written, or will be by a step in flight.
        length_limits: [S] int32, number of tokens at which the sequence ends.
        last_tokens: [S] int32, the newest known token, of decoding rows.
        last_steps: [S] int64, newest step that contains the row; -1 before the first.
        num_blocks: [S] int32, blocks held.
        block_tables: [S, B] int32, the blocks in order of position, then zeros.
        stop_tokens: [S, K] int32, tokens that end the sequence, then -1.
        temperatures: [S] float32.   top_ks: [S] int32.   top_ps: [S] float32.
        seeds: [S] int64.
        sequences: the sequence of each row, None where there is none.
        blocks, slots: the pools.
    """

    def __init__(
        self, num_slots: int, num_blocks: int, block_size: int, context_blocks_max: int
    ) -> None:
        self.slots = StateSlotPool(num_slots)
        self.blocks = BlockPool(num_blocks)
        self.block_size = block_size
        self.sequences: list[Sequence | None] = [None] * num_slots
        self.sequence_ids = np.full(num_slots, _NO_SEQUENCE, np.int64)
        self.num_tokens = np.zeros(num_slots, np.int32)
        self.num_scheduled = np.zeros(num_slots, np.int32)
        self.length_limits = np.zeros(num_slots, np.int32)
        self.last_tokens = np.zeros(num_slots, np.int32)
        self.last_steps = np.full(num_slots, -1, np.int64)
        self.num_blocks = np.zeros(num_slots, np.int32)
        self.block_tables = np.zeros((num_slots, context_blocks_max), np.int32)
        self.stop_tokens = np.full((num_slots, 1), _NO_TOKEN, np.int32)
        self.temperatures = np.zeros(num_slots, np.float32)
        self.top_ks = np.zeros(num_slots, np.int32)
        self.top_ps = np.ones(num_slots, np.float32)
        self.seeds = np.zeros(num_slots, np.int64)
        self._phases = np.zeros(num_slots, np.int8)
        self._retiring: list[int] = []
        self._preempted: list[Sequence] = []
        self._settled_step = -1

    @property
    def prefilling_rows(self) -> np.ndarray:
        """[N] rows whose prompt is not wholly computed yet, ascending."""
        return np.flatnonzero(self._phases == _PREFILL)

    @property
    def decoding_rows(self) -> np.ndarray:
        """[N] rows that generate, ascending."""
        return np.flatnonzero(self._phases == _DECODE)

    @property
    def is_retiring(self) -> bool:
        """Whether memory will come back when a step in flight is settled."""
        return bool(self._retiring)

    def blocks_for(self, num_tokens: np.ndarray) -> np.ndarray:
        """Blocks that so many tokens fill, the last perhaps in part."""
        return -(-num_tokens // self.block_size)

    def enter(self, sequence: Sequence) -> None:
        """Give a waiting sequence a row, with no blocks yet. The caller has checked the slots."""
        row = self.slots.allocate()
        sequence.move_to(SequenceStatus.PREFILLING)
        sequence.row = row
        sampling = sequence.request.sampling
        self.sequences[row] = sequence
        self.sequence_ids[row] = sequence.sequence_id
        self.num_tokens[row] = sequence.num_tokens
        self.num_scheduled[row] = 0
        self.length_limits[row] = sequence.length_limit
        self.last_steps[row] = -1
        self.temperatures[row] = sampling.temperature
        self.top_ks[row] = sampling.top_k
        self.top_ps[row] = sampling.top_p
        self.seeds[row] = sequence.seed
        self._set_stop_tokens(row, sequence.stop_token_ids)
        self._phases[row] = _PREFILL

    def begin_decoding(self, row: int) -> None:
        """The row's prompt is computed and its first token known."""
        sequence = self.sequences[row]
        assert sequence is not None, f"row {row} is empty"
        sequence.move_to(SequenceStatus.DECODING)
        self._phases[row] = _DECODE

    def leave(self, row: int, status: SequenceStatus) -> None:
        """End the row: the sequence goes to `status`, its memory back as soon as none uses it."""
        sequence = self.sequences[row]
        assert sequence is not None, f"row {row} is empty"
        sequence.move_to(status)
        sequence.row = 0
        self.sequences[row] = None
        self.sequence_ids[row] = _NO_SEQUENCE
        self._phases[row] = _EMPTY
        if self.last_steps[row] > self._settled_step:
            self._retiring.append(row)
        else:
            self._free(row)

    def claim(self, row: int, num_tokens: int) -> bool:
        """Make the row's blocks hold `num_tokens` tokens, by preemption if need be.

        Returns False, and leaves the row as it is, if that is not possible now.
        """
        num_held = int(self.num_blocks[row])
        num_wanted = -(-num_tokens // self.block_size) - num_held
        if num_wanted <= 0:
            return True
        while num_wanted > self.blocks.num_free:
            # What is on its way back may be enough; preempting more would waste computed work.
            if self.is_retiring:
                return False
            youngest = int(np.argmax(self.sequence_ids))
            if youngest == row:
                return False
            self._preempt(youngest)
        taken = self.blocks.allocate(num_wanted)
        self.block_tables[row, num_held : num_held + num_wanted] = taken
        self.num_blocks[row] = num_held + num_wanted
        return True

    def take_preempted(self) -> list[Sequence]:
        """The sequences preempted since the last call, youngest first."""
        preempted, self._preempted = self._preempted, []
        return preempted

    def settle(self, step_index: int) -> None:
        """All steps up to this one are over: free what only they still used."""
        self._settled_step = step_index
        if self._retiring:
            still_used = [row for row in self._retiring if self.last_steps[row] > step_index]
            for row in self._retiring:
                if self.last_steps[row] <= step_index:
                    self._free(row)
            self._retiring = still_used

    def _preempt(self, row: int) -> None:
        sequence = self.sequences[row]
        assert sequence is not None, f"row {row} is empty"
        self.leave(row, SequenceStatus.WAITING)
        sequence.num_preemptions += 1
        self._preempted.append(sequence)

    def _free(self, row: int) -> None:
        num_held = int(self.num_blocks[row])
        self.blocks.release(self.block_tables[row, :num_held].tolist())
        self.block_tables[row, :num_held] = 0
        self.num_blocks[row] = 0
        self.slots.release(row)

    def _set_stop_tokens(self, row: int, stop_token_ids: tuple[int, ...]) -> None:
        num_missing = len(stop_token_ids) - self.stop_tokens.shape[1]
        if num_missing > 0:
            self.stop_tokens = np.pad(
                self.stop_tokens, ((0, 0), (0, num_missing)), constant_values=_NO_TOKEN
            )
        self.stop_tokens[row] = _NO_TOKEN
        self.stop_tokens[row, : len(stop_token_ids)] = stop_token_ids
