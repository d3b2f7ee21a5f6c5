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
import gc
import os
import random
import signal
import socket
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from serving.config import ROUTER_NAME, VISION_ROLE, WORKER_ROLES, ServingConfig, load_config
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
from sharding.plan import MeshPlan, load_plan

if TYPE_CHECKING:
    from serving.http_service import Tenancy
    from serving.kv.link import CacheLink
    from serving.loading import LoadedModel

EXIT_BAD_INPUT = 2
_HOST_DEVICES = "--xla_force_host_platform_device_count"


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command; returns the exit code."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    if not given or given[0] not in COMMANDS:
        given.insert(0, "run")
    options = _parser().parse_args(given)
    if options.command in ("run", "node"):
        # To be told of new keys while the model is loaded is no reason to end. A server reads them
        # again when it is up.
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        if options.command == "plan":
            return _plan(options)
        if options.command == "simulate":
            return _simulate(options)
        config = _config_of(options)
        if options.command in ("keys", "usage"):
            return _administrate(config, options)
        if options.command == "cache":
            return ask_cache(options, config.tiers, config.cluster)
        _set_process_up(config)
        if options.command == "node" and options.role in WORKER_ROLES:
            return _work(config, options)
        if options.command == "node" and options.role == ROUTER_NAME:
            os.environ["JAX_PLATFORMS"] = "cpu"
            return _route(config, lambda: _config_of(options), options)
        if options.command == "node":
            # Devices belong to the servers.
            os.environ["JAX_PLATFORMS"] = "cpu"
            return run_node(options, config, partial(_salt_of, config))
        if options.command == "generate":
            return _generate(config, options)
        if config.cluster.is_on:
            return _supervise(config, options)
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


def _salt_of(config: ServingConfig, tenant: str) -> str | None:
    from serving.frontend.auth import Authenticator, SqliteKeyStore

    return Authenticator(SqliteKeyStore(_database_of(config))).salt_of(tenant)


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
    _set_devices_up(load_plan(config.sharding))
    cache_home = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    cache_dir = Path(cache_home) / "deepinfer-jax" / "compiled"
    os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(cache_dir))
    # Every shape is worth keeping: all of them are needed at each start.
    os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
    os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "-1")


def _set_devices_up(plan: MeshPlan) -> None:
    """A mesh of host devices finds as many as it needs; one of accelerators what is there."""
    if plan.devices == "host":
        os.environ["JAX_PLATFORMS"] = "cpu"
        flag = f"{_HOST_DEVICES}={plan.num_devices}"
        others = [f for f in os.environ.get("XLA_FLAGS", "").split() if _HOST_DEVICES not in f]
        os.environ["XLA_FLAGS"] = " ".join([*others, flag])


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
    from serving.offline import LLM, RowError, read_rows
    from serving.offline_outputs import write_rows

    if not options.out.parent.is_dir():
        raise ConfigError(f"{options.out.parent}: no such directory; --out is to be written there")
    try:
        rows = read_rows(options.prompts)
        _check_writable(options.out, options.prompts)
        with cache_process(config.kv, config.cluster, options) as cache:
            model = _load(config)
            with cache_link(config.kv, config.cluster, model.facts.kv_form, cache, _say) as link:
                llm = LLM.of_model(config, model, link)
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
        costs=options.costs,
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
    with _front_door(config, reread) as (listener, tenancy):
        _say(f"Loading {config.model.directory} ({config.model.cache_format} cache)")
        with cache_process(config.kv, config.cluster, options) as cache:
            model = _load(config)
            form = model.facts.kv_form
            with cache_link(config.kv, config.cluster, form, cache, _say) as link:
                return asyncio.run(_serve_model(config, model, listener, tenancy, link))


@contextlib.contextmanager
def _front_door(
    config: ServingConfig, reread: Callable[[], ServingConfig]
) -> "Iterator[tuple[socket.socket, Tenancy]]":
    """The port, and who may come in."""
    from serving.frontend.auth import Authenticator, SqliteKeyStore
    from serving.frontend.usage import UsageLog
    from serving.http_service import Tenancy
    from serving.listening import bind, check_openness

    database = _database_of(config)
    authenticator = Authenticator(SqliteKeyStore(database))
    check_openness(config.server.host, authenticator.needs_keys, _say)
    # The port is taken before the model is loaded, so that a port in use shows at once.
    listener = bind(config.server.host, config.server.port)
    with listener, UsageLog(database) as usage:
        yield listener, Tenancy(authenticator, usage, reread)


def _supervise(config: ServingConfig, options: argparse.Namespace) -> int:
    """Starts the processes of a cluster on this machine, and looks after them."""
    from serving.listening import bind
    from serving.planner import check_roles
    from serving.supervisor import meeting_place, run_cluster

    check_roles(config)
    # A router that is started anew has to be found where the first one was.
    with bind(config.server.host, config.server.port) as listener:
        port = listener.getsockname()[1]
    with meeting_place(config.cluster) as changes:
        options.set += [*changes, f"server.port={port}"]
        config = override_from_text(config, changes)
        return asyncio.run(run_cluster(config, _arguments_of(options), _say))


def _arguments_of(options: argparse.Namespace) -> list[str]:
    """The flags that give another process the configuration of this one."""
    flags = {
        "model.path": options.model,
        "model.cache_format": options.cache_format,
        "server.host": options.host,
    }
    given = [f"{key}={value}" for key, value in flags.items() if value is not None]
    arguments = [] if options.config is None else ["--config", options.config]
    return arguments + [part for change in [*given, *options.set] for part in ("--set", change)]


def _route(
    config: ServingConfig, reread: Callable[[], ServingConfig], options: argparse.Namespace
) -> int:
    """Runs the router of a cluster, and HTTP in front of it."""
    from serving.router_process import run_router

    with _front_door(config, reread) as (listener, tenancy):
        access = None
        if config.kv.is_on and config.kv.address:
            access = partial(
                cache_access,
                config.kv.address,
                config.cluster,
                salt_of=tenancy.authenticator.salt_of,
            )
        return asyncio.run(run_router(config, listener, tenancy, _say, options.parent, access))


def _work(config: ServingConfig, options: argparse.Namespace) -> int:
    """Runs one worker of a cluster."""
    from serving.code_version import code_version
    from serving.engine.step_times import TimedExecutor
    from serving.loading import load_encoder, recorded
    from serving.node_process import VisionParts, WorkerParts, check_node, run_worker
    from serving.nodes.values import NodeId
    from serving.transport.driver import SystemClock

    check_node(config, options.role, options.name)
    # Before the model is loaded, which takes a while: the program is what runs now.
    version = code_version()
    node_id = NodeId(options.role, options.name)
    if options.role == VISION_ROLE:
        encoder = load_encoder(config, _say)
        encode = VisionParts(encoder.executor.encode, encoder.facts, version)
        return asyncio.run(run_worker(config, node_id, encode, _say, options.parent))
    model = _load(config)
    with cache_link(config.kv, config.cluster, model.facts.kv_form, None, _say) as link:
        executor = TimedExecutor(model.executor, SystemClock().now_ns)
        executor = recorded(executor, config.engine.step_records)
        parts = WorkerParts(executor, model.facts, model.grammars, model.programs, link, version)
        return asyncio.run(run_worker(config, node_id, parts, _say, options.parent))


async def _serve_model(
    config: ServingConfig,
    model: "LoadedModel",
    listener: socket.socket,
    tenancy: "Tenancy",
    cache: "CacheLink | None" = None,
) -> int:
    """Serves with its own worker until a signal has come and running requests have finished."""
    from serving.cluster import FRONTEND, MESH_WORKER, Environment, build
    from serving.engine.profiler import StepProfiler
    from serving.engine.step_times import TimedExecutor
    from serving.frontend.conversion import ServedModel
    from serving.frontend.gateway import Gateway
    from serving.frontend.images import ImageReader
    from serving.frontend.quota import KVCosts
    from serving.frontend.tracing import open_tracer
    from serving.http_service import Front, serve_http
    from serving.loading import recorded
    from serving.observe import ServiceMetrics
    from serving.planner import ModelPlan
    from serving.transport.driver import Driver, SystemClock

    clock = SystemClock()
    gateway = Gateway(
        FRONTEND, MESH_WORKER, clock, ServiceMetrics(), config.server.backlog_tokens_max
    )
    folder = config.server.profile_dir
    executor = TimedExecutor(model.executor, clock.now_ns)
    executor = recorded(executor, config.engine.step_records)
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
    access = None
    if cache is not None:
        fingerprint, salt_of = model.facts.kv_fingerprint, tenancy.authenticator.salt_of
        access = cache_access(cache.address, config.cluster, fingerprint, salt_of)
    async with Driver(cluster.nodes, cluster.executors, cluster.caches) as driver:
        gateway.flush = driver.perform
        plan = ModelPlan.of(config.model.directory, config.model.cache_format)
        costs = KVCosts(*plan.kv_costs())
        with open_tracer(config.tracing, driver, str(MESH_WORKER)) as tracer:
            front = Front(gateway, served, config.engine, costs, access, None, tracer)
            await serve_http(config, front, listener, tenancy, clock, _say)
        profiler.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
