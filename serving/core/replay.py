"""Bounded replay: which tokens of a prompt pass the upper layers.

The layers above the last KV source keep nothing of a token but window entries, so a prompt needs
them only for its last tokens, its *tail*. The tail of a prompt of `N` tokens starts at
`max(0, N - num_kept)`, whatever chunks the prompt comes in; tokens before it stop at the last KV
source, and no window of an upper layer reaches behind the start. What is generated belongs to the
tail, and so does output that is computed again after a preemption: a sequence has one tail start
for all its life, hence the same tokens however it came to be computed.

A state at position `H` is then a function of the tokens before `H` alone in its lower part, and of
the tail start too in its upper part. So it can be gone on from

* by every sequence whose tail starts at `H` or later, for which only the lower part counts: the
  windows of its upper layers begin empty;
* by a sequence with the same tail start as the one that left it.

A state that ends before the tail of its own sequence has no upper part.

A state without an upper part can also be made anew where the blocks before it are present. What
the lower layers leave at a position depends on a bounded number of tokens before it, as far as it
goes by windows; the rest they read from the blocks. So the last `num_replayed` tokens before the
boundary are computed once more, with nothing before them visible in windows and without writing to
the blocks. That is exact, and stored prefixes need no states.
"""

import enum
from dataclasses import dataclass

import numpy as np

from serving.core.buckets import Bucket

_SIZE_RATIO = 4
"""Between the compiled sizes of the tail of one step shape."""


class ReplayMode(enum.Enum):
    """How upper layers leave tokens out: `MASK` computes all and hides those that are no tail,
    `COMPACT` computes the tail alone.
    """

    MASK = "mask"
    COMPACT = "compact"


@dataclass(frozen=True, slots=True, eq=False)
class StepTail:
    """What the upper layers compute in a prefill step that leaves something out.

    Attributes:
        num_tokens: compiled number of tokens of the upper layers; 0 computes all and masks.
        starts: [R] int32, the first position of each row's sequence that belongs to its tail.
        visible_starts: [R] int32, the first position that windows reach back to.
        entry_starts: [R] int32, the first position whose compressed entries are written.
    """

    num_tokens: int
    starts: np.ndarray
    visible_starts: np.ndarray
    entry_starts: np.ndarray


@dataclass(frozen=True, slots=True)
class ReplayRule:
    """Bounded replay of all prompts of an engine; the last `num_kept` tokens of each are its tail.

    `num_replayed` tokens before a block boundary make the state there anew; 0 if none do.

    Raises:
        ValueError: `num_kept` is less than 1, or `num_replayed` less than 0.
    """

    mode: ReplayMode
    num_kept: int
    num_replayed: int = 0

    def __post_init__(self) -> None:
        for name, value, least in (("kept", self.num_kept, 1), ("replayed", self.num_replayed, 0)):
            if value < least:
                raise ValueError(f"num_{name} is {value}; expected at least {least}")

    @property
    def fingerprint(self) -> bytes:
        """What states of prefixes depend on besides tokens, model and cache."""
        return f"replay {self.mode.value} {self.num_kept}".encode()

    def tail_start(self, num_prompt_tokens: int) -> int:
        """The first position of a prompt that passes the upper layers."""
        return max(0, num_prompt_tokens - self.num_kept)

    def sizes(self, bucket: Bucket) -> tuple[int, ...]:
        """`StepTail.num_tokens` that are compiled for a prefill bucket, smallest tail first.

        The last is 0, which holds any tail. A tail of more than half the tokens is not worth a
        program of its own.
        """
        sizes: list[int] = []
        if self.mode is ReplayMode.COMPACT:
            size = self.num_kept
            while 2 * size <= bucket.num_tokens:
                sizes.append(size)
                size *= _SIZE_RATIO
        return (*sizes, 0)

    def replay_start(self, num_tokens: int) -> int:
        """Where to begin for the state after `num_tokens` tokens, all of whose blocks are there;
        `num_tokens` itself if it cannot be made anew.
        """
        return max(0, num_tokens - self.num_replayed) if self.num_replayed else num_tokens

    def step_tail(
        self,
        bucket: Bucket,
        starts: np.ndarray,
        num_tokens: np.ndarray,
        tail_starts: np.ndarray,
        visible_starts: np.ndarray,
        entry_starts: np.ndarray,
    ) -> StepTail | None:
        """The tail of a prefill step; None if it leaves nothing out, so that it is an exact step.

        Args:
            starts, num_tokens: [R] int32, of the rows.
            tail_starts, visible_starts, entry_starts: [R] int32, as in `StepTail`.
        """
        # Past the prompt's end no window reaches back to the start of the tail any more.
        is_bounded = (tail_starts > 0) & (starts < tail_starts + self.num_kept)
        # Behind the boundary none reaches back to where the replay began.
        is_bounded |= starts < entry_starts
        if not is_bounded.any():
            return None
        in_tail = starts + num_tokens - np.maximum(starts, tail_starts)
        num_in_tail = int(np.maximum(in_tail, 0).sum())
        fitting = (size for size in self.sizes(bucket) if size >= num_in_tail)
        return StepTail(next(fitting, 0), tail_starts, visible_starts, entry_starts)
