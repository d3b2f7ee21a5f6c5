"""Goal: the tail of a prompt is its last tokens, a step knows what it leaves out, and some compiled
size holds whatever is left. Method: numbers by hand, and random steps compared with a count of
their positions.
"""

import numpy as np
import pytest

from serving.core.buckets import Bucket
from serving.core.replay import ReplayMode, ReplayRule, StepTail

COMPACT = ReplayRule(ReplayMode.COMPACT, 140)
MASK = ReplayRule(ReplayMode.MASK, 140)


def test_the_tail_of_a_prompt_starts_so_many_tokens_before_its_end() -> None:
    lengths = (1, 139, 140, 141, 1000)
    assert [COMPACT.tail_start(length) for length in lengths] == [0, 0, 0, 1, 860]


def test_sizes_grow_up_to_half_the_step() -> None:
    sizes = {n: COMPACT.sizes(Bucket(1, n, 8)) for n in (64, 279, 280, 1119, 1120, 8192)}
    assert sizes == {
        64: (0,),
        279: (0,),
        280: (140, 0),
        1119: (140, 0),
        1120: (140, 560, 0),
        8192: (140, 560, 2240, 0),
    }
    assert MASK.sizes(Bucket(1, 8192, 8)) == (0,)


def step_tail(rule: ReplayRule, rows: list[tuple[int, int, int]], size: int) -> StepTail | None:
    """Of a step of rows (prompt length, start, tokens)."""
    lengths, starts, counts = np.array(rows, np.int32).T
    tail_starts = np.array([rule.tail_start(int(n)) for n in lengths], np.int32)
    zeros = np.zeros_like(starts)
    return rule.step_tail(Bucket(len(rows), size, 8), starts, counts, tail_starts, zeros, zeros)


def test_a_replay_is_no_exact_step_before_its_boundary() -> None:
    rule = ReplayRule(ReplayMode.COMPACT, 140, num_replayed=300)
    assert [rule.replay_start(n) for n in (128, 384, 1024)] == [0, 84, 724]
    assert [COMPACT.replay_start(n) for n in (128, 384)] == [128, 384]
    for start, is_exact in ((724, False), (1023, False), (1024, True)):
        columns = np.array([start, 1, 0, 724, 1024], np.int32)[:, None]
        tail = rule.step_tail(Bucket(1, 512, 99), *columns)
        assert (tail is None) is is_exact
        if tail is not None:
            starts = tail.starts, tail.visible_starts, tail.entry_starts
            assert starts == (0, 724, 1024) and tail.num_tokens == 140
    with pytest.raises(ValueError, match="num_replayed is -1; expected at least 0"):
        ReplayRule(ReplayMode.MASK, 140, -1)


def test_the_rows_that_a_published_example_clips() -> None:
    """A prompt of 1,000 tokens in chunks: 512 tokens left out, then 348, then none."""
    for start, count, num_in_tail in ((0, 512, 0), (512, 488, 140), (900, 100, 100)):
        tail = step_tail(COMPACT, [(1000, start, count)], 512)
        assert tail is not None and tail.num_tokens == 140
        assert tail.starts.tolist() == [860]
        positions = np.arange(start, start + count)
        assert (positions >= tail.starts[0]).sum() == num_in_tail


@pytest.mark.parametrize(
    ("rows", "is_exact"),
    [
        ([(140, 0, 140)], True),
        ([(140, 100, 40), (3, 0, 3)], True),
        ([(141, 0, 1)], False),
        ([(3, 0, 3), (141, 139, 2)], False),
        # Output that is computed again: no window reaches back to the start of the tail.
        ([(200, 200, 5)], True),
        ([(200, 199, 5)], False),
    ],
)
def test_a_step_that_leaves_nothing_out_is_exact(
    rows: list[tuple[int, int, int]], is_exact: bool
) -> None:
    assert (step_tail(COMPACT, rows, 512) is None) is is_exact
    assert (step_tail(MASK, rows, 512) is None) is is_exact


def test_the_smallest_size_that_holds_the_tail_is_taken(rng: np.random.Generator) -> None:
    taken = set()
    for _ in range(300):
        rows = []
        for _ in range(int(rng.integers(1, 9))):
            length = int(rng.choice([50, 400, 2000]))
            start = int(rng.integers(0, length))
            rows.append((length, start, int(rng.integers(1, length - start + 1))))
        tail = step_tail(COMPACT, rows, 8192)
        if tail is None:
            continue
        num_in_tail = sum(
            position >= max(0, length - 140)
            for length, start, count in rows
            for position in range(start, start + count)
        )
        holding = [size for size in (140, 560, 2240) if size >= num_in_tail]
        assert tail.num_tokens == (holding or [0])[0]
        taken.add(tail.num_tokens)
        assert step_tail(MASK, rows, 8192).num_tokens == 0  # type: ignore[union-attr]
    assert {140, 560} <= taken


def test_a_tail_without_a_size_is_masked() -> None:
    tail = step_tail(COMPACT, [(1000, 512, 488), (1000, 512, 488)], 1000)
    assert tail is not None and tail.num_tokens == 0


def test_nothing_kept_is_refused() -> None:
    with pytest.raises(ValueError, match="num_kept is 0; expected at least 1"):
        ReplayRule(ReplayMode.MASK, 0)


def test_rules_have_fingerprints_of_their_own() -> None:
    rules = (COMPACT, MASK, ReplayRule(ReplayMode.MASK, 141))
    assert len({rule.fingerprint for rule in rules}) == 3
