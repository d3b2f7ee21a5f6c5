"""The router's side of images: which vision worker encodes them, and where their features are.

    a request with images -> Encode, to as many workers as it takes -> Encoded, from each
    -> the request gets in line for room, and with it goes where its features can be had

So images wait for the vision workers, in a line of their own, and nobody else does. If a worker is
lost, its images are encoded by another one; without any, prompts are computed without features,
which encodes their images where that is done.

An image that comes again goes to the worker that had it last, who is likely to have it still.
"""

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass

from serving.core.balance_prefill import NoWorkerError
from serving.core.balance_vision import VisionBalancer, VisionDispatch
from serving.core.request import RequestImage
from serving.nodes import messages
from serving.nodes.calls import Call
from serving.nodes.messages import Message
from serving.nodes.node import Outbox
from serving.nodes.registry import VISION, Member, Registry
from serving.nodes.values import FeatureRef, NodeId

TRIES_MAX = 4
"""Workers that may fail over an image before it is left to whoever computes the prompt."""

_HOLDERS_MAX = 4096
"""Images of which it is known who had them last."""


@dataclass(slots=True)
class _Encoding:
    """An image on its way, for one request. `dispatch` is None while no worker has it."""

    name: str
    call: Call
    image: RequestImage
    asked_ns: int
    member: Member | None = None
    dispatch: VisionDispatch | None = None
    num_tries: int = 0


class VisionPool:
    """Images under way; its effects go into the router's outbox.

    Args:
        places_max: workers, over all time.

    Attributes:
        num_again: images that were given to another worker.
    """

    def __init__(self, outbox: Outbox, registry: Registry, places_max: int) -> None:
        self.num_again = 0
        self._outbox = outbox
        self._registry = registry
        self._balancer = VisionBalancer([1.0] * places_max)
        for place in range(places_max):
            self._balancer.set_available(place, False)
        self._is_usable: dict[NodeId, bool] = {}
        self._encodings: dict[str, _Encoding] = {}
        self._holders: OrderedDict[bytes, NodeId] = OrderedDict()
        self._num_names = 0

    def __contains__(self, name: str) -> bool:
        return name in self._encodings

    @property
    def is_usable(self) -> bool:
        """Whether there is a worker that can be given images."""
        return any(self._is_usable.values())

    @property
    def num_images(self) -> int:
        """Images that are waited for."""
        return len(self._encodings)

    def load(self, member: Member) -> dict[str, float]:
        """What is counted at a worker, under names."""
        return {"image_tokens": int(self._balancer.num_tokens[member.place])}

    def refresh(self, member: Member) -> None:
        """Looks whether a worker, who may have just come, can be given images now."""
        is_usable = member.is_available
        if self._is_usable.get(member.node_id, False) != is_usable:
            self._is_usable[member.node_id] = is_usable
            weight = member.card.image_tokens_per_s or 1.0
            self._balancer.set_available(member.place, is_usable, weight)

    def must_encode(self, call: Call) -> bool:
        """Whether a request has images that a worker could encode before it is given room."""
        return self.is_usable and any(True for _ in self._missing(call))

    def begin(self, call: Call, now_ns: int) -> None:
        """Has the images of a request encoded; `must_encode` says that there are some."""
        for image in {image.digest: image for image in self._missing(call)}.values():
            self._num_names += 1
            name = f"{call.request.request_id}@{self._num_names}"
            encoding = self._encodings[name] = _Encoding(name, call, image, now_ns)
            self._give(encoding, now_ns)

    def refs(self, call: Call) -> tuple[FeatureRef, ...]:
        """Where the features of a request can be had, as far as it is known."""
        return tuple(
            FeatureRef(digest, member.node_id, member.card.address)
            for digest, member in call.features.items()
            if member is not None and self._is_there(member)
        )

    def on_message(self, source: NodeId, name: str, message: Message) -> Call | None:
        """Takes what a worker says of an image; the request, if that was the last one of it."""
        encoding = self._encodings[name]
        if encoding.member is None or encoding.member.node_id != source:
            return None  # Of a worker that it was taken from.
        match message:
            case messages.Encoded():
                return self._settle(encoding, encoding.member)
            case messages.Refused() | messages.Failed():
                self._take_back(encoding)
            case _:
                pass
        return None

    def on_undeliverable(self, name: str) -> None:
        """An image has not left for its worker."""
        encoding = self._encodings.get(name)
        if encoding is not None:
            self._take_back(encoding)

    def sweep(self, now_ns: int, answer_ns: int) -> list[Call]:
        """Gives images that were refused to another worker, and asks again for those of which
        nothing was heard; requests that are not to wait any more.
        """
        ended: list[Call | None] = []
        for encoding in list(self._encodings.values()):
            if encoding.member is None:
                ended.append(self._again(encoding, now_ns))
            elif now_ns - encoding.asked_ns >= answer_ns:
                self._ask(encoding, encoding.member, now_ns)
        return [call for call in ended if call is not None]

    def lose(self, member: Member, now_ns: int) -> list[Call]:
        """A worker is gone; requests that are not to wait any more."""
        if self._is_usable.pop(member.node_id, False):
            self._balancer.set_available(member.place, False)
        lost = [e for e in self._encodings.values() if e.member is member]
        for encoding in lost:
            self._take_back(encoding)
        ended = [self._again(encoding, now_ns) for encoding in lost]
        return [call for call in ended if call is not None]

    def abandon(self, call: Call) -> None:
        """Nobody waits for the images of a request any more."""
        for encoding in self._of(call):
            member = encoding.member
            self._take_back(encoding)
            del self._encodings[encoding.name]
            if member is not None and self._registry.get(member.node_id) is member:
                self._outbox.send(member.node_id, messages.Abort(encoding.name))

    def _missing(self, call: Call) -> Iterable[RequestImage]:
        """Images without features that could be had, if nobody has given them up."""
        for image in call.request.images:
            member = call.features.get(image.digest)
            is_given_up = image.digest in call.features and member is None
            if not is_given_up and not (member is not None and self._is_there(member)):
                yield image

    def _is_there(self, member: Member) -> bool:
        """Whether a worker can be asked for features; one that is leaving has others asked."""
        return member.is_available and self._registry.get(member.node_id) is member

    def _of(self, call: Call) -> list[_Encoding]:
        return [encoding for encoding in self._encodings.values() if encoding.call is call]

    def _give(self, encoding: _Encoding, now_ns: int) -> bool:
        """Chooses a worker for an image; False if there is none."""
        image = encoding.image
        members = self._registry.members(VISION)
        holder = self._holders.get(image.digest)
        places = [member.place for member in members if member.node_id == holder]
        try:
            dispatch = self._balancer.choose(image.num_tokens, *places)
        except NoWorkerError:
            return False
        encoding.dispatch = dispatch
        encoding.member = next(m for m in members if m.place == dispatch.worker)
        encoding.num_tries += 1
        self._ask(encoding, encoding.member, now_ns)
        return True

    def _ask(self, encoding: _Encoding, member: Member, now_ns: int) -> None:
        encoding.asked_ns = now_ns
        self._outbox.send(member.node_id, messages.Encode(encoding.name, encoding.image))

    def _take_back(self, encoding: _Encoding) -> None:
        """The worker that has the image does not count any more."""
        if encoding.dispatch is not None:
            self._balancer.finished(encoding.dispatch)
        encoding.member = encoding.dispatch = None
        self._holders.pop(encoding.image.digest, None)

    def _again(self, encoding: _Encoding, now_ns: int) -> Call | None:
        """Another worker; the request, if there is none for its last image."""
        if encoding.num_tries < TRIES_MAX and self._give(encoding, now_ns):
            self.num_again += 1
            return None
        return self._settle(encoding, None)

    def _settle(self, encoding: _Encoding, member: Member | None) -> Call | None:
        """An image is encoded, or given up; the request, if that was the last one of it."""
        call, digest = encoding.call, encoding.image.digest
        self._take_back(encoding)
        del self._encodings[encoding.name]
        if member is not None or encoding.num_tries >= TRIES_MAX:
            call.features[digest] = member
        if member is not None:
            self._holders[digest] = member.node_id
            if len(self._holders) > _HOLDERS_MAX:
                self._holders.popitem(last=False)
        return None if self._of(call) else call
