"""The sequences that hold KV memory, as numpy columns indexed by row.

A row of the table *is* a state slot: both belong to one sequence for the same time, so one number
names both. Planning a step gathers columns at the step's rows; nothing walks sequence objects.

Memory is taken by rank (`running_columns.py`): by priority and then by the order of admission, and
where there are several tenants they take turns. A sequence that needs a block when none is free
preempts the last one in rank, if that comes after itself: the victim gives everything back, waits
before its equals and later computes its prompt and output again. With none behind it, it sits the
step out and keeps what it has. So the first in rank always advances, and since any accepted
sequence fits the pool alone, all of them end.

*Why preemption and not a reservation of the worst case*: most sequences end long before
`max_tokens`, and a reservation would leave most of the pool empty. Tokens do not change by it:
each depends only on the tokens before it, the seed and its position.

A sequence goes on while its newest token is still in flight: the token is fed by reference
(`step_plan.LAST_SAMPLED`), and `num_scheduled` runs ahead of `num_tokens`. Only its end is noticed
late: a sequence that is ended by a token may be in one more step for each step that was in flight
beside it. Ends by length are known ahead.

With drafts a step keeps one to six of a row's tokens, so while it is in flight the length of the
row is only known to lie between two bounds. Memory is claimed for the upper one.

A sequence that leaves while a step that uses its memory is still in flight keeps the memory until
that step is settled; `is_retiring` says so.

Full blocks are shared. Once computed, a block is named by the prefix it ends; a sequence that
starts with a usable prefix holds the blocks of it instead of computing them. Of two sequences that
compute the same prefix at the same time the second one to finish a block changes over to the
block of the first and gives its own back.
"""

from collections.abc import Sequence as Many

import numpy as np

from serving.core.blocks import BlockPool, StateSlotPool
from serving.core.image_layout import whole_images_end
from serving.core.prefix import PrefixIndex, block_boundary
from serving.core.replay import ReplayRule
from serving.core.running_columns import RunningColumns
from serving.core.sequence import Sequence, SequenceStatus
from serving.core.step_plan import no_copies

_EMPTY, _PREFILL, _DECODE = 0, 1, 2


class RunningTable(RunningColumns):
    """Columns of the sequences that hold memory, with the pools that the memory comes from.

    Attributes:
        blocks, slots: the pools.
        prefixes: what may be shared. Slots `num_slots` and up are for its snapshots.
        kept: sequences and the number of their first blocks that became usable for others, where
            somebody asks for them; None where nobody does.
    """

    def __init__(
        self,
        num_slots: int,
        num_blocks: int,
        block_size: int,
        context_blocks_max: int,
        num_snapshots: int = 0,
        num_drafts: int = 0,
        replay: ReplayRule | None = None,
    ) -> None:
        super().__init__(num_slots, context_blocks_max, num_drafts)
        self.slots = StateSlotPool(num_slots)
        self.prefixes = PrefixIndex(range(num_slots, num_slots + num_snapshots))
        self.blocks = BlockPool(num_blocks, self.prefixes.forget, self.prefixes.may_go)
        self.block_size = block_size
        self._replay = replay
        self._phases = np.zeros(num_slots, np.int8)
        self._retiring: list[int] = []
        # Blocks that were replaced by equal ones, with the newest step that uses them.
        self._replaced: list[tuple[int, int]] = []
        self._restores: dict[int, int] = {}
        self._preempted: list[Sequence] = []
        self.kept: list[tuple[Sequence, int]] | None = None
        self._settled_step = -1

    @property
    def prefilling_rows(self) -> np.ndarray:
        """[N] rows whose prompt is not wholly computed yet, ascending."""
        return (self._phases == _PREFILL).nonzero()[0]

    @property
    def decoding_rows(self) -> np.ndarray:
        """[N] rows that generate, ascending."""
        return (self._phases == _DECODE).nonzero()[0]

    @property
    def generating_rows(self) -> np.ndarray:
        """[N] decoding rows that need another step, whatever those in flight keep, ascending.

        A row that may have reached its end, if all its drafts are kept, waits until that is known.
        Controls of a row may depend on all of its tokens; such a row waits for each step's.
        """
        rows = self.decoding_rows
        is_ready = self.num_scheduled[rows] + 1 < self.length_limits[rows]
        is_ready &= (self.num_in_flight[rows] == 0) | ~self.is_stepwise[rows]
        return rows[is_ready]

    @property
    def is_retiring(self) -> bool:
        """Whether memory will come back when a step in flight is settled."""
        return bool(self._retiring or self._replaced)

    @property
    def is_restoring(self) -> bool:
        """Whether a row waits for its next step to copy a snapshot."""
        return bool(self._restores)

    def is_restored_from(self, slot: int) -> bool:
        """Whether a row waits for its next step to copy this snapshot."""
        return slot in self._restores.values()

    def blocks_for(self, num_tokens: np.ndarray) -> np.ndarray:
        """Blocks that so many tokens fill, the last perhaps in part."""
        return -(-num_tokens // self.block_size)

    def blocks_of(self, num_tokens: int) -> int:
        """`blocks_for` of a single number."""
        return -(-num_tokens // self.block_size)

    def whole_keys(self, sequence: Sequence) -> list[bytes]:
        """Keys of the prefixes that leave a token to compute; none if nothing is shared."""
        if not self.prefixes.num_snapshots:
            return []
        return sequence.keys((sequence.num_tokens - 1) // self.block_size, self.block_size)

    def num_usable_blocks(self, sequence: Sequence) -> int:
        """Blocks that a waiting sequence need not compute; its last token it always must."""
        if sequence.request.sampling.prompt_logprobs is not None:
            return 0  # What is not computed has no logits.
        keys = self.whole_keys(sequence)
        num_usable = self.num_with_state(keys, sequence.tail_start)
        # What can be replayed has no upper windows, which only the tail would need.
        num_replayable = self.prefixes.num_present(keys[: sequence.tail_start // self.block_size])
        start = self.start_behind(sequence, num_replayable, has_state=False)
        return num_replayable if start > num_usable * self.block_size else num_usable

    def num_with_state(self, keys: Many[bytes], tail_start: int) -> int:
        """Blocks of a chain that a sequence with this tail can go on from, by the state there."""
        return self.prefixes.num_usable(keys, tail_start, tail_start // self.block_size)

    def start_behind(self, sequence: Sequence, num_blocks: int, has_state: bool) -> int:
        """The first position that a sequence computes behind blocks that are there; 0 if they are
        of no use.
        """
        num_tokens = num_blocks * self.block_size
        if has_state:
            return num_tokens
        if self._replay is None or not self._replay.num_replayed:
            return 0
        start = self._replay.replay_start(num_tokens)
        return whole_images_end(sequence.request.images, start)

    def num_held_blocks(self, sequence: Sequence, num_blocks: int) -> int:
        """How many of the first `num_blocks` blocks of a usable prefix are held by others."""
        keys = sequence.keys(num_blocks, self.block_size)
        return self.blocks.num_held([self._present_block(key) for key in keys])

    def enter(self, sequence: Sequence, num_usable_blocks: int = 0) -> None:
        """Give a waiting sequence a row, with the blocks of its usable prefix and no others yet.

        The caller has checked the slots, and `num_usable_blocks` just before.
        """
        row = self.slots.allocate()
        sequence.move_to(SequenceStatus.PREFILLING)
        sequence.row = row
        sampling = sequence.request.sampling
        self.sequences[row] = sequence
        self.rank(row, sequence)
        self.num_tokens[row] = sequence.num_tokens
        keys = sequence.keys(num_usable_blocks, self.block_size)
        has_state = self.num_with_state(keys, sequence.tail_start) == num_usable_blocks
        num_reused = self.start_behind(sequence, num_usable_blocks, has_state)
        num_covered = num_usable_blocks * self.block_size
        self.visible_starts[row] = 0 if has_state else num_reused
        self.entry_starts[row] = 0 if has_state else num_covered
        self.num_scheduled[row] = self.num_computed[row] = num_reused
        self.num_computed_before[row] = num_reused
        self.num_in_flight[row] = self.num_rounds[row] = 0
        self.num_named[row] = self.num_blocks[row] = num_usable_blocks
        self._share_prefix(row, sequence, num_usable_blocks, has_state)
        if sequence.num_cached_tokens is None:
            sequence.num_cached_tokens = num_reused
        self.request_ids[row] = sequence.request.request_id
        self.news[row] = sequence.news
        self.num_prompt_tokens[row] = len(sequence.prompt)
        self.num_cached_tokens[row] = sequence.num_cached_tokens
        self.length_limits[row] = sequence.length_limit
        self.tail_starts[row] = sequence.tail_start
        self.last_steps[row] = -1
        self.temperatures[row] = sampling.temperature
        self.top_ks[row] = sampling.top_k
        self.top_ps[row] = sampling.top_p
        self.seeds[row] = sequence.seed
        controls = sequence.controls
        self.is_controlled[row] = controls is not None
        self.is_stepwise[row] = controls is not None and controls.is_stepwise
        # A grammar has not seen the drafts of its row yet.
        has_grammar = controls is not None and controls.grammar is not None
        self.num_usable_drafts[row] = 0 if has_grammar else self.confidences.shape[1]
        self.set_stop_tokens(row, sequence.stop_token_ids)
        self._phases[row] = _PREFILL

    def adopt(self, sequence: Sequence, held: list[int], num_more: int) -> None:
        """Give a waiting sequence a row as if all of its tokens but the last had been computed.

        Its first blocks are `held` for it already; `num_more` are added. What is to be in them is
        written before the next step. The caller has checked slots and blocks.
        """
        self.enter(sequence)
        row, num_tokens = sequence.row, sequence.num_tokens
        blocks = [*held, *self.blocks.allocate(num_more)]
        self.block_tables[row, : len(blocks)] = blocks
        self.num_blocks[row], self.num_named[row] = len(blocks), len(held)
        self.num_scheduled[row] = num_tokens - 1
        self.last_tokens[row] = sequence.tokens(num_tokens - 1, num_tokens)[0]
        self.begin_decoding(row)
        self.add_computed(np.array([row]), np.array([num_tokens - 1]))
        self.num_computed_before[row] = num_tokens - 1

    def replayed(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """`tail_starts`, `visible_starts` and `entry_starts` of the rows [N]."""
        return self.tail_starts[rows], self.visible_starts[rows], self.entry_starts[rows]

    def begin_decoding(self, row: int) -> None:
        """The last of the row's prompt is in a step, which samples its first token."""
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
        if self.kept is not None and sequence.tail_key is not None:
            self.kept.append((sequence, sequence.prefix_keys.index(sequence.tail_key) + 1))
        sequence.tail_key = None
        self._restores.pop(row, None)
        self.sequences[row] = self.request_ids[row] = self.news[row] = None
        self.unrank(row)
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
        num_wanted = self.blocks_of(num_tokens) - num_held
        if num_wanted <= 0:
            return True
        while num_wanted > self.blocks.num_free:
            # What is on its way back may be enough; preempting more would waste computed work.
            if self.is_retiring:
                return False
            if int(np.argmax(self.ranks)) == row:
                return False
            self.preempt_last()
        taken = self.blocks.allocate(num_wanted)
        self.block_tables[row, num_held : num_held + num_wanted] = taken
        self.num_blocks[row] = num_held + num_wanted
        return True

    def preempt_last(self, among: np.ndarray | None = None) -> None:
        """Take the memory of the last sequence in rank, of all or of the rows `among` [N]; there
        must be one.
        """
        last = int(np.argmax(self.ranks if among is None else self.ranks[among]))
        row = last if among is None else int(among[last])
        sequence = self.sequences[row]
        assert sequence is not None, f"row {row} is empty"
        self.leave(row, SequenceStatus.WAITING)
        sequence.num_preemptions += 1
        self._preempted.append(sequence)

    def add_computed(self, rows: np.ndarray, num_tokens: np.ndarray) -> None:
        """A step is over: `num_tokens` [N] tokens of the rows [N] are computed and stay."""
        self.num_computed_before[rows] = self.num_computed[rows]
        self.num_computed[rows] = num_tokens
        if self.prefixes.num_snapshots:
            has_more = num_tokens >= (self.num_named[rows] + 1) * self.block_size
            for row in rows[has_more].tolist():
                self._name_blocks(row)

    def add_confidences(self, rows: np.ndarray, confidences: np.ndarray) -> None:
        """A step is over that drafted anew for the rows [R]: `confidences` [R, N]."""
        self.confidences_before[rows] = self.confidences.take(rows, axis=0)
        self.confidences[rows] = confidences
        self.num_rounds[rows] += 1

    def take_restores(self) -> np.ndarray:
        """[N, 2] int32, (snapshot slot, row) of the rows that started since the last call."""
        if not self._restores:
            return no_copies()
        restores = [(snapshot, row) for row, snapshot in self._restores.items()]
        self._restores.clear()
        return np.array(restores, np.int32).reshape(-1, 2)

    def claim_all(self, rows: np.ndarray, num_tokens: np.ndarray) -> bool:
        """Make the blocks of the rows [N] hold `num_tokens` [N] tokens, with free blocks alone.

        Returns False, and leaves all rows as they are, if there are too few.
        """
        num_held = self.num_blocks[rows]
        num_wanted = np.maximum(self.blocks_for(num_tokens) - num_held, 0)
        num_taken = int(num_wanted.sum())
        if num_taken > self.blocks.num_free:
            return False
        if num_taken:
            holders, places = rows, num_held
            if num_taken != len(rows) or not num_wanted.all():
                # Places behind those that the row of each block holds already.
                firsts = np.cumsum(num_wanted) - num_wanted
                places = np.arange(num_taken) + np.repeat(num_held - firsts, num_wanted)
                holders = np.repeat(rows, num_wanted)
            self.block_tables[holders, places] = self.blocks.allocate(num_taken)
            self.num_blocks[rows] = num_held + num_wanted
        return True

    def claim_free(self, row: int, num_tokens: int) -> int:
        """Make the row's blocks hold up to `num_tokens` tokens with free blocks alone.

        Returns how many they hold.
        """
        num_held = int(self.num_blocks[row])
        num_wanted = min(self.blocks_of(num_tokens) - num_held, self.blocks.num_free)
        if num_wanted > 0:
            self.block_tables[row, num_held : num_held + num_wanted] = self.blocks.allocate(
                num_wanted
            )
            self.num_blocks[row] = num_held = num_held + num_wanted
        return num_held * self.block_size

    def take_preempted(self) -> list[Sequence]:
        """The sequences preempted since the last call, last in rank first."""
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
        while self._replaced and self._replaced[0][0] <= step_index:
            self.blocks.release([self._replaced.pop(0)[1]])

    def forget_prefixes(self) -> None:
        """The device is lost and no sequence is left."""
        self.blocks.forget_names()
        self.prefixes.clear()

    def _present_block(self, key: bytes) -> int:
        block = self.prefixes.block(key)
        assert block is not None, "a prefix that was usable is not present"
        return block

    def _share_prefix(self, row: int, sequence: Sequence, num_blocks: int, has_state: bool) -> None:
        """Hold the blocks of the usable prefix, and choose where the rest is to be cut."""
        keys = self.whole_keys(sequence)
        if num_blocks:
            shared = [self._present_block(key) for key in keys[:num_blocks]]
            self.blocks.hold(shared)
            self.block_tables[row, :num_blocks] = shared
            if has_state:
                self._restores[row] = self.prefixes.use_snapshot(keys[num_blocks - 1])

        def cut(position: int) -> int:
            return whole_images_end(sequence.request.images, position)

        parting = self.prefixes.num_present(keys) * self.block_size
        last = len(keys) * self.block_size
        tail = min(sequence.tail_start, last)
        if tail:
            # A state in the tail serves prompts of this length, one before it all longer ones.
            parting = min(parting, tail)
        cuts = [block_boundary(end, self.block_size, cut) for end in (parting, tail, last)]
        self.cuts[row] = cuts

    def _name_blocks(self, row: int) -> None:
        """Let others share the blocks that are full."""
        sequence = self.sequences[row]
        assert sequence is not None, f"row {row} is empty"
        num_full = int(self.num_computed[row]) // self.block_size
        sequence.extend_keys(num_full, self.block_size)
        keys, prefixes = sequence.prefix_keys, self.prefixes
        for index in range(int(self.num_named[row]), num_full):
            block, key = int(self.block_tables[row, index]), keys[index]
            present = prefixes.block(key)
            if present is None:
                owner = prefixes.owner_behind(keys, index, sequence.request.cache_owner)
                prefixes.name(key, block, owner)
                self.blocks.name(block, owner)
            else:
                self.blocks.hold([present])
                self.block_tables[row, index] = present
                self._replaced.append((int(self.last_steps[row]), block))
        self.num_named[row] = num_full

    def _free(self, row: int) -> None:
        num_held = int(self.num_blocks[row])
        self.blocks.release(self.block_tables[row, :num_held].tolist())
        self.block_tables[row, :num_held] = 0
        self.num_blocks[row] = 0
        self.slots.release(row)
