"""Prefixes that leave the pools of an engine for other memory, and come back into them.

Coming back is no work of the scheduler's: blocks are written into free ones and named, the state
into a snapshot slot, and the request that waits for them then starts like any other whose prefix
is present. What came back has no holder, so it takes nothing from running sequences; it takes the
place of the prefixes that were used least recently.

Leaving is a copy of named blocks and of a snapshot. Neither is written to while it has its name,
and a transfer stands in line with the steps, so nothing need be held until the copy is made.
"""

from collections.abc import Sequence as Many
from dataclasses import dataclass

import numpy as np

from serving.core.admission import EngineLimits
from serving.core.kv_transfer import KVTransfer
from serving.core.prefix import PrefixKey, prefix_keys, root_key
from serving.core.request import Request
from serving.core.running_table import RunningTable


@dataclass(frozen=True, slots=True, eq=False)
class StagedPrefix:
    """The blocks of a prefix from the block `first` on, and the state at its end, in host memory.

    Attributes:
        keys: of all its blocks.
        first: blocks that are left out, because they were present.
        groups: per layer group [len(keys) - first, bytes] uint8.
        state: [bytes] uint8.
    """

    keys: tuple[PrefixKey, ...]
    first: int
    groups: tuple[np.ndarray, ...]
    state: np.ndarray


class PrefixTransfers:
    """Moves prefixes into and out of the pools of a table."""

    def __init__(self, table: RunningTable, limits: EngineLimits) -> None:
        self._table = table
        self._limits = limits
        self._num_transfers = 0

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
        """Keys of the prefixes of a prompt that leave a token to compute; none if none can serve.

        The prompt has passed `admission.check_request`.
        """
        if request.sampling.prompt_logprobs is not None or not self._limits.num_snapshots:
            return ()
        tokens = np.array(request.prompt_token_ids[:-1], np.int32)
        root = root_key(self._limits.fingerprint, request.cache_salt)
        return tuple(prefix_keys(root, tokens, self._limits.block_size, request.images))

    def num_present(self, keys: Many[PrefixKey]) -> int:
        """How many blocks of a chain are in the pool, from the first on."""
        return self._table.prefixes.num_present(keys)

    def num_usable(self, keys: Many[PrefixKey]) -> int:
        """How many blocks of a chain can be gone on from."""
        return self._table.prefixes.num_usable(keys)

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

    def write(self, prefix: StagedPrefix) -> KVTransfer | None:
        """A transfer that makes a prefix usable, which counts as such from now on.

        None if it is usable, if blocks that were left out are gone, or if there is no room.
        """
        table, keys = self._table, prefix.keys
        prefixes, blocks = table.prefixes, table.blocks
        num_present = prefixes.num_present(keys)
        num_missing = len(keys) - num_present
        is_possible = prefix.first <= num_present and num_missing <= blocks.num_free
        # A slot that a waiting row is about to be restored from must keep its content.
        if not is_possible or table.is_restoring or prefixes.num_usable(keys) == len(keys):
            return None
        present = [block for key in keys[:num_present] if (block := prefixes.block(key))]
        blocks.hold(present)
        # What was just held is no longer free.
        slot = prefixes.reserve_slot() if num_missing <= blocks.num_free else None
        if slot is None:
            blocks.release(present)
            return None
        written = blocks.allocate(num_missing)
        for key, block in zip(keys[num_present:], written, strict=True):
            prefixes.name(key, block)
            blocks.name(block)
        is_kept = prefixes.keep_snapshot(keys[-1], slot)
        assert is_kept, "a prefix that was not usable has a snapshot"
        blocks.release([*present, *written])
        return KVTransfer(
            self.next_id(),
            write_blocks=np.array(written, np.int32),
            write_groups=tuple(g[num_present - prefix.first :] for g in prefix.groups)
            if written
            else (),
            write_slots=np.array([slot], np.int32),
            write_states=prefix.state[None],
        )

    def next_id(self) -> int:
        """The number of a transfer that is about to be made."""
        self._num_transfers += 1
        return self._num_transfers
