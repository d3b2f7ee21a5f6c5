"""One request's progress through an engine, and the states it may pass through.

A `Sequence` holds what changes rarely or has no fixed size: the tokens, the status, the history.
What every step reads and writes for every running sequence stands in the columns of
`running_table.py` instead, under the sequence's row.
"""

import enum
from dataclasses import dataclass, field
from itertools import chain

import numpy as np

from serving.core.controls import SequenceControls
from serving.core.prefix import PrefixKey, next_key, plain_key, token_bytes
from serving.core.request import PRIORITY_MAX, FinishReason, Request, TokenDelta

_ID_BITS = 47
"""So that 2**47 sequences, of 2**16 urgencies, have ranks of 63 bits."""


def lowest_rank(urgency: int) -> int:
    """The smallest rank that a sequence of this urgency, or one of less, can have."""
    return (urgency + PRIORITY_MAX + 1) << _ID_BITS


class SequenceStatus(enum.Enum):
    """Waiting sequences hold neither blocks nor a slot; prefilling and decoding ones do."""

    WAITING = "waiting"
    PREFILLING = "prefilling"
    DECODING = "decoding"
    FINISHED = "finished"


_NEXT_STATUSES: dict[SequenceStatus, set[SequenceStatus]] = {
    SequenceStatus.WAITING: {SequenceStatus.PREFILLING, SequenceStatus.FINISHED},
    SequenceStatus.PREFILLING: {
        SequenceStatus.DECODING,
        SequenceStatus.WAITING,
        SequenceStatus.FINISHED,
    },
    SequenceStatus.DECODING: {SequenceStatus.WAITING, SequenceStatus.FINISHED},
    SequenceStatus.FINISHED: set(),
}


@dataclass(slots=True, eq=False)
class Sequence:
    """One request's progress; owned by one engine.

    Attributes:
        sequence_id: position in the order of admission; an earlier sequence has a smaller one.
        prompt: [L] int32.
        seed: the request's seed, or the one drawn for it.
        stop_token_ids: every token that ends the sequence, end-of-sequence included if it counts.
        length_limit: tokens, prompt included, at which the sequence ends whatever it says.
        added, news: what it has generated; `news` are the tokens of steps that nobody has asked
            for yet (`output_token_ids`), which saves steps the growth of a list.
        row: its row of the running table, which is its state slot; 0 while it has none.
        is_promoted: it was outranked for so long that it now goes before every priority.
        num_overtakes: how many later sequences started while this one waited for room.
        num_preemptions: how often it lost its blocks and began anew.
        root_key: the key before its first block.
        prefix_keys: keys of its first blocks, as far as they were asked for.
        num_cached_tokens: prompt tokens it did not compute when it started; None before that.
        tail_key: the prefix that ends in the newest snapshot of what it generated, if it has one.
        controls: what it asks of its tokens beyond temperature, top_k and top_p; None for nothing.
        tail_start: the first position that passes the upper layers; 0 for all (`core/replay.py`).
    """

    sequence_id: int
    request: Request
    prompt: np.ndarray
    seed: int
    stop_token_ids: tuple[int, ...]
    length_limit: int
    status: SequenceStatus = SequenceStatus.WAITING
    added: list[int] = field(default_factory=list[int])
    news: list[tuple[int, ...]] = field(default_factory=list[tuple[int, ...]])
    row: int = 0
    is_promoted: bool = False
    num_overtakes: int = 0
    num_preemptions: int = 0
    root_key: PrefixKey = b""
    prefix_keys: list[PrefixKey] = field(default_factory=list[PrefixKey])
    num_cached_tokens: int | None = None
    tail_key: PrefixKey | None = None
    controls: SequenceControls | None = None
    tail_start: int = 0

    @property
    def urgency(self) -> int:
        """Its priority, or less than any if it was promoted; who has a smaller one goes first."""
        return -PRIORITY_MAX - 1 if self.is_promoted else self.request.priority

    @property
    def rank(self) -> int:
        """Its place among all sequences, by urgency and then by admission; 0 or more, unique."""
        return lowest_rank(self.urgency) + self.sequence_id

    @property
    def output_token_ids(self) -> list[int]:
        """The tokens it has generated."""
        if self.news:
            self.added.extend(chain.from_iterable(self.news))
            self.news.clear()
        return self.added

    @property
    def num_tokens(self) -> int:
        """Tokens known so far, prompt and output."""
        return len(self.prompt) + len(self.output_token_ids)

    def tokens(self, start: int, stop: int) -> np.ndarray:
        """The tokens at positions `start` to `stop - 1`, int32; all of them must be known."""
        assert 0 <= start <= stop <= self.num_tokens, f"{start}:{stop} of {self.num_tokens} tokens"
        prompt_length = len(self.prompt)
        if stop <= prompt_length:
            return self.prompt[start:stop]
        first = max(start - prompt_length, 0)
        output = np.array(self.output_token_ids[first : stop - prompt_length], np.int32)
        if start >= prompt_length:
            return output
        return np.concatenate([self.prompt[start:], output])

    def keys(self, num_blocks: int, block_size: int) -> list[PrefixKey]:
        """Keys of the first `num_blocks` blocks, whose tokens must all be known."""
        self.extend_keys(num_blocks, block_size)
        return self.prefix_keys[:num_blocks]

    def extend_keys(self, num_blocks: int, block_size: int) -> None:
        """Make `prefix_keys` hold at least so many; a copy of them all would cost long texts."""
        for index in range(len(self.prefix_keys), num_blocks):
            start = index * block_size
            before = self.prefix_keys[-1] if self.prefix_keys else self.root_key
            first = start - len(self.prompt)
            if first >= 0:
                # No image is generated.
                data = token_bytes(self.output_token_ids[first : first + block_size])
                key = plain_key(before, data)
            else:
                token_ids = self.tokens(start, start + block_size)
                key = next_key(before, token_ids, start, self.request.images)
            self.prefix_keys.append(key)

    def move_to(self, status: SequenceStatus) -> None:
        """Change the status; an illegal change is a defect of the engine."""
        assert status in _NEXT_STATUSES[self.status], (
            f"sequence {self.sequence_id} cannot go from {self.status.value} to {status.value}"
        )
        self.status = status

    def delta(self, token_ids: tuple[int, ...], reason: FinishReason | None = None) -> TokenDelta:
        """What the client is told after `token_ids` were added."""
        num_cached = self.num_cached_tokens or 0
        return TokenDelta(self.request.request_id, token_ids, reason, len(self.prompt), num_cached)
