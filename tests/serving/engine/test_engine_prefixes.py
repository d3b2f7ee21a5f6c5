"""Goal: what was computed once serves every later sequence that begins alike, and changes no token.

Method: the simulated device, which reads every context back from blocks and slots, under requests
that share beginnings in chosen ways; counts of computed tokens, and the checks of all blocks, names
and snapshots after every call.
"""

import numpy as np
import pytest

from serving.core.request import Request, RequestImage, SamplingParams
from tests.serving.engine.checked_engine import (
    BUCKETS,
    CheckedEngine,
    make_limits,
)
from tests.serving.engine.prompts import prompt_of
from tests.serving.engine.simulated_device import make_image

ONE = SamplingParams(max_tokens=1, temperature=0, seed=3, ignore_eos=True)
LONG = SamplingParams(max_tokens=20, temperature=0, seed=3, ignore_eos=True)


def make_checked(
    num_blocks: int = 65, num_slots: int = 5, num_snapshots: int = 8, in_flight_max: int = 1
) -> CheckedEngine:
    limits = make_limits(
        num_blocks, num_slots, num_snapshots=num_snapshots, in_flight_max=in_flight_max
    )
    return CheckedEngine(limits, BUCKETS)


def run(
    checked: CheckedEngine,
    prompt: list[int],
    sampling: SamplingParams = ONE,
    images: tuple[RequestImage, ...] = (),
    cache_salt: str = "",
) -> str:
    name = checked.admit(prompt, sampling, images, cache_salt)
    checked.drain()
    return name


@pytest.mark.parametrize("in_flight_max", [1, 2])
@pytest.mark.parametrize(
    ("length", "num_cached"), [(3, 0), (4, 0), (5, 4), (8, 4), (9, 8), (30, 28)]
)
def test_the_same_prompt_again_computes_its_last_block_only(
    length: int, num_cached: int, in_flight_max: int
) -> None:
    checked = make_checked(in_flight_max=in_flight_max)
    first = run(checked, prompt_of(length), LONG)
    num_computed = checked.num_computed_tokens
    again = run(checked, prompt_of(length), LONG)
    other = run(checked, prompt_of(length, salt=1), LONG)
    assert checked.outputs[first] == checked.outputs[again] != checked.outputs[other]
    assert [checked.num_cached[name] for name in (first, again, other)] == [0, num_cached, 0]
    # Each prompt token once, and 19 of the 20 generated ones.
    assert num_computed == length + 19
    assert checked.num_computed_tokens == 3 * num_computed - num_cached


def test_without_room_for_snapshots_nothing_is_shared() -> None:
    checked = make_checked(num_snapshots=0)
    names = [run(checked, prompt_of(30)) for _ in range(3)]
    assert [checked.num_cached[name] for name in names] == [0, 0, 0]
    assert checked.engine.status().num_cached_blocks == 0


def test_a_common_beginning_is_shared_from_the_third_prompt_on() -> None:
    """The first prompt ends elsewhere; the second finds out where they part, and cuts there."""
    checked = make_checked()
    common = prompt_of(18)
    names = [run(checked, [*common, *prompt_of(9, salt)]) for salt in range(4, 9)]
    assert [checked.num_cached[name] for name in names] == [0, 0, 16, 16, 16]


def test_a_conversation_goes_on_from_what_was_generated() -> None:
    checked = make_checked()
    prompt = prompt_of(10)
    first = run(checked, prompt, LONG)
    # 29 tokens were computed, seven whole blocks of them.
    second = run(checked, [*prompt, *checked.outputs[first], *prompt_of(5)], LONG)
    assert checked.num_cached[second] == 28


def test_only_the_newest_snapshot_of_what_is_generated_is_kept() -> None:
    checked = make_checked()
    run(checked, prompt_of(10), LONG)
    assert checked.engine.status().num_snapshots == 2


def test_running_sequences_share_blocks() -> None:
    checked = make_checked(num_blocks=14)
    prompt = prompt_of(30)
    names = [checked.admit(prompt, LONG)]
    for _ in range(4):
        checked.step()
    assert checked.engine.status().num_decoding == 1
    names.append(checked.admit(prompt, LONG))
    for _ in range(2):
        checked.step()
    # Seven of them common; one after another they would not fit into 13 blocks.
    assert checked.engine.status().num_running == 2
    checked.drain()
    assert checked.num_cached[names[1]] == 28


def test_a_prefix_that_nobody_holds_takes_room() -> None:
    checked = make_checked(num_blocks=11)
    run(checked, prompt_of(20))
    checked.admit(prompt_of(22, 1), LONG)
    checked.step()
    again = checked.admit(prompt_of(20), LONG)
    checked.step()
    # Six blocks are wanted and four are free, though four of the six are among those.
    assert (checked.engine.status().num_running, checked.engine.status().num_waiting) == (1, 1)
    checked.drain()
    assert checked.engine.status().num_preemptions == 0
    assert again in checked.outputs


def test_equal_prompts_at_once_end_up_in_the_same_blocks() -> None:
    checked = make_checked(num_slots=3, in_flight_max=2)
    for _ in range(2):
        checked.admit(prompt_of(22), LONG)
    while checked.engine.status().num_decoding != 2:
        checked.step()
    tables = checked.engine._table.block_tables[1:3]
    assert (tables[0, :5] == tables[1, :5]).all()
    assert tables[0, 5] != tables[1, 5]
    checked.drain()


def test_the_end_of_the_prefix_used_longest_ago_gives_way_first() -> None:
    checked = make_checked(num_blocks=21)
    old, new = prompt_of(30, 1), prompt_of(30, 2)
    run(checked, old)
    run(checked, new)
    assert checked.engine.status().num_cached_blocks == 14
    # Nine of the twenty blocks are needed: six that nothing is in, then the end of the old one.
    run(checked, prompt_of(34, 3))
    assert checked.engine._table.prefixes.num_present(_keys(checked, old)) == 4
    assert checked.num_cached[run(checked, new)] == 28
    assert checked.num_cached[run(checked, old)] == 0


def _keys(checked: CheckedEngine, prompt: list[int]) -> list[bytes]:
    name = checked.admit(prompt, ONE)
    keys = checked.engine._sequences[name].prefix_keys
    checked.abort(name)
    return list(keys)


def test_cached_tokens_count_once_even_after_preemption() -> None:
    checked = make_checked(num_blocks=12, num_slots=6, num_snapshots=12)
    names = [checked.admit(prompt_of(5, salt), LONG) for salt in range(5)]
    checked.drain()
    assert checked.engine.status().num_preemptions > 0
    assert [checked.num_cached[name] for name in names] == [0] * 5


def test_a_preempted_sequence_comes_back_with_what_it_had_computed() -> None:
    num_computed = []
    for num_snapshots in (0, 12):
        checked = make_checked(num_blocks=12, num_slots=6, num_snapshots=num_snapshots)
        for salt in range(5):
            checked.admit(prompt_of(5, salt), LONG)
        checked.drain()
        assert checked.engine.status().num_preemptions > 0
        num_computed.append(checked.num_computed_tokens)
    assert num_computed[1] < num_computed[0]


def test_salts_keep_prefixes_apart() -> None:
    checked = make_checked()
    names = [run(checked, prompt_of(20), cache_salt=salt) for salt in ("a", "b", "a")]
    assert [checked.num_cached[name] for name in names] == [0, 0, 16]


def test_images_are_part_of_a_prefix_and_are_not_cut() -> None:
    checked = make_checked()
    prompt = prompt_of(22)
    names = [run(checked, prompt, images=(make_image(6, 7, name),)) for name in (1, 2, 1)]
    assert [checked.num_cached[name] for name in names] == [0, 0, 20]
    inside = [run(checked, prompt, images=(make_image(13, 8, name),)) for name in (3, 3)]
    # The third prompt knew that others had parted from the first after four tokens.
    assert [checked.num_cached[name] for name in inside] == [4, 12]


@pytest.mark.parametrize("moment", range(12))
def test_abort_while_a_snapshot_is_taken_leaves_nothing_behind(moment: int) -> None:
    checked = make_checked(num_snapshots=2, in_flight_max=2)
    run(checked, prompt_of(20))
    names = [checked.admit(prompt_of(20), LONG), checked.admit(prompt_of(31, 1), LONG)]
    for index in range(moment):
        if index % 3 == 2:
            checked.commit()
        else:
            checked.plan()
    for name in names:
        if name not in checked.reasons:
            checked.abort(name)
    checked.drain()
    # All slots can be had again.
    run(checked, prompt_of(20, 2))
    run(checked, prompt_of(20, 3))
    assert checked.engine.status().num_snapshots == 2


def test_prefixes_are_forgotten_with_the_device() -> None:
    checked = make_checked()
    run(checked, prompt_of(20))
    assert checked.engine.fail() == []
    assert checked.engine.status().num_cached_blocks == 5
    checked.engine.admit(Request("a", tuple(prompt_of(20)), LONG))
    while checked.engine.plan() is not None:
        pass
    assert len(checked.engine.fail()) == 1
    status = checked.engine.status()
    assert (status.num_cached_blocks, status.num_snapshots) == (0, 0)
    assert status.num_free_blocks == status.num_blocks


def test_a_full_set_of_snapshots_that_wait_for_a_step_takes_no_more() -> None:
    checked = make_checked(num_snapshots=1, num_slots=4)
    for salt in range(3):
        checked.admit(prompt_of(5, salt), ONE)
    plan = checked.plan()
    assert plan is not None
    assert plan.num_rows == 3
    np.testing.assert_array_equal(plan.snapshots[:, 1], [4])
    checked.drain()
