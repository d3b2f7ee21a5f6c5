"""The router of a cluster as a process of its own, with HTTP in front of it.

It loads no model: what it needs to know of it, workers say when they join. It begins to answer HTTP
when there is a worker of each role, so who connects before waits, or is refused by the machine.
"""

import asyncio
import contextlib
import os
import random
import socket
from collections.abc import Callable, Iterator
from dataclasses import replace

import zmq

from serving.cluster import FRONTEND, ROUTER, build_router
from serving.code_version import code_version
from serving.config import ROUTER_NAME, ServingConfig
from serving.frontend.cache_admin import CacheAccess
from serving.frontend.conversion import ServedModel
from serving.frontend.gateway import Gateway
from serving.frontend.images import ImageReader
from serving.frontend.quota import KVCosts
from serving.frontend.text import TextCodec
from serving.frontend.tracing import open_tracer
from serving.http_service import Front, Tenancy, serve_http
from serving.kv.whereabouts import Announcer, Here
from serving.node_process import cluster_key, watch_parent
from serving.nodes.pools import DECODE
from serving.nodes.router import Router
from serving.nodes.values import MemberCard
from serving.observe import ServiceMetrics
from serving.transport.driver import Driver, SystemClock
from serving.transport.zeromq import ZeroMQNetwork
from sharding.config_file import ConfigError

_POLL_S = 0.02


async def run_router(
    config: ServingConfig,
    listener: socket.socket,
    tenancy: Tenancy,
    say: Callable[[str], None],
    parent: int | None = None,
    make_access: Callable[[bytes], CacheAccess] | None = None,
) -> int:
    """Route requests to workers until stopped; the exit code.

    Args:
        make_access: gives the way to the KV tiers for a model's fingerprint; None without tiers.

    Raises:
        ConfigError: it cannot listen for workers, or the tokenizer cannot be read.
    """
    codec = TextCodec.load(config.model.directory)
    clock = SystemClock()
    router = build_router(config, clock, random.Random(), code_version())
    gateway = Gateway(FRONTEND, ROUTER, clock, ServiceMetrics(), config.server.backlog_tokens_max)
    address = config.cluster.address_of(ROUTER_NAME)
    async with Driver([router, gateway], {}) as driver:
        gateway.flush = driver.perform
        try:
            network = ZeroMQNetwork(address, cluster_key(config), driver.deliver)
        except zmq.ZMQError as error:
            raise ConfigError(f"router: cannot listen at {address}: {error.strerror}") from None
        async with network:
            driver.remote = network
            router.start()
            driver.perform(ROUTER)
            watch = asyncio.create_task(watch_parent(parent, lambda: os._exit(1)))
            say(f"Routing at {network.address}; waiting for workers")
            card = await _first_card(router)
            model = _served_model(config, codec, card)
            num_decode = sum(node.role == "decode" for node in config.cluster.nodes.values())
            rows = tuple(num * max(num_decode, 1) for num in config.engine.decode_rows)
            engine, costs = replace(config.engine, decode_rows=rows), KVCosts(*card.kv_bytes)
            access = None if make_access is None else make_access(card.fingerprint)
            tracing = open_tracer(config.tracing, driver, str(ROUTER))
            with _tier_nodes(config, network.address, clock) as nodes, tracing as tracer:

                def overview() -> dict[str, object]:
                    return {**router.overview(), "tier_nodes": nodes()}

                front = Front(gateway, model, engine, costs, access, overview, tracer)
                await serve_http(config, front, listener, tenancy, clock, say)
            watch.cancel()
    return 0


async def _first_card(router: Router) -> MemberCard:
    """What the first workers say of their model, once there are some of each role."""
    while router.pools.missing_roles:
        await asyncio.sleep(_POLL_S)
    return router.registry.members(DECODE)[0].card


@contextlib.contextmanager
def _tier_nodes(
    config: ServingConfig, address: str, clock: SystemClock
) -> Iterator[Callable[[], list[dict[str, object]]]]:
    """What the nodes of the KV tiers tell of themselves; nothing without a metadata node."""
    metadata = config.cluster.metadata
    if not metadata:
        yield list
        return
    here = Here(0, ROUTER.role, ROUTER.name, address, os.getpid())
    announcer = Announcer(metadata, here, cluster_key(config), clock)

    async def beat() -> None:
        while True:
            announcer.beat()
            await asyncio.sleep(announcer.every_s)

    beating = asyncio.create_task(beat())

    def nodes() -> list[dict[str, object]]:
        found = [node for node in announcer.found() if node.role != ROUTER.role]
        return [
            {
                "node": f"{node.role}/{node.name}",
                "address": node.address,
                "pid": node.pid,
                "state": "silent" if node.silent_s > config.cluster.lost_s else "available",
                "silent_s": node.silent_s,
                "numbers": node.numbers,
            }
            for node in sorted(found, key=lambda node: (node.role, node.name))
        ]

    try:
        yield nodes
    finally:
        beating.cancel()
        announcer.close()


def _served_model(config: ServingConfig, codec: TextCodec, card: MemberCard) -> ServedModel:
    if card.images is not None:
        codec = codec.with_image_token(card.images.token_id)
    return ServedModel(
        name=config.model.served_name,
        codec=codec,
        vocab_size=card.engine_limits.vocab_size,
        context_max=card.engine_limits.context_max,
        eos_token_id=card.engine_limits.eos_token_id,
        images=ImageReader(card.images, config.images),
    )
