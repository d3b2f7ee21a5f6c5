"""Goal: a stream that is silent for long says that it is alive, and one that cannot be recorded
ends with an error instead of its last byte. What has ended in the engine leaves its place there.

Method: an answer written by hand against a gateway that is fed by hand.
"""

import asyncio
import sqlite3
from typing import Any

import pytest

import serving.frontend.answers as answers_module
from serving.core.request import FinishReason, TokenDelta
from serving.frontend.accounting import Accounting
from serving.frontend.answers import Answer
from serving.frontend.auth import LOCAL
from serving.frontend.completions import CompletionCall
from serving.frontend.errors import ApiError
from serving.frontend.fair_queue import FairQueue
from serving.frontend.quota import Quotas
from serving.nodes import messages
from serving.transport.driver import SystemClock
from tests.serving.frontend.alphabet import LETTERS
from tests.serving.frontend.test_gateway import WORKER, make_gateway
from tests.serving.frontend.test_protocols import MODEL


class BrokenLog:
    """Takes the beginning of a record and loses its end."""

    async def begin(self, record: object) -> None:
        self.begun = record

    async def end(self, record: object) -> None:
        raise sqlite3.OperationalError("disk full")


def write(body: bytes, usage: Any = None, wait_s: float = 0.0) -> list[bytes]:
    """What goes out for a call whose one token comes after `wait_s` seconds."""
    clock = SystemClock()
    call = CompletionCall(body, MODEL, clock, 1)
    gateway, _ = make_gateway()
    queue, metrics = FairQueue(1, 1), gateway.metrics
    accounting = Accounting(Quotas({}, clock), queue, usage, "tiny", clock, metrics)
    sent: list[bytes] = []

    async def receive() -> Any:
        return await asyncio.Future()

    async def send(message: Any) -> None:
        sent.append(message.get("body", b""))

    async def run() -> None:
        answer = Answer(call, accounting.open(call, LOCAL, "/"), gateway)
        writing = asyncio.create_task(answer({}, receive, send))
        while not gateway.outbox.take():
            await asyncio.sleep(0)
        gateway.on_message(WORKER, messages.Admitted(call.requests[0].request_id))
        await asyncio.sleep(wait_s)
        delta = TokenDelta(call.requests[0].request_id, (LETTERS[0],), FinishReason.LENGTH)
        gateway.on_message(WORKER, messages.Tokens((delta,)))
        await asyncio.wait_for(writing, 5)

    asyncio.run(run())
    return sent


def test_a_sample_that_has_ended_leaves_its_place_before_anybody_reads() -> None:
    async def run() -> None:
        body = b'{"model": "tiny", "prompt": "x", "n": 3, "max_tokens": 1, "stream": true}'
        call = CompletionCall(body, MODEL, SystemClock(), 3)
        gateway, clock = make_gateway()
        queue = FairQueue(3, 1)
        accounting = Accounting(Quotas({}, clock), queue, None, "tiny", clock, gateway.metrics)
        is_read = asyncio.Event()

        async def receive() -> Any:
            return await asyncio.Future()

        async def send(message: Any) -> None:
            await is_read.wait()

        answer = Answer(call, accounting.open(call, LOCAL, "/"), gateway)
        writing = asyncio.create_task(answer({}, receive, send))
        while not gateway.outbox.take():
            await asyncio.sleep(0)
        left: list[int] = []
        for request in call.requests:
            gateway.on_message(WORKER, messages.Admitted(request.request_id))
        for request in call.requests:
            delta = TokenDelta(request.request_id, (LETTERS[0],), FinishReason.LENGTH)
            gateway.on_message(WORKER, messages.Tokens((delta,)))
            left.append(queue.num_running)
        assert left == [2, 1, 0]
        is_read.set()
        await asyncio.wait_for(writing, 5)
        assert queue.num_running == 0

    asyncio.run(run())


class RefusingLog(BrokenLog):
    """Loses the beginning of a record and takes its end."""

    async def begin(self, record: object) -> None:
        raise sqlite3.OperationalError("disk full")

    async def end(self, record: object) -> None:
        pass


STREAM = b'{"model": "tiny", "prompt": "x", "max_tokens": 1, "stream": true}'


def test_silence_is_broken_by_comments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answers_module, "KEEP_ALIVE_S", 0.02)
    sent = write(STREAM, wait_s=0.1)
    assert sent.count(b": waiting\n\n") >= 2 and sent[-1].endswith(b"data: [DONE]\n\n")
    assert b": waiting\n\n" not in write(STREAM)


def test_no_last_byte_without_a_record() -> None:
    (*_, last) = write(STREAM, BrokenLog())
    assert last.startswith(b"event: error\n") and b"Usage cannot be recorded" in last


@pytest.mark.parametrize("body", [STREAM, STREAM.replace(b"true", b"false")])
def test_no_answer_without_the_beginning_of_a_record(body: bytes) -> None:
    with pytest.raises(ApiError, match="Usage cannot be recorded") as caught:
        write(body, RefusingLog())
    assert caught.value.status == 503
