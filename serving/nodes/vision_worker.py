"""The vision role: images are encoded here; features wait for whoever computes the prompt.

    Encode -> a job on the device -> Encoded
    ReadFeatures -> Features, or FeaturesRefused if they had to go meanwhile

Features depend on the picture and the model alone, so they are kept under the picture's digest,
the least recently used gone first, and an image that comes again is not encoded again. Nothing is
lost with them: whoever does not get them has the picture, and encodes it by itself.

Images are encoded one after another, in the order in which they came, two at a time so that the
device does not wait for the host. Images of the same digest that wait are encoded once.
"""

import random
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import cast

import numpy as np

from serving.core.image_features import FeatureCache
from serving.core.request import RequestImage
from serving.nodes import membership, messages
from serving.nodes.membership import Membership
from serving.nodes.messages import Message, RefusalReason
from serving.nodes.node import Outbox
from serving.nodes.values import MemberCard, NodeId, NodeStatus, VisionStatus

_LEAVING = "leaving"
_LEAVING_NS = 1_000_000_000
"""Time in which features that others were just told of can be asked for before this node leaves."""

ENCODING_MAX = 2
"""Images at one time."""

_ENCODING = "image "

Encode = Callable[[RequestImage], np.ndarray]
"""Gives the features of an image, and waits for them."""


@dataclass(frozen=True, slots=True)
class VisionOptions:
    """How a vision worker works.

    Attributes:
        router: whom it joins.
        card: what it says of itself.
        kept_bytes_max: of the features that are kept.
        waiting_max: images that may wait to be encoded.
        timeout_ns: how long one image may take before the device counts as lost.
    """

    router: NodeId
    card: MemberCard
    kept_bytes_max: int
    waiting_max: int
    timeout_ns: int


class VisionWorker:
    """A node around an image encoder; see the text of the module.

    Args:
        encode: is called away from the nodes, on some thread.
        random_source: of the generations of its lives.
    """

    def __init__(
        self, node_id: NodeId, encode: Encode, options: VisionOptions, random_source: random.Random
    ) -> None:
        self.node_id = node_id
        self.outbox = Outbox()
        self._encode = encode
        self._options = options
        self._membership = Membership(
            self.outbox, options.router, options.card, self.status, self._reset, random_source
        )
        self._kept = FeatureCache(options.kept_bytes_max)
        # Images by digest, and of each the names under which it was asked for.
        self._waiting: OrderedDict[bytes, RequestImage] = OrderedDict()
        self._names: dict[bytes, dict[str, NodeId]] = {}
        self._encoding: dict[str, bytes] = {}
        self._num_jobs = 0
        self._failure: str | None = None
        self._may_leave = False
        self._num_encoded = self._num_hits = self._num_sent = self._num_missing = 0

    def start(self) -> None:
        """Begins to join; the caller performs the effects."""
        self._membership.start()

    def drain(self) -> None:
        """Takes nothing more; `is_idle` says when it has finished what it has."""
        self._membership.drain()
        self.outbox.set_timer(_LEAVING, _LEAVING_NS)

    @property
    def is_member(self) -> bool:
        """Whether the router has taken it in."""
        return self._membership.is_member

    @property
    def is_idle(self) -> bool:
        """Whether nobody waits for an image, or has just been told of one."""
        return self._may_leave and not self._names

    def status(self) -> NodeStatus:
        """How it is now."""
        vision = VisionStatus(
            num_waiting=len(self._waiting),
            num_waiting_tokens=sum(image.num_tokens for image in self._waiting.values()),
            num_encoding=len(self._encoding),
            num_kept=len(self._kept),
            kept_bytes=self._kept.num_bytes,
            num_evicted=self._kept.num_evicted,
            num_encoded=self._num_encoded,
            num_hits=self._num_hits,
            num_sent=self._num_sent,
            num_missing=self._num_missing,
        )
        return NodeStatus(self._failure, None, vision=vision)

    def on_message(self, source: NodeId, message: Message) -> None:
        """Takes one message; those of other roles are passed over."""
        match message:
            case messages.Encode(request_id, image):
                if self._membership.is_member:
                    self._on_encode(source, request_id, image)
            case messages.Computed(key) if key in self._encoding:
                self._on_encoded(message)
            case messages.ReadFeatures(digest, fingerprint):
                self._on_read(source, digest, fingerprint)
            case messages.Abort(request_id):
                self._on_abort(request_id)
            case messages.Welcome() | messages.Rejected() | messages.Fenced():
                self._membership.on_message(message)
            case messages.Crashed(detail):
                self._fail(detail)
            case _:
                pass

    def on_timer(self, name: str) -> None:
        """The next sign of life is due, or others have had their time."""
        if name == membership.TIMER:
            self._membership.on_timer()
        elif name == _LEAVING:
            self._may_leave = True

    def _on_encode(self, source: NodeId, request_id: str, image: RequestImage) -> None:
        digest = image.digest
        if self._failure is not None:
            reason, detail = RefusalReason.UNAVAILABLE, self._failure
            self.outbox.send(source, messages.Refused(request_id, reason, detail))
            return
        if self._kept.get(digest) is not None:
            self._num_hits += 1
            self.outbox.send(source, messages.Encoded(request_id))
            return
        if digest in self._names or digest in self._encoding.values():
            self._names.setdefault(digest, {})[request_id] = source
            return
        if len(self._waiting) >= self._options.waiting_max:
            detail = f"{len(self._waiting)} images wait to be encoded already"
            self.outbox.send(source, messages.Refused(request_id, RefusalReason.BUSY, detail))
            return
        self._names[digest] = {request_id: source}
        self._waiting[digest] = image
        self._advance()

    def _advance(self) -> None:
        while self._waiting and len(self._encoding) < ENCODING_MAX and self._failure is None:
            digest, image = self._waiting.popitem(last=False)
            self._num_jobs += 1
            key = f"{_ENCODING}{self._num_jobs}"
            self._encoding[key] = digest
            self.outbox.compute(key, partial(self._encode, image), self._options.timeout_ns)

    def _on_encoded(self, computed: messages.Computed) -> None:
        digest = self._encoding.pop(computed.key)
        if computed.error is not None:
            # An encoder does not fail for a picture, whose size was checked: the device is gone.
            self._fail(f"an image could not be encoded: {computed.error}")
            return
        rows = cast("np.ndarray", computed.value)
        self._num_encoded += 1
        self._kept.put(digest, rows)
        for request_id, source in self._names.pop(digest, {}).items():
            self.outbox.send(source, messages.Encoded(request_id))
        self._advance()

    def _on_read(self, source: NodeId, digest: bytes, fingerprint: bytes) -> None:
        is_same = fingerprint == self._options.card.features
        rows = self._kept.get(digest) if is_same else None
        if rows is None:
            self._num_missing += 1
            self.outbox.send(source, messages.FeaturesRefused(digest))
            return
        self._num_sent += 1
        self.outbox.send(source, messages.Features(digest, rows))

    def _on_abort(self, request_id: str) -> None:
        for digest, names in list(self._names.items()):
            if names.pop(request_id, None) is not None and not names:
                # One that is being encoded is kept all the same.
                del self._names[digest]
                self._waiting.pop(digest, None)

    def _fail(self, detail: str) -> None:
        self._failure = detail
        for names in self._names.values():
            for request_id, source in names.items():
                self.outbox.send(source, messages.Failed(request_id, detail))
        self._reset()
        # A process that is started anew has a device again.
        self.outbox.quit(detail)

    def _reset(self) -> None:
        """Nobody waits any more; features that are kept are as good as before."""
        self._names.clear()
        self._waiting.clear()
