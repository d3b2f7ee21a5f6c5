"""Configuration and environment in, wired nodes out.

Everything that differs between a real deployment, a test and a simulation is in the `Environment`:
the clock, the source of randomness and the executor. Nothing below knows which one it runs in.
"""

import random
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from serving.clock import Clock, ns_of_s
from serving.config import EngineOptions, KVOptions, ServingConfig
from serving.core.blocks import BLOCK_SIZE
from serving.core.buckets import TILE_TOKENS, Bucket, BucketTable, CompiledProgram, StepKind
from serving.core.cost import PrefillCost
from serving.core.grammar import GrammarCompiler
from serving.core.image_layout import ImageGeometry
from serving.core.prefill_scheduler import PrefillBudget
from serving.core.profiling import Profiler
from serving.core.replay import ReplayMode, ReplayRule
from serving.engine.engine import Engine, EngineLimits, Executor
from serving.engine.mesh_engine import MeshEngine
from serving.kv.offload import CachePort, OffloadLimits
from serving.kv.store import PayloadForm
from serving.nodes.member_worker import MemberOptions, MemberWorker
from serving.nodes.mesh_worker import MeshWorker
from serving.nodes.node import Node, NodeId
from serving.nodes.reception import RouterOptions
from serving.nodes.router import Router
from serving.nodes.values import MemberCard
from serving.nodes.vision_worker import Encode, VisionOptions, VisionWorker
from sharding.config_file import ConfigError

MESH_WORKER = NodeId("mesh_worker", "0")
ROUTER = NodeId("router", "0")
FRONTEND = NodeId("frontend", "0")

_ROW_TOKENS = (1, 3, 6)
"""Tokens of each row for which decode steps are compiled if there are drafts."""


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """The numbers of the model that serving depends on.

    `images` is None if it takes none. `num_drafts` tokens are drafted by its executor at a time,
    and `step_ms` is the time of its decode steps, as far as they were measured. `prefill_cost` is
    what its prefill steps cost; None if that was not measured. `num_replayed` is that of
    `core.replay.ReplayRule`. `kv_form` is what its blocks are
    outside the device, and `kv_fingerprint` names everything they depend on; None and empty if
    they stay there. `num_ranks` of the executor's devices have rows of their own. `features` names
    what the features of images depend on; empty if there are none.
    """

    vocab_size: int
    max_position_embeddings: int
    eos_token_id: int | None
    images: ImageGeometry | None = None
    num_drafts: int = 0
    step_ms: Mapping[Bucket, float] = field(default_factory=dict[Bucket, float])
    prefill_cost: PrefillCost | None = None
    num_replayed: int = 0
    kv_form: PayloadForm | None = None
    kv_fingerprint: bytes = b""
    num_ranks: int = 1
    features: bytes = b""


@dataclass(frozen=True, slots=True)
class VisionFacts:
    """The numbers of a vision worker's encoder: as in `ModelFacts`, the bytes of the features of a
    token, and what it encodes in a second.
    """

    images: ImageGeometry
    features: bytes
    feature_bytes: int
    tokens_per_s: float


@dataclass(frozen=True, slots=True)
class Environment:
    """What is given from outside. `cache` is the way to the KV tiers; None if there are none."""

    clock: Clock
    random_source: random.Random
    executor: Executor
    grammars: GrammarCompiler | None = None
    profiler: Profiler | None = None
    programs: tuple[CompiledProgram, ...] = ()
    cache: CachePort | None = None


@dataclass(frozen=True, slots=True)
class Cluster:
    """The nodes of this process, and the executors and ways to KV tiers of those that have one."""

    nodes: list[Node]
    executors: Mapping[NodeId, Executor]
    caches: Mapping[NodeId, CachePort] = field(default_factory=dict[NodeId, CachePort])


@dataclass(frozen=True, slots=True)
class Capacity:
    """What has to be compiled and allocated on the device before the first request."""

    buckets: BucketTable
    num_blocks: int
    num_slots: int
    num_snapshots: int
    replay: ReplayRule | None = None


def plan_capacity(options: EngineOptions) -> Capacity:
    """The shapes and pools that the options ask for.

    Raises:
        ConfigError: a context of no whole number of blocks, a pool too small for one request, no
            prefill step from which tokens could be left out, or replay in steps of tiles.
    """
    num_context_blocks, rest = divmod(options.max_context, BLOCK_SIZE)
    if rest:
        raise ConfigError(
            f"engine.max_context is {options.max_context}; expected a multiple of {BLOCK_SIZE}"
        )
    if options.num_blocks <= num_context_blocks:
        raise ConfigError(
            f"engine.num_blocks is {options.num_blocks}; expected at least "
            f"{num_context_blocks + 1}: the reserved block and those of one request of "
            f"{options.max_context} tokens"
        )
    prefill = [
        Bucket(min(options.prefill_rows, num_tokens), num_tokens, num_context_blocks)
        for num_tokens in options.prefill_tokens
    ]
    decode = [
        Bucket(num_rows, num_rows * num_tokens, num_context_blocks)
        for num_rows in options.decode_rows
        for num_tokens in (_ROW_TOKENS if options.has_drafts else (1,))
    ]
    buckets: dict[StepKind, Iterable[Bucket]]
    buckets = {StepKind.PREFILL: prefill, StepKind.DECODE: decode}
    if options.batch_invariant:
        num_rows = max(bucket.num_rows for bucket in (*prefill, *decode))
        buckets = {kind: _in_tiles(some, num_rows) for kind, some in buckets.items()}
    return Capacity(
        BucketTable(buckets),
        options.num_blocks,
        options.decode_rows[-1] + 1,
        options.prefix_snapshots,
        _replay_rule(options),
    )


def _in_tiles(buckets: Iterable[Bucket], num_rows: int) -> list[Bucket]:
    """Buckets of whole tiles for all that `buckets` hold, each for `num_rows` rows.

    What is computed in a tile must not differ between steps, and rows cost next to nothing.
    """
    tiles = {-(-max(b.num_tokens, num_rows) // TILE_TOKENS): b.num_blocks for b in buckets}
    return [Bucket(num_rows, TILE_TOKENS * n, num_blocks) for n, num_blocks in tiles.items()]


def _replay_rule(options: EngineOptions) -> ReplayRule | None:
    if options.replay == "off":
        return None
    if options.batch_invariant:
        raise ConfigError(
            f"engine.replay is {options.replay!r} and engine.batch_invariant true; expected one of "
            "the two: steps in tiles run every token in every layer"
        )
    mode, num_kept = ReplayMode(options.replay), options.replay_keep
    # Smaller steps run all of their tokens.
    if mode is ReplayMode.COMPACT and options.prefill_tokens[-1] < 2 * num_kept:
        raise ConfigError(
            f"engine.replay is 'compact', engine.replay_keep {num_kept} and the largest of "
            f"engine.prefill_tokens {options.prefill_tokens[-1]}; expected a prefill step of at "
            f"least {2 * num_kept} tokens, twice what is kept, or smaller steps would leave "
            "nothing out"
        )
    return ReplayRule(mode, num_kept)


def make_engine(
    options: EngineOptions, facts: ModelFacts, random_source: random.Random
) -> Engine | MeshEngine:
    """The engine that the options ask for.

    Raises:
        ConfigError: the options do not fit together, or not with the model.
    """
    if options.max_context > facts.max_position_embeddings:
        raise ConfigError(
            f"engine.max_context is {options.max_context}; expected at most "
            f"{facts.max_position_embeddings}, the longest context of the model"
        )
    capacity = plan_capacity(options)
    replay = capacity.replay
    if replay is not None:
        replay = replace(replay, num_replayed=facts.num_replayed)
    limits = EngineLimits(
        num_blocks=capacity.num_blocks,
        num_slots=capacity.num_slots,
        num_snapshots=capacity.num_snapshots,
        in_flight_max=options.steps_in_flight,
        num_drafts=facts.num_drafts,
        context_max=options.max_context,
        vocab_size=facts.vocab_size,
        eos_token_id=facts.eos_token_id,
        waiting_max=options.waiting_max,
        replay=replay,
        fingerprint=facts.kv_fingerprint,
    )
    budget = None
    if options.prefill_time_budget_ms:
        if facts.prefill_cost is None:
            raise ConfigError(
                f"engine.prefill_time_budget_ms is {options.prefill_time_budget_ms:g}, but what "
                "prefill steps cost is not known; expected 0, or an executor that was measured"
            )
        budget = PrefillBudget(options.prefill_time_budget_ms, facts.prefill_cost)
    more = (limits, capacity.buckets, random_source, facts.step_ms, budget)
    return Engine(*more) if facts.num_ranks == 1 else MeshEngine(facts.num_ranks, *more)


def build(
    config: ServingConfig, facts: ModelFacts, environment: Environment, frontend: Node
) -> Cluster:
    """One mesh worker that plays every role, with `frontend` in front of it.

    Raises:
        ConfigError: the configuration does not fit the model.
    """
    engine = make_engine(config.engine, facts, environment.random_source)
    worker = MeshWorker(
        MESH_WORKER,
        engine,
        ns_of_s(config.engine.step_timeout_s),
        environment.grammars,
        ns_of_s(config.engine.grammar_timeout_s),
        environment.profiler,
        environment.programs,
        None if environment.cache is None else offload_limits(config.kv),
        environment.clock,
    )
    caches = {} if environment.cache is None else {MESH_WORKER: environment.cache}
    return Cluster([worker, frontend], {MESH_WORKER: environment.executor}, caches)


@dataclass(frozen=True, slots=True)
class ProcessFacts:
    """What a node says of its process: where it listens, what program it runs, and its number."""

    address: str
    code_version: str
    pid: int


def build_member(
    config: ServingConfig,
    facts: ModelFacts,
    environment: Environment,
    node_id: NodeId,
    process: ProcessFacts,
) -> MemberWorker:
    """One worker of several.

    Raises:
        ConfigError: the configuration does not fit the model.
    """
    engine = make_engine(config.engine, facts, environment.random_source)
    if isinstance(engine, MeshEngine):
        raise ConfigError(
            f"sharding {config.sharding} gives {facts.num_ranks} devices rows of their own, and "
            "this worker hands contexts to others; expected a mesh without a rule for batch"
        )
    buckets = engine.buckets
    card = MemberCard(
        address=process.address,
        code_version=process.code_version,
        fingerprint=facts.kv_fingerprint,
        limits=engine.limits,
        prefill_buckets=tuple(buckets.of(StepKind.PREFILL)),
        decode_buckets=tuple(buckets.of(StepKind.DECODE)),
        images=facts.images,
        prefill_cost=facts.prefill_cost,
        kv_bytes=_kv_bytes(facts.kv_form),
        pid=process.pid,
        features=facts.features,
    )
    options = MemberOptions(
        ROUTER, card, ns_of_s(config.cluster.lease_s), ns_of_s(config.cluster.answer_s)
    )
    return MemberWorker(
        node_id,
        engine,
        ns_of_s(config.engine.step_timeout_s),
        options,
        environment.random_source,
        grammars=environment.grammars,
        grammar_timeout_ns=ns_of_s(config.engine.grammar_timeout_s),
        profiler=environment.profiler,
        programs=environment.programs,
        offload=None if environment.cache is None else offload_limits(config.kv),
        clock=environment.clock,
    )


def build_vision(
    config: ServingConfig,
    facts: VisionFacts,
    encode: Encode,
    random_source: random.Random,
    node_id: NodeId,
    process: ProcessFacts,
) -> VisionWorker:
    """One vision worker, which encodes images by `encode`.

    Raises:
        ConfigError: an image would not fit into its memory.
    """
    size, limit = facts.images.max_image_tokens * facts.feature_bytes, config.cluster.vision_bytes
    if size > limit:
        raise ConfigError(
            f"cluster.vision_bytes is {limit}; expected at least {size}, the features of one "
            "image of this model"
        )
    card = MemberCard(
        address=process.address,
        code_version=process.code_version,
        fingerprint=b"",
        limits=None,
        images=facts.images,
        pid=process.pid,
        features=facts.features,
        image_tokens_per_s=facts.tokens_per_s,
    )
    options = VisionOptions(
        ROUTER,
        card,
        limit,
        config.cluster.images_waiting_max,
        ns_of_s(config.engine.step_timeout_s),
    )
    return VisionWorker(node_id, encode, options, random_source)


def _kv_bytes(form: PayloadForm | None) -> tuple[float, int]:
    return (0.0, 0) if form is None else (sum(form.group_bytes) / BLOCK_SIZE, form.state_bytes)


def build_router(
    config: ServingConfig, clock: Clock, random_source: random.Random, code_version: str
) -> Router:
    """The node in front of the workers.

    Raises:
        ConfigError: images of one request are more than may wait.
    """
    options = config.cluster
    if options.images_waiting_max < config.images.per_request_max:
        raise ConfigError(
            f"cluster.images_waiting_max is {options.images_waiting_max} and "
            f"images.per_request_max {config.images.per_request_max}; expected room for at least "
            "the images of one request"
        )
    return Router(
        ROUTER,
        clock,
        RouterOptions(
            code_version=code_version,
            heartbeat_ns=ns_of_s(options.heartbeat_s),
            lost_ns=ns_of_s(options.lost_s),
            # The worker's own limit comes first, and says more.
            answer_ns=2 * ns_of_s(options.answer_s),
            stranded_ns=ns_of_s(options.stranded_s),
            waiting_max=config.engine.waiting_max,
            local_prefill_ms=options.local_prefill_ms,
            images_waiting_max=options.images_waiting_max,
        ),
        random_source,
    )


def offload_limits(options: KVOptions) -> OffloadLimits:
    """How far a worker goes with the tiers that the options describe."""
    return OffloadLimits(
        wait_ns=ns_of_s(options.wait_s),
        retry_ns=ns_of_s(options.retry_s),
        sightings_min=options.sightings_min,
        # As much again as the cache process has in shared memory.
        staged_bytes_max=options.host_bytes,
    )
