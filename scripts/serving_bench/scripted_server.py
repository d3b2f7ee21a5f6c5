"""A server whose engine is a script: all of the service, from sockets to usage records, and no
model. A worker admits every request at once; steps come at a fixed pace and bring each request the
same number of tokens.

    python -m scripts.serving_bench.scripted_server --database FILE --step-ms 50 --tokens 1

It prints its port, serves until its standard input ends, and answers each line on it with a line
of JSON: its processor seconds and its resident bytes.
"""

import argparse
import asyncio
import gc
import json
import resource
import sys
from collections import deque
from collections.abc import AsyncIterator
from pathlib import Path

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request as HttpRequest
from starlette.responses import StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp

from serving.clock import Clock, ns_of_s
from serving.cluster import FRONTEND, MESH_WORKER
from serving.config import DEFAULT_MODEL_DIR, EngineOptions, QuotaOptions, ServerOptions
from serving.core.request import FinishReason, Request, TokenDelta
from serving.frontend.accounting import Accounting
from serving.frontend.app import make_app
from serving.frontend.auth import Authenticator, SqliteKeyStore
from serving.frontend.conversion import ServedModel
from serving.frontend.fair_queue import FairQueue
from serving.frontend.gateway import Gateway, Update
from serving.frontend.http_limits import limited_protocol
from serving.frontend.protocols import ChatCall
from serving.frontend.quota import Quotas
from serving.frontend.text import TextCodec
from serving.frontend.usage import UsageLog
from serving.nodes import messages
from serving.nodes.messages import Message
from serving.nodes.node import NodeId, Outbox
from serving.observe import ServiceMetrics
from serving.transport.driver import Driver, SystemClock

MODEL_NAME = "scripted"
TEXT = "The quick brown fox jumps over the lazy dog and runs away into the woods. "
_CONTEXT_MAX = 2**20
_ROWS_MAX = 2048
_STEP = "step"


class ScriptedWorker:
    """A node that answers like a worker with an engine.

    Args:
        text_ids: tokens of the answers, over and over.
        step_s: time between steps; 0 answers a request whole, at once.
        num_tokens: tokens that a step brings each request.
        steps_max: steps after which requests get nothing more and stay open; 0 is no limit.

    Steps are due at fixed times, as those of an engine that is not held up by who waits for them.
    """

    def __init__(
        self,
        text_ids: tuple[int, ...],
        step_s: float,
        num_tokens: int,
        clock: Clock,
        steps_max: int = 0,
    ) -> None:
        self.node_id = MESH_WORKER
        self.outbox = Outbox()
        self._text = text_ids * (2 + num_tokens // len(text_ids))
        self._period = len(text_ids)
        self._step_ns = ns_of_s(step_s)
        self._num_tokens = num_tokens
        self._steps_max = steps_max
        self._clock = clock
        self._due_ns = 0
        self._done: dict[str, tuple[Request, int]] = {}

    def on_message(self, source: NodeId, message: Message) -> None:
        """Takes one message of the frontend."""
        match message:
            case messages.Submit(request):
                self.outbox.send(FRONTEND, messages.Admitted(request.request_id))
                if not self._step_ns:
                    delta = self._delta(request, 0, request.sampling.max_tokens)
                    self.outbox.send(FRONTEND, messages.Tokens((delta,)))
                    return
                if not self._done:
                    self._due_ns = self._clock.now_ns()
                    self._set_timer()
                self._done[request.request_id] = (request, 0)
            case messages.Abort(request_id):
                self._done.pop(request_id, None)
            case _:
                pass

    def on_timer(self, name: str) -> None:
        """One step."""
        deltas: deque[TokenDelta] = deque()
        for request, num_done in list(self._done.values()):
            if self._steps_max and num_done >= self._steps_max * self._num_tokens:
                continue
            num = min(self._num_tokens, request.sampling.max_tokens - num_done)
            deltas.append(self._delta(request, num_done, num))
            if deltas[-1].finish_reason is None:
                self._done[request.request_id] = (request, num_done + num)
            else:
                del self._done[request.request_id]
        if self._done:
            self._set_timer()
        self.outbox.send(FRONTEND, messages.Tokens(tuple(deltas)))

    def _set_timer(self) -> None:
        now_ns = self._clock.now_ns()
        # One that could not keep up does not run after what it has missed.
        self._due_ns = max(self._due_ns + self._step_ns, now_ns)
        self.outbox.set_timer(_STEP, self._due_ns - now_ns)

    def _delta(self, request: Request, num_done: int, num: int) -> TokenDelta:
        is_last = num_done + num >= request.sampling.max_tokens
        reason = FinishReason.LENGTH if is_last else None
        start = num_done % self._period
        tokens = self._text[start : start + num]
        if num > len(tokens):
            tokens = (self._text * (1 + num // self._period))[start : start + num]
        return TokenDelta(request.request_id, tokens, reason, len(request.prompt_token_ids), 0)


def make_bare_app(codec: TextCodec) -> Starlette:
    """What there is to compare with: the same events by the same parser, and nothing else."""
    clock = SystemClock()
    model = ServedModel(MODEL_NAME, codec, 2**20, _CONTEXT_MAX, None)
    text_ids = codec.encode_text(TEXT)

    async def answer(request: HttpRequest) -> StreamingResponse:
        call = ChatCall(await request.body(), model, clock)
        num_tokens = call.requests[0].sampling.max_tokens

        async def events() -> AsyncIterator[bytes]:
            yield call.opening()
            for index in range(num_tokens):
                reason = FinishReason.LENGTH if index + 1 == num_tokens else None
                yield call.feed(Update(0, [text_ids[index % len(text_ids)]], reason))
                await asyncio.sleep(0)
            yield call.closing()

        return StreamingResponse(events(), media_type="text/event-stream")

    return Starlette(routes=[Route("/v1/chat/completions", answer, methods=["POST"])])


async def serve(options: argparse.Namespace) -> None:
    """Serves until standard input ends."""
    if options.bare:
        await _listen(make_bare_app(TextCodec.load(DEFAULT_MODEL_DIR)))
        return
    clock = SystemClock()
    codec = TextCodec.load(DEFAULT_MODEL_DIR)
    gateway = Gateway(FRONTEND, MESH_WORKER, clock, ServiceMetrics(), 4096)
    model = ServedModel(MODEL_NAME, codec, 2**20, _CONTEXT_MAX, None)
    worker = ScriptedWorker(
        codec.encode_text(TEXT), options.step_ms / 1e3, options.tokens, clock, options.steps_max
    )
    with UsageLog(options.database) as usage:
        quota = QuotaOptions(tokens_per_minute=2**31 - 1, requests_per_minute=2**31 - 1)
        queue = FairQueue.for_engine(EngineOptions(decode_rows=(_ROWS_MAX,)))
        accounting = Accounting(
            Quotas({"default": quota}, clock), queue, usage, MODEL_NAME, clock, gateway.metrics
        )
        keys = Authenticator(SqliteKeyStore(options.database))
        app = make_app(gateway, model, ServerOptions(), clock, keys, accounting)
        async with Driver([worker, gateway], {}) as driver:
            gateway.flush = driver.perform
            await _listen(app)


async def _listen(app: ASGIApp) -> None:
    limits = ServerOptions()
    http = limited_protocol(limits.head_bytes_max, limits.head_s)
    config = uvicorn.Config(
        app, http=http, ws="none", port=0, lifespan="off", log_level="warning", access_log=False
    )
    server = uvicorn.Server(config)
    serving = asyncio.create_task(server.serve())
    while not server.started:
        await asyncio.sleep(0.01)
    gc.collect()
    gc.freeze()
    print(server.servers[0].sockets[0].getsockname()[1], flush=True)
    await _answer_lines()
    server.should_exit = True
    await serving


async def _answer_lines() -> None:
    reader = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), sys.stdin
    )
    while await reader.readline():
        used = resource.getrusage(resource.RUSAGE_SELF)
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        state = {
            "processor_s": used.ru_utime + used.ru_stime,
            "resident_bytes": pages * resource.getpagesize(),
        }
        print(json.dumps(state), flush=True)


def main() -> None:
    """Serves."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--database", type=Path, required=True, help="keys and usage records")
    parser.add_argument("--step-ms", type=float, default=0.0, help="time between steps")
    parser.add_argument("--tokens", type=int, default=1, help="tokens that a step brings")
    parser.add_argument("--steps-max", type=int, default=0, help="then silence; 0: no limit")
    parser.add_argument("--bare", type=int, default=0, help="1: stream tokens without a service")
    asyncio.run(serve(parser.parse_args()))


if __name__ == "__main__":
    main()
