"""What messages between nodes speak of: nodes, members, and contexts that are handed over."""

import enum
from dataclasses import dataclass, field

from serving.core.admission import EngineLimits
from serving.core.buckets import Bucket
from serving.core.cost import PrefillCost
from serving.core.image_layout import ImageGeometry
from serving.engine.engine import EngineStatus
from serving.kv.offload import OffloadStatus


@dataclass(frozen=True, slots=True, order=True)
class NodeId:
    """Names one node: its role (`mesh_worker`, `frontend`, ...) and a name within the role."""

    role: str
    name: str

    def __str__(self) -> str:
        return f"{self.role}/{self.name}"


@dataclass(frozen=True, slots=True)
class MemberCard:
    """What a worker says of itself when it joins.

    Attributes:
        address: where its process listens.
        code_version: of the program that runs there.
        fingerprint: what its KV bytes depend on; only equal ones can be handed over.
        limits: of its engine; None for a vision worker, which has none.
        prefill_buckets, decode_buckets: its compiled shapes.
        images: None for a model that takes none.
        prefill_cost: what its prefill steps cost; None if that was not measured.
        kv_bytes: that a token takes, and a sequence besides; zeros where that is unknown.
        pid: number of its process, for people.
        features: what features of images depend on (`core/image_features.py`); empty without.
        image_tokens_per_s: that a vision worker encodes, as measured; 0 for others.
    """

    address: str
    code_version: str
    fingerprint: bytes
    limits: EngineLimits | None
    prefill_buckets: tuple[Bucket, ...] = ()
    decode_buckets: tuple[Bucket, ...] = ()
    images: ImageGeometry | None = None
    prefill_cost: PrefillCost | None = None
    kv_bytes: tuple[float, int] = (0.0, 0)
    pid: int = 0
    features: bytes = b""
    image_tokens_per_s: float = 0.0

    @property
    def engine_limits(self) -> EngineLimits:
        """The limits of a worker that is known to have an engine."""
        assert self.limits is not None, f"the worker at {self.address} has no engine"
        return self.limits


@dataclass(frozen=True, slots=True)
class HandOffCounts:
    """Hand-offs of one worker: those it holds or waits for now, and what came of others so far.

    `num_held` contexts wait to be pulled, `num_reserved` places are kept for requests to come,
    `num_pulling` contexts are on their way here, and `num_ready` are here and wait for room.
    `num_spared_blocks` of contexts were here already and were not pulled.
    `refused` counts references by why they were refused.
    """

    num_held: int = 0
    num_reserved: int = 0
    num_pulling: int = 0
    num_ready: int = 0
    num_given: int = 0
    num_taken: int = 0
    num_lost: int = 0
    num_spared_blocks: int = 0
    refused: dict[str, int] = field(default_factory=dict[str, int])


@dataclass(frozen=True, slots=True)
class VisionStatus:
    """What a vision worker has, and what it has done so far.

    `num_waiting` images with `num_waiting_tokens` tokens are to be encoded, `num_encoding` are
    being. `num_kept` images are kept as `kept_bytes`, `num_evicted` had to go. Of images asked for,
    `num_encoded` were computed and `num_hits` were here; `num_sent` went to those who asked for
    them, who asked for `num_missing` that were here no more.
    """

    num_waiting: int = 0
    num_waiting_tokens: int = 0
    num_encoding: int = 0
    num_kept: int = 0
    kept_bytes: int = 0
    num_evicted: int = 0
    num_encoded: int = 0
    num_hits: int = 0
    num_sent: int = 0
    num_missing: int = 0


@dataclass(frozen=True, slots=True)
class FeatureCounts:
    """Features of images that a worker has pulled from vision workers.

    `num_pulling` requests wait for theirs, and `held_bytes` are here for those that were not
    computed yet. `num_taken` came, `num_lost` did not, so that their images are encoded here.
    """

    num_pulling: int = 0
    held_bytes: int = 0
    num_taken: int = 0
    num_lost: int = 0


@dataclass(frozen=True, slots=True)
class NodeStatus:
    """How a worker is at one moment. `failure` says why it cannot serve, None when it can.

    `engine` is None for a vision worker, `vision` for all others.
    """

    failure: str | None
    engine: EngineStatus | None
    hand_offs: HandOffCounts = HandOffCounts()
    offload: OffloadStatus | None = None
    features: FeatureCounts = FeatureCounts()
    vision: VisionStatus | None = None


@dataclass(frozen=True, slots=True)
class FeatureRef:
    """Where the features of an image are: at a vision worker, under the image's digest."""

    digest: bytes
    holder: NodeId
    address: str


@dataclass(frozen=True, slots=True)
class HandOffRef:
    """Names a context that a prefill worker holds for one decode worker, for a while.

    Attributes:
        holder: where it is.
        generation: of the life that the holder had then.
        number: of the context there.
        num_tokens: whose KV it is.
        num_blocks: that they fill, the last perhaps in part.
    """

    holder: NodeId
    generation: int
    number: int
    num_tokens: int
    num_blocks: int


class HandOffProblem(enum.Enum):
    """Why a reference is not served: it is of another life, meant for another worker, used up,
    older than its lease, of other bytes, or names nothing.
    """

    STALE = "stale"
    FOREIGN = "foreign"
    CONSUMED = "consumed"
    EXPIRED = "expired"
    LAYOUT = "layout"
    UNKNOWN = "unknown"
