"""Goal: the scripted worker gives each request exactly the tokens that it asked for, step by step.

Method: messages and timers by hand.
"""

from scripts.serving_bench.scripted_server import ScriptedWorker
from serving.cluster import FRONTEND
from serving.core.request import FinishReason, Request, SamplingParams, TokenDelta
from serving.nodes import messages
from serving.nodes.node import Send, SetTimer
from tests.serving.nodes.fleet import VirtualClock


def make_request(name: str, max_tokens: int) -> Request:
    return Request(name, (1, 2), SamplingParams(max_tokens=max_tokens))


def deltas_of(worker: ScriptedWorker) -> list[TokenDelta]:
    sent = [effect.message for effect in worker.outbox.take() if isinstance(effect, Send)]
    return [d for message in sent if isinstance(message, messages.Tokens) for d in message.deltas]


def test_steps_bring_every_token_once() -> None:
    worker = ScriptedWorker((7, 8, 9), 0.01, 2, VirtualClock())
    for name, length in (("a", 5), ("b", 2)):
        worker.on_message(FRONTEND, messages.Submit(make_request(name, length)))
    assert any(isinstance(effect, SetTimer) for effect in worker.outbox.take())
    got: dict[str, list[int]] = {"a": [], "b": []}
    ends: dict[str, FinishReason | None] = {}
    for _ in range(3):
        worker.on_timer("step")
        for delta in deltas_of(worker):
            got[delta.request_id] += delta.token_ids
            ends[delta.request_id] = delta.finish_reason
    assert got == {"a": [7, 8, 9, 7, 8], "b": [7, 8]}
    assert set(ends.values()) == {FinishReason.LENGTH}
    worker.on_timer("step")
    assert not deltas_of(worker)


def test_without_steps_an_answer_is_whole_and_with_a_limit_it_stays_open() -> None:
    worker = ScriptedWorker((7, 8, 9), 0.0, 2, VirtualClock())
    worker.on_message(FRONTEND, messages.Submit(make_request("a", 7)))
    (delta,) = deltas_of(worker)
    assert delta.token_ids == (7, 8, 9, 7, 8, 9, 7) and delta.finish_reason is FinishReason.LENGTH
    worker = ScriptedWorker((7, 8, 9), 0.01, 2, VirtualClock(), steps_max=1)
    worker.on_message(FRONTEND, messages.Submit(make_request("a", 7)))
    worker.on_timer("step")
    assert [delta.finish_reason for delta in deltas_of(worker)] == [None]
    worker.on_timer("step")
    assert not deltas_of(worker)


def test_a_late_step_does_not_delay_those_after_it() -> None:
    clock = VirtualClock()
    worker = ScriptedWorker((7, 8, 9), 0.01, 2, clock)
    worker.on_message(FRONTEND, messages.Submit(make_request("a", 9)))
    delays = []
    for now_ns in (13_000_000, 20_000_000, 55_000_000):
        delays += [e.delay_ns for e in worker.outbox.take() if isinstance(e, SetTimer)]
        clock.ns = now_ns
        worker.on_timer("step")
    delays += [e.delay_ns for e in worker.outbox.take() if isinstance(e, SetTimer)]
    assert delays == [10_000_000, 7_000_000, 10_000_000, 0], "far behind, it starts anew"
