"""The part of a worker that gets features of images before a prompt is computed.

    a request with `FeatureRef`s -> ReadFeatures -> Features -> the engine's shelf -> the request

Requests without images pass by. Features of one picture are moved once for all requests that wait
for them, and are gone when they were used, or when their request is over. If they do not come, for
whatever reason, the request goes on without: its images are encoded by the step that needs them.
"""

from dataclasses import dataclass, field

from serving.core.request import Request
from serving.engine.engine import Engine
from serving.nodes import messages
from serving.nodes.node import Outbox
from serving.nodes.values import FeatureCounts, FeatureRef, NodeId

TIMER = "features "


@dataclass(slots=True)
class _Waiting:
    """A request, who has sent it, and the digests that are still to come."""

    source: NodeId
    request: Request
    digests: set[bytes] = field(default_factory=set[bytes])


class FeaturePulls:
    """Pulls features; its effects go into the worker's outbox.

    Args:
        fingerprint: what features depend on; empty for a model that takes no images.
        timeout_ns: how long they may take to come.

    Attributes:
        num_taken: features that came.
        num_lost: features that did not.
    """

    def __init__(self, outbox: Outbox, engine: Engine, fingerprint: bytes, timeout_ns: int) -> None:
        self.num_taken = self.num_lost = 0
        self._outbox = outbox
        self._engine = engine
        self._fingerprint = fingerprint
        self._timeout_ns = timeout_ns
        self._waiting: dict[str, _Waiting] = {}
        # What was asked for, and not answered yet.
        self._asked: dict[bytes, NodeId] = {}

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._waiting

    @property
    def num_pulling(self) -> int:
        """Requests that wait for features."""
        return len(self._waiting)

    def counts(self) -> FeatureCounts:
        """How it is now."""
        held = self._engine.features.num_bytes
        return FeatureCounts(len(self._waiting), held, self.num_taken, self.num_lost)

    def begin(self, source: NodeId, request: Request, refs: tuple[FeatureRef, ...]) -> bool:
        """Asks for the features of a request; False if there are none to wait for."""
        wanted = {image.digest for image in request.images} & {ref.digest for ref in refs}
        if not wanted or not self._fingerprint:
            return False
        self._waiting[request.request_id] = _Waiting(source, request, wanted)
        for ref in refs:
            if ref.digest in wanted and ref.digest not in self._asked:
                self._asked[ref.digest] = ref.holder
                self._outbox.connect(ref.holder, ref.address)
                ask = messages.ReadFeatures(ref.digest, self._fingerprint)
                self._outbox.send(ref.holder, ask)
                self._outbox.set_timer(TIMER + ref.digest.hex(), self._timeout_ns)
        return True

    def on_features(self, message: messages.Features) -> list[tuple[NodeId, Request]]:
        """Takes features; the requests that can go on now."""
        if self._asked.pop(message.digest, None) is None:
            return []  # Late, or a duplicate.
        self.num_taken += 1
        rows = message.rows
        for request_id, waiting in self._waiting.items():
            # Whose image has another size would read beyond them.
            fits = all(
                len(rows) == image.num_tokens
                for image in waiting.request.images
                if image.digest == message.digest
            )
            if message.digest in waiting.digests and fits:
                self._engine.features.put(request_id, message.digest, rows)
        return self._settled(message.digest)

    def on_refused(self, digest: bytes) -> list[tuple[NodeId, Request]]:
        """Features will not come; the requests that go on without them."""
        if self._asked.pop(digest, None) is None:
            return []
        self.num_lost += 1
        return self._settled(digest)

    def on_timer(self, name: str) -> list[tuple[NodeId, Request]]:
        """Features have not come in time."""
        return self.on_refused(bytes.fromhex(name.removeprefix(TIMER)))

    def forget(self, request_id: str) -> None:
        """Nobody wants this request any more."""
        waiting = self._waiting.pop(request_id, None)
        self._engine.features.drop(request_id)
        if waiting is not None:
            still = {d for other in self._waiting.values() for d in other.digests}
            for digest in waiting.digests - still:
                self._asked.pop(digest, None)

    def reset(self) -> None:
        """Everything is dropped, also what running requests have not used yet."""
        for request_id in list(self._waiting):
            self.forget(request_id)
        self._engine.features.clear()

    def drain(self) -> list[tuple[NodeId, Request]]:
        """Those that wait, which are not waited for any more."""
        waiting = [(entry.source, entry.request) for entry in self._waiting.values()]
        self.reset()
        return waiting

    def _settled(self, digest: bytes) -> list[tuple[NodeId, Request]]:
        ready: list[tuple[NodeId, Request]] = []
        for request_id, waiting in list(self._waiting.items()):
            waiting.digests.discard(digest)
            if not waiting.digests:
                del self._waiting[request_id]
                ready.append((waiting.source, waiting.request))
        return ready
