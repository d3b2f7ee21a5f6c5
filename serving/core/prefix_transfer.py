"""Prefixes that leave the pools of an engine for other memory, and come back into them.

Coming back: blocks are written into free ones and named, the state into a snapshot slot, and the
request that waits for them then starts like any other whose prefix is present. What came back has
no holder, so it takes nothing from running sequences; it takes the place of the prefixes that were
used least recently. It could itself be evicted before its request starts, if many wait. So it is
*staged* in host memory until the scheduler starts the request, and written at that moment.

Leaving is a copy of named blocks and of a snapshot. Neither is written to while it has its name,
and a transfer stands in line with the steps, so nothing need be held until the copy is made. What
waits to be copied is *pinned*: its blocks are evicted last, its snapshots not at all. Pins are
no more than half of either, and nothing that runs ever waits for them.
"""

from collections.abc import Callable
from collections.abc import Sequence as Many
from dataclasses import dataclass

import numpy as np

from serving.core.admission import EngineLimits
from serving.core.kv_transfer import KVTransfer
from serving.core.prefix import PrefixKey, prefix_keys, root_key
from serving.core.request import Request
from serving.core.running_table import RunningTable
from serving.core.sequence import Sequence

_TRIES_MAX = 16
"""Plans in which a request waits for a slot for its staged state, before it goes on without."""


@dataclass(frozen=True, slots=True, eq=False)
class StagedPrefix:
    """The blocks of a prefix from the block `first` on, and the state at its end, in host memory.

    Attributes:
        keys: of all its blocks.
        first: blocks that are left out, because they were present.
        groups: per layer group [len(keys) - first, bytes] uint8.
        state: [bytes] uint8; None for a prefix that is gone on from by a replay.
    """

    keys: tuple[PrefixKey, ...]
    first: int
    groups: tuple[np.ndarray, ...]
    state: np.ndarray | None

    @property
    def num_bytes(self) -> int:
        """How much host memory it takes."""
        state = 0 if self.state is None else self.state.nbytes
        return sum(group.nbytes for group in self.groups) + state


@dataclass(frozen=True, slots=True)
class WantedPrefix:
    """What of a prompt would be of use if it were stored.

    Attributes:
        keys: of the blocks that would.
        first: blocks that are present.
        num_usable: a prefix of so many blocks or fewer is of no use.
        has_state: the state at the end of the prefix is needed too.
    """

    keys: tuple[PrefixKey, ...]
    first: int
    num_usable: int
    has_state: bool


@dataclass(slots=True)
class _Staged:
    """A prefix that waits for the start of its request."""

    prefix: StagedPrefix
    owner: str
    num_tries: int = 0


def _nobody(transfer: KVTransfer | None) -> None:
    raise AssertionError("a prefix is staged, but nobody moves it")


def prompt_keys(request: Request, limits: EngineLimits) -> tuple[PrefixKey, ...]:
    """Keys of the prefixes of a prompt that leave a token to compute; none if none can serve.

    The prompt has passed `admission.check_request`.
    """
    if request.sampling.prompt_logprobs is not None or not limits.num_snapshots:
        return ()
    tokens = np.array(request.prompt_token_ids[:-1], np.int32)
    root = root_key(limits.prefix_fingerprint, request.cache_salt)
    return tuple(prefix_keys(root, tokens, limits.block_size, request.images))


class PrefixTransfers:
    """Moves prefixes into and out of the pools of a table.

    Attributes:
        deliver: gets the transfer of a staged prefix whose request is about to start, which must
            be dispatched before the next step, or None for one that cannot be used.
    """

    def __init__(self, table: RunningTable, limits: EngineLimits) -> None:
        self._table = table
        self._limits = limits
        self._num_transfers = 0
        self._staged: dict[str, _Staged] = {}
        self._pins: dict[int, tuple[tuple[PrefixKey, ...], int]] = {}
        self.num_staged_bytes = 0
        self.deliver: Callable[[KVTransfer | None], None] = _nobody

    def record(self) -> None:
        """Begin to remember which prefixes can be gone on from."""
        self._table.kept = []

    def take_kept(self) -> list[tuple[str, tuple[PrefixKey, ...]]]:
        """The salts and keys of prefixes that became usable since the last call, oldest first.

        Those at the end of a prompt as soon as they are; those behind it when the sequence ends.
        """
        kept = self._table.kept or []
        if kept:
            self._table.kept = []
        size = self._table.block_size
        return [(s.request.cache_salt, tuple(s.keys(count, size))) for s, count in kept]

    def keys_of(self, request: Request) -> tuple[PrefixKey, ...]:
        """Keys of the prefixes of a prompt that may be cached, as `prompt_keys` has them."""
        return prompt_keys(request, self._limits)

    @property
    def needs_states(self) -> bool:
        """Whether a prefix can be gone on from by its state alone, and not by a replay."""
        replay = self._limits.replay
        return replay is None or not replay.num_replayed

    def wanted(self, request: Request) -> WantedPrefix | None:
        """What could be fetched for a checked request; None if nothing could be of use."""
        keys, replay, size = self.keys_of(request), self._limits.replay, self._table.block_size
        prefixes = self._table.prefixes
        if replay is None or not replay.num_replayed:
            num_usable = prefixes.num_usable(keys)
            wanted = WantedPrefix(keys, prefixes.num_present(keys), num_usable, has_state=True)
        else:
            tail_start = replay.tail_start(len(request.prompt_token_ids))
            keys = keys[: tail_start // size]
            num_present = prefixes.num_present(keys)
            start = self._table.num_with_state(keys, tail_start) * size
            start = max(start, replay.replay_start(num_present * size))
            # What begins no later than that is of no use.
            num_usable = max(num_present, (start + replay.num_replayed) // size)
            wanted = WantedPrefix(keys, num_present, num_usable, has_state=False)
        return wanted if len(wanted.keys) > wanted.num_usable else None

    def num_present(self, keys: Many[PrefixKey]) -> int:
        """How many blocks of a chain are in the pool, from the first on."""
        return self._table.prefixes.num_present(keys)

    def read(
        self, blocks: Many[PrefixKey], state: PrefixKey | None
    ) -> tuple[KVTransfer, tuple[PrefixKey, ...], bool]:
        """A transfer that copies those of the blocks, and the state, that are still present.

        Returns:
            the transfer, the keys of its blocks, and whether it has the state.
        """
        prefixes = self._table.prefixes
        found = [(key, block) for key in blocks if (block := prefixes.block(key)) is not None]
        slot = None if state is None else prefixes.snapshot(state)
        transfer = KVTransfer(
            self.next_id(),
            read_blocks=np.array([block for _, block in found], np.int32),
            read_slots=np.array([] if slot is None else [slot], np.int32),
        )
        return transfer, tuple(key for key, _ in found), slot is not None

    def pin(self, number: int, keys: tuple[PrefixKey, ...]) -> None:
        """Keep a prefix that is about to be read, if there is room for one more, until `unpin`."""
        prefixes = self._table.prefixes
        num_states = sum(prefixes.snapshot(key) is not None for key in keys)
        num_pinned = sum(count for _, count in self._pins.values())
        is_small = prefixes.num_pinned + len(keys) <= self._table.blocks.num_usable // 2
        if is_small and num_pinned + num_states <= prefixes.num_snapshots // 2:
            self._pins[number] = keys, num_states
            prefixes.pin(keys)

    def unpin(self, number: int) -> None:
        """What was pinned under a number is not about to be read any more."""
        keys, _ = self._pins.pop(number, ((), 0))
        self._table.prefixes.unpin(keys)

    def stage(self, request_id: str, prefix: StagedPrefix, owner: str = "") -> None:
        """Keep a prefix until its request starts, or until `unstage`."""
        self.unstage(request_id)
        self._staged[request_id] = _Staged(prefix, owner)
        self.num_staged_bytes += prefix.num_bytes

    def unstage(self, request_id: str) -> None:
        """Nobody needs a prefix any more."""
        staged = self._staged.pop(request_id, None)
        if staged is not None:
            self.num_staged_bytes -= staged.prefix.num_bytes

    def has_staged(self, sequence: Sequence) -> bool:
        """Whether a prefix waits for the start of a sequence."""
        return sequence.request.request_id in self._staged

    def num_present_of(self, sequence: Sequence) -> int:
        """Blocks on the device of the prefix that is staged for a sequence."""
        return self.num_present(self._staged[sequence.request.request_id].prefix.keys)

    def bring(self, sequence: Sequence) -> bool:
        """Write what is staged for a sequence that is about to start; False if it has to wait.

        It waits for a slot that holds no state which somebody is about to use.
        """
        request_id = sequence.request.request_id
        staged = self._staged[request_id]
        transfer = self.write(staged.prefix, staged.owner)
        staged.num_tries += 1
        if transfer is None and self._waits_for_slot(staged) and staged.num_tries < _TRIES_MAX:
            return False
        self.unstage(request_id)
        self.deliver(transfer)
        return True

    def _waits_for_slot(self, staged: _Staged) -> bool:
        keys, prefixes = staged.prefix.keys, self._table.prefixes
        if staged.prefix.state is None or prefixes.num_usable(keys) == len(keys):
            return False
        return staged.prefix.first <= prefixes.num_present(keys)

    def write(self, prefix: StagedPrefix, owner: str = "") -> KVTransfer | None:
        """A transfer that makes a prefix usable, which counts as such from now on, for `owner`.

        None if it is usable, if blocks that were left out are gone, or if there is no room.
        """
        table, keys, has_state = self._table, prefix.keys, prefix.state is not None
        prefixes, blocks = table.prefixes, table.blocks
        num_present = prefixes.num_present(keys)
        num_missing = len(keys) - num_present
        is_possible = prefix.first <= num_present and num_missing <= blocks.num_free
        is_there = prefixes.num_usable(keys) == len(keys) if has_state else not num_missing
        if not is_possible or is_there:
            return None
        present = [block for key in keys[:num_present] if (block := prefixes.block(key))]
        blocks.hold(present)
        # What was just held is no longer free.
        is_possible = num_missing <= blocks.num_free
        # A slot that a waiting row is about to be restored from must keep its content.
        needed = table.is_restored_from
        slot = prefixes.reserve_slot(needed) if is_possible and has_state else None
        if not is_possible or (has_state and slot is None):
            blocks.release(present)
            return None
        written = blocks.allocate(num_missing)
        owner = prefixes.owner_behind(keys, num_present, owner)
        for key, block in zip(keys[num_present:], written, strict=True):
            prefixes.name(key, block, owner)
            blocks.name(block, owner)
        if slot is not None:
            is_kept = prefixes.keep_snapshot(keys[-1], slot)
            assert is_kept, "a prefix that was not usable has a snapshot"
        blocks.release([*present, *written])
        groups = tuple(group[num_present - prefix.first :] for group in prefix.groups)
        numbers, groups = np.array(written, np.int32), groups if written else ()
        if slot is None or prefix.state is None:
            return KVTransfer(self.next_id(), write_blocks=numbers, write_groups=groups)
        return KVTransfer(
            self.next_id(),
            write_blocks=numbers,
            write_groups=groups,
            write_slots=np.array([slot], np.int32),
            write_states=prefix.state[None],
        )

    def next_id(self) -> int:
        """The number of a transfer that is about to be made."""
        self._num_transfers += 1
        return self._num_transfers
