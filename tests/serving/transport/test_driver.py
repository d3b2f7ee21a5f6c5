"""Goal: the driver performs every effect of its nodes: messages, timers and executions, runs plans
off the event loop, and turns exceptions into messages.

Method: nodes that record what they get and ask for what a test tells them to.
"""

import asyncio
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest

from serving.core.buckets import Bucket, StepKind
from serving.core.request import RequestError
from serving.core.step_plan import StepPlan, StepResult
from serving.nodes import messages
from serving.nodes.messages import Message
from serving.nodes.node import NodeId, Outbox
from serving.transport.driver import _COMPUTE_THREADS, Driver, SystemClock

A, B = NodeId("a", "0"), NodeId("b", "0")


class Recorder:
    """A node that keeps what it gets; `react` may ask for effects."""

    def __init__(self, node_id: NodeId, react: Callable[..., None] = lambda *_: None) -> None:
        self.node_id = node_id
        self.outbox = Outbox()
        self.got: list[Any] = []
        self._react = react

    def on_message(self, source: NodeId, message: Message) -> None:
        self.got.append(message)
        self._react(self, message)

    def on_timer(self, name: str) -> None:
        self.got.append(name)
        self._react(self, name)


class RecordingExecutor:
    """Remembers the threads it ran on; fails for step 1, and cannot even submit step 4.

    A step ends when `gate` is set.
    """

    def __init__(self) -> None:
        self.threads: list[str] = []
        self.gate = threading.Event()
        self.gate.set()
        self.submitted: deque[int] = deque()

    def submit(self, plan: StepPlan) -> None:
        self.threads.append(threading.current_thread().name)
        if plan.step_index == 4:
            raise KeyError("no such bucket")
        self.submitted.append(plan.step_index)

    def collect(self) -> StepResult:
        self.threads.append(threading.current_thread().name)
        assert self.gate.wait(5)
        step_index = self.submitted.popleft()
        if step_index == 1:
            raise ValueError("no such token")
        return StepResult(step_index, np.array([7], np.int32))


def plan_of(step_index: int) -> StepPlan:
    none: Any = np.zeros(0, np.int32)
    return StepPlan(step_index, StepKind.DECODE, Bucket(1, 1, 1), *([none] * 10))


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(5):
        while not condition():
            await asyncio.sleep(0.001)


def test_messages_travel_both_ways() -> None:
    def answer(node: Recorder, message: Message) -> None:
        node.outbox.send(A, messages.Admitted("back"))

    async def run() -> None:
        a, b = Recorder(A), Recorder(B, answer)
        async with Driver([a, b], {}) as driver:
            a.outbox.send(B, messages.Admitted("there"))
            driver.perform(A)
        assert b.got == [messages.Admitted("there")]
        assert a.got == [messages.Admitted("back")]

    asyncio.run(run())


def test_message_to_nobody_is_dropped_and_logged(caplog: pytest.LogCaptureFixture) -> None:
    a = Recorder(A)

    async def run() -> None:
        async with Driver([a], {}) as driver:
            a.outbox.send(B, messages.Admitted("x"))
            driver.perform(A)

    with caplog.at_level(logging.WARNING):
        asyncio.run(run())
    assert "Admitted from a/0 to b/0 dropped" in caplog.text
    assert a.got == [messages.Undeliverable(B, messages.Admitted("x"))]


def test_plans_run_on_their_own_thread_in_order() -> None:
    async def run() -> None:
        a, executor = Recorder(A), RecordingExecutor()
        async with Driver([a], {A: executor}) as driver:
            for step in (0, 2, 3):
                a.outbox.execute(plan_of(step))
            driver.perform(A)
            await until(lambda: len(a.got) == 3)
        assert [message.result.step_index for message in a.got] == [0, 2, 3]
        assert set(executor.threads) == {"submit a/0", "collect a/0"}

    asyncio.run(run())


def test_a_step_is_submitted_while_the_one_before_it_runs() -> None:
    async def run() -> None:
        a, executor = Recorder(A), RecordingExecutor()
        executor.gate.clear()
        async with Driver([a], {A: executor}) as driver:
            a.outbox.execute(plan_of(0))
            driver.perform(A)
            await until(lambda: "collect a/0" in executor.threads)
            a.outbox.execute(plan_of(2))
            driver.perform(A)
            await until(lambda: list(executor.submitted) == [0, 2])
            assert a.got == []
            executor.gate.set()
            await until(lambda: len(a.got) == 2)
        assert [message.result.step_index for message in a.got] == [0, 2]

    asyncio.run(run())


def test_exceptions_of_an_executor_become_messages(caplog: pytest.LogCaptureFixture) -> None:
    async def run() -> None:
        a = Recorder(A)
        async with Driver([a], {A: RecordingExecutor()}) as driver:
            for step in (1, 4):
                a.outbox.execute(plan_of(step))
                driver.perform(A)
                await until(lambda: isinstance(a.got[-1], messages.StepFailed) if a.got else False)
                assert a.got.pop() == messages.StepFailed(
                    step, "ValueError: no such token" if step == 1 else "KeyError: 'no such bucket'"
                )

    asyncio.run(run())
    assert "step 1 failed" in caplog.text and "step 4 failed" in caplog.text


def test_exception_of_a_node_is_told_to_the_node(caplog: pytest.LogCaptureFixture) -> None:
    def stumble(node: Recorder, message: Message) -> None:
        if isinstance(message, messages.Admitted):
            raise AssertionError("impossible")
        node.outbox.send(B, messages.Failed("x", "told"))

    async def run() -> None:
        a, b = Recorder(A, stumble), Recorder(B)
        async with Driver([a, b], {}) as driver:
            b.outbox.send(A, messages.Admitted("x"))
            driver.perform(B)
        assert a.got == [messages.Admitted("x"), messages.Crashed("AssertionError: impossible")]
        assert b.got == [messages.Failed("x", "told")]

    asyncio.run(run())
    assert "impossible" in caplog.text


def test_node_that_fails_on_its_own_failure_does_not_loop(caplog: pytest.LogCaptureFixture) -> None:
    def stumble(node: Recorder, message: Message) -> None:
        raise AssertionError("always")

    async def run() -> None:
        a = Recorder(A, stumble)
        async with Driver([a], {}) as driver:
            a.outbox.send(A, messages.Admitted("x"))
            driver.perform(A)
        assert a.got == [messages.Admitted("x"), messages.Crashed("AssertionError: always")]

    asyncio.run(run())


def test_timers_fire_once_and_restart_when_set_again() -> None:
    async def run() -> None:
        a = Recorder(A)
        async with Driver([a], {}) as driver:
            started = time.monotonic()
            a.outbox.set_timer("one", 15_000_000)
            a.outbox.set_timer("one", 60_000_000)
            a.outbox.set_timer("two", 10_000_000)
            driver.perform(A)
            await until(lambda: len(a.got) == 2)
            assert time.monotonic() - started > 0.055, "setting a timer again replaces it"
            await asyncio.sleep(0.03)
        assert a.got == ["two", "one"]

    asyncio.run(run())


def test_no_timer_fires_after_the_end() -> None:
    async def run() -> None:
        a = Recorder(A)
        async with Driver([a], {}) as driver:
            a.outbox.set_timer("late", 10_000_000)
            driver.perform(A)
        await asyncio.sleep(0.03)
        assert a.got == []

    asyncio.run(run())


def test_system_clock_goes_forward_and_knows_the_date() -> None:
    clock = SystemClock()
    first = clock.now_ns()
    assert clock.now_ns() >= first
    assert abs(clock.unix_s() - time.time()) < 5


def run_jobs(jobs: Mapping[str, Callable[[], object]], timeout_s: float = 5.0) -> Recorder:
    """A node that asks for the jobs, after all of them have been answered."""
    node = Recorder(A)
    for key, job in jobs.items():
        node.outbox.compute(key, job, int(timeout_s * 1e9))

    async def run() -> None:
        async with Driver([node], {}) as driver:
            driver.perform(A)
            async with asyncio.timeout(10):
                while len(node.got) < len(jobs):
                    await asyncio.sleep(0.005)

    asyncio.run(run())
    return node


def test_slow_work_is_done_beside_the_loop() -> None:
    node = run_jobs({"a": lambda: threading.current_thread().name})
    (done,) = node.got
    assert (done.key, done.error) == ("a", None) and done.value.startswith("compute")


def test_work_that_is_refused_fails_or_takes_too_long(caplog: pytest.LogCaptureFixture) -> None:
    def refuse() -> object:
        raise RequestError("no such form", "guided_regex")

    release = threading.Event()
    try:
        node = run_jobs({"slow": release.wait, "bad": refuse, "broken": lambda: 1 // 0}, 0.2)
    finally:
        release.set()
    errors = {done.key: done.error for done in node.got}
    assert errors["bad"] == "no such form"
    assert "0.2 s" in errors["slow"]
    assert "ZeroDivisionError" in errors["broken"] and "broken" in caplog.text
    assert all(done.value is None for done in node.got)


def test_the_wait_for_a_thread_is_not_time_of_the_job() -> None:
    # Those of the second turn end 1.2 s after they were asked for.
    slow = {str(number): lambda: time.sleep(0.6) for number in range(2 * _COMPUTE_THREADS)}
    node = run_jobs(slow, 1.0)
    assert [(done.error, done.is_busy) for done in node.got] == [(None, False)] * len(slow)


def test_a_job_that_finds_no_thread_is_not_blamed_and_never_runs() -> None:
    release, ran = threading.Event(), list[str]()
    slow = {str(number): release.wait for number in range(_COMPUTE_THREADS)}
    try:
        node = run_jobs({**slow, "late": lambda: ran.append("late")}, 0.2)
    finally:
        release.set()
    done = {message.key: message for message in node.got}
    late = done.pop("late")
    assert late.is_busy and "no thread was free" in late.error and late.value is None
    assert all("not finished" in other.error and not other.is_busy for other in done.values())
    assert ran == []
