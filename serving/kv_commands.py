"""`python -m serving node | cache`: run a node of the KV tiers, and ask one.

What runs them is imported where it is used, because every command line imports this module.
"""

import argparse
import contextlib
import json
import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from serving.config import WORKER_ROLES, ClusterOptions, KVOptions
from sharding.config_file import ConfigError

if TYPE_CHECKING:
    from serving.kv.link import CacheLink
    from serving.kv.store import PayloadForm
    from serving.kv_process import CacheProcess

ROLES = ("cache", "metadata", "storage", *WORKER_ROLES)
QUESTIONS = ("stats", "flush", "purge", "verify", "repair", "drain", "rejoin", "stop")

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
    node.add_argument(
        "--name", default="0", help="of a worker, a metadata node or a storage node (default: 0)"
    )
    node.add_argument("--parent", type=int, metavar="PID", help="end when this process does")
    cache = commands.add_parser("cache", description="Asks a cache process about what it keeps.")
    cache.add_argument(
        "question",
        choices=QUESTIONS,
        help="stats: numbers; flush: write what waits; purge: forget everything, or a tenant; "
        "verify: read and check everything in storage; repair: make lost fragments anew; drain: "
        "have a storage node give away what it holds; rejoin: have it take again; stop: write what "
        "waits and end",
    )
    cache.add_argument(
        "--address", help="of the cache process (default: the one that uses kv.directory)"
    )
    cache.add_argument("--salt", help="purge only what requests with this cache_salt have left")
    cache.add_argument("--node", default="", help="the storage node to drain, or to rejoin")
    for command in (node, cache):
        add_config(command)


def run_node(options: argparse.Namespace, kv: KVOptions, cluster: ClusterOptions) -> int:
    """Run a node until it is stopped.

    Raises:
        ConfigError: the configuration has no tiers, or they cannot be used.
    """
    from serving.kv_process import default_address, run_cache
    from serving.kv_storage import check_address, print_ready, read_key, run_storage_node

    key = read_key(cluster.key_file)
    if options.role == "metadata":
        from serving.metadata_process import run_metadata

        address = options.listen or kv.metadata
        if not address or not kv.directory:
            raise ConfigError(
                "a metadata node needs --listen or kv.metadata, and a folder in kv.directory"
            )
        check_address(address, key)
        run_metadata(kv, options.name, address, lambda at: print_ready("metadata", at), key)
        return 0
    if options.role == "storage":
        run_storage_node(kv, options.name, options.listen, key)
        return 0
    if not kv.is_on:
        raise ConfigError("kv.storage is 'off'; expected another value for a cache process")
    run_cache(kv, options.listen or kv.address or default_address(kv), options.parent, key)
    return 0


def ask_cache(options: argparse.Namespace, kv: KVOptions, cluster: ClusterOptions) -> int:
    """Ask, and print the answer as JSON.

    Raises:
        ConfigError: no process to ask, or it does not answer.
    """
    from serving.kv.store import tenant_id
    from serving.kv_process import ask, default_address
    from serving.kv_storage import read_key

    address = options.address or kv.address
    if not address:
        if not kv.directory:
            raise ConfigError(
                "which cache process? Expected --address, or a --config with kv.directory"
            )
        address = default_address(kv)
    tenant = None if options.salt is None else tenant_id(options.salt)
    key = read_key(cluster.key_file)
    numbers = ask(address, options.question, tenant, key=key, node=options.node)
    sys.stdout.write(json.dumps(numbers, indent=2) + "\n")
    return 0


@contextlib.contextmanager
def cache_process(
    kv: KVOptions, cluster: ClusterOptions, options: argparse.Namespace
) -> "Iterator[CacheProcess | None]":
    """The cache process of a server with these flags, which starts meanwhile; None without."""
    if not kv.is_on or kv.address:
        yield None
        return
    from serving.kv_process import CacheProcess
    from serving.kv_storage import read_key

    arguments = [] if options.config is None else ["--config", options.config]
    arguments += [part for change in options.set for part in ("--set", change)]
    process = CacheProcess(kv, arguments, read_key(cluster.key_file))
    try:
        yield process
    finally:
        process.stop()


@contextlib.contextmanager
def cache_link(
    kv: KVOptions,
    cluster: ClusterOptions,
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
    from serving.kv_storage import read_key
    from serving.transport.driver import SystemClock

    key = read_key(cluster.key_file)
    if cache is None:
        ask(kv.address, "stats", timeout_s=5.0, key=key)
    else:
        cache.wait_until_ready()
    address = kv.address if cache is None else cache.address
    assert form is not None, "the model was loaded without transfers"
    link = CacheLink(address, form, SystemClock(), key)
    link.start()
    say(f"Cache   {kv.storage} at {address}")
    try:
        yield link
    finally:
        link.close()
