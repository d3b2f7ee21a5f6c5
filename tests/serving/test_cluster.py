"""Goal: the configuration becomes the shapes, pools and limits it promises, and combinations that
cannot serve one full request are refused before anything is compiled.

Method: capacities compared with numbers worked out by hand; a built cluster answers a request.
"""

import random
from dataclasses import replace

import numpy as np
import pytest

from serving.cluster import (
    FRONTEND,
    MESH_WORKER,
    Environment,
    ModelFacts,
    ProcessFacts,
    VisionFacts,
    build,
    build_router,
    build_vision,
    make_engine,
    plan_capacity,
)
from serving.config import ClusterOptions, EngineOptions, ServingConfig
from serving.core.buckets import Bucket, StepKind
from serving.core.cost import PrefillCost
from serving.core.image_layout import ImageGeometry
from serving.core.replay import ReplayMode, ReplayRule
from serving.core.request import Request, RequestImage, SamplingParams
from serving.nodes import messages
from serving.nodes.messages import Message
from serving.nodes.node import Execute, NodeId, Outbox, Send
from serving.nodes.vision_worker import VisionWorker
from serving.transport.driver import SystemClock
from sharding.config_file import ConfigError
from tests.serving.scripted import ScriptedExecutor

FACTS = ModelFacts(vocab_size=320, max_position_embeddings=4096, eos_token_id=1)


class SilentNode:
    """A frontend that asks for nothing."""

    node_id = FRONTEND
    outbox = Outbox()

    def on_message(self, source: NodeId, message: Message) -> None:
        pass

    def on_timer(self, name: str) -> None:
        pass


def test_capacity_follows_the_options() -> None:
    options = EngineOptions(
        max_context=512,
        num_blocks=9,
        prefill_tokens=(2, 64),
        prefill_rows=4,
        decode_rows=(1, 6),
        prefix_snapshots=3,
        steps_in_flight=1,
    )
    capacity = plan_capacity(options)
    assert list(capacity.buckets) == [
        # No prompt can share a chunk of 2 tokens with more than one other.
        (StepKind.PREFILL, Bucket(2, 2, 4)),
        (StepKind.PREFILL, Bucket(4, 64, 4)),
        (StepKind.DECODE, Bucket(1, 1, 4)),
        (StepKind.DECODE, Bucket(6, 6, 4)),
    ]
    assert capacity.num_blocks == 9
    assert capacity.num_slots == 7, "six sequences and the padding slot"
    assert capacity.num_snapshots == 3
    engine = make_engine(options, FACTS, random.Random(0))
    assert (engine.limits.num_slots, engine.limits.num_snapshots) == (7, 3)
    assert engine.limits.in_flight_max == 1


def test_with_drafts_decode_steps_have_room_for_several_tokens_of_a_row() -> None:
    options = EngineOptions(max_context=512, decode_rows=(1, 8), has_drafts=True)
    decode = plan_capacity(options).buckets.of(StepKind.DECODE)
    assert sorted((bucket.num_rows, bucket.num_tokens) for bucket in decode) == [
        (1, 1),
        (1, 3),
        (1, 6),
        (8, 8),
        (8, 24),
        (8, 48),
    ]
    facts = replace(FACTS, num_drafts=5)
    assert make_engine(options, facts, random.Random(0)).limits.num_drafts == 5


def test_batch_invariant_steps_are_whole_tiles_for_the_same_rows() -> None:
    options = EngineOptions(
        max_context=512,
        prefill_tokens=(20, 512),
        decode_rows=(1, 4, 40),
        has_drafts=True,
        batch_invariant=True,
    )
    buckets = plan_capacity(options).buckets
    assert buckets.of(StepKind.PREFILL) == (Bucket(40, 48, 4), Bucket(40, 512, 4))
    decode = [Bucket(40, num_tokens, 4) for num_tokens in (48, 128, 240)]
    assert list(buckets.of(StepKind.DECODE)) == decode


def test_replay_of_the_options_is_that_of_the_engine() -> None:
    for name in ("mask", "compact"):
        options = EngineOptions(replay=name, replay_keep=150)
        rule = ReplayRule(ReplayMode(name), 150)
        assert plan_capacity(options).replay == rule
        assert make_engine(options, FACTS, random.Random(0)).limits.replay == rule
    assert plan_capacity(EngineOptions(replay_keep=150)).replay is None


def test_impossible_capacities_are_refused() -> None:
    small = EngineOptions(replay="compact", prefill_tokens=(64, 279))
    with pytest.raises(ConfigError, match="largest of engine.prefill_tokens 279; .* at least 280"):
        plan_capacity(small)
    plan_capacity(replace(small, replay="mask"))
    with pytest.raises(ConfigError, match="replay is .mask. and engine.batch_invariant true"):
        plan_capacity(replace(small, replay="mask", batch_invariant=True))
    with pytest.raises(ConfigError, match="max_context is 500; expected a multiple of 128"):
        plan_capacity(EngineOptions(max_context=500))
    with pytest.raises(ConfigError, match="num_blocks is 32; expected at least 33"):
        plan_capacity(EngineOptions(max_context=4096, num_blocks=32))
    plan_capacity(EngineOptions(max_context=4096, num_blocks=33))


def test_engine_has_the_limits_of_options_and_model() -> None:
    options = EngineOptions(max_context=256, num_blocks=5, waiting_max=3, decode_rows=(2,))
    limits = make_engine(options, FACTS, random.Random(1)).limits
    assert (limits.context_max, limits.num_blocks, limits.num_slots) == (256, 5, 3)
    assert (limits.waiting_max, limits.vocab_size, limits.eos_token_id) == (3, 320, 1)
    with pytest.raises(ConfigError, match="expected at most 4096, the longest context"):
        make_engine(EngineOptions(max_context=8192), FACTS, random.Random(1))


def test_a_time_budget_shortens_prefill_steps() -> None:
    options = EngineOptions(
        max_context=1024,
        prefill_tokens=(64, 512),
        prefill_time_budget_ms=100,
        prefix_snapshots=0,
    )
    # Within 100 ms are 64 tokens and their padding, but not 512.
    facts = replace(FACTS, prefill_cost=PrefillCost(5.0, 1.0, 0.0))
    lengths: list[int] = []
    for some in (options, replace(options, prefill_time_budget_ms=0.0)):
        engine = make_engine(some, facts, random.Random(0))
        engine.admit(Request("a", (3,) * 500, SamplingParams(max_tokens=2)))
        plan = engine.plan()
        assert plan is not None
        lengths.append(len(plan.token_ids))
    assert lengths == [64, 500]
    with pytest.raises(ConfigError, match="prefill_time_budget_ms is 100, but what prefill steps"):
        make_engine(options, FACTS, random.Random(0))


def test_built_worker_serves_and_uses_the_executor() -> None:
    executor = ScriptedExecutor(lambda position: 7)
    environment = Environment(SystemClock(), random.Random(1), executor)
    cluster = build(ServingConfig(), FACTS, environment, SilentNode())
    assert cluster.executors == {MESH_WORKER: executor}
    worker, frontend = cluster.nodes
    assert (worker.node_id, frontend.node_id) == (MESH_WORKER, FRONTEND)
    worker.on_message(FRONTEND, messages.Submit(Request("a", (3,), SamplingParams(max_tokens=2))))
    effects = worker.outbox.take()
    assert effects[0] == Send(FRONTEND, messages.Admitted("a"))
    assert isinstance(effects[1], Execute)


def test_vision_workers_need_room_for_an_image_and_routers_for_those_of_a_request() -> None:
    facts = VisionFacts(
        ImageGeometry(5, 14, 3, 100, 1764), b"f" * 32, feature_bytes=8, tokens_per_s=1.0
    )

    def encode(image: RequestImage) -> np.ndarray:
        return np.zeros((image.num_tokens, 8), np.uint8)

    def make(size: int) -> VisionWorker:
        config = ServingConfig(cluster=ClusterOptions(vision_bytes=size))
        process, node_id = ProcessFacts("ipc://v", "1", 7), NodeId("vision", "v")
        return build_vision(config, facts, encode, random.Random(1), node_id, process)

    assert make(800).status().vision is not None
    with pytest.raises(ConfigError, match="vision_bytes is 799; expected at least 800"):
        make(799)
    few = ServingConfig(cluster=ClusterOptions(images_waiting_max=15))
    with pytest.raises(ConfigError, match="images_waiting_max is 15 and images.per_request_max 16"):
        build_router(few, SystemClock(), random.Random(1), "1")
