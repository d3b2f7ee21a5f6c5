"""`python -m serving [run | generate | plan | simulate | keys | usage | node | cache]`: settings.

`run`, the default, serves HTTP until SIGINT or SIGTERM: then readiness goes off, running requests
finish within a time limit, and the process exits 0; a second signal ends it at once. SIGHUP reads
API keys and quotas again. `keys` and `usage` work on the server's database. `plan` counts a model
without loading it; `simulate` replays a trace on a fleet in virtual time; `node` and `cache` are
for the KV tiers. What is wrong with the input is one line on stderr and exit code 2.
"""

import argparse
import asyncio
import contextlib
import dataclasses
import errno
import gc
import ipaddress
import os
import random
import signal
import socket
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from serving.config import WORKER_ROLES, KVOptions, ServingConfig, load_config
from serving.frontend.arguments import COMMANDS, add_config, make_parser
from serving.kv_commands import (
    add_commands,
    ask_cache,
    cache_access,
    cache_link,
    cache_process,
    run_node,
)
from sharding.config_file import ConfigError, override, override_from_text

if TYPE_CHECKING:
    from serving.frontend.auth import Authenticator
    from serving.frontend.quota import Quotas
    from serving.frontend.tracing import Tracer
    from serving.frontend.usage import UsageLog
    from serving.kv.link import CacheLink
    from serving.loading import LoadedModel

EXIT_BAD_INPUT = 2


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command; returns the exit code."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    if not given or given[0] not in COMMANDS:
        given.insert(0, "run")
    options = _parser().parse_args(given)
    try:
        if options.command == "plan":
            return _plan(options)
        if options.command == "simulate":
            return _simulate(options)
        config = _config_of(options)
        if options.command in ("keys", "usage"):
            return _administrate(config, options)
        if options.command == "cache":
            return ask_cache(options, config.kv, config.cluster)
        _set_process_up(config)
        if options.command == "node" and options.role in WORKER_ROLES:
            return _work(config, options)
        if options.command == "node":
            # Devices belong to the servers.
            os.environ["JAX_PLATFORMS"] = "cpu"
            return run_node(options, config.kv, config.cluster)
        if options.command == "generate":
            return _generate(config, options)
        return _serve(config, lambda: _config_of(options), options)
    except ConfigError as error:
        print(f"serving: {error}", file=sys.stderr)
        return EXIT_BAD_INPUT
    except KeyboardInterrupt:
        return 128 + signal.SIGINT


def _parser() -> argparse.ArgumentParser:
    parser, commands = make_parser()
    add_commands(commands, add_config)
    return parser


def _administrate(config: ServingConfig, options: argparse.Namespace) -> int:
    from serving.frontend.administration import run_keys, run_usage
    from serving.transport.driver import SystemClock

    database = _database_of(config)
    if options.command == "usage":
        return run_usage(options, database, _say)
    return run_keys(options, database, SystemClock().unix_s(), _say)


def _database_of(config: ServingConfig) -> Path:
    """The file with keys and usage records."""
    if config.server.database:
        return Path(config.server.database).expanduser()
    state_home = os.environ.get("XDG_STATE_HOME") or str(Path.home() / ".local" / "state")
    return Path(state_home) / "deepinfer-jax" / "service.sqlite3"


def _config_of(options: argparse.Namespace) -> ServingConfig:
    config = override_from_text(load_config(options.config), options.set)
    flags: dict[str, Any] = {
        "model.path": getattr(options, "model", None),
        "model.cache_format": getattr(options, "cache_format", None),
        "server.host": getattr(options, "host", None),
        "server.port": getattr(options, "port", None),
    }
    given = {key: value for key, value in flags.items() if value is not None}
    return override(config, given, source="command line")


def _set_process_up(config: ServingConfig) -> None:
    """Settings of the whole process; before jax is imported, which reads some of them."""
    from serving.frontend import logs

    logs.set_up(config.server.log_format)
    cache_home = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    cache_dir = Path(cache_home) / "deepinfer-jax" / "compiled"
    os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(cache_dir))
    # Every shape is worth keeping: all of them are needed at each start.
    os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
    os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "-1")


def _say(line: str) -> None:
    print(line, flush=True)


def _load(config: ServingConfig) -> "LoadedModel":
    from serving.loading import load_model

    model = load_model(config, _say)
    # What start-up made lives as long as the process; the collector need not look at it again.
    gc.collect()
    gc.freeze()
    return model


def _generate(config: ServingConfig, options: argparse.Namespace) -> int:
    from serving.offline import LLM, RowError, read_rows, write_rows

    if not options.out.parent.is_dir():
        raise ConfigError(f"{options.out.parent}: no such directory; --out is to be written there")
    try:
        rows = read_rows(options.prompts)
        _check_writable(options.out, options.prompts)
        # Offline prompts run without the service, and so without the process that keeps prefixes.
        config = dataclasses.replace(config, kv=KVOptions())
        llm = LLM.of_model(config, _load(config))
        outputs = llm.generate_rows(rows, source=str(options.prompts), progress=True)
    except RowError as error:
        raise ConfigError(str(error)) from None
    try:
        write_rows(options.out, outputs)
    except OSError as error:
        raise ConfigError(f"{options.out}: cannot be written: {error.strerror}") from None
    return 0


def _check_writable(out: Path, prompts: Path) -> None:
    """Says before the work, not after it, that its result has nowhere to go."""
    if out.exists() and out.samefile(prompts):
        raise ConfigError(f"{out}: is the file of prompts; expected another one for --out")
    try:
        with out.open("ab"):
            pass
    except OSError as error:
        raise ConfigError(f"{out}: cannot be written: {error.strerror}") from None


def _plan(options: argparse.Namespace) -> int:
    # Arithmetic only: a device that another process serves from stays untouched.
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    from serving.mesh_planner import run

    return run(options, _say)


def _simulate(options: argparse.Namespace) -> int:
    from serving.simulate import SimulateOptions, simulate, summary
    from serving.transport.driver import SystemClock

    given = SimulateOptions(
        trace=options.trace,
        config=options.config,
        changes=tuple(options.set),
        workers=options.workers,
        policy=options.policy,
        seed=options.seed,
        rate_rps=options.rate,
        load=options.load,
        duration_s=options.seconds,
        report=options.report,
        plot=options.plot,
    )
    _say(summary(simulate(given, SystemClock())))
    return 0


def _serve(
    config: ServingConfig, reread: Callable[[], ServingConfig], options: argparse.Namespace
) -> int:
    """Serves until stopped; `reread` gives the configuration as it is by then."""
    from serving.frontend.auth import Authenticator, SqliteKeyStore
    from serving.frontend.usage import UsageLog

    database = _database_of(config)
    authenticator = Authenticator(SqliteKeyStore(database))
    _check_openness(config.server.host, authenticator.needs_keys)
    # The port is taken before the model is loaded, so that a port in use shows at once.
    listener = _bind(config.server.host, config.server.port)
    with listener, UsageLog(database) as usage:
        _say(f"Loading {config.model.directory} ({config.model.cache_format} cache)")
        with cache_process(config.kv, config.cluster, options) as cache:
            model = _load(config)
            form = model.facts.kv_form
            with cache_link(config.kv, config.cluster, form, cache, _say) as link:
                tenancy = _Tenancy(authenticator, usage, reread)
                return asyncio.run(_serve_model(config, model, listener, tenancy, link))


@dataclass(frozen=True, slots=True)
class _Tenancy:
    """Who may call, where usage is recorded, and how the configuration is read again."""

    authenticator: "Authenticator"
    usage: "UsageLog"
    reread: Callable[[], ServingConfig]


def _work(config: ServingConfig, options: argparse.Namespace) -> int:
    """Runs one worker of a cluster."""
    from serving.engine.step_times import TimedExecutor
    from serving.node_process import WorkerParts, check_node, run_worker
    from serving.nodes.values import NodeId
    from serving.transport.driver import SystemClock

    check_node(config, options.role, options.name)
    model = _load(config)
    with cache_link(config.kv, config.cluster, model.facts.kv_form, None, _say) as link:
        executor = TimedExecutor(model.executor, SystemClock().now_ns)
        parts = WorkerParts(executor, model.facts, model.grammars, model.programs, link)
        node_id = NodeId(options.role, options.name)
        return asyncio.run(run_worker(config, node_id, parts, _say, options.parent))


def _check_openness(host: str, needs_keys: bool) -> None:
    """Raises ConfigError where everybody on a network could use a server without keys."""
    if needs_keys:
        return
    try:
        is_this_machine = host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        is_this_machine = False
    if not is_this_machine:
        raise ConfigError(
            f"server.host is {host} and there are no API keys; make one first: "
            "python -m serving keys add TENANT"
        )
    _say("No API keys: this machine alone is served; python -m serving keys add TENANT makes one")


def _bind(host: str, port: int) -> socket.socket:
    """A socket that nobody else can listen in place of, though it does not listen yet.

    Two sockets may bind one port if both may reuse the address, so that is asked for only where
    connections of an earlier server are still being closed; then the socket listens at once.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        try:
            listener.bind((host, port))
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind((host, port))
            _listen(listener)
    except OSError as error:
        listener.close()
        raise ConfigError(_listen_problem(host, port, error)) from None
    return listener


def _listen(listener: socket.socket) -> None:
    """Connections made from now on do not keep the next server from binding the port."""
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.listen()


def _listen_problem(host: str, port: int, error: OSError) -> str:
    return f"cannot listen on {host} port {port}: {error.strerror}; choose another with --port"


async def _serve_model(
    config: ServingConfig,
    model: "LoadedModel",
    listener: socket.socket,
    tenancy: _Tenancy,
    cache: "CacheLink | None" = None,
) -> int:
    """Serves until a signal has come and running requests have finished."""
    from serving.cluster import FRONTEND, MESH_WORKER, Environment, build
    from serving.engine.profiler import StepProfiler
    from serving.engine.step_times import TimedExecutor
    from serving.frontend.accounting import Accounting
    from serving.frontend.app import make_app
    from serving.frontend.conversion import ServedModel
    from serving.frontend.fair_queue import FairQueue
    from serving.frontend.gateway import Gateway
    from serving.frontend.images import ImageReader
    from serving.frontend.quota import KVCosts, Quotas
    from serving.observe import ServiceMetrics
    from serving.planner import ModelPlan
    from serving.transport.driver import Driver, SystemClock

    clock = SystemClock()
    gateway = Gateway(
        FRONTEND, MESH_WORKER, clock, ServiceMetrics(), config.server.backlog_tokens_max
    )
    folder = config.server.profile_dir
    executor = TimedExecutor(model.executor, clock.now_ns)
    profiler = StepProfiler(
        executor, Path(folder).expanduser() if folder else None, model.program_texts
    )
    environment = Environment(
        clock, random.Random(), profiler, model.grammars, profiler, model.programs, cache
    )
    cluster = build(config, model.facts, environment, gateway)
    served = ServedModel(
        name=config.model.served_name,
        codec=model.codec,
        vocab_size=model.facts.vocab_size,
        context_max=config.engine.max_context,
        eos_token_id=model.facts.eos_token_id,
        images=ImageReader(model.facts.images, config.images),
    )
    plan = ModelPlan.of(config.model.directory, config.model.cache_format)
    quotas = Quotas(config.quotas, clock, KVCosts(*plan.kv_costs()))
    queue = FairQueue.for_engine(config.engine)
    with _tracer(config) as tracer:
        accounting = Accounting(
            quotas,
            queue,
            tenancy.usage,
            served.name,
            clock,
            gateway.metrics,
            tracer,
            config.prices,
        )
        keys = tenancy.authenticator
        access = None
        if cache is not None:
            access = cache_access(
                cache.address, config.cluster, model.facts.kv_fingerprint, keys.salt_of
            )
        app = make_app(gateway, served, config.server, clock, keys, accounting, access)
        async with Driver(cluster.nodes, cluster.executors, cluster.caches) as driver:
            gateway.flush = driver.perform
            with _reload_on_signal(tenancy, quotas):
                await _serve_app(app, gateway, config, listener)
            profiler.close()
    return 0


def _tracer(config: ServingConfig) -> "contextlib.AbstractContextManager[Tracer | None]":
    """What makes the spans of calls, if they are to go anywhere. Raises ConfigError."""
    if not config.tracing.endpoint:
        return contextlib.nullcontext()
    from serving.frontend.tracing import Tracer
    from serving.transport.driver import unix_offset_ns

    return Tracer(config.tracing, unix_offset_ns())


@contextlib.contextmanager
def _reload_on_signal(tenancy: _Tenancy, quotas: "Quotas") -> Iterator[None]:
    """SIGHUP reads keys and quotas again; what cannot be used leaves both as they were."""

    def reload() -> None:
        try:
            options = tenancy.reread().quotas
            tenancy.authenticator.reload()
        except ConfigError as error:
            _say(f"Not reloaded: {error}")
            return
        quotas.reload(options)
        _say("Reloaded: API keys and quotas")

    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGHUP, reload)
    try:
        yield
    finally:
        loop.remove_signal_handler(signal.SIGHUP)


async def _serve_app(
    app: Any,  # noqa: ANN401
    gateway: Any,  # noqa: ANN401
    config: ServingConfig,
    listener: socket.socket,
) -> None:
    import uvicorn

    class Server(uvicorn.Server):
        """uvicorn, with signals and the start-up message being ours."""

        @contextlib.contextmanager
        def capture_signals(self) -> Iterator[None]:
            yield

        async def startup(self, sockets: list[socket.socket] | None = None) -> None:
            await super().startup(sockets=sockets)
            _say(_ready_message(config, listener))

    from serving.frontend.http_limits import limited_protocol

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
    with _stop_on_signal(server, gateway, config.server.drain_s):
        _listen(listener)
        await server.serve(sockets=[listener])


@contextlib.contextmanager
def _stop_on_signal(server: Any, gateway: Any, drain_s: float) -> Iterator[None]:  # noqa: ANN401
    """The first SIGINT or SIGTERM drains and stops the server; the second ends the process."""
    loop = asyncio.get_running_loop()
    draining: list[asyncio.Task[None]] = []

    async def drain() -> None:
        await gateway.drain(drain_s)
        server.should_exit = True

    def stop(number: int) -> None:
        if draining:
            os._exit(128 + number)
        _say(f"Stopping: running requests have {drain_s:g} s to finish")
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


if __name__ == "__main__":
    sys.exit(main())
