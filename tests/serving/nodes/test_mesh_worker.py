"""Goal: the worker keeps its engine busy, answers every request exactly once with an end, survives
duplicates and strangers, and gives up cleanly when its device is lost.

Method: messages in, effects out, with the real engine and a scripted executor run by hand.
"""

import random
from dataclasses import replace

from serving.cluster import ModelFacts, make_engine
from serving.config import EngineOptions
from serving.core.request import (
    ConstraintKind,
    FinishReason,
    OutputConstraint,
    Request,
    SamplingParams,
)
from serving.core.step_plan import StepPlan
from serving.engine.engine import Engine
from serving.nodes import messages
from serving.nodes.mesh_worker import COMPILING_MAX, MeshWorker
from serving.nodes.messages import Message, RefusalReason
from serving.nodes.node import Compute, Effect, Execute, NodeId, Send, SetTimer
from tests.serving.core.vocabularies import SMALL
from tests.serving.scripted import ScriptedExecutor

WORKER = NodeId("mesh_worker", "0")
FRONTEND, OTHER = NodeId("frontend", "0"), NodeId("frontend", "1")
OPTIONS = EngineOptions(
    max_context=128,
    num_blocks=5,
    prefill_tokens=(128,),
    prefill_rows=2,
    decode_rows=(2,),
    steps_in_flight=1,
    waiting_max=1,
)
TIMEOUT_NS = 1000


def make_worker() -> MeshWorker:
    facts = ModelFacts(vocab_size=320, max_position_embeddings=4096, eos_token_id=1)
    return MeshWorker(WORKER, make_engine(OPTIONS, facts, random.Random(1)), TIMEOUT_NS)


def request(name: str, max_tokens: int = 3, prompt: tuple[int, ...] = (3, 4)) -> Request:
    return Request(name, prompt, SamplingParams(max_tokens=max_tokens))


def give(worker: MeshWorker, message: Message, source: NodeId = FRONTEND) -> list[Effect]:
    worker.on_message(source, message)
    return worker.outbox.take()


def sent(effects: list[Effect], to: NodeId = FRONTEND) -> list[Message]:
    return [e.message for e in effects if isinstance(e, Send) and e.destination == to]


def run(effects: list[Effect], executor: ScriptedExecutor) -> messages.StepDone:
    (plan,) = [effect.plan for effect in effects if isinstance(effect, Execute)]
    assert isinstance(plan, StepPlan)
    executor.submit(plan)
    return messages.StepDone(executor.collect())


def is_idle(worker: MeshWorker) -> bool:
    (status,) = sent(give(worker, messages.QueryStatus(1)))
    assert isinstance(status, messages.WorkerStatus)
    engine = status.engine
    return engine.num_free_blocks == engine.num_blocks and engine.num_free_slots == engine.num_slots


def test_one_request_from_admission_to_its_last_token() -> None:
    worker, executor = make_worker(), ScriptedExecutor(lambda position: 10 + position)
    effects = give(worker, messages.Submit(request("a")))
    assert sent(effects) == [messages.Admitted("a")]
    seen: list[int] = []
    for step in range(3):
        effects = give(worker, run(effects, executor), WORKER)
        (tokens,) = sent(effects)
        assert isinstance(tokens, messages.Tokens)
        (delta,) = tokens.deltas
        seen += delta.token_ids
        is_last = step == 2
        assert delta.finish_reason is (FinishReason.LENGTH if is_last else None)
        if not is_last:
            kinds = [type(effect) for effect in effects]
            assert kinds.index(Execute) < kinds.index(Send), "the device must not wait for tokens"
    assert seen == [12, 13, 14]
    assert is_idle(worker)


def test_tokens_go_to_whoever_asked() -> None:
    worker, executor = make_worker(), ScriptedExecutor(lambda position: 10)
    effects = give(worker, messages.Submit(request("a")))
    give(worker, messages.Submit(request("b")), OTHER)
    effects = give(worker, run(effects, executor), WORKER)  # The prefill of a.
    effects = give(worker, run(effects, executor), WORKER)  # Both from here on.
    names = {FRONTEND: set[str](), OTHER: set[str]()}
    while any(isinstance(effect, Execute) for effect in effects):
        effects = give(worker, run(effects, executor), WORKER)
        for owner, some in names.items():
            for message in sent(effects, owner):
                assert isinstance(message, messages.Tokens)
                some.update(delta.request_id for delta in message.deltas)
    assert names == {FRONTEND: {"a"}, OTHER: {"b"}}


def test_requests_that_cannot_be_served_are_refused_with_the_field() -> None:
    worker = make_worker()
    (refused,) = sent(give(worker, messages.Submit(request("a", prompt=(3, 400)))))
    assert isinstance(refused, messages.Refused)
    assert (refused.reason, refused.param) == (RefusalReason.INVALID, "prompt")
    assert "400" in refused.detail
    assert is_idle(worker)


def test_full_queue_is_refused_as_busy() -> None:
    worker = make_worker()
    answers = [sent(give(worker, messages.Submit(request(str(n)))))[0] for n in range(4)]
    assert [type(answer) for answer in answers[:3]] == [messages.Admitted] * 3
    assert isinstance(answers[3], messages.Refused)
    assert answers[3].reason is RefusalReason.BUSY


def test_duplicates_and_strangers_change_nothing() -> None:
    worker, executor = make_worker(), ScriptedExecutor(lambda position: 10)
    first = give(worker, messages.Submit(request("a")))
    assert give(worker, messages.Submit(request("a"))) == []
    assert give(worker, messages.Abort("stranger")) == []
    assert give(worker, messages.Admitted("a")) == []
    done = run(first, executor)
    assert give(worker, done, WORKER) != []
    assert give(worker, done, WORKER) == [], "the same completion twice"
    assert give(worker, messages.StepFailed(17, "unknown step"), WORKER) == []


def test_abort_while_a_step_runs_frees_everything() -> None:
    worker, executor = make_worker(), ScriptedExecutor(lambda position: 10)
    effects = give(worker, messages.Submit(request("a")))
    assert sent(give(worker, messages.Abort("a"))) == []
    assert sent(give(worker, run(effects, executor), WORKER)) == []
    assert is_idle(worker)


def test_lost_device_fails_every_request_once_and_refuses_new_ones() -> None:
    worker, executor = make_worker(), ScriptedExecutor(lambda position: 10)
    effects = give(worker, messages.Submit(request("a")))
    give(worker, messages.Submit(request("b")), OTHER)
    late = run(effects, executor)
    worker.on_message(WORKER, messages.StepFailed(0, "it burns"))
    effects = worker.outbox.take()
    assert sent(effects) == [messages.Failed("a", "it burns")]
    assert sent(effects, OTHER) == [messages.Failed("b", "it burns")]
    (refused,) = sent(give(worker, messages.Submit(request("c"))))
    assert isinstance(refused, messages.Refused)
    assert (refused.reason, refused.detail) == (RefusalReason.UNAVAILABLE, "it burns")
    (status,) = sent(give(worker, messages.QueryStatus(9)))
    assert isinstance(status, messages.WorkerStatus)
    assert (status.failure, status.query_id) == ("it burns", 9)
    assert is_idle(worker)
    assert give(worker, late, WORKER) == [], "a completion after the device was given up"


def test_broken_engine_fails_requests_too() -> None:
    worker = make_worker()
    give(worker, messages.Submit(request("a")))
    effects = give(worker, messages.Crashed("AssertionError: no"), WORKER)
    assert sent(effects) == [messages.Failed("a", "AssertionError: no")]


def test_watchdog_spares_steps_that_end_and_catches_one_that_hangs() -> None:
    worker, executor = make_worker(), ScriptedExecutor(lambda position: 10)
    effects = give(worker, messages.Submit(request("a", max_tokens=50)))
    timers = [effect for effect in effects if isinstance(effect, SetTimer)]
    assert timers == [SetTimer("watchdog", TIMEOUT_NS)]
    effects = give(worker, run(effects, executor), WORKER)
    assert not [effect for effect in effects if isinstance(effect, SetTimer)], "one timer at a time"
    worker.on_timer("watchdog")  # Step 0 was watched and is over; step 1 is watched from here.
    assert worker.outbox.take() == [SetTimer("watchdog", TIMEOUT_NS)]
    worker.on_timer("watchdog")
    (failed,) = sent(worker.outbox.take())
    assert isinstance(failed, messages.Failed) and "step 1 did not finish" in failed.detail
    worker.on_timer("watchdog")
    assert worker.outbox.take() == [], "nothing is left to watch"


CONSTRAINT = OutputConstraint(ConstraintKind.REGEX, "[ab]{2}", param="guided_regex")


def make_constrained_worker() -> MeshWorker:
    facts = ModelFacts(vocab_size=320, max_position_embeddings=4096, eos_token_id=1)
    engine = make_engine(OPTIONS, facts, random.Random(1))
    return MeshWorker(WORKER, engine, TIMEOUT_NS, SMALL, 2000)


def constrained(name: str) -> Request:
    return Request(name, (3, 4), SamplingParams(max_tokens=3), constraint=CONSTRAINT)


def compute_of(effects: list[Effect]) -> Compute:
    (effect,) = effects
    assert isinstance(effect, Compute) and effect.timeout_ns == 2000
    return effect


def test_a_constrained_request_waits_for_its_grammar() -> None:
    worker, executor = make_constrained_worker(), ScriptedExecutor(lambda position: 67)
    job = compute_of(give(worker, messages.Submit(constrained("a"))))
    assert give(worker, messages.Submit(constrained("a"))) == [], "a duplicate"
    effects = give(worker, messages.Computed(job.key, job.job()), WORKER)
    assert sent(effects) == [messages.Admitted("a")]
    for _ in range(3):
        effects = give(worker, run(effects, executor), WORKER)
    (tokens,) = sent(effects)
    assert isinstance(tokens, messages.Tokens)
    assert tokens.deltas[0].finish_reason is FinishReason.STOP
    assert give(worker, messages.Computed(job.key, job.job()), WORKER) == [], "late"
    assert is_idle(worker)


def test_a_grammar_that_cannot_be_compiled_is_a_refusal() -> None:
    worker = make_constrained_worker()
    job = compute_of(give(worker, messages.Submit(constrained("a"))))
    effects = give(worker, messages.Computed(job.key, None, "too hard"), WORKER)
    refused = messages.Refused("a", RefusalReason.INVALID, "too hard", "guided_regex")
    assert sent(effects) == [refused]
    assert compute_of(give(worker, messages.Submit(constrained("a")))), "it may be sent again"


def test_a_grammar_that_finds_no_thread_is_no_fault_of_its_request() -> None:
    worker = make_constrained_worker()
    job = compute_of(give(worker, messages.Submit(constrained("a"))))
    effects = give(worker, messages.Computed(job.key, None, "no thread", is_busy=True), WORKER)
    assert sent(effects) == [messages.Refused("a", RefusalReason.BUSY, "no thread")]
    assert compute_of(give(worker, messages.Submit(constrained("a")))), "it may be sent again"


def test_requests_of_one_constraint_wait_for_one_grammar() -> None:
    worker = make_constrained_worker()
    job = compute_of(give(worker, messages.Submit(constrained("a"))))
    for name in ("b", "c"):
        assert give(worker, messages.Submit(constrained(name))) == []
    assert give(worker, messages.Abort("b")) == []
    effects = give(worker, messages.Computed(job.key, job.job()), WORKER)
    assert sent(effects) == [messages.Admitted("a"), messages.Admitted("c")]
    engine = worker._engine
    assert isinstance(engine, Engine)
    states = [engine._sequences[name].controls for name in ("a", "c")]
    assert all(state is not None and state.grammar is not None for state in states)
    job = compute_of(give(worker, messages.Submit(constrained("d"))))
    assert give(worker, messages.Submit(constrained("e"))) == []
    refused = sent(give(worker, messages.Computed(job.key, None, "too hard"), WORKER))
    for name, answer in zip(("d", "e"), refused, strict=True):
        assert isinstance(answer, messages.Refused) and answer.request_id == name


def test_an_abort_while_compiling() -> None:
    worker = make_constrained_worker()
    job = compute_of(give(worker, messages.Submit(constrained("a"))))
    assert give(worker, messages.Abort("a")) == []
    assert give(worker, messages.Computed(job.key, job.job()), WORKER) == []
    assert is_idle(worker)


def test_a_failure_while_compiling_ends_the_request() -> None:
    worker = make_constrained_worker()
    job = compute_of(give(worker, messages.Submit(constrained("a"))))
    assert sent(give(worker, messages.Crashed("boom"), WORKER)) == [messages.Failed("a", "boom")]
    assert give(worker, messages.Computed(job.key, job.job()), WORKER) == []
    (refused,) = sent(give(worker, messages.Submit(constrained("b"))))
    assert isinstance(refused, messages.Refused) and refused.reason is RefusalReason.UNAVAILABLE


def test_compiling_is_bounded() -> None:
    worker = make_constrained_worker()
    for number in range(COMPILING_MAX):
        other = replace(CONSTRAINT, text=f"a{{{number + 1}}}")
        request = replace(constrained(str(number)), constraint=other)
        compute_of(give(worker, messages.Submit(request)))
    (refused,) = sent(give(worker, messages.Submit(constrained("more"))))
    assert isinstance(refused, messages.Refused) and refused.reason is RefusalReason.BUSY


def test_a_model_without_grammars_refuses_constraints() -> None:
    (refused,) = sent(give(make_worker(), messages.Submit(constrained("a"))))
    assert isinstance(refused, messages.Refused)
    assert (refused.reason, refused.param) == (RefusalReason.INVALID, "guided_regex")
