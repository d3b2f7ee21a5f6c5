"""A router and workers in one process and in virtual time, for tests of what they do together.

Messages take no time and are encoded as between processes; steps take `STEP_NS`. A worker can be
killed, stopped for a while, and cut off.
"""

import heapq
import itertools
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from serving.core.buckets import StepKind
from serving.core.kv_transfer import KVTransfer
from serving.core.request import Request, RequestImage, SamplingParams
from serving.core.step_plan import StepPlan
from serving.engine.engine import Engine
from serving.nodes import messages
from serving.nodes.member_worker import MemberOptions, MemberWorker
from serving.nodes.messages import Message
from serving.nodes.node import Compute, Connect, Execute, Node, Quit, Send, SetTimer, Trace
from serving.nodes.reception import RouterOptions
from serving.nodes.router import Router
from serving.nodes.values import MemberCard, NodeId, VisionStatus
from serving.nodes.vision_worker import VisionOptions, VisionWorker
from serving.observe import SpanNote
from serving.transport.codec import Codec, Parcel, WireError
from tests.serving.engine.checked_engine import BUCKETS, make_limits
from tests.serving.engine.prompts import prompt_of
from tests.serving.engine.simulated_device import SimulatedDevice, features_of

ROUTER, FRONTEND = NodeId("router", "0"), NodeId("frontend", "0")
MS = 1_000_000
STEP_NS = 10 * MS
FEATURES = b"i" * 32
OPTIONS = RouterOptions(
    code_version="1",
    heartbeat_ns=100 * MS,
    lost_ns=500 * MS,
    answer_ns=400 * MS,
    stranded_ns=1000 * MS,
    waiting_max=100,
)


class VirtualClock:
    """Time that a test sets."""

    def __init__(self) -> None:
        self.ns = 0

    def now_ns(self) -> int:
        return self.ns

    def unix_s(self) -> int:
        return self.ns // 10**9


@dataclass
class Place:
    """A node and what drives it. One that is `stopped` keeps what comes; a dead one drops it."""

    node: Node
    device: SimulatedDevice | None = None
    is_alive: bool = True
    is_stopped: bool = False
    life: int = 0
    kept: list[Callable[[], None]] = field(default_factory=list)
    timers: dict[str, int] = field(default_factory=dict)


class Fleet:
    """`frontend` hears of tokens; `ended` says how each request ended."""

    def __init__(
        self,
        num_prefill: int = 2,
        num_decode: int = 2,
        options: RouterOptions = OPTIONS,
        num_vision: int = 0,
        vision_bytes: int = 2**20,
        **sizes: Any,
    ) -> None:
        self.clock = VirtualClock()
        self.router = Router(ROUTER, self.clock, options, random.Random(5))
        self.places: dict[NodeId, Place] = {ROUTER: Place(self.router)}
        self.tokens: dict[str, list[int]] = {}
        self.ended: dict[str, Any] = {}
        self.admitted: list[str] = []
        self.sent: list[tuple[NodeId, NodeId, Message]] = []
        self.quits: list[str] = []
        self.notes: list[SpanNote] = []
        self.cut: set[tuple[NodeId, NodeId]] = set()
        self.lose: Callable[[NodeId, NodeId, Message], bool] = lambda *_: False
        self._sizes = {"num_snapshots": 6, "in_flight_max": 2, **sizes}
        self._codec = Codec()
        self._events: list[tuple[int, int, Callable[[], None]]] = []
        self._numbers = itertools.count()
        self.router.start()
        self._perform(ROUTER)
        self.prefill = [self.add("prefill", str(n)) for n in range(num_prefill)]
        self.decode = [self.add("decode", str(n)) for n in range(num_decode)]
        self.encode_ns = MS
        self.vision_bytes = vision_bytes
        self.vision = [self.add_vision(str(n)) for n in range(num_vision)]

    def add(self, role: str, name: str, **card: Any) -> NodeId:
        """Start a worker, or start it anew."""
        node_id = NodeId(role, name)
        life = self.places[node_id].life + 1 if node_id in self.places else 0
        limits = make_limits(**self._sizes)
        told = MemberCard(
            **{
                "address": f"ipc://{node_id}",
                "code_version": "1",
                "fingerprint": b"f" * 32,
                "limits": limits,
                "prefill_buckets": tuple(BUCKETS.of(StepKind.PREFILL)),
                "decode_buckets": tuple(BUCKETS.of(StepKind.DECODE)),
                "features": FEATURES,
                **card,
            }
        )
        worker = MemberWorker(
            node_id,
            Engine(limits, BUCKETS, random.Random(1)),
            10**12,
            MemberOptions(ROUTER, told, 2000 * MS, 200 * MS),
            random.Random(f"{node_id} {life}"),
            clock=self.clock,
        )
        self.places[node_id] = Place(worker, SimulatedDevice(limits, BUCKETS), life=life)
        worker.start()
        self._perform(node_id)
        return node_id

    def add_vision(self, name: str, **card: Any) -> NodeId:
        """Start a vision worker, or start it anew."""
        node_id = NodeId("vision", name)
        life = self.places[node_id].life + 1 if node_id in self.places else 0
        told = MemberCard(
            **{
                "address": f"ipc://{node_id}",
                "code_version": "1",
                "fingerprint": b"",
                "limits": None,
                "features": FEATURES,
                **card,
            }
        )
        worker = VisionWorker(
            node_id,
            features_of,
            VisionOptions(ROUTER, told, self.vision_bytes, 8, 10**12),
            random.Random(f"{node_id} {life}"),
        )
        self.places[node_id] = Place(worker, life=life)
        worker.start()
        self._perform(node_id)
        return node_id

    def vision_worker(self, node_id: NodeId) -> VisionWorker:
        """The vision worker of a name."""
        node = self.places[node_id].node
        assert isinstance(node, VisionWorker)
        return node

    def vision_status(self, node_id: NodeId) -> VisionStatus:
        """How a vision worker is."""
        status = self.vision_worker(node_id).status().vision
        assert status is not None
        return status

    def device(self, node_id: NodeId) -> SimulatedDevice:
        """The device of a worker."""
        device = self.places[node_id].device
        assert device is not None
        return device

    def worker(self, node_id: NodeId) -> MemberWorker:
        """The worker of a name."""
        node = self.places[node_id].node
        assert isinstance(node, MemberWorker)
        return node

    def is_running(self, node_id: NodeId) -> bool:
        """Whether a worker's engine has requests."""
        engine = self.worker(node_id).status().engine
        return engine is not None and engine.num_running > 0

    def kill(self, node_id: NodeId) -> None:
        """The process is gone."""
        self.places[node_id].is_alive = False

    def stop(self, node_id: NodeId) -> None:
        """The process gets no time until `go_on`."""
        self.places[node_id].is_stopped = True

    def go_on(self, node_id: NodeId) -> None:
        """A stopped process finds everything that has come meanwhile."""
        place = self.places[node_id]
        place.is_stopped = False
        kept, place.kept = place.kept, []
        for call in kept:
            call()

    def submit(
        self,
        name: str,
        length: int = 10,
        salt: int = 0,
        images: tuple[RequestImage, ...] = (),
        traceparent: str = "",
        **sampling: Any,
    ) -> Request:
        """A request of the frontend."""
        params = {"max_tokens": 12, "temperature": 0.5, "seed": 3, "ignore_eos": True, **sampling}
        request = Request(
            name,
            tuple(prompt_of(length, salt)),
            SamplingParams(**params),
            images=images,
            traceparent=traceparent,
        )
        self.give(FRONTEND, ROUTER, messages.Submit(request))
        return request

    def give(self, source: NodeId, destination: NodeId, message: Message) -> None:
        """Carry a message, unless the way is cut."""
        self.sent.append((source, destination, message))
        if destination == FRONTEND:
            self._take(message)
            return
        place = self.places.get(destination)
        is_lost = (source, destination) in self.cut or self.lose(source, destination, message)
        if place is None or not place.is_alive or is_lost:
            return
        if source != destination and FRONTEND not in (source, destination):
            message = self._travelled(source, destination, message)
        if place.is_stopped:
            place.kept.append(lambda: self.give(source, destination, message))
            return
        place.node.on_message(source, message)
        self._perform(destination)

    def run(self, seconds: float = 1.0, until: Callable[[], bool] | None = None) -> None:
        """Let time pass."""
        end = self.clock.ns + round(seconds * 1e9)
        while self._events and self._events[0][0] <= end:
            if until is not None and until():
                return
            self.clock.ns, _, call = heapq.heappop(self._events)
            call()
        if until is not None:
            assert until(), f"did not happen within {seconds} s"
        else:
            self.clock.ns = end

    def check_at_rest(self) -> None:
        """Nobody holds anything."""
        assert (
            self.router.num_calls == self.router.num_waiting == self.router.vision.num_images == 0
        )
        for node_id, place in self.places.items():
            if node_id == ROUTER or not place.is_alive:
                continue
            if node_id.role == "vision":
                status = self.vision_status(node_id)
                assert not status.num_waiting and not status.num_encoding
                continue
            worker = self.worker(node_id)
            status = worker.status()
            assert not status.features.held_bytes, f"{node_id}: {status.features}"
            assert worker.is_idle, f"{node_id}: {status}"
            engine = status.engine
            assert engine is not None
            assert engine.num_free_slots == engine.num_slots and not engine.num_waiting
            assert engine.num_free_blocks == engine.num_blocks

    def _travelled(self, source: NodeId, destination: NodeId, message: Message) -> Message:
        try:
            frames = self._codec.encode(Parcel(source, f"ipc://{source}", destination, message))
        except WireError as error:
            raise AssertionError(error) from error
        return self._codec.decode(frames).message

    def _take(self, message: Message) -> None:
        match message:
            case messages.Tokens(deltas):
                for delta in deltas:
                    assert delta.request_id not in self.ended, f"{delta} after its end"
                    self.tokens.setdefault(delta.request_id, []).extend(delta.token_ids)
                    if delta.finish_reason is not None:
                        self.ended[delta.request_id] = delta.finish_reason
            case messages.Admitted(request_id):
                self.admitted.append(request_id)
            case messages.Refused(request_id) | messages.Failed(request_id):
                assert request_id not in self.ended, f"{message} after its end"
                self.ended[request_id] = message
            case _:
                pass

    def _at(self, delay_ns: int, node_id: NodeId, call: Callable[[], None]) -> None:
        life = self.places[node_id].life

        def happen() -> None:
            place = self.places[node_id]
            if place.life != life or not place.is_alive:
                return
            if place.is_stopped:
                place.kept.append(happen)
                return
            call()

        heapq.heappush(self._events, (self.clock.ns + delay_ns, next(self._numbers), happen))

    def _perform(self, node_id: NodeId) -> None:
        place = self.places[node_id]
        effects = place.node.outbox.take()
        for effect in effects:
            if isinstance(effect, Execute):
                self._execute(node_id, effect.plan)
        for effect in effects:
            match effect:
                case Send(destination, message):
                    self.give(node_id, destination, message)
                case SetTimer(name, delay_ns):
                    self._set_timer(node_id, name, delay_ns)
                case Quit(detail):
                    self.quits.append(detail)
                    place.is_alive = False
                case Trace(note):
                    self.notes.append(note)
                case Execute() | Connect():
                    pass
                case Compute(key, job):
                    computed = messages.Computed(key, job())
                    delay_ns = self.encode_ns if node_id.role == "vision" else MS
                    self._at(delay_ns, node_id, lambda c=computed: self.give(node_id, node_id, c))
                case _:
                    raise AssertionError(effect)

    def _execute(self, node_id: NodeId, plan: StepPlan | KVTransfer) -> None:
        device = self.places[node_id].device
        assert device is not None
        if isinstance(plan, KVTransfer):
            device.move(plan)
            if not plan.is_reading:
                return
        else:
            device.submit(plan)

        def done() -> None:
            if isinstance(plan, KVTransfer):
                message: Message = messages.BlocksRead(device.collect_read())
            else:
                message = messages.StepDone(device.collect())
            self.give(node_id, node_id, message)

        place = self.places[node_id]
        # In line with what runs already.
        begin = max(self.clock.ns, place.timers.get("device", 0))
        place.timers["device"] = begin + STEP_NS
        self._at(place.timers["device"] - self.clock.ns, node_id, done)

    def _set_timer(self, node_id: NodeId, name: str, delay_ns: int) -> None:
        place = self.places[node_id]
        number = next(self._numbers)
        place.timers[f"timer {name}"] = number

        def ring() -> None:
            if place.timers.get(f"timer {name}") == number:
                place.node.on_timer(name)
                self._perform(node_id)

        self._at(delay_ns, node_id, ring)
