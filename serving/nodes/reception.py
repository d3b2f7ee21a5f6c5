"""Whether a cluster takes a request, and how it is as a whole: what a router answers at once."""

from dataclasses import dataclass, replace

from serving.core.admission import check_request
from serving.core.buckets import BucketTable, StepKind
from serving.core.engine_status import total_status
from serving.core.request import Request, RequestError
from serving.nodes import messages
from serving.nodes.calls import Calls
from serving.nodes.messages import RefusalReason
from serving.nodes.pools import DECODE, PREFILL, WorkerPools
from serving.nodes.registry import VISION, Registry
from serving.nodes.vision_pool import VisionPool


@dataclass(frozen=True, slots=True)
class RouterOptions:
    """How a router works.

    Attributes:
        code_version: of this program; workers must have the same.
        heartbeat_ns: how often workers are to be heard of.
        lost_ns: a worker that is silent for so long is lost.
        answer_ns: how long a decode worker may take to keep room, or to pull a context.
        stranded_ns: how long a request waits while a role has no worker at all.
        waiting_max: requests that may wait for room.
        attempts_max: how often a request is started before it is given up.
        images_waiting_max: images that may wait for vision workers.
        local_prefill_ms: prompts predicted to take no longer are computed where they decode.
    """

    code_version: str
    heartbeat_ns: int
    lost_ns: int
    answer_ns: int
    stranded_ns: int
    waiting_max: int
    attempts_max: int = 4
    local_prefill_ms: float = 0.0
    images_waiting_max: int = 256


class Reception:
    """Looks at workers and at requests under way; changes neither."""

    def __init__(
        self,
        registry: Registry,
        pools: WorkerPools,
        vision: VisionPool,
        calls: Calls,
        options: RouterOptions,
    ) -> None:
        self._registry = registry
        self._pools = pools
        self._vision = vision
        self._calls = calls
        self._options = options

    def refusal(self, request: Request) -> messages.Refused | None:
        """Why a request is not taken; None if it is."""
        request_id = request.request_id
        members = self._registry.members(DECODE) or self._registry.members(PREFILL)
        if not members:
            detail = "there is no worker"
            return messages.Refused(request_id, RefusalReason.UNAVAILABLE, detail)
        card = members[0].card
        buckets = BucketTable(
            {StepKind.PREFILL: card.prefill_buckets, StepKind.DECODE: card.decode_buckets}
        )
        try:
            check_request(request, card.engine_limits, buckets)
        except RequestError as error:
            return messages.Refused(request_id, RefusalReason.INVALID, str(error), error.param)
        limit = self._options.waiting_max
        if self._calls.num_waiting >= limit:
            detail = f"{limit} requests wait for room already; send it again later"
            return messages.Refused(request_id, RefusalReason.BUSY, detail)
        num_images, limit = self._vision.num_images, self._options.images_waiting_max
        if request.images and num_images and num_images + len(request.images) > limit:
            detail = f"{num_images} images wait to be encoded already; send it again later"
            return messages.Refused(request_id, RefusalReason.BUSY, detail)
        return None

    def worker_status(self, query_id: int) -> messages.WorkerStatus:
        """How all workers are, taken together."""
        missing = self._pools.missing_roles
        failure = f"no {' and no '.join(missing)} worker is there" if missing else None
        statuses = [m.status.engine for m in self._registry.members() if m.status]
        total = total_status([status for status in statuses if status is not None])
        num_waiting = total.num_waiting + self._calls.num_waiting
        vision = {
            member.node_id.name: member.status.vision
            for member in self._registry.members(VISION)
            if member.status is not None and member.status.vision is not None
        }
        engine = replace(total, num_waiting=num_waiting)
        return messages.WorkerStatus(query_id, failure, engine, vision=vision)
