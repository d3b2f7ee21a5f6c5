"""Goal: a request is found by its own name to its end, by that of an attempt as long as it
lasts, and stands in line once.

Method: requests are added, begun, put back and removed, and the table is looked at after each.
"""

from serving.core.request import Request, SamplingParams
from serving.nodes.calls import Call, Calls, Phase
from serving.nodes.values import NodeId


def call_of(name: str) -> Call:
    return Call(Request(name, (1, 2, 3), SamplingParams()), NodeId("frontend", "0"), 0)


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
