"""A service over a scripted executor, served by uvicorn on a thread of the test process."""

import asyncio
import contextlib
import random
import threading
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import uvicorn
from starlette.types import ASGIApp

from serving.cluster import FRONTEND, MESH_WORKER, Environment, ModelFacts, build
from serving.config import ServingConfig
from serving.core.buckets import CompiledProgram
from serving.core.grammar import GrammarCompiler
from serving.core.image_layout import ImageGeometry
from serving.engine.profiler import StepProfiler
from serving.frontend.accounting import Accounting
from serving.frontend.app import make_app
from serving.frontend.auth import Authenticator, SqliteKeyStore
from serving.frontend.conversion import ServedModel
from serving.frontend.fair_queue import FairQueue
from serving.frontend.gateway import Gateway
from serving.frontend.http_limits import limited_protocol
from serving.frontend.images import ImageReader
from serving.frontend.quota import KVCosts, Quotas
from serving.frontend.text import TextCodec
from serving.frontend.tracing import open_tracer
from serving.frontend.usage import UsageLog
from serving.observe import ServiceMetrics
from serving.transport.driver import Driver, SystemClock
from sharding.config_file import override
from tests.serving.scripted import ScriptedExecutor

MODEL_DIR = Path(__file__).parents[1] / "golden" / "tiny-v41"
FACTS = ModelFacts(
    vocab_size=320,
    max_position_embeddings=2**20,
    eos_token_id=1,
    images=ImageGeometry(318, 14, 3, 64, 1764),
)
GRAMMARS = GrammarCompiler((MODEL_DIR / "tokenizer.json").read_text(encoding="utf-8"), 320, 1)
COMPILED = CompiledProgram("decode_r16_t16_b4", 1.5, True)
PROGRAMS = ('HloModule jit_step\n  %a = f32[] sine(%x), metadata={op_name="jit(step)/moe/sin"}\n',)
SMALL = {
    "model.path": str(MODEL_DIR),
    "engine.max_context": 512,
    "engine.num_blocks": 65,
    "engine.prefill_tokens": [512],
    "engine.decode_rows": [16],
}


class RunningService:
    """Serves on a free port between entry and exit.

    `options` are dotted configuration keys on top of a small engine. With a `database` there are
    keys, quotas and records.
    """

    def __init__(
        self,
        executor: ScriptedExecutor,
        options: Mapping[str, Any] | None = None,
        database: Path | None = None,
    ) -> None:
        self.executor = executor
        self.config = override(ServingConfig(), SMALL | dict(options or {}))
        self.codec = TextCodec.load(MODEL_DIR).with_image_token(318)
        self.url = ""
        self._database = database
        self.accounting: Any = None
        self._started = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()))

    def __enter__(self) -> "RunningService":
        self._thread.start()
        assert self._started.wait(20), "the service did not start"
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._loop.call_soon_threadsafe(setattr, self._server, "should_exit", True)
        self._thread.join(20)
        assert not self._thread.is_alive(), "the service did not stop"

    def drain(self, timeout_s: float) -> None:
        """Begins to drain; returns at once."""
        asyncio.run_coroutine_threadsafe(self.gateway.drain(timeout_s), self._loop)

    async def _serve(self) -> None:
        self._loop = asyncio.get_running_loop()
        clock = SystemClock()
        self.gateway = Gateway(
            FRONTEND, MESH_WORKER, clock, ServiceMetrics(), self.config.server.backlog_tokens_max
        )
        folder = self.config.server.profile_dir
        profiler = StepProfiler(self.executor, Path(folder) if folder else None, lambda: PROGRAMS)
        environment = Environment(
            clock, random.Random(1), profiler, GRAMMARS, profiler, (COMPILED,)
        )
        cluster = build(self.config, FACTS, environment, self.gateway)
        model = ServedModel(
            "tiny-v41",
            self.codec,
            FACTS.vocab_size,
            self.config.engine.max_context,
            FACTS.eos_token_id,
            ImageReader(FACTS.images, self.config.images),
        )
        async with Driver(cluster.nodes, cluster.executors) as driver:
            self.gateway.flush = driver.perform
            with contextlib.ExitStack() as stack:
                keys = None
                if self._database is not None:
                    usage = stack.enter_context(UsageLog(self._database))
                    tracer = stack.enter_context(
                        open_tracer(self.config.tracing, driver, str(MESH_WORKER))
                    )
                    quotas = Quotas(self.config.quotas, clock, KVCosts(100.0, 1000))
                    queue = FairQueue.for_engine(self.config.engine)
                    self.accounting = Accounting(
                        quotas,
                        queue,
                        usage,
                        model.name,
                        clock,
                        self.gateway.metrics,
                        tracer,
                        self.config.prices,
                    )
                    keys = Authenticator(SqliteKeyStore(self._database))
                server = self.config.server
                await self._listen(
                    make_app(self.gateway, model, server, clock, keys, self.accounting)
                )
            profiler.close()

    async def _listen(self, app: ASGIApp) -> None:
        server = self.config.server
        options = uvicorn.Config(
            app,
            http=limited_protocol(server.head_bytes_max, server.head_s),
            port=0,
            lifespan="off",
            log_level="critical",
            timeout_graceful_shutdown=1,
        )
        self._server = uvicorn.Server(options)
        serving = asyncio.create_task(self._server.serve())
        while not self._server.started:
            await asyncio.sleep(0.01)
        port = self._server.servers[0].sockets[0].getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        self._started.set()
        await serving
