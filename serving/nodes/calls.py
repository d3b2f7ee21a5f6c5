"""The requests that a router has under way: by their names, by the names of their attempts, and in
the line of those that wait for room.
"""

import enum
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from serving.core.prefix import PrefixKey
from serving.core.request import PRIORITY_MAX, Request
from serving.core.waiting_queue import WaitingQueue
from serving.nodes.pools import Placement
from serving.nodes.registry import Member
from serving.nodes.values import NodeId


class Phase(enum.Enum):
    """How far an attempt has come."""

    ENCODING = "encoding"
    WAITING = "waiting"
    RESERVING = "reserving"
    PREFILLING = "prefilling"
    PULLING = "pulling"
    DECODING = "decoding"


@dataclass(slots=True, eq=False)
class Call:
    """A request under way. `since_ns` is when its phase began.

    `sequence_id` is its number, in the order of admission; `keys` are those of its prompt's blocks
    that may be cached; `avoided` names prefill workers whose contexts could not be had;
    `features` says which vision worker has encoded an image, None for one that was given up.
    """

    request: Request
    frontend: NodeId
    since_ns: int
    tokens: list[int] = field(default_factory=list[int])
    attempt: int = 0
    num_failures: int = 0
    phase: Phase = Phase.WAITING
    num_cached: int | None = None
    placement: Placement | None = None
    last_fault: str = ""
    sequence_id: int = 0
    is_promoted: bool = False
    keys: tuple[PrefixKey, ...] = ()
    avoided: set[NodeId] = field(default_factory=set[NodeId])
    features: dict[bytes, Member | None] = field(default_factory=dict[bytes, Member | None])

    @property
    def urgency(self) -> int:
        """Its priority, or less than any if it was outranked for too long."""
        return -PRIORITY_MAX - 1 if self.is_promoted else self.request.priority

    @property
    def num_preemptions(self) -> int:
        """How often it was in line again: it goes before those of its priority that were not."""
        return self.attempt

    @property
    def attempt_id(self) -> str:
        """The name of the current attempt."""
        return f"{self.request.request_id}#{self.attempt}"

    @property
    def num_tokens(self) -> int:
        """Tokens whose KV the current attempt needs before it goes on."""
        return len(self.request.prompt_token_ids) + len(self.tokens)

    def current(self) -> Request:
        """What the current attempt asks of a worker."""
        return replace(
            self.request, request_id=self.attempt_id, resumed_token_ids=tuple(self.tokens)
        )

    def enter(self, phase: Phase, now_ns: int) -> None:
        """A phase begins."""
        self.phase, self.since_ns = phase, now_ns

    def is_at(self, node_id: NodeId) -> bool:
        """Whether the current attempt needs this worker."""
        members = [] if self.placement is None else self.placement.members
        return any(member.node_id == node_id for member in members)

    def pair(self) -> tuple[Member, Member]:
        """The workers of an attempt that needs a prefill and a decode worker."""
        placement = self.placement
        assert placement is not None and placement.prefill is not None
        assert placement.decode is not None
        return placement.prefill, placement.decode


class Calls:
    """All requests under way. One has its images encoded, is in line, or is being tried."""

    def __init__(self) -> None:
        self._calls: dict[str, Call] = {}
        self._attempts: dict[str, Call] = {}
        self._num_begun = Counter[str]()
        self._waiting = WaitingQueue[Call](self._num_begun.__getitem__)
        self._num_added = 0

    def __len__(self) -> int:
        return len(self._calls)

    def __iter__(self) -> Iterator[Call]:
        """Those there are now; they may be changed meanwhile."""
        return iter(list(self._calls.values()))

    @property
    def num_waiting(self) -> int:
        """Requests in line."""
        return len(self._waiting)

    @property
    def waiting(self) -> list[Call]:
        """Those in line, the next one first."""
        return list(self._waiting)

    def first(self) -> Call | None:
        """The next one in line."""
        return next(iter(self._waiting), None)

    def phases(self) -> dict[str, int]:
        """How many requests are in each phase."""
        return dict(Counter(call.phase.value for call in self._calls.values()))

    def get(self, request_id: str) -> Call | None:
        """The request of a name; None if it is not under way."""
        return self._calls.get(request_id)

    def of_attempt(self, attempt_id: str) -> Call | None:
        """The request whose current attempt has this name; None if there is none."""
        return self._attempts.get(attempt_id)

    def add(self, call: Call) -> None:
        """A new request, at the end of the line of its priority unless its images come first."""
        self._calls[call.request.request_id] = call
        self._num_added += 1
        call.sequence_id = self._num_added
        if call.phase is Phase.WAITING:
            self._waiting.add(call)

    def leave_line(self, call: Call, now_ns: int) -> None:
        """The images of a request are encoded once more."""
        self._waiting.remove(call)
        call.enter(Phase.ENCODING, now_ns)

    def line_up(self, call: Call, now_ns: int) -> None:
        """The images of a request are encoded: it gets in line, where it would be without any."""
        call.enter(Phase.WAITING, now_ns)
        self._waiting.add(call)

    def begin(self, call: Call) -> None:
        """An attempt begins: the request leaves the line."""
        self._waiting.remove(call)
        self._attempts[call.attempt_id] = call
        self._num_begun[call.request.cache_owner] += 1

    def count_start(self, call: Call) -> None:
        """An attempt has found room: those in line that are less urgent were outranked once."""
        self._waiting.count_starts([call])

    def end_attempt(self, call: Call) -> None:
        """The current attempt, if there is one, is over."""
        if self._attempts.pop(call.attempt_id, None) is not None:
            owner = call.request.cache_owner
            self._num_begun[owner] -= 1
            if not self._num_begun[owner]:
                del self._num_begun[owner]

    def requeue(self, call: Call, now_ns: int) -> None:
        """The next attempt goes before all others of its priority, having waited longest."""
        call.attempt += 1
        call.enter(Phase.WAITING, now_ns)
        self._waiting.add(call)

    def remove(self, call: Call) -> None:
        """The request is over."""
        del self._calls[call.request.request_id]
        if call.phase is Phase.WAITING:
            self._waiting.remove(call)
