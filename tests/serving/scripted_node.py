"""A worker process without a model, for tests of clusters: `python -m tests.serving.scripted_node
ROLE NAME CONFIG [PARENT]`. It is run as any other, around a simulated device, which notices wrong
blocks and states, and whose tokens can be worked out by hand.
"""

import asyncio
import json
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np

from serving.cluster import ModelFacts, plan_capacity
from serving.code_version import code_version
from serving.config import ServingConfig, load_config
from serving.core.admission import EngineLimits
from serving.core.step_plan import StepResult
from serving.node_process import WorkerParts, run_worker
from serving.nodes.values import NodeId
from tests.serving.engine.simulated_device import SimulatedDevice

STEP_S = 0.003
FACTS = ModelFacts(
    vocab_size=320, max_position_embeddings=2**20, eos_token_id=1, kv_fingerprint=b"s" * 32
)


class SlowDevice(SimulatedDevice):
    """Steps take `STEP_S`; what is read from it has the types that a device gives."""

    def __init__(self, limits: EngineLimits, buckets: Any) -> None:
        super().__init__(limits, buckets)
        self._sleep = threading.Event()

    def collect(self) -> StepResult:
        self._sleep.wait(STEP_S)
        return super().collect()


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


def main(role: str, name: str, path: str, parent: str = "", version: str = "") -> int:
    """Runs the worker until it is stopped."""
    config = load_config(Path(path))
    parts = WorkerParts(make_device(config), FACTS, code_version=version or code_version())
    said = lambda line: print(json.dumps(line), flush=True)  # noqa: E731
    number = int(parent) if parent else None
    return asyncio.run(run_worker(config, NodeId(role, name), parts, said, number))


if __name__ == "__main__":
    np.seterr(all="raise")
    sys.exit(main(*sys.argv[1:]))
