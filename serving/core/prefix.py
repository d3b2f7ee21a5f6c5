"""Prefixes of token sequences: their names, which blocks hold them, and which can be gone on with.

A `PrefixKey` names all tokens up to a block boundary: the digest of the key before it and of the
tokens of its block, so that equal keys mean equal prefixes. The first key of a chain is the digest
of what must agree besides the tokens: the *fingerprint* (model, cache layout, block size) and the
*salt* of the request, which keeps tenants apart.

Blocks are half of what a sequence needs to go on from position `H`; the other half is the state
slot as it was at `H`: windows, unfinished compression groups, token classes. It depends on more
tokens than any window holds, since every layer looks back over the layer below, so it cannot be
replayed exactly from the last tokens. It is kept instead: a *snapshot* is a copy of a state slot
in a spare slot, taken right after a step that ended at `H`. A prefix of `n` blocks is usable if
all `n` blocks are present and a snapshot at their end is.

With bounded replay (`core/replay.py`) the windows of the upper layers in a snapshot also depend on
where the tail of its sequence starts. Such a snapshot is usable by sequences with the same tail
start, and by those whose tail starts at `H` or later, which need no such windows.

Snapshots are taken where they are likely to be used:

1. at the last block boundary of a prompt that leaves a token to compute, for the same prompt again
   and for conversations that go on from it;
2. where a prompt leaves a prefix that is present but has no snapshot, for prompts that share their
   beginning (the second one finds the place, the third one gains by it);
3. at every block boundary of what is generated, only the newest of each sequence being kept, for
   conversations that go on and for sequences that lose their memory and come back;
4. with bounded replay, at the last block boundary before the tail of a prompt, for all longer
   prompts that begin alike, however short the rest of them is.
"""

import hashlib
import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from serving.core.request import RequestImage
from serving.core.shared_lru import SharedLru

PrefixKey = bytes
"""16 bytes that name a prefix up to a block boundary."""

_KEY_SIZE = 16
_TOKEN = np.dtype("<i4")


def root_key(fingerprint: bytes, salt: str) -> PrefixKey:
    """The key before the first block."""
    digest = hashlib.sha256(len(fingerprint).to_bytes(8, "little"))
    digest.update(fingerprint)
    digest.update(salt.encode())
    return digest.digest()[:_KEY_SIZE]


def next_key(
    key: PrefixKey, token_ids: np.ndarray, start: int, images: Sequence[RequestImage] = ()
) -> PrefixKey:
    """The key of the prefix that is one block longer.

    Args:
        key: of the prefix before the block.
        token_ids: [block_size] int32, the tokens of the block, from position `start` on.
        images: those of the sequence. The tokens of an image say nothing of its content, so the
            digests of the images that reach into the block are part of the key.
    """
    digest = hashlib.sha256(key + token_ids.astype(_TOKEN, copy=False).tobytes())
    for image in images:
        if image.start < start + len(token_ids) and image.stop > start:
            digest.update((image.start - start).to_bytes(8, "little", signed=True))
            digest.update(image.digest)
    return digest.digest()[:_KEY_SIZE]


def token_bytes(token_ids: Sequence[int]) -> bytes:
    """Tokens as the keys take them in."""
    return struct.pack(f"<{len(token_ids)}i", *token_ids)


def plain_key(key: PrefixKey, tokens: bytes) -> PrefixKey:
    """`next_key` where no image reaches, of tokens as `token_bytes` gives them."""
    return hashlib.sha256(key + tokens).digest()[:_KEY_SIZE]


def prefix_keys(
    root: PrefixKey, token_ids: np.ndarray, block_size: int, images: Sequence[RequestImage] = ()
) -> list[PrefixKey]:
    """Keys of all whole blocks of `token_ids` [L] int32, from position 0 on."""
    return list(iterate_keys(root, token_ids, block_size, images))


def iterate_keys(
    root: PrefixKey, token_ids: np.ndarray, block_size: int, images: Sequence[RequestImage] = ()
) -> Iterator[PrefixKey]:
    """The keys of `prefix_keys`, each when it is asked for.

    The same as `next_key` for each of them, at a fraction of its cost where no image reaches.
    """
    num_blocks = len(token_ids) // block_size
    data = np.ascontiguousarray(token_ids[: num_blocks * block_size], "<i4")
    # One bytes object for each block: with that, a key takes a single call.
    rows: list[bytes] = data.view(f"V{4 * block_size}").tolist() if num_blocks else []
    touched = {
        index
        for image in images
        for index in range(image.start // block_size, -(-image.stop // block_size))
    }
    key = root
    for index, row in enumerate(rows):
        if index in touched:
            start = index * block_size
            key = next_key(key, token_ids[start : start + block_size], start, images)
        else:
            key = plain_key(key, row)
        yield key


@dataclass(slots=True)
class _Entry:
    """A prefix that is present. `snapshot` is a slot, 0 if there is none; `tail_start` that of the
    sequence that left it, None if the snapshot ends before that tail.
    """

    block: int
    owner: str = ""
    snapshot: int = 0
    is_reused: bool = False
    tail_start: int | None = 0
    num_pins: int = 0


class PrefixIndex:
    """The prefixes that a pool of blocks holds, and the snapshots at their ends.

    Whoever names a block has named, and still holds, all blocks before it; so if a prefix is
    present, all shorter ones are.

    Args:
        snapshot_slots: spare state slots; with none, no prefix is ever usable.
    """

    def __init__(self, snapshot_slots: Sequence[int]) -> None:
        self.num_snapshots = len(snapshot_slots)
        self._entries: dict[PrefixKey, _Entry] = {}
        self._keys: dict[int, PrefixKey] = {}
        self._free_slots = list(reversed(snapshot_slots))
        # Slots with a snapshot, in the order in which they may go, and the prefixes they end.
        self._used_slots = SharedLru()
        self._slot_keys: dict[int, PrefixKey] = {}
        self.num_pinned = 0

    @property
    def num_used_snapshots(self) -> int:
        """Snapshots that can be gone on from."""
        return len(self._used_slots)

    def num_present(self, keys: Sequence[PrefixKey]) -> int:
        """How many blocks of a chain are present, from the first on."""
        low, high = 0, len(keys)
        while low < high:
            middle = (low + high + 1) // 2
            if keys[middle - 1] in self._entries:
                low = middle
            else:
                high = middle - 1
        return low

    def num_usable(
        self, keys: Sequence[PrefixKey], tail_start: int = 0, num_before_tail: int = 0
    ) -> int:
        """How many blocks of a chain can be gone on from; 0 if none.

        Args:
            tail_start: of the sequence that would go on.
            num_before_tail: blocks of the chain that end at or before that position.
        """
        num_blocks = self.num_present(keys)
        while num_blocks:
            entry = self._entries[keys[num_blocks - 1]]
            fits = num_blocks <= num_before_tail or entry.tail_start == tail_start
            if entry.snapshot and fits:
                break
            num_blocks -= 1
        return num_blocks

    def block(self, key: PrefixKey) -> int | None:
        """The last block of a prefix; None if it is not present."""
        entry = self._entries.get(key)
        return None if entry is None else entry.block

    def snapshot(self, key: PrefixKey) -> int | None:
        """The slot with the state at the end of a prefix; None if it is not kept."""
        entry = self._entries.get(key)
        return entry.snapshot if entry is not None and entry.snapshot else None

    def use_snapshot(self, key: PrefixKey) -> int:
        """The slot of a snapshot that is about to be gone on from."""
        entry = self._entries[key]
        assert entry.snapshot, "the prefix has no snapshot"
        entry.is_reused = True
        self._used_slots.use(entry.snapshot)
        return entry.snapshot

    def owner_behind(self, keys: Sequence[PrefixKey], num_blocks: int, owner: str) -> str:
        """Whose a block behind `num_blocks` of a chain is; `owner`'s if it is the first.

        All blocks of a chain are one owner's, or some could go before those behind them.
        """
        return self._entries[keys[num_blocks - 1]].owner if num_blocks else owner

    def name(self, key: PrefixKey, block: int, owner: str = "") -> None:
        """`block` now is the last one of the prefix, which was not present; it is `owner`'s."""
        assert key not in self._entries, f"block {block} is named like another"
        self._entries[key] = _Entry(block, owner)
        self._keys[block] = key

    def forget(self, block: int) -> None:
        """The block will hold something else: its prefix and its snapshot are no longer present."""
        entry = self._entries.pop(self._keys.pop(block))
        self.num_pinned -= bool(entry.num_pins)
        if entry.snapshot:
            self._used_slots.remove(entry.snapshot)
            self._free_slots.append(entry.snapshot)

    def pin(self, keys: Iterable[PrefixKey]) -> None:
        """Somebody is about to need these blocks: they go last, and their snapshots not at all."""
        for key in keys:
            entry = self._entries.get(key)
            if entry is not None:
                self.num_pinned += not entry.num_pins
                entry.num_pins += 1

    def unpin(self, keys: Iterable[PrefixKey]) -> None:
        """Take back one pin of each block that is there still."""
        for key in keys:
            entry = self._entries.get(key)
            if entry is not None and entry.num_pins:
                entry.num_pins -= 1
                self.num_pinned -= not entry.num_pins

    def may_go(self, block: int) -> bool:
        """Whether nobody is about to need a named block."""
        return not self.num_pinned or not self._entries[self._keys[block]].num_pins

    def reserve_slot(self, is_needed: Callable[[int], bool] = lambda slot: False) -> int | None:
        """A slot for a new snapshot, that of an old one if need be: the least recently used one of
        the owner with most of them that is neither pinned nor needed.

        None if there is none. Give it to `keep_snapshot` or `return_slot`.
        """
        if self._free_slots:
            return self._free_slots.pop()

        def may_go(slot: int) -> bool:
            return not self._entries[self._slot_keys[slot]].num_pins and not is_needed(slot)

        slot = self._used_slots.pop_first(may_go)
        if slot is not None:
            self._entries[self._slot_keys[slot]].snapshot = 0
        return slot

    def return_slot(self, slot: int) -> None:
        """Give back a reserved slot without a snapshot."""
        self._free_slots.append(slot)

    def keep_snapshot(self, key: PrefixKey, slot: int, tail_start: int | None = 0) -> bool:
        """`slot` holds the state at the end of the prefix; False if that is of no use.

        It is of none if the prefix is not present or has a snapshot that serves as many; the slot
        is free again then. One for sequences with another tail start gives way.

        Args:
            tail_start: of the sequence that left the state; None if the prefix ends before it.
        """
        entry = self._entries.get(key)
        if entry is None or (entry.snapshot and tail_start in (None, entry.tail_start)):
            self.return_slot(slot)
            return False
        if entry.snapshot:
            self._used_slots.remove(entry.snapshot)
            self._free_slots.append(entry.snapshot)
        entry.snapshot, entry.is_reused, entry.tail_start = slot, False, tail_start
        self._used_slots.add(slot, entry.owner)
        self._slot_keys[slot] = key
        return True

    def drop_unused_snapshot(self, key: PrefixKey) -> None:
        """Free the snapshot of a prefix, unless it is gone or was of use."""
        entry = self._entries.get(key)
        if entry is not None and entry.snapshot and not entry.is_reused:
            self._used_slots.remove(entry.snapshot)
            self._free_slots.append(entry.snapshot)
            entry.snapshot = 0

    def clear(self) -> None:
        """The device is lost, and with it all blocks and snapshots."""
        self._free_slots.extend(self._used_slots)
        self._used_slots.clear()
        self.num_pinned = 0
        self._entries.clear()
        self._keys.clear()


def block_boundary(
    position: int, block_size: int, cut: Callable[[int], int] = lambda position: position
) -> int:
    """The last block boundary up to `position` that `cut` leaves where it is.

    `cut` moves a position back to where a sequence may be cut, for example before an image.
    """
    boundary = position - position % block_size
    while (allowed := cut(boundary)) != boundary:
        boundary = allowed - allowed % block_size
    return boundary
