"""Every message that crosses between nodes, one frozen dataclass each."""

import enum
from dataclasses import dataclass

from serving.core.buckets import CompiledProgram
from serving.core.kv_transfer import KVRead
from serving.core.profiling import ProfileCapture, ProfileRefusal
from serving.core.request import Request, TokenDelta
from serving.core.step_plan import StepResult
from serving.engine.engine import EngineStatus
from serving.kv.offload import CacheReply, OffloadStatus


class RefusalReason(enum.Enum):
    """Why a request was not taken: it never fits, there is no room now, or nobody can serve."""

    INVALID = "invalid"
    BUSY = "busy"
    UNAVAILABLE = "unavailable"


@dataclass(frozen=True, slots=True)
class Submit:
    """Frontend to worker: serve this request. `Admitted` or `Refused` follows."""

    request: Request


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
    """Driver to node: the job `key` has given `value`, or `error` says why it has not."""

    key: str
    value: object
    error: str | None = None


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
    """

    query_id: int
    failure: str | None
    engine: EngineStatus
    programs: tuple[CompiledProgram, ...] = ()
    offload: OffloadStatus | None = None


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
)
