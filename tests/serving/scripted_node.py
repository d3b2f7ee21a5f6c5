"""Clusters whose workers have no model, for tests: `python -m tests.serving.scripted_node --config
FILE` runs a whole one, with `--role ROLE --name NAME` one node of it. Workers run as any other,
around simulated devices, which notice wrong blocks and states, and whose tokens can be worked out
by hand.
"""

import argparse
import asyncio
import sys
import threading
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

import serving.__main__ as command_line
from serving import node_process
from serving.cluster import ModelFacts, VisionFacts, plan_capacity
from serving.code_version import code_version
from serving.config import (
    CACHE_NAME,
    ROUTER_NAME,
    TIER_ROLES,
    VISION_ROLE,
    ServingConfig,
    load_config,
)
from serving.core.admission import EngineLimits
from serving.core.blocks import BLOCK_SIZE
from serving.core.image_layout import ImageGeometry
from serving.core.request import RequestImage
from serving.core.step_plan import StepResult
from serving.kv.store import PayloadForm, layout_id
from serving.kv_commands import cache_link
from serving.node_process import VisionParts, WorkerParts, run_worker
from serving.nodes.messages import Blocks, Message
from serving.nodes.values import NodeId
from serving.supervisor import meeting_place, run_cluster
from serving.transport.zeromq import ZeroMQNetwork
from sharding.config_file import override_from_text
from tests.serving.engine.simulated_device import ROLLBACK_MAX, SimulatedDevice, features_of

NODE_COMMAND = (sys.executable, "-m", "tests.serving.scripted_node")
STEP_S = 0.01
_BLOCK_BYTES = 8 * BLOCK_SIZE
"""A device's block holds its tokens."""

GEOMETRY = ImageGeometry(
    token_id=318, patch_size=14, downsample_ratio=3, max_image_tokens=32, min_pixels=1764
)
FEATURES = b"i" * 32
FACTS = ModelFacts(
    vocab_size=320,
    max_position_embeddings=2**20,
    eos_token_id=1,
    kv_fingerprint=b"s" * 32,
    kv_form=PayloadForm(layout_id(b"s" * 32), (_BLOCK_BYTES // 2,) * 2, (ROLLBACK_MAX + 1) * 4 * 8),
    images=GEOMETRY,
    features=FEATURES,
)


class SlowDevice(SimulatedDevice):
    """Steps take `STEP_S`; what is read from it has the types that a device gives."""

    def __init__(self, limits: EngineLimits, buckets: Any) -> None:
        super().__init__(limits, buckets)
        self._sleep = threading.Event()

    def collect(self) -> StepResult:
        self._sleep.wait(STEP_S)
        return super().collect()


class SlowNetwork(ZeroMQNetwork):
    """Parts of contexts leave later by the seconds that a file beside the socket says."""

    def send(self, source: NodeId, destination: NodeId, message: Message) -> bool:
        slow = Path(self.address.removeprefix("ipc://")).with_name(f"slow-{source.name}")
        if isinstance(message, Blocks) and slow.exists():
            send = partial(super().send, source, destination, message)
            asyncio.get_running_loop().call_later(float(slow.read_text()), send)
            return True
        return super().send(source, destination, message)


def make_encoder(config: ServingConfig, name: str, version: str) -> VisionParts:
    """An encoder that takes the seconds that a file beside its socket says."""
    slow = Path(config.cluster.address_of(name).removeprefix("ipc://")).with_name(f"slow-{name}")
    sleep = threading.Event()

    def encode(image: RequestImage) -> np.ndarray:
        sleep.wait(float(slow.read_text()) if slow.exists() else STEP_S)
        return features_of(image)

    facts = VisionFacts(GEOMETRY, FEATURES, feature_bytes=4, tokens_per_s=1000.0)
    return VisionParts(encode, facts, version)


def make_device(config: ServingConfig) -> SlowDevice:
    """The device of a configuration."""
    capacity = plan_capacity(config.engine)
    limits = EngineLimits(
        num_blocks=capacity.num_blocks,
        num_slots=capacity.num_slots,
        context_max=config.engine.max_context,
        vocab_size=FACTS.vocab_size,
        eos_token_id=FACTS.eos_token_id,
        num_snapshots=capacity.num_snapshots,
    )
    return SlowDevice(limits, capacity.buckets)


def main(arguments: list[str]) -> int:
    """Runs a whole cluster, or one node of it, until it is stopped."""
    parser = argparse.ArgumentParser()
    for flag in ("--config", "--role", "--name", "--parent", "--code-version"):
        parser.add_argument(flag)
    parser.add_argument("--set", action="append", default=[])
    options = parser.parse_args(arguments)
    if options.role in (ROUTER_NAME, CACHE_NAME, *TIER_ROLES):
        return command_line.main(["node", *arguments])
    config = override_from_text(load_config(options.config), options.set)
    if options.role is None:
        with meeting_place(config.cluster) as changes:
            options.set += changes
            config = override_from_text(config, changes)
            changed = [part for change in options.set for part in ("--set", change)]
            flags = ["--config", options.config, *changed]
            return asyncio.run(run_cluster(config, flags, _say, NODE_COMMAND))
    version = options.code_version or code_version()
    node_process.ZeroMQNetwork = SlowNetwork
    parent = int(options.parent) if options.parent else None
    node_id = NodeId(options.role, options.name)
    if options.role == VISION_ROLE:
        encoder = make_encoder(config, options.name, version)
        return asyncio.run(run_worker(config, node_id, encoder, _say, parent))
    with cache_link(config.kv, config.cluster, FACTS.kv_form, None, _say) as link:
        parts = WorkerParts(make_device(config), FACTS, cache=link, code_version=version)
        return asyncio.run(run_worker(config, node_id, parts, _say, parent))


def _say(line: str) -> None:
    print(line, flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
