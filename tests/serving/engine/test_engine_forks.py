"""Goal: samples of one prompt compute it once, get the tokens they would get alone, and leave
nothing behind however they end.

Method: the simulated device, which reads every context back from blocks and slots; counts of
computed tokens and held blocks; random traces of forked requests with aborts over small pools.
"""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serving.core.forking import fork
from serving.core.request import QueueFullError, Request, SamplingParams
from tests.serving.engine.checked_engine import (
    BUCKETS,
    CheckedEngine,
    make_limits,
    walk,
)
from tests.serving.engine.prompts import prompt_of

LONG = SamplingParams(max_tokens=9, temperature=0.5, seed=3, ignore_eos=True)


def admit(
    checked: CheckedEngine,
    length: int,
    num_samples: int,
    sampling: SamplingParams = LONG,
    name: str = "r",
    salt: int = 0,
) -> list[str]:
    request = Request(name, tuple(prompt_of(length, salt)), sampling)
    return [checked.admit_request(sample) for sample in fork(request, num_samples)]


@pytest.mark.parametrize("in_flight_max", [1, 2])
@pytest.mark.parametrize("num_drafts", [0, 2])
@pytest.mark.parametrize(("length", "num_shared"), [(3, 0), (4, 0), (9, 8), (30, 28)])
def test_the_prompt_is_computed_once(
    length: int, num_shared: int, num_drafts: int, in_flight_max: int
) -> None:
    limits = make_limits(num_snapshots=8, num_drafts=num_drafts, in_flight_max=in_flight_max)
    checked = CheckedEngine(limits, BUCKETS)
    names = admit(checked, length, 4)
    checked.drain()
    assert [checked.num_cached[name] for name in names] == [0, *[num_shared] * 3]
    assert len({tuple(checked.outputs[name]) for name in names}) > 1
    if not num_drafts:
        num_own = length - num_shared + LONG.max_tokens - 1
        assert checked.num_computed_tokens == num_shared + 4 * num_own


def test_running_samples_hold_the_same_blocks() -> None:
    checked = CheckedEngine(make_limits(num_snapshots=8), BUCKETS)
    admit(checked, 22, 4)
    while checked.engine.status().num_decoding < 4:
        checked.step()
    table = checked.engine._table
    tables = table.block_tables[table.decoding_rows, :5]
    assert (tables == tables[0]).all(), "five blocks are full"
    assert (table.blocks.num_holders[tables[0]] == 4).all()
    tails = table.block_tables[table.decoding_rows, 5].tolist()
    assert len(set(tails)) == 4, "a partial block is nobody else's"
    checked.drain()


def test_aborting_the_leader_lets_the_next_one_lead() -> None:
    checked = CheckedEngine(make_limits(num_snapshots=8), BUCKETS)
    names = admit(checked, 40, 3)
    checked.step()
    assert checked.engine.status().num_waiting == 2
    checked.abort(names[0])
    checked.drain()
    assert [checked.num_cached[name] for name in names] == [0, 0, 36]


@pytest.mark.parametrize("last_first", [False, True])
def test_aborting_all_at_every_moment_leaves_nothing_behind(last_first: bool) -> None:
    moment, is_over = 0, False
    while not is_over:
        limits = make_limits(num_blocks=16, num_snapshots=4, in_flight_max=2)
        checked = CheckedEngine(limits, BUCKETS)
        names = admit(checked, 21, 3)
        for index in range(moment):
            if index % 2:
                checked.commit()
            else:
                checked.plan()
        is_over = not checked.engine.has_work
        for name in reversed(names) if last_first else names:
            checked.abort(name)
        checked.drain()
        moment += 1
    assert moment > 15


def test_held_samples_count_as_waiting() -> None:
    checked = CheckedEngine(make_limits(waiting_max=2, num_slots=2, num_snapshots=4), BUCKETS)
    request = Request("r", tuple(prompt_of(9)), LONG)
    with pytest.raises(QueueFullError, match="3 requests wait already and the limit is 2"):
        for sample in fork(request, 4):
            checked.admit_request(sample)
    assert checked.engine.status().num_waiting == 3
    checked.drain()


def test_losing_the_device_ends_held_samples_too() -> None:
    checked = CheckedEngine(make_limits(num_snapshots=4), BUCKETS)
    names = admit(checked, 30, 3)
    checked.plan()
    deltas = checked.engine.fail()
    assert sorted(delta.request_id for delta in deltas) == sorted(names)
    status = checked.engine.status()
    assert (status.num_waiting, status.num_running) == (0, 0)
    assert status.num_free_blocks == status.num_blocks and not checked.engine.has_work


calls = st.one_of(
    st.tuples(st.just("admit"), st.integers(1, 20), st.integers(1, 5), st.integers(0, 2)),
    st.tuples(st.just("abort"), st.integers(0, 30)),
    st.tuples(st.just("plan")),
    st.tuples(st.just("commit")),
    st.tuples(st.just("step"), st.integers(1, 12)),
)


@settings(max_examples=150)
@given(
    num_blocks=st.integers(8, 20),
    num_snapshots=st.sampled_from([0, 1, 6]),
    in_flight_max=st.integers(1, 3),
    trace=st.lists(calls, min_size=5, max_size=60),
)
def test_random_traces_end_with_the_right_tokens(
    num_blocks: int, num_snapshots: int, in_flight_max: int, trace: list[tuple]
) -> None:
    limits = make_limits(
        num_blocks, num_snapshots=num_snapshots, in_flight_max=in_flight_max, context_max=28
    )
    checked = CheckedEngine(limits, BUCKETS)

    def admit_samples(length: int, num_samples: int, salt: int) -> list[str]:
        return admit(checked, length, num_samples, LONG, f"r{len(checked.outputs)}", salt)

    walk(checked, trace, admit_samples)
    assert checked.engine._forks.num_held == 0 and not checked.engine._forks._leaders
