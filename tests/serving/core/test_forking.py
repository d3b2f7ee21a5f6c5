"""Goal: samples of one prompt differ by name and seed alone, and one of them at a time leads.

Method: requests and sequences made by hand.
"""

import numpy as np
import pytest

from serving.core.forking import SAMPLES_MAX, ForkGroups, fork, sample_seed
from serving.core.request import SEED_MAX, Request, RequestError, SamplingParams
from serving.core.sequence import Sequence, SequenceStatus

REQUEST = Request("r", (1, 2), SamplingParams(seed=7, prompt_logprobs=1), priority=3)


def sequences(num_samples: int) -> list[Sequence]:
    return [
        Sequence(index, request, np.array([1, 2], np.int32), 0, (), 9)
        for index, request in enumerate(fork(REQUEST, num_samples))
    ]


def test_samples_have_names_and_seeds_of_their_own() -> None:
    assert fork(REQUEST, 1) == [REQUEST]
    samples = fork(REQUEST, SAMPLES_MAX)
    assert len({sample.request_id for sample in samples}) == SAMPLES_MAX
    seeds = [sample.sampling.seed for sample in samples]
    assert len(set(seeds)) == SAMPLES_MAX and seeds[0] == 7
    assert [sample.sample_index for sample in samples] == list(range(SAMPLES_MAX))
    assert {sample.fork_group for sample in samples} == {"r"}
    assert all((s.prompt_token_ids, s.priority) == ((1, 2), 3) for s in samples)
    asking = [sample.sampling.prompt_logprobs for sample in samples]
    assert asking == [1, *[None] * (SAMPLES_MAX - 1)]
    assert fork(REQUEST, 3) == samples[:3]


def test_samples_without_a_seed_get_one_each_from_the_engine() -> None:
    samples = fork(Request("r", (1,), SamplingParams()), 3)
    assert [sample.sampling.seed for sample in samples] == [None] * 3


@pytest.mark.parametrize("num_samples", [0, -1, SAMPLES_MAX + 1])
def test_too_few_or_many_samples(num_samples: int) -> None:
    with pytest.raises(RequestError, match=f"n is {num_samples}; expected 1 to 64") as caught:
        fork(REQUEST, num_samples)
    assert caught.value.param == "n"


def test_derived_seeds_are_fixed_and_in_range() -> None:
    assert sample_seed(7, 0) == 7
    seeds = [sample_seed(seed, index) for seed in (0, 1, SEED_MAX) for index in range(1, 50)]
    assert len(set(seeds)) == len(seeds)
    assert all(0 <= seed <= SEED_MAX for seed in seeds)
    assert max(seeds) > SEED_MAX // 2


def test_samples_wait_for_the_first_token_of_the_leader() -> None:
    groups = ForkGroups()
    first, *others = sequences(3)
    assert not groups.hold(first) and all(groups.hold(other) for other in others)
    assert groups.take_ready() == [] and groups.num_held == 2
    first.output_token_ids.append(5)
    assert groups.take_ready() == others
    assert groups.num_held == 0 and groups.take_ready() == []
    # Who comes later has nothing to wait for.
    assert not groups.hold(sequences(4)[3])


def test_the_next_sample_leads_when_the_leader_ends_early() -> None:
    groups = ForkGroups()
    first, second, third, last = sequences(4)
    for sequence in (first, second, third, last):
        groups.hold(sequence)
    assert groups.discard(second) and not groups.discard(second) and not groups.discard(first)
    first.move_to(SequenceStatus.FINISHED)
    assert groups.take_ready() == [third]
    assert groups.num_held == 1
    third.output_token_ids.append(5)
    third.move_to(SequenceStatus.PREFILLING)
    third.move_to(SequenceStatus.FINISHED)
    assert groups.take_ready() == [last]


def test_a_group_without_others_is_forgotten() -> None:
    groups = ForkGroups()
    first, second = sequences(2)
    groups.hold(first)
    groups.hold(second)
    groups.discard(second)
    first.move_to(SequenceStatus.FINISHED)
    assert groups.take_ready() == [] and groups.num_held == 0
    assert not groups.hold(first), "a new leader"
