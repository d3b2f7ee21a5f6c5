"""`python -m serving node | cache`: run a node of the KV tiers, and ask one.

What runs them is imported where it is used, because every command line imports this module.
"""

import argparse
import asyncio
import contextlib
import json
import sys
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from serving.config import (
    CACHE_NAME,
    ROUTER_NAME,
    WORKER_ROLES,
    ClusterOptions,
    KVOptions,
    ServingConfig,
)
from sharding.config_file import ConfigError

if TYPE_CHECKING:
    from serving.frontend.cache_admin import CacheAccess, Numbers
    from serving.kv.cluster_key import ClusterKey
    from serving.kv.eviction import TenantLimits
    from serving.kv.link import CacheLink
    from serving.kv.store import PayloadForm
    from serving.kv_process import CacheProcess

ROLES = (CACHE_NAME, "metadata", "storage", ROUTER_NAME, *WORKER_ROLES)
QUESTIONS = ("stats", "flush", "purge", "verify", "repair", "drain", "rejoin", "stop")
PREFIX_ACTIONS = ("pin", "unpin", "warm")
_WARM_S = 900.0
_CACHE_START_S = 30.0
"""How long a worker waits for a cache process, which may be about to be started anew."""

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
        choices=(*QUESTIONS, *PREFIX_ACTIONS),
        help="stats: numbers; flush: write what waits; purge: forget everything, or a tenant; "
        "verify: read and check everything in storage; repair: make lost fragments anew; drain: "
        "have a storage node give away what it holds; rejoin: have it take again; stop: write what "
        "waits and end; pin, unpin, warm: keep a prompt in shared memory, no longer, or bring it "
        "there",
    )
    cache.add_argument(
        "--address", help="of the cache process (default: the one that uses kv.directory)"
    )
    cache.add_argument("--server", metavar="URL", help="for pin, unpin and warm: whose model it is")
    cache.add_argument("--prompt-file", type=Path, help="for pin, unpin and warm: the text")
    cache.add_argument("--tenant", help="for pin, unpin and warm: whose prompt it is")
    cache.add_argument("--api-key", help="for pin, unpin and warm: a key with the scope admin")
    cache.add_argument("--salt", help="purge only what requests with this cache_salt have left")
    cache.add_argument("--node", default="", help="the storage node to drain, or to rejoin")
    for command in (node, cache):
        add_config(command)


def run_node(
    options: argparse.Namespace,
    config: ServingConfig,
    salt_of: Callable[[str], str | None],
) -> int:
    """Run a node until it is stopped; `salt_of` gives the salts of tenants with keys.

    Raises:
        ConfigError: the configuration has no tiers, or they cannot be used.
    """
    from serving.kv_storage import read_key, stop_signal

    kv, cluster = config.tiers, config.cluster
    key = read_key(cluster.key_file)
    with stop_signal(options.parent) as is_over:
        if options.role == "storage":
            from serving.kv_storage import run_storage_node

            run_storage_node(kv, options.name, options.listen, key, cluster.metadata, is_over)
            return 0
        from serving.kv_process import default_address, limits_by_tenant, run_cache

        limits = limits_by_tenant(kv, salt_of)
        if options.role == "metadata":
            address = options.listen or cluster.metadata or kv.metadata
            _run_metadata(kv, options.name, address, key, limits, is_over)
            return 0
        if not kv.is_on:
            raise ConfigError("kv.storage is 'off'; expected another value for a cache process")
        address = options.listen or kv.address or default_address(kv)
        run_cache(kv, address, is_over, key, limits)
    return 0


def _run_metadata(
    kv: KVOptions,
    name: str,
    address: str,
    key: "ClusterKey | None",
    limits: "dict[bytes, TenantLimits]",
    is_over: Callable[[], bool],
) -> None:
    from serving.kv_storage import check_address, print_ready
    from serving.metadata_process import run_metadata

    if not address or not kv.directory:
        raise ConfigError(
            "a metadata node needs --listen or kv.metadata, and a folder in kv.directory"
        )
    check_address(address, key)
    run_metadata(kv, name, address, partial(print_ready, "metadata"), key, limits, is_over)


def ask_cache(options: argparse.Namespace, kv: KVOptions, cluster: ClusterOptions) -> int:
    """Ask, and print the answer as JSON.

    Raises:
        ConfigError: no process to ask, or it does not answer.
    """
    if options.question in PREFIX_ACTIONS:
        sys.stdout.write(json.dumps(_ask_server(options), indent=2) + "\n")
        return 0
    from serving.kv.store import tenant_id
    from serving.kv_process import ask, default_address
    from serving.kv_storage import read_key

    address = options.address or kv.address or cluster.address_of(CACHE_NAME)
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


def _ask_server(options: argparse.Namespace) -> object:
    """What a server answers to an action on a prompt.

    Raises:
        ConfigError: something is missing, or the server refuses or does not answer.
    """
    if not options.server or options.prompt_file is None:
        raise ConfigError(f"{options.question} needs --server and --prompt-file")
    try:
        body = {"action": options.question, "prompt": options.prompt_file.read_text("utf-8")}
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{options.prompt_file}: cannot be read: {error}") from None
    body |= {
        name: value
        for name, value in (("tenant", options.tenant), ("cache_salt", options.salt))
        if value is not None
    }
    headers = {"content-type": "application/json"}
    if options.api_key:
        headers["authorization"] = f"Bearer {options.api_key}"
    url = f"{options.server.rstrip('/')}/admin/cache"
    try:
        request = urllib.request.Request(url, json.dumps(body).encode(), headers)
        with urllib.request.urlopen(request, timeout=_WARM_S) as answer:
            return json.load(answer)
    except urllib.error.HTTPError as error:
        raise ConfigError(f"{url}: {_message(error.read())}") from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"{url}: no answer: {error}") from None


def _message(raw: bytes) -> str:
    """What an error answer says."""
    try:
        return str(json.loads(raw)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return raw[:200].decode("utf-8", "replace")


def cache_access(
    address: str, cluster: ClusterOptions, fingerprint: bytes, salt_of: Callable[[str], str | None]
) -> "CacheAccess":
    """The way of a server's operators to its tiers."""
    from serving.frontend.cache_admin import CacheAccess, CacheRefusal
    from serving.kv_process import ask
    from serving.kv_storage import read_key

    key = read_key(cluster.key_file)

    async def ask_tiers(
        what: str, tenant: bytes | None, keys: bytes, timeout_s: float
    ) -> "Numbers":
        try:
            return await asyncio.to_thread(
                ask, address, what, tenant, timeout_s, key=key, keys=keys
            )
        except ConfigError as error:
            raise CacheRefusal(str(error)) from None

    return CacheAccess(ask_tiers, fingerprint, salt_of)


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
        ask(kv.address, "stats", timeout_s=_CACHE_START_S, key=key)
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
