"""Goal: with bounded replay the tokens of a request depend on its own prompt and output alone: they
are the same computed cold, gone on from another's prefix, in any chunks, and after preemptions.

Method: the simulated device, whose tokens depend on where the tail of a prompt starts and which
refuses windows that were computed for another tail; random traces over prompts that share
beginnings, and hand-made prompts for each way to go on from a prefix.
"""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serving.core.replay import ReplayMode, ReplayRule
from serving.core.request import Request, RequestError, RequestImage, SamplingParams
from tests.serving.engine.checked_engine import (
    BUCKETS,
    CheckedEngine,
    make_buckets,
    make_limits,
    step_on,
)
from tests.serving.engine.prompts import prompt_of
from tests.serving.engine.simulated_device import (
    ROLLBACK_MAX,
    WINDOW,
    make_image,
)

KEEP = WINDOW + ROLLBACK_MAX
COMPACT = ReplayRule(ReplayMode.COMPACT, KEEP)
MASK = ReplayRule(ReplayMode.MASK, KEEP)
ONE = SamplingParams(max_tokens=1, temperature=0, seed=3, ignore_eos=True)
LONG = SamplingParams(max_tokens=20, temperature=0, seed=3, ignore_eos=True)
WIDE = make_buckets(
    prefill=[(3, 6, 16), (4, 40, 16)], decode=[(1, 1, 16), (4, 4, 16), (4, 12, 16), (4, 24, 16)]
)


def make_checked(
    rule: ReplayRule | None = COMPACT, num_snapshots: int = 8, num_blocks: int = 65
) -> CheckedEngine:
    limits = make_limits(num_blocks, num_snapshots=num_snapshots, replay=rule)
    return CheckedEngine(limits, WIDE)


def run(
    checked: CheckedEngine,
    prompt: list[int],
    sampling: SamplingParams = ONE,
    images: tuple[RequestImage, ...] = (),
) -> str:
    name = checked.admit(prompt, sampling, images)
    checked.drain()
    return name


@settings(max_examples=60)
@given(
    seed=st.integers(0, 2**32),
    mode=st.sampled_from(ReplayMode),
    num_kept=st.integers(KEEP, 2 * KEEP),
    num_replayed=st.sampled_from([0, 3, 6, 10]),
    in_flight_max=st.sampled_from([1, 2, 2, 3]),
    num_drafts=st.sampled_from([0, 0, 1, 5]),
)
def test_random_traces_end_with_the_tokens_of_cold_runs(
    seed: int,
    mode: ReplayMode,
    num_kept: int,
    num_replayed: int,
    in_flight_max: int,
    num_drafts: int,
) -> None:
    """The device checks every window; the end of the trace checks every token."""
    source = random.Random(seed)
    limits = make_limits(
        num_blocks=source.randint(9, 30),
        num_slots=source.randint(2, 6),
        context_max=48,
        num_snapshots=source.choice([0, 2, 5, 20]),
        in_flight_max=in_flight_max,
        num_drafts=num_drafts,
        replay=ReplayRule(mode, num_kept, num_replayed),
    )
    checked = CheckedEngine(limits, source.choice([BUCKETS, WIDE]))
    for _ in range(14):
        length = source.randint(1, min(44, checked.length_max - 1))
        prompt = prompt_of(length, source.randint(0, 1))
        if checked.reasons and source.random() < 0.4:
            # A conversation goes on.
            name = source.choice(sorted(checked.reasons))
            prompt = [*checked._requests[name].prompt_token_ids, *checked.outputs[name]]
            prompt = [*prompt, *prompt_of(source.randint(0, 14), 3)][: checked.length_max - 1]
        sampling = SamplingParams(source.randint(1, 16), 0.5, ignore_eos=source.random() < 0.5)
        step_on(checked, source, checked.admit(prompt, sampling), 5, abort_share=0.1)
    checked.drain()


def test_traces_reach_preemptions_hits_and_tails() -> None:
    """What random traces are made of does occur: they are no proof of nothing."""
    num_preemptions = num_hits = num_left_out = 0
    tails: set[int | None] = set()
    for seed in range(8):
        source = random.Random(seed)
        checked = CheckedEngine(
            make_limits(14, 6, 48, num_snapshots=9, in_flight_max=2, replay=COMPACT), WIDE
        )
        for _ in range(12):
            name = checked.admit(prompt_of(source.randint(8, 34), source.randint(0, 1)), LONG)
            step_on(checked, source, name, 5, abort_share=0.0)
        checked.drain()
        num_preemptions += checked.engine.status().num_preemptions
        num_hits += sum(count > 0 for count in checked.num_cached.values())
        num_left_out += checked.device.num_left_out
        tails |= set(checked.device.tails)
    assert num_preemptions > 20 and num_hits > 20 and num_left_out > 200
    # Exact steps, masked ones, and the one size that fits twice into forty tokens.
    assert tails == {None, 0, KEEP}


def test_blocks_without_a_state_are_gone_on_from_by_a_replay() -> None:
    rule = ReplayRule(ReplayMode.COMPACT, KEEP, num_replayed=6)
    checked = make_checked(rule, num_snapshots=1)
    long, other = prompt_of(40), prompt_of(40, 1)
    run(checked, long)
    # It takes the only snapshot away.
    run(checked, other)
    num_before = checked.device.num_replayed
    again = run(checked, long)
    # The tail starts at 31, so seven blocks of it are of use; six tokens before them are replayed.
    assert checked.num_cached[again] == 28 - 6
    assert checked.device.num_replayed - num_before == 6
    # Where there is a snapshot it serves.
    kept = make_checked(rule)
    run(kept, long)
    assert kept.num_cached[run(kept, [*long[:35], *prompt_of(6, 2)])] == 28
    # An image is not cut by the beginning of a replay.
    image = make_image(20, 5)
    for _ in range(2):
        cached = checked.num_cached[run(checked, long, images=(image,))]
        run(checked, other)
    assert cached == 20
    # Without the rule the blocks alone are of no use.
    plain = make_checked(COMPACT, num_snapshots=1)
    for prompt in (long, other, long):
        name = run(plain, prompt)
    assert plain.num_cached[name] == 0


@pytest.mark.parametrize("rule", [COMPACT, MASK])
def test_only_the_tail_of_a_prompt_passes_the_upper_layers(rule: ReplayRule) -> None:
    checked = make_checked(rule, num_snapshots=0)
    exact = make_checked(None, num_snapshots=0)
    name = run(checked, prompt_of(50), ONE)
    assert checked.outputs[name] != exact.outputs[run(exact, prompt_of(50), ONE)]
    assert checked.device.num_left_out == 50 - KEEP
    # Forty tokens, all left out; then one more and the tail.
    size = KEEP if rule is COMPACT else 0
    assert checked.device.tails == [size, size]


def test_prompts_that_are_all_tail_run_exact_steps() -> None:
    checked, exact = make_checked(num_snapshots=0), make_checked(None)
    for length in (1, KEEP - 1, KEEP):
        assert (
            checked.expected[run(checked, prompt_of(length), LONG)]
            == (exact.expected[run(exact, prompt_of(length), LONG)])
        )
    assert set(checked.device.tails) == {None}
    run(checked, prompt_of(KEEP + 1), LONG)
    assert set(checked.device.tails) == {None, KEEP}


def test_the_same_prompt_goes_on_from_inside_its_tail() -> None:
    checked = make_checked()
    first, again = (run(checked, prompt_of(30), LONG) for _ in range(2))
    assert [checked.num_cached[name] for name in (first, again)] == [0, 28]
    assert checked.outputs[first] == checked.outputs[again]


@pytest.mark.parametrize("num_more", [1, 5, 6, 7, 20])
def test_a_longer_prompt_goes_on_from_before_its_own_tail(num_more: int) -> None:
    """The first prompt leaves states at 20, before its tail, and at 28, inside of it."""
    checked = make_checked()
    run(checked, prompt_of(30))
    name = run(checked, prompt_of(30 + num_more), LONG)
    # From 37 tokens on the tail starts at 28 or later.
    assert checked.num_cached[name] == (28 if num_more >= 7 else 20)


def test_a_state_inside_another_tail_is_not_gone_on_from() -> None:
    checked = make_checked()
    run(checked, prompt_of(16))
    # The states at 4 and 12 are those of a prompt whose tail starts at 7.
    assert checked.num_cached[run(checked, prompt_of(18))] == 4


def test_what_is_left_of_a_prefix_by_the_newest_tail_replaces_the_older() -> None:
    checked = make_checked()
    lengths = (30, 29, 30, 29)
    names = [run(checked, prompt_of(length), LONG) for length in lengths]
    # Each has its own state at 28, of which one is kept; the common one is at 20.
    assert [checked.num_cached[name] for name in names] == [0, 20, 20, 20]
    assert checked.num_cached[run(checked, prompt_of(29))] == 28


def test_a_conversation_goes_on_from_what_was_generated() -> None:
    checked = make_checked()
    prompt = prompt_of(20)
    first = run(checked, prompt, LONG)
    prompt = [*prompt, *checked.outputs[first]]
    # The newest state of the output is at 36, the newest of the prompt at 16.
    for num_more, num_cached in ((KEEP - 5, 16), (KEEP - 4, 36)):
        assert checked.num_cached[run(checked, [*prompt, *prompt_of(num_more, 2)])] == num_cached


def test_a_preempted_sequence_keeps_its_tail() -> None:
    """What it had generated is computed again as part of the tail."""
    for num_snapshots in (0, 12):
        limits = make_limits(14, 6, num_snapshots=num_snapshots, replay=COMPACT)
        checked = CheckedEngine(limits, WIDE)
        for salt in range(5):
            checked.admit(prompt_of(13, salt), LONG)
        checked.drain()
        assert checked.engine.status().num_preemptions > 0


def test_images_are_part_of_head_and_tail() -> None:
    checked = make_checked()
    prompt = prompt_of(34)
    image = make_image(20, 9)
    names = [run(checked, prompt, LONG, (image,)) for _ in range(2)]
    # The tail starts inside the image; the last boundary before it that cuts no image is at 20.
    assert [checked.num_cached[name] for name in names] == [0, 32]
    longer = run(checked, prompt_of(35), LONG, (image,))
    assert checked.num_cached[longer] == 20


def test_log_probabilities_of_a_prompt_are_refused() -> None:
    sampling = SamplingParams(prompt_logprobs=1, max_tokens=1)
    request = Request("a", tuple(prompt_of(30)), sampling)
    with pytest.raises(RequestError, match="only the last 9 tokens pass all layers") as caught:
        make_checked().engine.admit(request)
    assert caught.value.param == "prompt_logprobs"
    make_checked(None).engine.admit(request)


def test_prefixes_of_other_rules_have_other_names() -> None:
    keys = []
    rules = (None, MASK, COMPACT, ReplayRule(ReplayMode.COMPACT, KEEP + 1))
    for rule in (*rules, *rules):
        checked = make_checked(rule)
        name = checked.admit(prompt_of(30))
        keys.append(checked.engine._sequences[name].prefix_keys[0])
    assert keys[:4] == keys[4:]
    assert len(set(keys)) == 4
