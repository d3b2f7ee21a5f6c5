"""The serving configuration: one frozen dataclass per table of the TOML file.

Every field has a default, so a file states only what it changes; `configs/embedded.toml` spells
all of them out. Command line flags arrive through `sharding.config_file.override`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Literal

from serving.kv_config import SECONDS_MAX, KVOptions
from sharding.config_file import check, load

CONFIGS_DIR = Path(__file__).parent / "configs"
DEFAULT_CONFIG = CONFIGS_DIR / "embedded.toml"
DEFAULT_MODEL_DIR = Path(__file__).parents[1] / "deepinfer_jax" / "checkpoints" / "small-v41"
"""The small trained checkpoint that the package carries, in the real on-disk layout."""


COUNT_MAX = 2**31 - 1
"""Blocks, slots and tokens are numbered with 32 bits."""

BYTES_MAX = 2**60
"""More than any pool of memory has."""


@dataclass(frozen=True, slots=True)
class ModelOptions:
    """Which model is served.

    `path` is a checkpoint directory; empty means the small one of this repository. `name` is what
    clients call the model; empty means the directory's name. `cache_format` is `kvq` (cache
    quantised as the model was trained for) or `noq` (cache kept at full precision). `engram` says
    where the Engram tables lie: on the `device` like all weights, or on the `host`, in the mapped
    checkpoint, from where the rows of each step are sent along.
    """

    path: str = ""
    name: str = ""
    cache_format: Literal["kvq", "noq"] = "kvq"
    engram: Literal["device", "host"] = "device"

    @property
    def directory(self) -> Path:
        """The checkpoint directory in effect."""
        return Path(self.path).expanduser() if self.path else DEFAULT_MODEL_DIR

    @property
    def served_name(self) -> str:
        """The model name that requests must give."""
        return self.name or self.directory.resolve().name


@dataclass(frozen=True, slots=True)
class ServerOptions:
    """Where and how HTTP is served.

    `database`: SQLite file with API keys and usage records; empty means one in the user's state
    directory.
    `drain_s`: how long running requests may take to finish after a stop signal.
    `log_format`: how the log is written; as `json` it has a line for each call that has ended.
    `head_bytes_max`, `head_s`: how large the head of a request may be, and how long it may take.
    `body_bytes_max`: larger request bodies are refused.
    `body_s`: how long a request body may take to arrive.
    `prompts_max`: prompts in one completions request.
    `backlog_tokens_max`: tokens that may wait for a slow reader before its request is aborted.
    `profile_dir`: folder for the traces of `POST /profile`; empty makes none.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    database: str = ""
    drain_s: float = 30.0
    log_format: Literal["text", "json"] = "text"
    head_bytes_max: int = 32 * 2**10
    head_s: float = 10.0
    body_bytes_max: int = 16 * 2**20
    body_s: float = 60.0
    prompts_max: int = 64
    backlog_tokens_max: int = 4096
    profile_dir: str = ""

    def __post_init__(self) -> None:
        check(0 <= self.port <= 65535, "port", self.port, "0 to 65535 (0 picks a free one)")
        check(0 <= self.drain_s <= SECONDS_MAX, "drain_s", self.drain_s, f"0 to {SECONDS_MAX:g}")
        for name in ("head_s", "body_s"):
            seconds = getattr(self, name)
            check(0 < seconds <= SECONDS_MAX, name, seconds, f"more than 0, to {SECONDS_MAX:g}")
        for name in ("head_bytes_max", "body_bytes_max", "prompts_max", "backlog_tokens_max"):
            check(getattr(self, name) >= 1, name, getattr(self, name), "at least 1")


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """Sizes of the engine; each listed step size is one compiled shape.

    `max_context`: prompt plus generated tokens of one request; whole blocks.
    `num_blocks`: KV blocks in the pool, the reserved one included.
    `prefill_tokens`: prompt tokens in one prefill step, ascending.
    `prefill_rows`: prompts that may share one prefill step.
    `prefill_time_budget_ms`: how long one prefill step may take, as predicted from steps measured
    at start-up; 0 is as long as the largest takes. It bounds how long running sequences wait for
    their next token; the smallest step runs in any case.
    `decode_rows`: sequences in one decode step, ascending; the last is how many run at once.
    `prefix_snapshots`: places in computed prompts from which other requests can go on; 0 turns the
    reuse of prefixes off.
    `batch_invariant`: tokens and log probabilities of a request are the same bits in any company.
    Steps run in tiles then, which makes them slower.
    `replay`: of a prompt only the last `replay_keep` tokens pass the upper layers, which nearly
    halves its work and changes the answers to longer prompts. `compact` leaves the other tokens
    out, `mask` computes and hides them, to compare with; `off` is the exact model.
    `has_drafts`: tokens are drafted and verified several at a time, with the model's draft module.
    Each of the decode sizes is compiled for rows of 1, 3 and all 6 tokens then.
    `steps_in_flight`: steps dispatched before the first one's tokens are looked at; 2 hides the
    host's work behind the device's, 1 does not.
    `waiting_max`: requests that may wait for room; more are refused.
    `step_timeout_s`: a step that takes longer means that the device is lost.
    `grammar_timeout_s`: how long the grammar of one request may take to compile.
    `cost_file`: what prefill steps cost, as `scripts/fit_cost.py` has fitted it; empty measures it
    at the first start, if anything goes by it.
    `step_records`: file to which a line for each step is added, for that script; empty for none.
    """

    max_context: int = 4096
    num_blocks: int = 513
    prefill_tokens: tuple[int, ...] = (64, 512)
    prefill_rows: int = 8
    prefill_time_budget_ms: float = 0.0
    decode_rows: tuple[int, ...] = (1, 8, 32)
    prefix_snapshots: int = 64
    batch_invariant: bool = False
    replay: Literal["off", "mask", "compact"] = "off"
    replay_keep: int = 140
    has_drafts: bool = False
    steps_in_flight: int = 2
    waiting_max: int = 512
    step_timeout_s: float = 120.0
    grammar_timeout_s: float = 5.0
    cost_file: str = ""
    step_records: str = ""

    def __post_init__(self) -> None:
        for name in ("prefill_tokens", "decode_rows"):
            sizes = getattr(self, name)
            check(
                bool(sizes) and sizes[0] >= 1 and list(sizes) == sorted(set(sizes)),
                name,
                list(sizes),
                "positive sizes in ascending order, at least one",
            )
        counts = (
            "max_context",
            "num_blocks",
            "prefill_rows",
            "replay_keep",
            "steps_in_flight",
            "waiting_max",
        )
        for name in counts:
            value = getattr(self, name)
            check(1 <= value <= COUNT_MAX, name, value, f"1 to {COUNT_MAX}")
        snapshots = self.prefix_snapshots
        is_count = 0 <= snapshots <= COUNT_MAX
        check(is_count, "prefix_snapshots", snapshots, f"0 to {COUNT_MAX}")
        budget_ms = self.prefill_time_budget_ms
        is_time = 0 <= budget_ms <= 1e3 * SECONDS_MAX
        check(is_time, "prefill_time_budget_ms", budget_ms, f"0 to {1e3 * SECONDS_MAX:g}")
        for name in ("step_timeout_s", "grammar_timeout_s"):
            seconds = getattr(self, name)
            check(0 < seconds <= SECONDS_MAX, name, seconds, f"more than 0, to {SECONDS_MAX:g}")


@dataclass(frozen=True, slots=True)
class ImageOptions:
    """Which images of a request are accepted.

    `per_request_max`: images in one request; 0 refuses all.
    `bytes_max`: size of one image file.
    `pixels_max`: width times height of one image, which bounds the memory of decoding it.
    `fetches_urls`: images may be named by web addresses, which are fetched from public hosts only.
    `fetch_s`: how long fetching all images of one request may take.
    `fetch_redirects_max`: redirects that are followed for one image.
    """

    per_request_max: int = 16
    bytes_max: int = 8 * 2**20
    pixels_max: int = 32 * 2**20
    fetches_urls: bool = False
    fetch_s: float = 10.0
    fetch_redirects_max: int = 3

    def __post_init__(self) -> None:
        for name in ("per_request_max", "fetch_redirects_max"):
            check(getattr(self, name) >= 0, name, getattr(self, name), "0 or more")
        is_time = 0 < self.fetch_s <= SECONDS_MAX
        check(is_time, "fetch_s", self.fetch_s, f"more than 0, to {SECONDS_MAX:g}")
        for name in ("bytes_max", "pixels_max"):
            check(getattr(self, name) >= 1, name, getattr(self, name), "at least 1")


@dataclass(frozen=True, slots=True)
class TracingOptions:
    """OpenTelemetry spans of calls.

    `endpoint`: of an OTLP receiver over HTTP, such as `http://127.0.0.1:4318`; empty makes none.
    `service_name`: what the spans name this server.
    `sample_ratio`: share of calls that are traced; those with a `traceparent` go by that.
    """

    endpoint: str = ""
    service_name: str = "deepinfer-jax"
    sample_ratio: float = 1.0

    def __post_init__(self) -> None:
        is_url = not self.endpoint or self.endpoint.startswith(("http://", "https://"))
        check(is_url, "endpoint", self.endpoint, "http://HOST:PORT, or nothing")
        ratio = self.sample_ratio
        check(0 <= ratio <= 1, "sample_ratio", ratio, "0 to 1")


@dataclass(frozen=True, slots=True)
class QuotaOptions:
    """What one tenant may take; 0 means no limit.

    `requests_per_minute`: calls.
    `tokens_per_minute`: prompt tokens that were computed, and generated ones.
    `input_tokens_per_minute`, `cached_tokens_per_minute`, `output_tokens_per_minute`: prompt tokens
    that were computed, those that were reused, and generated ones.
    `concurrent_max`: calls at one time.
    `context_max`: prompt plus generated tokens of one call.
    `held_tokens_max`: tokens of prompts and answers at one time, which KV memory grows with.
    `held_bytes_max`: bytes of KV memory that those may come to, states of sequences included.
    """

    requests_per_minute: int = 0
    tokens_per_minute: int = 0
    input_tokens_per_minute: int = 0
    cached_tokens_per_minute: int = 0
    output_tokens_per_minute: int = 0
    concurrent_max: int = 0
    context_max: int = 0
    held_tokens_max: int = 0
    held_bytes_max: int = 0

    def __post_init__(self) -> None:
        for option in fields(self):
            value = getattr(self, option.name)
            largest = BYTES_MAX if option.name == "held_bytes_max" else COUNT_MAX
            check(0 <= value <= largest, option.name, value, f"0 to {largest}; 0: no limit")


@dataclass(frozen=True, slots=True)
class PriceOptions:
    """What usage records count as cost, in units of one currency; 0 is free.

    `input`, `cached`, `output`: of a million prompt tokens that were computed, of as many that were
    reused, and of as many generated ones.
    `image`: of one image, beyond its tokens.
    """

    input: float = 0.0
    cached: float = 0.0
    output: float = 0.0
    image: float = 0.0

    def __post_init__(self) -> None:
        for option in fields(self):
            value = getattr(self, option.name)
            check(0 <= value <= COUNT_MAX, option.name, value, f"0 to {COUNT_MAX}")


VISION_ROLE = "vision"
WORKER_ROLES = ("prefill", "decode", VISION_ROLE)
"""The roles that serve requests, in the order in which a cluster starts them."""

TIER_ROLES = ("storage", "metadata")
"""The roles that keep what workers have computed, and tell nodes of each other."""

NEEDED_ROLES = ("prefill", "decode")
"""Those without which there is no cluster. Without `vision`, prefill workers encode images."""

ROUTER_NAME = "router"
"""What the router is called among nodes."""

CACHE_NAME = "cache"
"""What the cache process of a cluster's machine is called among nodes."""


@dataclass(frozen=True, slots=True)
class NodeOptions:
    """One node of a cluster.

    `role`: what it does.
    `address`: where it listens, such as `tcp://10.0.0.7:7001`; empty for a socket in
    `cluster.directory`.
    """

    role: Literal["prefill", "decode", "vision", "storage", "metadata"]
    address: str = ""


@dataclass(frozen=True, slots=True)
class ClusterOptions:
    """Which processes serve together; a table without nodes means one process for everything.

    `nodes`: by name: workers, storage nodes and at most one metadata node.
    `router`: where the router listens; empty for a socket in `directory`.
    `directory`: of sockets, on one machine; empty makes one that is removed at the end.
    `key_file`: holds the secret that all nodes share; empty makes one in `directory`.
    `heartbeat_s`: how often workers are heard of.
    `lost_s`: a worker that is silent for so long is lost, and its requests go elsewhere.
    `answer_s`: how long a worker may take to keep room, or to send a part of a context.
    `lease_s`: how long a computed context waits to be pulled.
    `stranded_s`: how long requests wait while there is no worker of a role.
    `context_transfer`: how contexts go to decode workers: `auto` through shared memory between
    nodes with `ipc://` addresses and over sockets else, `sockets` always over these.
    `local_prefill_ms`: a prompt is computed where it decodes, and its context not moved, if that is
    predicted to take no longer, from steps measured at the first start; 0 moves all.
    `vision_bytes`: of the features of images that a vision worker keeps.
    `images_waiting_max`: images that may wait for vision workers; requests with more are refused.
    """

    nodes: Mapping[str, NodeOptions] = field(default_factory=dict[str, NodeOptions])
    router: str = ""
    directory: str = ""
    key_file: str = ""
    heartbeat_s: float = 0.5
    lost_s: float = 3.0
    answer_s: float = 5.0
    lease_s: float = 10.0
    stranded_s: float = 5.0
    context_transfer: Literal["auto", "sockets"] = "auto"
    local_prefill_ms: float = 0.0
    vision_bytes: int = 2**30
    images_waiting_max: int = 256

    def __post_init__(self) -> None:
        for name in ("heartbeat_s", "lost_s", "answer_s", "lease_s", "stranded_s"):
            seconds = getattr(self, name)
            check(0 < seconds <= SECONDS_MAX, name, seconds, f"more than 0, to {SECONDS_MAX:g}")
        local_ms = self.local_prefill_ms
        is_time = 0 <= local_ms <= 1e3 * SECONDS_MAX
        check(is_time, "local_prefill_ms", local_ms, f"0 to {1e3 * SECONDS_MAX:g}")
        size, count = self.vision_bytes, self.images_waiting_max
        check(1 <= size <= BYTES_MAX, "vision_bytes", size, f"1 to {BYTES_MAX}")
        check(1 <= count <= COUNT_MAX, "images_waiting_max", count, f"1 to {COUNT_MAX}")
        longer = 2 * self.heartbeat_s
        check(self.lost_s >= longer, "lost_s", self.lost_s, f"at least {longer:g}: two heartbeats")
        if not self.nodes:
            return
        for role in NEEDED_ROLES:
            has_role = any(node.role == role for node in self.nodes.values())
            check(has_role, "nodes", "/".join(self.nodes), f"a {role} worker among them")
        for name, whose in ((ROUTER_NAME, "router"), (CACHE_NAME, "cache process")):
            is_free = name not in self.nodes
            check(is_free, f"nodes.{name}", "a node", f"another name; this is the {whose}'s")
        metadata = self.named("metadata")
        check(len(metadata) <= 1, "nodes", "/".join(metadata), "one metadata node at most")
        places = {ROUTER_NAME: self.router} | {n: o.address for n, o in self.nodes.items()}
        seen: dict[str, str] = {}
        for name, address in places.items():
            where = f"nodes.{name}.address"
            is_one_machine = "//*" not in address and "//0.0.0.0" not in address
            check(
                is_one_machine, where, address, "one that other machines can use, not all of them"
            )
            other = seen.setdefault(address, name)
            is_own = not address or other == name
            check(is_own, where, address, f"another one than that of {other}")

    @property
    def is_on(self) -> bool:
        """Whether there is more than one process."""
        return bool(self.nodes)

    def named(self, role: str) -> list[str]:
        """The names of the nodes of a role."""
        return [name for name, node in self.nodes.items() if node.role == role]

    @property
    def metadata(self) -> str:
        """Where the metadata node listens; empty if there is none, or nobody says."""
        return next((self.address_of(name) for name in self.named("metadata")), "")

    def address_of(self, name: str) -> str:
        """Where the node of a name listens; `router` for the router. Empty if nobody says."""
        node = self.nodes.get(name)
        given = self.router if name == ROUTER_NAME else "" if node is None else node.address
        if given or not self.directory:
            return given
        return f"ipc://{Path(self.directory).expanduser().resolve() / name}.sock"


@dataclass(frozen=True, slots=True)
class ServingConfig:
    """Everything a server or an offline run needs to know.

    `sharding` names a mesh plan: a file of `sharding/configs` without its ending, or a path.
    `quotas` are by tenant; those named `default` are for every tenant without its own.
    """

    model: ModelOptions = field(default_factory=ModelOptions)
    server: ServerOptions = field(default_factory=ServerOptions)
    engine: EngineOptions = field(default_factory=EngineOptions)
    images: ImageOptions = field(default_factory=ImageOptions)
    quotas: Mapping[str, QuotaOptions] = field(default_factory=lambda: {"default": QuotaOptions()})
    kv: KVOptions = field(default_factory=KVOptions)
    tracing: TracingOptions = field(default_factory=TracingOptions)
    prices: PriceOptions = field(default_factory=PriceOptions)
    cluster: ClusterOptions = field(default_factory=ClusterOptions)
    sharding: str = "single"

    def __post_init__(self) -> None:
        kv, storage = self.kv, self.cluster.named("storage")
        is_erasure = kv.storage == "erasure" and not kv.address
        if is_erasure:
            names = {*storage, *kv.erasure.nodes}
            code = (kv.erasure.data_fragments, kv.erasure.parity_fragments)
            check(bool(names), "kv.erasure.nodes", "none", "at least one storage node")
            is_enough = not storage or len(names) >= sum(code)
            what = f"{len(names)} storage nodes"
            check(is_enough, "cluster.nodes", what, f"at least {sum(code)}, a fragment for each")
        for name in storage:
            is_used = kv.storage == "erasure"
            check(is_used, f"cluster.nodes.{name}", "a storage node", "kv.storage = 'erasure'")

    @property
    def tiers(self) -> KVOptions:
        """The table `kv` with what the nodes of the cluster add to it."""
        kv, cluster = self.kv, self.cluster
        has_tier_nodes = any(node.role in TIER_ROLES for node in cluster.nodes.values())
        if cluster.directory and not kv.directory and has_tier_nodes:
            kv = replace(kv, directory=str(Path(cluster.directory).expanduser() / "kv"))
        addresses = {name: cluster.address_of(name) for name in cluster.named("storage")}
        if any(addresses.values()):
            nodes = {**addresses, **kv.erasure.nodes}
            kv = replace(kv, erasure=replace(kv.erasure, nodes=nodes))
        if cluster.metadata and kv.storage in ("disk", "object") and not kv.metadata:
            kv = replace(kv, metadata=cluster.metadata)
        return kv


def load_config(path: str | Path | None = None) -> ServingConfig:
    """Reads a serving configuration; None reads the embedded default.

    Raises:
        sharding.config_file.ConfigError: the file cannot be read, or holds an unknown key or an
            unusable value.
    """
    return load(path or DEFAULT_CONFIG, ServingConfig)
