"""Compiled shapes, and which of them a step runs in.

Every shape the engine may ask for stands in a `BucketTable` and is compiled before the first
request; a plan outside the table is an error, never a compilation.
"""

import enum
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

TILE_TOKENS = 16
"""Tokens that are computed together when steps are batch invariant. Fewer would make full steps
slow, more those of few sequences; see `scripts/bench_engine.py`."""


class StepKind(enum.Enum):
    """Prefill samples only after the last token of each row; decode after every token."""

    PREFILL = "prefill"
    DECODE = "decode"


@dataclass(frozen=True, slots=True, order=True)
class Bucket:
    """One compiled step shape.

    `num_rows` sequences, `num_tokens` tokens over all of them, and block tables `num_blocks`
    wide (so a context of `num_blocks * block_size` tokens fits).
    """

    num_rows: int
    num_tokens: int
    num_blocks: int


@dataclass(frozen=True, slots=True)
class CompiledProgram:
    """A program that was compiled at the start: what it is called, how long it took, and whether
    the compilation cache had it.
    """

    name: str
    seconds: float
    is_from_cache: bool


class BucketTable:
    """The compiled shapes of each step kind.

    Raises:
        ValueError: a kind has no bucket, or a bucket has fewer tokens than rows.
    """

    def __init__(self, buckets: dict[StepKind, Iterable[Bucket]]) -> None:
        self._buckets = {
            kind: tuple(sorted(set(some), key=lambda b: (b.num_tokens, b.num_blocks, b.num_rows)))
            for kind, some in buckets.items()
        }
        for kind in StepKind:
            if not self._buckets.get(kind):
                raise ValueError(f"no {kind.value} bucket; expected at least one of each kind")
        for kind, bucket in self:
            if bucket.num_tokens < bucket.num_rows or bucket.num_rows < 1 or bucket.num_blocks < 1:
                raise ValueError(
                    f"{kind.value} bucket {bucket}: expected at least one row, one block and as "
                    "many tokens as rows"
                )

    def __iter__(self) -> Iterator[tuple[StepKind, Bucket]]:
        for kind in StepKind:
            for bucket in self._buckets[kind]:
                yield kind, bucket

    def of(self, kind: StepKind) -> tuple[Bucket, ...]:
        """The buckets of a kind, smallest first: fewest tokens, then blocks, then rows."""
        return self._buckets[kind]

    def smallest(
        self, kind: StepKind, num_rows: int, num_tokens: int, num_blocks: int
    ) -> Bucket | None:
        """The smallest bucket that holds the step: fewest tokens, then blocks, then rows."""
        for bucket in self._buckets[kind]:
            if (
                bucket.num_rows >= num_rows
                and bucket.num_tokens >= num_tokens
                and bucket.num_blocks >= num_blocks
            ):
                return bucket
        return None

    def largest(self, kind: StepKind) -> Bucket:
        """The element-wise maximum over the buckets of a kind (it need not itself be one)."""
        some = self._buckets[kind]
        return Bucket(
            max(b.num_rows for b in some),
            max(b.num_tokens for b in some),
            max(b.num_blocks for b in some),
        )
