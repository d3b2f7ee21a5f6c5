"""Every message that crosses between nodes, one frozen dataclass each."""

import enum
from dataclasses import dataclass, field
from typing import get_args

import numpy as np

from serving.core.buckets import CompiledProgram
from serving.core.kv_transfer import KVRead
from serving.core.profiling import ProfileCapture, ProfileRefusal
from serving.core.request import Request, RequestImage, TokenDelta
from serving.core.step_plan import StepResult
from serving.engine.engine import EngineStatus
from serving.kv.offload import CacheReply, OffloadStatus
from serving.nodes.values import (
    FeatureRef,
    HandOffProblem,
    HandOffRef,
    MemberCard,
    NodeId,
    NodeStatus,
    VisionStatus,
)


class RefusalReason(enum.Enum):
    """Why a request was not taken: it never fits, there is no room now, or nobody can serve."""

    INVALID = "invalid"
    BUSY = "busy"
    UNAVAILABLE = "unavailable"


@dataclass(frozen=True, slots=True)
class Submit:
    """Frontend to worker: serve this request. `Admitted` or `Refused` follows.

    `features` are as in `Prefill`.
    """

    request: Request
    features: tuple[FeatureRef, ...] = ()


@dataclass(frozen=True, slots=True)
class Admitted:
    """Worker to frontend: the request is queued; `Tokens` follow until its last delta."""

    request_id: str


@dataclass(frozen=True, slots=True)
class Refused:
    """Worker to frontend: the request is not taken. `param` names the field at fault, if any."""

    request_id: str
    reason: RefusalReason
    detail: str
    param: str | None = None


@dataclass(frozen=True, slots=True)
class Abort:
    """Frontend to worker: nobody waits for this request any more; free what it holds."""

    request_id: str


@dataclass(frozen=True, slots=True)
class Tokens:
    """Worker to frontend: what one step produced for the requests of that frontend."""

    deltas: tuple[TokenDelta, ...]


@dataclass(frozen=True, slots=True)
class Failed:
    """Worker to frontend: the request ended by a fault of the service, not of the client."""

    request_id: str
    detail: str


@dataclass(frozen=True, slots=True)
class StepDone:
    """Driver to worker: a plan has run."""

    result: StepResult


@dataclass(frozen=True, slots=True)
class StepFailed:
    """Driver to worker: running a plan raised; the device must be taken as lost."""

    step_index: int
    detail: str


@dataclass(frozen=True, slots=True)
class BlocksRead:
    """Driver to worker: a transfer has copied blocks and states to the host."""

    read: KVRead


@dataclass(frozen=True, slots=True)
class CacheReplied:
    """Driver to worker: the KV tiers have answered a call."""

    reply: CacheReply


@dataclass(frozen=True, slots=True)
class Computed:
    """Driver to node: the job `key` has given `value`, or `error` says why it has not.

    `is_busy` if it has not even begun because others are being done.
    """

    key: str
    value: object
    error: str | None = None
    is_busy: bool = False


@dataclass(frozen=True, slots=True)
class Crashed:
    """Driver to node: handling a message raised, so the node's state is not to be trusted."""

    detail: str


@dataclass(frozen=True, slots=True)
class QueryStatus:
    """Asks a worker how it is; `WorkerStatus` with the same `query_id` follows."""

    query_id: int


@dataclass(frozen=True, slots=True)
class WorkerStatus:
    """A worker's gauges at one moment. `failure` says why it cannot serve, None when it can;
    `programs` is what it compiled at its start. `offload` is None for a worker without KV tiers.
    `vision` are the vision workers of a cluster, by name.
    """

    query_id: int
    failure: str | None
    engine: EngineStatus
    programs: tuple[CompiledProgram, ...] = ()
    offload: OffloadStatus | None = None
    vision: dict[str, VisionStatus] = field(default_factory=dict[str, VisionStatus])


@dataclass(frozen=True, slots=True)
class Profile:
    """Asks a worker for a trace of its next steps; `Profiled` with the same `query_id` follows."""

    query_id: int
    num_steps: int
    timeout_s: float


@dataclass(frozen=True, slots=True)
class Profiled:
    """What came of asking for a trace."""

    query_id: int
    result: ProfileCapture | ProfileRefusal


@dataclass(frozen=True, slots=True)
class Undeliverable:
    """Driver to node: a message of its own could not be sent to another process."""

    destination: NodeId
    message: object


# --- membership ---


@dataclass(frozen=True, slots=True)
class Join:
    """Worker to router: it wants to be a member; `Welcome` or `Rejected` follows.

    `generation` is drawn anew for each life as a member, so that what belongs to an earlier one is
    told apart.
    """

    generation: int
    card: MemberCard


@dataclass(frozen=True, slots=True)
class Welcome:
    """Router to worker: it is a member, and is to be heard of that often."""

    generation: int
    heartbeat_ns: int


@dataclass(frozen=True, slots=True)
class Rejected:
    """Router to worker: it cannot be a member, because."""

    generation: int
    detail: str


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """Worker to router: it lives. One that `is_draining` takes no new requests."""

    generation: int
    status: NodeStatus
    is_draining: bool = False


@dataclass(frozen=True, slots=True)
class Fenced:
    """Router to worker: that life as a member is over; whatever it had was given to others."""

    generation: int


# --- hand-off ---


@dataclass(frozen=True, slots=True)
class Reserve:
    """Router to decode worker: keep room for a request; `Reserved` or `Refused` follows."""

    request_id: str
    num_tokens: int


@dataclass(frozen=True, slots=True)
class Reserved:
    """Decode worker to router: there is room, until the request comes or is aborted."""

    request_id: str


@dataclass(frozen=True, slots=True)
class Prefill:
    """Router to prefill worker: compute a prompt and the first token after it, for `taker`.

    `Admitted` or `Refused` follows, then `Tokens` with that token, then `Held`; or `Failed`. If the
    token ends the request, that is all. Images of which no features are said to be anywhere are
    encoded there.
    """

    request: Request
    taker: NodeId
    features: tuple[FeatureRef, ...] = ()


@dataclass(frozen=True, slots=True)
class Held:
    """Prefill worker to router: the context of a request waits to be pulled."""

    request_id: str
    ref: HandOffRef


@dataclass(frozen=True, slots=True)
class TakeOver:
    """Router to decode worker: pull a context from its holder and go on with the request.

    The request has the first token among its `resumed_token_ids`. `HandedOver` follows, and
    `Tokens` to the end; or `HandOffLost`.
    """

    request: Request
    ref: HandOffRef
    address: str


@dataclass(frozen=True, slots=True)
class HandedOver:
    """Decode worker to router: it has all of the context and needs its holder no more."""

    request_id: str


@dataclass(frozen=True, slots=True)
class HandOffLost:
    """Decode worker to router: the context could not be had, so it must be computed again."""

    request_id: str
    detail: str


@dataclass(frozen=True, slots=True)
class ReadBlocks:
    """Decode worker to prefill worker: send so many blocks of a context, from `first` on.

    With the last block comes the state. Every call renews the lease. `Blocks` or `BlocksRefused`
    follows.
    """

    ref: HandOffRef
    fingerprint: bytes
    first: int
    count: int


@dataclass(frozen=True, slots=True)
class Blocks:
    """Prefill worker to decode worker: a part of a context; with the last one comes the state."""

    ref: HandOffRef
    first: int
    part: KVRead


@dataclass(frozen=True, slots=True)
class BlocksRefused:
    """Prefill worker to decode worker: nothing is sent for this reference."""

    ref: HandOffRef
    problem: HandOffProblem


@dataclass(frozen=True, slots=True)
class HandOffDone:
    """Decode worker to prefill worker: everything has come; let go of it."""

    ref: HandOffRef


# --- images ---


@dataclass(frozen=True, slots=True)
class Encode:
    """Router to vision worker: encode an image and keep its features for a while.

    `Encoded`, `Refused` or `Failed` follows. `request_id` names this image of one request.
    """

    request_id: str
    image: RequestImage


@dataclass(frozen=True, slots=True)
class Encoded:
    """Vision worker to router: the features of an image can be had here."""

    request_id: str


@dataclass(frozen=True, slots=True)
class ReadFeatures:
    """Prefill worker to vision worker: send the features of an image.

    `Features` or `FeaturesRefused` follows.
    """

    digest: bytes
    fingerprint: bytes


@dataclass(frozen=True, slots=True)
class Features:
    """Vision worker to prefill worker: `rows` [num_tokens, bytes] uint8 of an image."""

    digest: bytes
    rows: np.ndarray


@dataclass(frozen=True, slots=True)
class FeaturesRefused:
    """Vision worker to prefill worker: those features are not here any more."""

    digest: bytes


Message = (
    Submit
    | Admitted
    | Refused
    | Abort
    | Tokens
    | Failed
    | StepDone
    | StepFailed
    | BlocksRead
    | CacheReplied
    | Computed
    | Crashed
    | QueryStatus
    | WorkerStatus
    | Profile
    | Profiled
    | Undeliverable
    | Join
    | Welcome
    | Rejected
    | Heartbeat
    | Fenced
    | Reserve
    | Reserved
    | Prefill
    | Held
    | TakeOver
    | HandedOver
    | HandOffLost
    | ReadBlocks
    | Blocks
    | BlocksRefused
    | HandOffDone
    | Encode
    | Encoded
    | ReadFeatures
    | Features
    | FeaturesRefused
)

_DRIVER_ONLY = (StepDone, StepFailed, BlocksRead, CacheReplied, Computed, Crashed, Undeliverable)
_ONE_PROCESS = (Profile, Profiled)
"""Traces are files of the machine that makes them."""

WIRE_MESSAGES: tuple[type, ...] = tuple(
    kind for kind in get_args(Message) if kind not in (*_DRIVER_ONLY, *_ONE_PROCESS)
)
"""The messages that may cross between processes."""
