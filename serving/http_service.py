"""HTTP in front of a gateway, as a process serves it: the port, signals, keys, quotas and records.

It is the same for a server that has a worker of its own and for the router of a cluster; what they
serve with is behind the gateway.
"""

import asyncio
import contextlib
import os
import signal
import socket
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import uvicorn
from starlette.types import ASGIApp

from serving.clock import Clock
from serving.config import EngineOptions, ServingConfig
from serving.frontend.accounting import Accounting
from serving.frontend.app import make_app
from serving.frontend.auth import Authenticator
from serving.frontend.cache_admin import CacheAccess
from serving.frontend.conversion import ServedModel
from serving.frontend.fair_queue import FairQueue
from serving.frontend.gateway import Gateway
from serving.frontend.http_limits import limited_protocol
from serving.frontend.quota import KVCosts, Quotas
from serving.frontend.tracing import Tracer
from serving.frontend.usage import UsageLog
from serving.listening import listen
from sharding.config_file import ConfigError

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Tenancy:
    """Who may call, where usage is recorded, and how the configuration is read again."""

    authenticator: Authenticator
    usage: UsageLog
    reread: Callable[[], ServingConfig]


@dataclass(frozen=True, slots=True)
class Front:
    """What is served: a gateway, the model behind it, how many requests that can run, and what each
    of them takes.

    `cache` is the way to the KV tiers, `overview` tells what there is in a cluster, and `tracer`
    makes spans; None if there is none.
    """

    gateway: Gateway
    model: ServedModel
    engine: EngineOptions
    costs: KVCosts
    cache: CacheAccess | None = None
    overview: Callable[[], object] | None = None
    tracer: Tracer | None = None


async def serve_http(
    config: ServingConfig,
    front: Front,
    listener: socket.socket,
    tenancy: Tenancy,
    clock: Clock,
    say: Say,
) -> None:
    """Serves until a signal has come and running requests have finished.

    The gateway's effects are performed by the caller's driver.
    """
    quotas = Quotas(config.quotas, clock, front.costs)
    accounting = Accounting(
        quotas,
        FairQueue.for_engine(front.engine),
        tenancy.usage,
        front.model.name,
        clock,
        front.gateway.metrics,
        front.tracer,
        config.prices,
    )
    app = make_app(
        front.gateway,
        front.model,
        config.server,
        clock,
        tenancy.authenticator,
        accounting,
        front.cache,
        front.overview,
    )
    with _reload_on_signal(tenancy, quotas, say):
        await _serve_app(app, front.gateway, config, listener, say)


@contextlib.contextmanager
def _reload_on_signal(tenancy: Tenancy, quotas: Quotas, say: Say) -> Iterator[None]:
    """SIGHUP reads keys and quotas again; what cannot be used leaves both as they were.

    So does the start, because a signal that came while the model was loaded was passed over.
    """

    def reload() -> bool:
        try:
            options = tenancy.reread().quotas
            tenancy.authenticator.reload()
        except ConfigError as error:
            say(f"Not reloaded: {error}")
            return False
        quotas.reload(options)
        return True

    def on_signal() -> None:
        if reload():
            say("Reloaded: API keys and quotas")

    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGHUP, on_signal)
    reload()
    try:
        yield
    finally:
        loop.remove_signal_handler(signal.SIGHUP)


async def _serve_app(
    app: ASGIApp,
    gateway: Gateway,
    config: ServingConfig,
    listener: socket.socket,
    say: Say,
) -> None:
    class Server(uvicorn.Server):
        """uvicorn, with signals and the start-up message being ours."""

        @contextlib.contextmanager
        def capture_signals(self) -> Iterator[None]:
            yield

        async def startup(self, sockets: list[socket.socket] | None = None) -> None:
            await super().startup(sockets=sockets)
            say(_ready_message(config, listener))

    options = uvicorn.Config(
        app,
        http=limited_protocol(config.server.head_bytes_max, config.server.head_s),
        ws="none",
        lifespan="off",
        log_level="warning",
        access_log=False,
        timeout_graceful_shutdown=2,
        timeout_keep_alive=75,
    )
    server = Server(options)
    with _stop_on_signal(server, gateway, config.server.drain_s, say):
        listen(listener)
        await server.serve(sockets=[listener])


@contextlib.contextmanager
def _stop_on_signal(
    server: uvicorn.Server, gateway: Gateway, drain_s: float, say: Say
) -> Iterator[None]:
    """The first SIGINT or SIGTERM drains and stops the server; the second ends the process."""
    loop = asyncio.get_running_loop()
    draining: list[asyncio.Task[None]] = []

    async def drain() -> None:
        await gateway.drain(drain_s)
        server.should_exit = True

    def stop(number: int) -> None:
        if draining:
            os._exit(128 + number)
        say(f"Stopping: running requests have {drain_s:g} s to finish")
        draining.append(loop.create_task(drain()))

    numbers = (signal.SIGINT, signal.SIGTERM)
    for number in numbers:
        loop.add_signal_handler(number, stop, number)
    try:
        yield
    finally:
        for number in numbers:
            loop.remove_signal_handler(number)


def _ready_message(config: ServingConfig, listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    shown = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(host, f"[{host}]" if ":" in host else host)
    url = f"http://{shown}:{port}"
    name = config.model.served_name
    message = '{"role": "user", "content": "Hello"}'
    body = f'{{"model": "{name}", "max_tokens": 32, "messages": [{message}]}}'
    return (
        f"Model   {name} from {config.model.directory}\n"
        f"Serving {url}/v1\n"
        f"Try     curl {url}/v1/chat/completions -H 'Content-Type: application/json' -d '{body}'"
    )
