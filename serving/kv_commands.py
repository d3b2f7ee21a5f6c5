"""`python -m serving node | cache`: run a node of the KV tiers, and ask one.

What runs them is imported where it is used, because every command line imports this module.
"""

import argparse
import contextlib
import json
import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from serving.config import WORKER_ROLES, KVOptions
from sharding.config_file import ConfigError

if TYPE_CHECKING:
    from serving.kv.link import CacheLink
    from serving.kv.store import PayloadForm
    from serving.kv_process import CacheProcess

ROLES = ("cache", "metadata", *WORKER_ROLES)
QUESTIONS = ("stats", "flush", "purge", "verify", "stop")

AddConfig = Callable[[argparse.ArgumentParser], None]


def add_commands(
    commands: "argparse._SubParsersAction[argparse.ArgumentParser]", add_config: AddConfig
) -> None:
    """Add both commands to a parser; `add_config` adds the flags of a configuration."""
    node = commands.add_parser(
        "node", description="Runs one worker, or one node of the KV tiers, until it is stopped."
    )
    node.add_argument("--role", choices=ROLES, required=True, help="what the node does")
    node.add_argument(
        "--listen",
        metavar="ADDRESS",
        help="ipc://PATH or tcp://HOST:PORT (default: by kv.directory)",
    )
    node.add_argument("--name", default="0", help="of a worker, or of a metadata node (0)")
    node.add_argument("--parent", type=int, metavar="PID", help="end when this process does")
    cache = commands.add_parser("cache", description="Asks a cache process about what it keeps.")
    cache.add_argument(
        "question",
        choices=QUESTIONS,
        help="stats: numbers; flush: write what waits; purge: forget everything, or a tenant; "
        "verify: read and check everything in storage; stop: write what waits and end",
    )
    cache.add_argument(
        "--address", help="of the cache process (default: the one that uses kv.directory)"
    )
    cache.add_argument("--salt", help="purge only what requests with this cache_salt have left")
    for command in (node, cache):
        add_config(command)


def run_node(options: argparse.Namespace, kv: KVOptions) -> int:
    """Run a node until it is stopped.

    Raises:
        ConfigError: the configuration has no tiers, or they cannot be used.
    """
    from serving.kv_process import default_address, print_ready, run_cache

    if options.role == "metadata":
        from serving.metadata_process import run_metadata

        address = options.listen or kv.metadata
        if not address or not kv.directory:
            raise ConfigError(
                "a metadata node needs --listen or kv.metadata, and a folder in kv.directory"
            )
        run_metadata(kv, options.name, address, lambda at: print_ready(at, "metadata ready"))
        return 0
    if not kv.is_on:
        raise ConfigError("kv.storage is 'off'; expected another value for a cache process")
    run_cache(kv, options.listen or kv.address or default_address(kv), options.parent)
    return 0


def ask_cache(options: argparse.Namespace, kv: KVOptions) -> int:
    """Ask, and print the answer as JSON.

    Raises:
        ConfigError: no process to ask, or it does not answer.
    """
    from serving.kv.store import tenant_id
    from serving.kv_process import ask, default_address

    address = options.address or kv.address
    if not address:
        if kv.storage != "disk":
            raise ConfigError(
                "which cache process? Expected --address, or a --config with kv.storage = 'disk'"
            )
        address = default_address(kv)
    tenant = None if options.salt is None else tenant_id(options.salt)
    numbers = ask(address, options.question, tenant)
    sys.stdout.write(json.dumps(numbers, indent=2) + "\n")
    return 0


@contextlib.contextmanager
def cache_process(kv: KVOptions, options: argparse.Namespace) -> "Iterator[CacheProcess | None]":
    """The cache process of a server with these flags, which starts meanwhile; None without."""
    if not kv.is_on or kv.address:
        yield None
        return
    from serving.kv_process import CacheProcess

    arguments = [] if options.config is None else ["--config", options.config]
    arguments += [part for change in options.set for part in ("--set", change)]
    process = CacheProcess(kv, arguments)
    try:
        yield process
    finally:
        process.stop()


@contextlib.contextmanager
def cache_link(
    kv: KVOptions,
    form: "PayloadForm | None",
    cache: "CacheProcess | None",
    say: Callable[[str], None],
) -> "Iterator[CacheLink | None]":
    """The line to the cache process that is used, once that answers; None without.

    Raises:
        ConfigError: it does not answer, or has ended.
    """
    if not kv.is_on:
        yield None
        return
    from serving.kv.link import CacheLink
    from serving.kv_process import ask
    from serving.transport.driver import SystemClock

    if cache is None:
        ask(kv.address, "stats", timeout_s=5.0)
    else:
        cache.wait_until_ready()
    address = kv.address if cache is None else cache.address
    assert form is not None, "the model was loaded without transfers"
    link = CacheLink(address, form, SystemClock())
    link.start()
    say(f"Cache   {kv.storage} at {address}")
    try:
        yield link
    finally:
        link.close()
