"""Goal: a request is found by its own name to its end, by that of an attempt as long as it
lasts, and stands in line once.

Method: requests are added, begun, put back and removed, and the table is looked at after each.
"""

from serving.core.request import Request, SamplingParams
from serving.core.waiting_queue import OUTRANKED_MAX
from serving.nodes.calls import Call, Calls, Phase
from serving.nodes.values import NodeId


def call_of(name: str, priority: int = 0) -> Call:
    request = Request(name, (1, 2, 3), SamplingParams(), priority=priority)
    return Call(request, NodeId("frontend", "0"), 0)


def names(calls: Calls) -> list[str]:
    return [call.request.request_id for call in calls.waiting]


def test_a_request_has_one_attempt_at_a_time() -> None:
    calls, call = Calls(), call_of("a")
    calls.add(call)
    assert calls.get("a") is call and calls.of_attempt("a#0") is None and names(calls) == ["a"]
    calls.begin(call)
    call.enter(Phase.DECODING, 5)
    assert calls.of_attempt("a#0") is call and names(calls) == [] and len(calls) == 1
    call.tokens += [7, 8]
    calls.end_attempt(call)
    calls.requeue(call, 9)
    assert calls.of_attempt("a#0") is None and names(calls) == ["a"]
    assert (call.phase, call.since_ns, call.num_tokens) == (Phase.WAITING, 9, 5)
    calls.begin(call)
    assert calls.of_attempt("a#1") is call and calls.of_attempt("a#0") is None
    current = call.current()
    assert current.request_id == "a#1" and current.resumed_token_ids == (7, 8)


def test_those_that_were_begun_before_go_first() -> None:
    calls = Calls()
    some = [call_of(name) for name in "abc"]
    for call in some:
        calls.add(call)
    calls.begin(some[0])
    calls.end_attempt(some[0])
    calls.requeue(some[0], 1)
    assert names(calls) == ["a", "b", "c"] and calls.first() is some[0]
    calls.remove(some[1])
    assert names(calls) == ["a", "c"] and calls.get("b") is None
    assert calls.phases() == {"waiting": 2}


def test_one_that_is_under_way_is_not_in_line_when_it_ends() -> None:
    calls, other, call = Calls(), call_of("b"), call_of("a")
    calls.add(other)
    calls.add(call)
    calls.begin(call)
    call.enter(Phase.DECODING, 1)
    calls.end_attempt(call)
    calls.remove(call)
    assert names(calls) == ["b"] and list(calls) == [other]


def test_the_line_goes_by_priority_and_nobody_is_outranked_for_ever() -> None:
    calls = Calls()
    for name, priority in (("a", 0), ("low", 5), ("b", 0), ("high", -1)):
        calls.add(call_of(name, priority))
    assert names(calls) == ["high", "a", "b", "low"]
    # One that was tried goes before its equals, and not before others.
    again = calls.get("b")
    assert again is not None
    calls.begin(again)
    calls.end_attempt(again)
    calls.requeue(again, 1)
    assert names(calls) == ["high", "b", "a", "low"]
    for number in range(OUTRANKED_MAX):
        assert names(calls)[-1] == "low"
        urgent = call_of(f"u{number}", -2)
        calls.add(urgent)
        calls.begin(urgent)
        calls.count_start(urgent)
    assert "low" in names(calls)[:3] and names(calls)[-1] != "low"
