"""Goal: a request whose prompt one engine has computed goes on in another one with the tokens that
it would have had in one, whatever the two hold at the time, and neither keeps anything of it.

Method: two engines around simulated devices, which notice a wrong block or state. A test carries
contexts from one to the other by hand.
"""

import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from serving.core.hand_off import HandedContext, blocks_of, goes_on, prefill_part
from serving.core.request import FinishReason, Request, RequestError, SamplingParams, TokenDelta
from serving.engine.engine import Engine, run_step
from tests.serving.engine.checked_engine import (
    BUCKETS,
    make_limits,
)
from tests.serving.engine.prompts import prompt_of
from tests.serving.engine.simulated_device import (
    SimulatedDevice,
    expected_tokens,
)

CONTEXT_MAX = 64


class Side:
    """One engine and its device."""

    def __init__(self, **limits: Any) -> None:
        self.limits = make_limits(**{"num_snapshots": 6, "in_flight_max": 2, **limits})
        self.device = SimulatedDevice(self.limits, BUCKETS)
        self.engine = Engine(self.limits, BUCKETS, random.Random(1))
        self.tokens: dict[str, list[int]] = {}

    def step(self) -> list[TokenDelta]:
        deltas = run_step(self.engine, self.device)
        for delta in deltas:
            self.tokens.setdefault(delta.request_id, []).extend(delta.token_ids)
        return deltas

    def run(self) -> None:
        while self.engine.has_work:
            self.step()

    def prefill(self, request: Request) -> tuple[TokenDelta, HandedContext]:
        """The first token and the context, taken as soon as the token is out."""
        self.engine.hand_offs.watch(request.request_id)
        self.engine.admit(prefill_part(request))
        while True:
            for delta in self.step():
                if delta.request_id == request.request_id:
                    transfer = self.engine.hand_offs.take(request.request_id)
                    assert transfer is not None and delta.finish_reason is FinishReason.LENGTH
                    self.device.move(transfer)
                    # What comes next may write where the context was.
                    self.engine.admit(make_request("next", prompt_of(30, 9)))
                    self.step()
                    self.step()
                    read = self.device.collect_read()
                    self.engine.abort("next")
                    num_tokens = len(request.prompt_token_ids) + len(request.resumed_token_ids)
                    return delta, HandedContext(num_tokens, read.groups, read.states[0])

    def adopt(self, request: Request, context: HandedContext) -> bool:
        transfer = self.engine.adopt(request, context)
        if transfer is not None:
            self.device.move(transfer)
        return transfer is not None

    def check_empty(self) -> None:
        self.run()
        status = self.engine.status()
        assert status.num_free_slots == status.num_slots
        assert status.num_free_blocks == status.num_blocks


def make_request(name: str, prompt: list[int], **sampling: Any) -> Request:
    params = {"max_tokens": 12, "temperature": 0.5, "seed": 3, "ignore_eos": True, **sampling}
    return Request(name, tuple(prompt), SamplingParams(**params))


def taken_over(request: Request, delta: TokenDelta) -> Request:
    return replace(request, resumed_token_ids=request.resumed_token_ids + delta.token_ids)


@pytest.mark.parametrize("num_snapshots", [0, 6])
@pytest.mark.parametrize("num_drafts", [0, 3])
@pytest.mark.parametrize("length", [1, 3, 4, 5, 8, 21, 37])
def test_a_request_goes_on_where_it_stopped(
    length: int, num_drafts: int, num_snapshots: int
) -> None:
    sizes = {"num_drafts": num_drafts, "num_snapshots": num_snapshots}
    one, other = Side(**sizes), Side(**sizes)
    request = make_request("a", prompt_of(length))
    expected = expected_tokens(request, 3, CONTEXT_MAX)
    one.engine.admit(make_request("before", prompt_of(9, 1)))
    other.engine.admit(make_request("beside", prompt_of(7, 2)))
    other.step()
    delta, context = one.prefill(request)
    assert len(context.groups[0]) == blocks_of(length, 4)
    assert other.adopt(taken_over(request, delta), context)
    other.run()
    assert list(delta.token_ids) + other.tokens["a"] == expected
    assert other.tokens["beside"] == expected_tokens(
        make_request("beside", prompt_of(7, 2)), 3, CONTEXT_MAX
    )
    one.check_empty()
    other.check_empty()


def test_blocks_that_are_there_are_shared_and_others_are_named() -> None:
    one, other = Side(), Side()
    prompt = prompt_of(18)
    for name in ("a", "b"):
        request = make_request(name, prompt)
        delta, context = one.prefill(request)
        assert other.adopt(taken_over(request, delta), context)
        held = other.engine.status().num_blocks - other.engine.status().num_free_blocks
        # Four full blocks are shared by both, the fifth is each one's own.
        assert held == {"a": 5, "b": 6}[name]
    other.run()
    assert other.tokens["a"] == other.tokens["b"]
    # A later request of the other engine finds the prefix that was written there.
    assert other.engine.status().num_cached_blocks >= 4
    other.check_empty()


def test_blocks_that_are_held_need_not_come() -> None:
    one, other = Side(), Side()
    first = make_request("a", prompt_of(18), max_tokens=3)
    delta, context = one.prefill(first)
    assert other.adopt(taken_over(first, delta), context)
    other.run()
    for name, length, num_there in (("b", 22, 4), ("c", 20, 5), ("d", 3, 0)):
        prompt = prompt_of(18) + prompt_of(length, 3)[18:] if length > 18 else prompt_of(3, 8)
        request = make_request(name, prompt)
        delta, whole = one.prefill(request)
        taken = taken_over(request, delta)
        held = other.engine.hold_present(taken)
        assert len(held) == num_there
        # Others may want the memory meanwhile; what is held stays.
        for salt in range(4, 7):
            other.engine.admit(make_request(f"{name}{salt}", prompt_of(30, salt)))
        other.run()
        groups = tuple(group[num_there:] for group in whole.groups)
        rest = HandedContext(whole.num_tokens, groups, whole.state, num_there)
        assert other.adopt(taken, rest)
        other.engine.hand_offs.release(held)
        other.run()
        expected = expected_tokens(request, 3, CONTEXT_MAX)
        assert list(delta.token_ids) + other.tokens[name] == expected
    other.check_empty()


def test_without_room_nothing_changes() -> None:
    one, other = Side(), Side(num_blocks=17)
    other.engine.admit(make_request("large", prompt_of(40), max_tokens=20))
    while not other.step():
        pass
    request = make_request("a", prompt_of(30, 5))
    delta, context = one.prefill(request)
    before = other.engine.status()
    assert not other.adopt(taken_over(request, delta), context)
    assert other.engine.status() == before
    other.run()
    assert other.adopt(taken_over(request, delta), context)
    other.run()
    assert list(delta.token_ids) + other.tokens["a"] == expected_tokens(request, 3, CONTEXT_MAX)
    other.check_empty()


def test_one_that_loses_its_memory_computes_all_of_it_again() -> None:
    one, other = Side(), Side(num_blocks=17)
    requests = [make_request(name, prompt_of(21, n), max_tokens=20) for n, name in enumerate("abc")]
    for request in requests[:2]:
        delta, context = one.prefill(request)
        assert other.adopt(taken_over(request, delta), context)
    other.run()
    assert other.engine.status().num_preemptions
    for request in requests[:2]:
        expected = expected_tokens(request, 3, CONTEXT_MAX)
        assert other.tokens[request.request_id] == expected[1:]
    other.check_empty()


def test_tokens_that_were_generated_before_are_not_said_again() -> None:
    request = make_request("a", prompt_of(10))
    expected = expected_tokens(request, 3, CONTEXT_MAX)
    for num_resumed in (1, 5, 11):
        resumed = replace(request, resumed_token_ids=tuple(expected[:num_resumed]))
        alone, one, other = Side(), Side(), Side()
        alone.engine.admit(resumed)
        alone.run()
        assert alone.tokens["a"] == expected[num_resumed:]
        delta, context = one.prefill(resumed)
        if goes_on(resumed, delta, CONTEXT_MAX):
            assert other.adopt(taken_over(resumed, delta), context)
            other.run()
        else:
            assert num_resumed == 11
        assert [*delta.token_ids, *other.tokens.get("a", [])] == expected[num_resumed:]


def test_a_request_is_over_or_goes_on() -> None:
    request = make_request("a", prompt_of(10), max_tokens=5)

    def is_going_on(reason: FinishReason, resumed: int = 0, context_max: int = 64) -> bool:
        before = replace(request, resumed_token_ids=(3,) * resumed)
        return goes_on(before, TokenDelta("a", (4,), reason), context_max)

    assert is_going_on(FinishReason.LENGTH) and is_going_on(FinishReason.LENGTH, resumed=3)
    assert not is_going_on(FinishReason.LENGTH, resumed=4)
    assert not is_going_on(FinishReason.LENGTH, context_max=11)
    assert is_going_on(FinishReason.LENGTH, context_max=12)
    for reason in (FinishReason.STOP, FinishReason.ABORT, FinishReason.ERROR):
        assert not is_going_on(reason)


def test_what_is_not_asked_for_is_not_kept() -> None:
    side = Side()
    side.engine.hand_offs.watch("a")
    side.engine.hand_offs.forget("a")
    side.engine.admit(prefill_part(make_request("a", prompt_of(5))))
    side.engine.admit(prefill_part(make_request("b", prompt_of(5))))
    side.run()
    assert side.engine.hand_offs.take("a") is None and side.engine.hand_offs.take("b") is None


def test_wrong_resumptions_are_refused() -> None:
    side = Side()
    with pytest.raises(RequestError, match="resumed_token_ids has 12 tokens; expected fewer"):
        side.engine.admit(replace(make_request("a", [1]), resumed_token_ids=(1,) * 12))
    with pytest.raises(RequestError, match="token 0 of resumed_token_ids is 23"):
        side.engine.admit(replace(make_request("a", [1]), resumed_token_ids=(23,)))
    context = HandedContext(3, (), np.zeros(0, np.uint8))
    with pytest.raises(AssertionError, match="a context of 3 tokens for a sequence of 3"):
        side.engine.adopt(replace(make_request("a", [1, 2]), resumed_token_ids=(1,)), context)
