"""Goal: a request starts with its stored prefix, or without it when that is late, missing, broken
or does not fit; and what was computed is offered and stored once.

Method: a worker around a real engine and a simulated device; the test plays driver and tiers.
"""

import dataclasses
import random
from collections.abc import Sequence
from typing import Any

import pytest

from serving.core.kv_transfer import KVTransfer, SwapInTimes
from serving.core.prefix_transfer import StagedPrefix
from serving.core.replay import ReplayMode, ReplayRule
from serving.core.request import Request, SamplingParams
from serving.core.step_plan import StepPlan
from serving.engine.engine import Engine
from serving.kv.offload import (
    CacheCall,
    FetchPrefix,
    OfferPrefix,
    OffloadLimits,
    OffloadStatus,
    PrefixFetched,
    PrefixWanted,
    StorePrefix,
)
from serving.nodes import messages
from serving.nodes.mesh_worker import MeshWorker
from serving.nodes.node import AskCache, Execute, NodeId, Send, SetTimer
from tests.serving.engine.checked_engine import BUCKETS, make_limits
from tests.serving.engine.prompts import prompt_of
from tests.serving.engine.simulated_device import (
    ROLLBACK_MAX,
    WINDOW,
    SimulatedDevice,
    expected_tokens,
)

WORKER, FRONTEND = NodeId("mesh_worker", "0"), NodeId("frontend", "0")
LIMITS = OffloadLimits(wait_ns=1000, faults_max=2, retry_ns=5000, fetching_max=3)


class Rig:
    """A worker whose effects are performed here: steps at once, calls to the tiers on demand."""

    def __init__(self, limits: OffloadLimits = LIMITS, **engine: Any) -> None:
        self.limits = make_limits(**{"num_snapshots": 8, "in_flight_max": 2, **engine})
        self.device = SimulatedDevice(self.limits, BUCKETS)
        self.worker = MeshWorker(
            WORKER, Engine(self.limits, BUCKETS, random.Random(1)), 10**9, offload=limits
        )
        self.calls: list[CacheCall] = []
        self.timers: list[str] = []
        self.tokens: dict[str, list[int]] = {}
        self.cached: dict[str, int] = {}
        self.sent: list[messages.Message] = []
        self.swap_in: SwapInTimes | None = None

    def submit(self, name: str, prompt: Sequence[int], **sampling: Any) -> Request:
        params = SamplingParams(**{"max_tokens": 9, "temperature": 0, "seed": 3, **sampling})
        request = Request(name, tuple(prompt), params)
        self.give(messages.Submit(request))
        return request

    def give(self, message: messages.Message) -> None:
        self.worker.on_message(FRONTEND, message)
        self.perform()

    def fire(self, name: str) -> None:
        self.timers.remove(name)
        self.worker.on_timer(name)
        self.perform()

    def perform(self) -> None:
        waiting: list[KVTransfer | StepPlan] = []
        while True:
            for effect in self.worker.outbox.take():
                match effect:
                    case AskCache(call):
                        self.calls.append(call)
                    case SetTimer(name):
                        self.timers.append(name)
                    case Execute(plan) if isinstance(plan, KVTransfer):
                        self.device.move(plan)
                        if plan.is_reading:
                            waiting.append(plan)
                    case Execute(plan):
                        assert isinstance(plan, StepPlan)
                        self.device.submit(plan)
                        waiting.append(plan)
                    case Send(_, message):
                        self.take(message)
                    case _:
                        raise AssertionError(effect)
            if not waiting:
                return
            if isinstance(waiting.pop(0), KVTransfer):
                message = messages.BlocksRead(self.device.collect_read())
            else:
                result = dataclasses.replace(self.device.collect(), swap_in=self.swap_in)
                message = messages.StepDone(result)
            self.worker.on_message(WORKER, message)

    def take(self, message: messages.Message) -> None:
        self.sent.append(message)
        if isinstance(message, messages.Tokens):
            for delta in message.deltas:
                self.tokens.setdefault(delta.request_id, []).extend(delta.token_ids)
                self.cached[delta.request_id] = delta.num_cached_tokens

    def reply(self, reply: PrefixFetched | PrefixWanted) -> None:
        self.give(messages.CacheReplied(reply))

    def status(self) -> OffloadStatus:
        self.give(messages.QueryStatus(1))
        (status,) = [m for m in self.sent if isinstance(m, messages.WorkerStatus)]
        self.sent.remove(status)
        assert status.offload is not None
        engine = status.engine
        assert engine.num_free_blocks == engine.num_blocks
        assert engine.num_free_slots == engine.num_slots
        return status.offload

    def check(self, request: Request) -> None:
        assert self.tokens[request.request_id] == expected_tokens(
            request, 3, self.limits.context_max
        )

    def only_call(self, kind: type) -> Any:
        (call,) = self.calls
        assert isinstance(call, kind)
        self.calls.clear()
        return call


def stored(rig: Rig, prompt: Sequence[int]) -> tuple[StagedPrefix, StorePrefix]:
    """A prefix as it is stored after `rig` has computed a prompt."""
    request = rig.submit("source", prompt, max_tokens=1)
    fetch = rig.only_call(FetchPrefix)
    rig.reply(PrefixFetched("source", None))
    rig.check(request)
    offer = rig.only_call(OfferPrefix)
    assert offer.keys == fetch.keys
    rig.reply(PrefixWanted(offer.offer_id, offer.keys, True))
    store = rig.only_call(StorePrefix)
    assert store.blocks == offer.keys and store.state == offer.keys[-1]
    return StagedPrefix(store.blocks, 0, store.read.groups, store.read.states[0]), store


def test_a_stored_prefix_is_used() -> None:
    prompt = prompt_of(30)
    prefix, _ = stored(Rig(), prompt)
    rig = Rig()
    request = rig.submit("a", prompt)
    call = rig.only_call(FetchPrefix)
    assert (call.first, call.num_usable, call.keys) == (0, 0, prefix.keys)
    assert not rig.tokens and not rig.sent
    rig.reply(PrefixFetched("a", prefix))
    rig.check(request)
    assert rig.cached == {"a": 28}
    status = rig.status()
    assert (status.num_hits, status.num_fetched_blocks, status.num_waiting) == (1, 7, 0)
    # It is on the device now: the same prompt asks for nothing.
    rig.calls.clear()
    again = rig.submit("b", prompt)
    rig.check(again)
    assert rig.cached["b"] == 28
    assert not any(isinstance(call, FetchPrefix) for call in rig.calls)


def test_what_is_offered_stays_until_it_is_read() -> None:
    rig = Rig(num_blocks=25, num_snapshots=4)
    rig.submit("a", prompt_of(30), max_tokens=1)
    rig.reply(PrefixFetched("a", None))
    (offer,) = [call for call in rig.calls if isinstance(call, OfferPrefix)]
    for number in range(6):
        rig.submit(f"b{number}", prompt_of(30, number + 1), max_tokens=1)
        rig.reply(PrefixFetched(f"b{number}", None))
    rig.calls.clear()
    rig.reply(PrefixWanted(offer.offer_id, offer.keys, True))
    store = rig.only_call(StorePrefix)
    assert store.blocks == offer.keys and store.state == offer.keys[-1]
    # An offer whose answer is lost is closed: its place is for others.
    for timer in [timer for timer in rig.timers if timer.startswith("kv offer ")]:
        rig.fire(timer)
    assert rig.worker._offload is not None and rig.worker._offload.num_offers == 0
    engine = rig.worker._engine
    assert isinstance(engine, Engine) and engine.transfers._pins == {}


def test_what_does_not_fit_beside_the_device_is_written_at_once() -> None:
    prompt = prompt_of(30)
    prefix, _ = stored(Rig(), prompt)
    limits = dataclasses.replace(LIMITS, staged_bytes_max=prefix.num_bytes - 1)
    rig = Rig(limits)
    request = rig.submit("a", prompt)
    rig.reply(PrefixFetched("a", prefix))
    rig.check(request)
    assert rig.cached == {"a": 28} and rig.status().num_fetched_blocks == 7


def test_with_replay_no_states_are_stored_nor_asked_for() -> None:
    rule = ReplayRule(ReplayMode.MASK, WINDOW + ROLLBACK_MAX, num_replayed=6)
    prompt, source = prompt_of(40), Rig(replay=rule)
    source.submit("source", prompt, max_tokens=1)
    fetch = source.only_call(FetchPrefix)
    assert len(fetch.keys) == 7 and not fetch.has_state
    source.reply(PrefixFetched("source", None))
    offers = [call for call in source.calls if isinstance(call, OfferPrefix)]
    source.calls.clear()
    offer = max(offers, key=lambda offer: len(offer.keys))
    assert fetch.keys == offer.keys[:7]
    source.reply(PrefixWanted(offer.offer_id, (), True))
    assert source.calls == []
    rig = Rig(replay=rule)
    rig.submit("other", prompt, max_tokens=1)
    rig.reply(PrefixFetched("other", None))
    (offer,) = [call for call in rig.calls if getattr(call, "keys", None) == offer.keys]
    assert isinstance(offer, OfferPrefix)
    rig.calls.clear()
    rig.reply(PrefixWanted(offer.offer_id, offer.keys, True))
    store = rig.only_call(StorePrefix)
    assert store.state is None and not len(store.read.states)
    rig = Rig(replay=rule)
    request = rig.submit("a", prompt)
    groups = tuple(group[:7] for group in store.read.groups)
    rig.reply(PrefixFetched("a", StagedPrefix(fetch.keys, 0, groups, None)))
    assert rig.cached == {"a": 28 - 6} and rig.status().num_hits == 1
    tail_start = rule.tail_start(len(prompt))
    expected = expected_tokens(request, 3, rig.limits.context_max, tail_start)
    assert rig.tokens["a"] == expected


def test_times_of_swap_ins_add_up() -> None:
    rig = Rig()
    rig.swap_in = SwapInTimes(50, 40)
    rig.submit("a", prompt_of(3), max_tokens=2)
    rig.swap_in = None
    rig.submit("b", prompt_of(3), max_tokens=2)
    status = rig.status()
    assert (status.swap_in_ns, status.swap_in_hidden_ns) == (100, 80)


@pytest.mark.parametrize("error", [None, "broken"])
def test_a_miss_and_a_fault_are_computed(error: str | None) -> None:
    rig = Rig()
    request = rig.submit("a", prompt_of(30))
    rig.reply(PrefixFetched("a", None, error))
    rig.check(request)
    assert rig.cached == {"a": 0}
    status = rig.status()
    assert (status.num_misses, status.num_faults) == ((0, 1) if error else (1, 0))


def test_a_late_answer_touches_nothing() -> None:
    prompt = prompt_of(30)
    prefix, _ = stored(Rig(), prompt)
    rig = Rig(num_blocks=10, context_max=36)
    request = rig.submit("a", prompt)
    rig.fire("kv wait a")
    rig.check(request)
    before = rig.device._pool.copy()
    rig.reply(PrefixFetched("a", prefix))
    assert (rig.device._pool == before).all() and rig.cached == {"a": 0}
    assert rig.status().num_late == 1
    other = rig.submit("b", prompt_of(30, 1))
    rig.reply(PrefixFetched("b", None))
    rig.check(other)


def test_a_prefix_without_room_is_computed() -> None:
    prompt = prompt_of(30)
    prefix, _ = stored(Rig(), prompt)
    rig = Rig()
    request = rig.submit("a", prompt)
    # Blocks that were present when it was asked for are gone.
    rig.reply(PrefixFetched("a", dataclasses.replace(prefix, first=1)))
    rig.check(request)
    assert rig.cached == {"a": 0}
    assert rig.status().num_unused == 1


def test_tiers_that_are_late_again_and_again_are_left_alone_and_tried_again() -> None:
    rig = Rig()
    for number in range(2):
        rig.submit(f"a{number}", prompt_of(30, number))
        rig.fire(f"kv wait a{number}")
    assert rig.status().is_open and rig.status().num_opened == 1
    rig.calls.clear()
    request = rig.submit("b", prompt_of(30, 3))
    rig.check(request)
    assert rig.calls == [] and rig.status().num_skipped == 1
    rig.fire("kv probe")
    rig.submit("c", prompt_of(30, 4))
    rig.only_call(FetchPrefix)
    rig.submit("d", prompt_of(30, 5))
    assert rig.calls == [] and rig.status().num_skipped == 2
    rig.reply(PrefixFetched("c", None))
    assert not rig.status().is_open
    rig.calls.clear()
    rig.submit("e", prompt_of(30, 6))
    rig.only_call(FetchPrefix)


def test_only_so_many_wait_and_each_only_once() -> None:
    rig = Rig()
    for name in "abca":
        rig.submit(name, prompt_of(30, ord(name)))
    assert len(rig.calls) == 3
    rig.submit("d", prompt_of(30, 9))
    assert "d" in rig.tokens and rig.worker._offload is not None
    assert rig.worker._offload.status().num_skipped == 1
    rig.give(messages.Abort("b"))
    rig.fire("kv wait a")
    rig.fire("kv wait b")
    rig.fire("kv wait c")
    assert set(rig.tokens) == {"a", "c", "d"}


def test_what_cannot_be_served_or_stored_asks_nothing() -> None:
    rig = Rig()
    rig.submit("short", prompt_of(4))
    rig.submit("long", prompt_of(64))
    rig.submit("odd", (99,) * 9)
    rig.submit("logprobs", prompt_of(30), prompt_logprobs=0)
    assert not any(isinstance(call, FetchPrefix) for call in rig.calls)
    refused = [m.request_id for m in rig.sent if isinstance(m, messages.Refused)]
    assert refused == ["long", "odd"]


def test_only_what_was_seen_often_enough_is_offered() -> None:
    rig = Rig(OffloadLimits(wait_ns=1000, sightings_min=2), num_snapshots=1)
    for number, salt in enumerate([0, 1, 0]):
        rig.submit(str(number), prompt_of(30, salt), max_tokens=1)
        rig.reply(PrefixFetched(str(number), None))
        offers = [call for call in rig.calls if isinstance(call, OfferPrefix)]
        assert len(offers) == (number == 2)


def test_an_answer_for_a_request_that_is_gone_is_dropped() -> None:
    prefix, _ = stored(Rig(), prompt_of(30))
    rig = Rig()
    rig.submit("a", prompt_of(30))
    rig.give(messages.Abort("a"))
    rig.reply(PrefixFetched("a", prefix))
    assert rig.tokens == {} and rig.status().num_hits == 0


def test_a_device_that_is_lost_ends_those_who_wait() -> None:
    rig = Rig()
    rig.submit("a", prompt_of(30))
    rig.give(messages.Crashed("gone"))
    assert [m.request_id for m in rig.sent if isinstance(m, messages.Failed)] == ["a"]
    prefix, _ = stored(Rig(), prompt_of(30))
    rig.reply(PrefixFetched("a", prefix))
    rig.fire("kv wait a")
    assert rig.tokens == {}
