"""Contexts that go from one engine to another in the middle of a request.

One engine computes a prompt and the first token after it; its request ends there, and what its KV
memory holds of it is copied to the host: all blocks, the last perhaps in part, and the state. The
other engine writes the copy into memory of its own and goes on as if it had computed it.

The copy stands in line with the steps, so what ended keeps no memory: whoever is given its blocks
next writes to them in a later step.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from serving.core.kv_transfer import KVTransfer
from serving.core.prefill_scheduler import num_promised_blocks
from serving.core.request import FinishReason, Request, TokenDelta
from serving.core.running_table import RunningTable
from serving.core.sequence import Sequence


def prefill_part(request: Request) -> Request:
    """The request that ends with the next token."""
    max_tokens = len(request.resumed_token_ids) + 1
    return replace(request, sampling=replace(request.sampling, max_tokens=max_tokens))


def goes_on(request: Request, delta: TokenDelta, context_max: int) -> bool:
    """Whether a request wants more tokens after the only delta of its `prefill_part`."""
    num_generated = len(request.resumed_token_ids) + len(delta.token_ids)
    return (
        delta.finish_reason is FinishReason.LENGTH
        and num_generated < request.sampling.max_tokens
        and len(request.prompt_token_ids) + num_generated < context_max
    )


def blocks_of(num_tokens: int, block_size: int) -> int:
    """Blocks that so many tokens fill, the last perhaps in part."""
    return -(-num_tokens // block_size)


@dataclass(frozen=True, slots=True, eq=False)
class HandedContext:
    """All that is known after `num_tokens` tokens, in host memory, but for what is there already.

    Attributes:
        groups: per layer group [blocks, bytes] uint8.
        state: [bytes] uint8.
        first: blocks that are left out at the beginning; somebody holds them in the pool that the
            context comes to (`HandOffs.hold_present`).
    """

    num_tokens: int
    groups: tuple[np.ndarray, ...]
    state: np.ndarray
    first: int = 0


class HandOffs:
    """Reads contexts out of the pools of a table when their sequences end, and writes others in.

    Args:
        next_id: numbers of transfers.
    """

    def __init__(self, table: RunningTable, next_id: Callable[[], int]) -> None:
        self._table = table
        self._next_id = next_id
        self._watched: set[str] = set()
        self._ended: dict[str, KVTransfer] = {}

    def watch(self, request_id: str) -> None:
        """Remember where the context of this request is when it ends."""
        self._watched.add(request_id)

    def forget(self, request_id: str) -> None:
        """Nobody wants this context any more."""
        self._watched.discard(request_id)
        self._ended.pop(request_id, None)

    def note_end(self, sequence: Sequence) -> None:
        """A sequence with a row is about to leave it, having said all that it will."""
        request_id = sequence.request.request_id
        if request_id not in self._watched:
            return
        self._watched.discard(request_id)
        # KV of the last token is never computed.
        table, row = self._table, sequence.row
        num_blocks = blocks_of(sequence.num_tokens - 1, table.block_size)
        self._ended[request_id] = KVTransfer(
            self._next_id(),
            read_blocks=table.block_tables[row, :num_blocks].copy(),
            read_slots=np.array([row], np.int32),
        )

    def take(self, request_id: str) -> KVTransfer | None:
        """The transfer that reads the context of a request that has just ended, before it is too
        late: it must be run before the next plan is made.
        """
        return self._ended.pop(request_id, None)

    def hold_present(self, sequence: Sequence, num_tokens: int) -> list[int]:
        """Hold the blocks that the pool has of a context of so many tokens, from its beginning on.

        They need not be brought then; `release` them when the context is adopted or given up.
        """
        present = self._present_blocks(sequence, num_tokens // self._table.block_size)
        self._table.blocks.hold(present)
        return present

    def release(self, blocks: list[int]) -> None:
        """Give up what `hold_present` holds."""
        self._table.blocks.release(blocks)

    def adopt(self, sequence: Sequence, context: HandedContext) -> KVTransfer | None:
        """Give a sequence a row whose context is written by the transfer.

        None if there is no room beside what running sequences soon need; nothing has changed then.
        """
        table = self._table
        num_tokens, size = context.num_tokens, table.block_size
        assert num_tokens == sequence.num_tokens - 1, (
            f"a context of {num_tokens} tokens for a sequence of {sequence.num_tokens}"
        )
        # A slot that a waiting row is about to be restored from must keep its content.
        if not table.slots.num_free or table.is_restoring:
            return None
        present, first = self._present_blocks(sequence, num_tokens // size), context.first
        assert len(present) >= first, f"{first} blocks were left out and {len(present)} are there"
        num_wanted = blocks_of(num_tokens + 1, size) - len(present)
        table.blocks.hold(present)
        if num_wanted > table.blocks.num_free - num_promised_blocks(table):
            table.blocks.release(present)
            return None
        table.adopt(sequence, present, num_wanted)
        blocks = table.block_tables[sequence.row]
        num_blocks = first + (len(context.groups[0]) if context.groups else 0)
        return KVTransfer(
            self._next_id(),
            write_blocks=blocks[len(present) : num_blocks].copy(),
            write_groups=tuple(group[len(present) - first :] for group in context.groups)
            if num_blocks > len(present)
            else (),
            write_slots=np.array([sequence.row], np.int32),
            write_states=context.state[None],
        )

    def _present_blocks(self, sequence: Sequence, num_full: int) -> list[int]:
        """The first blocks of the context, as far as the pool has them already."""
        prefixes = self._table.prefixes
        if not prefixes.num_snapshots:
            return []
        keys = sequence.keys(num_full, self._table.block_size)
        keys = keys[: prefixes.num_present(keys)]
        return [block for key in keys if (block := prefixes.block(key)) is not None]
