"""What a node does for requests whose calls are traced, and when: it becomes spans of the call.

A request is in one *phase* at a node at a time. Each phase that has ended is one note in the
outbox; whoever drives the node makes a span of it. Requests that nobody traces cost a look at an
empty string, and their tokens a look at an empty table.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from serving.clock import Clock
from serving.core.request import Request, TokenDelta
from serving.nodes.node import Outbox
from serving.nodes.values import NodeId
from serving.observe import SpanNote

GRAMMAR, FETCH, QUEUE = "grammar", "fetch", "queue"
PREFILL, HAND_OFF, DECODE, ATTEMPT = "prefill", "hand-off", "decode", "attempt"


@dataclass(slots=True)
class _Phase:
    parent: str
    name: str
    start_ns: int
    attributes: dict[str, str | int]
    num_tokens: int = 0


class RequestSpans:
    """The phases of one node's requests.

    Args:
        clock: None notes nothing.

    Attributes:
        queued: the traced requests that are in the phase `QUEUE`.
    """

    def __init__(self, node_id: NodeId, outbox: Outbox, clock: Clock | None) -> None:
        self.queued: set[str] = set()
        self._node = str(node_id)
        self._outbox = outbox
        self._clock = clock
        self._phases: dict[str, _Phase] = {}

    def enter(self, request: Request, name: str, **attributes: str | int) -> None:
        """The request is in this phase from now on; no effect if it is in it already."""
        if not request.traceparent or self._clock is None:
            return
        known = self._phases.get(request.request_id)
        if known is None or known.name != name:
            named = {f"deepinfer.{key}": value for key, value in attributes.items()}
            self._begin(request.request_id, request.traceparent, name, named)

    def move(self, request_id: str, name: str) -> None:
        """The request goes on to this phase, if it is traced."""
        known = self._phases.get(request_id)
        if known is not None:
            self._begin(request_id, known.parent, name, {})

    def take(self, deltas: Iterable[TokenDelta]) -> None:
        """Tokens were made: the first one ends the phase `PREFILL`, the last one everything."""
        if not self._phases:
            return
        for delta in deltas:
            phase = self._phases.get(delta.request_id)
            if phase is None:
                continue
            if phase.name != HAND_OFF:
                phase.num_tokens += len(delta.token_ids)
            reason = delta.finish_reason
            if phase.name == PREFILL and delta.token_ids and reason is None:
                self.move(delta.request_id, DECODE)
            elif reason is not None:
                phase.attributes["deepinfer.finish_reason"] = reason.value
                self.end(delta.request_id, "error" if delta.error else "")

    def end(self, request_id: str, fault: str = "") -> None:
        """The phase of the request is over; no effect if there is none."""
        if request_id in self._phases:
            self._end(request_id, self._now_ns(), fault)

    def end_all(self, fault: str) -> None:
        """Whatever there is ends badly."""
        for request_id in list(self._phases):
            self.end(request_id, fault)

    def _begin(
        self, request_id: str, parent: str, name: str, attributes: dict[str, str | int]
    ) -> None:
        now_ns = self._now_ns()
        if request_id in self._phases:
            self._end(request_id, now_ns, "")
        self._phases[request_id] = _Phase(parent, name, now_ns, attributes)
        if name == QUEUE:
            self.queued.add(request_id)

    def _end(self, request_id: str, now_ns: int, fault: str) -> None:
        phase = self._phases.pop(request_id)
        self.queued.discard(request_id)
        attributes = {
            "deepinfer.node": self._node,
            "deepinfer.request_id": request_id,
            **phase.attributes,
        }
        if phase.num_tokens:
            attributes["deepinfer.num_tokens"] = phase.num_tokens
        self._outbox.trace(
            SpanNote(phase.parent, phase.name, phase.start_ns, now_ns, attributes, fault)
        )

    def _now_ns(self) -> int:
        assert self._clock is not None
        return self._clock.now_ns()
