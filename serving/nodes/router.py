"""The node between frontend and workers: it knows who is there, and where every request is.

    Submit -> Admitted                                        the request waits for room
           -> Encode -> Encoded                               first its images, at vision workers
           -> Reserve -> Reserved                             room at a decode worker
           -> Prefill -> Tokens (one), Held                   at a prefill worker
           -> TakeOver -> HandedOver, Tokens, Tokens, ...     at the decode worker

A prompt that is not worth moving is submitted to the decode worker as a whole.

Tokens pass through here, so the router always has all that a client has been sent. When a worker
is lost, or fails a request, the request starts again at other workers behind those tokens; they are
not said again, and the client notices nothing but a pause. KV bytes never pass.

At workers a request goes by the name of its *attempt*. What comes under another name than that of
the current attempt is late, and is dropped, counted, and aborted where it comes from.

*Why tokens go through the router and not straight to the frontend*: somebody has to know them when
a decode worker dies, and frontend and router are one process.
"""

import random
from dataclasses import replace

from msgspec import structs

from serving.clock import Clock, s_of_ns
from serving.core.known_prefixes import KnownPrefixes
from serving.core.prefix import PrefixKey
from serving.core.prefix_transfer import prompt_keys
from serving.core.profiling import ProfileProblem, ProfileRefusal
from serving.core.request import Request, TokenDelta
from serving.nodes import messages, request_spans
from serving.nodes.calls import Call, Calls, Phase
from serving.nodes.messages import Message, RefusalReason
from serving.nodes.node import Outbox
from serving.nodes.pools import DECODE, PLACES_MAX, WorkerPools
from serving.nodes.reception import Reception, RouterOptions
from serving.nodes.registry import VISION, JoinRefusedError, Member, Registry
from serving.nodes.request_spans import RequestSpans
from serving.nodes.values import HandOffRef, NodeId
from serving.nodes.vision_pool import VisionPool

SWEEP = "sweep"
RETRY = "retry"

_RETRY_NS = 50_000_000
"""Time after which workers that had no room are asked again."""

_KNOWN_MAX = 500_000
"""Blocks of prompts that are remembered as computed: of 64 million tokens."""


class Router:
    """A node; see the text of the module.

    Attributes:
        registry: who is there.
        pools: who of them can be given requests.
        vision: who of them can be given images.
        num_restarted: attempts that were given up for another one.
        num_stale: messages under names of attempts that are over.
    """

    def __init__(
        self, node_id: NodeId, clock: Clock, options: RouterOptions, random_source: random.Random
    ) -> None:
        self.node_id = node_id
        self.outbox = Outbox()
        self.registry = Registry(options.code_version, options.lost_ns, PLACES_MAX)
        self.num_restarted = self.num_stale = 0
        self._clock = clock
        self._options = options
        self._random = random_source
        self.pools = WorkerPools(self.registry, options.local_prefill_ms)
        self.vision = VisionPool(self.outbox, self.registry, PLACES_MAX)
        self._calls = Calls()
        self._reception = Reception(self.registry, self.pools, self.vision, self._calls, options)
        self._known = KnownPrefixes(_KNOWN_MAX)
        self._spans = RequestSpans(node_id, self.outbox, clock)
        # Set while those that said that they have no room are left alone.
        self._is_resting = False
        self._stranded_since_ns: int | None = None

    def start(self) -> None:
        """Begins to look after the workers; the caller performs the effects."""
        self.outbox.set_timer(SWEEP, self._options.heartbeat_ns)

    @property
    def num_waiting(self) -> int:
        """Requests that wait for room."""
        return self._calls.num_waiting

    @property
    def num_calls(self) -> int:
        """Requests under way, those that wait included."""
        return len(self._calls)

    def phases(self) -> dict[str, int]:
        """How many requests are in each phase."""
        return self._calls.phases()

    def overview(self) -> dict[str, object]:
        """Workers with what they hold, and where requests are, for people."""
        now_ns = self._clock.now_ns()
        return {
            "nodes": [
                {
                    "node": str(member.node_id),
                    "address": member.card.address,
                    "pid": member.card.pid,
                    "state": member.state,
                    "silent_s": round(s_of_ns(now_ns - member.seen_ns), 3),
                    "load": self._load(member),
                    "status": member.status,
                }
                for member in self.registry.members()
            ],
            "missing_roles": self.pools.missing_roles,
            "requests": self.phases(),
            "num_waiting": self.num_waiting,
            "num_waiting_images": self.vision.num_images,
            "num_restarted": self.num_restarted,
            "num_stale": self.num_stale,
        }

    def on_message(self, source: NodeId, message: Message) -> None:
        """Takes one message; those of other roles are passed over."""
        match message:
            case messages.Tokens(deltas):
                self._on_tokens(source, deltas)
            case messages.Heartbeat():
                self._on_heartbeat(source, message)
            case messages.Submit(request):
                self._on_submit(source, request)
            case messages.Abort(request_id):
                call = self._calls.get(request_id)
                if call is not None:
                    self._leave_workers(call)
                    self._end(call, "aborted")
                    self._start_waiting()
            case messages.Join(generation, card):
                self._on_join(source, generation, card)
            case messages.QueryStatus(query_id):
                self.outbox.send(source, self._reception.worker_status(query_id))
            case messages.Profile(query_id):
                detail = "traces are made by the server of a single worker"
                refusal = ProfileRefusal(ProfileProblem.OFF, detail)
                self.outbox.send(source, messages.Profiled(query_id, refusal))
            case messages.Undeliverable(destination, lost):
                self._on_undeliverable(destination, lost)
            case _:
                self._on_progress(source, message)

    def on_timer(self, name: str) -> None:
        """Looks for workers that have fallen silent, and for requests that get nowhere."""
        if name == SWEEP:
            self.outbox.set_timer(SWEEP, self._options.heartbeat_ns)
            self._sweep()
        else:
            self._is_resting = False
        self._start_waiting()

    # --- frontend ---

    def _on_submit(self, source: NodeId, request: Request) -> None:
        request_id = request.request_id
        if self._calls.get(request_id) is not None:
            return  # A duplicate: the first one is being served.
        refused = self._reception.refusal(request)
        if refused is not None:
            self.outbox.send(source, refused)
            return
        sampling = request.sampling
        if sampling.seed is None:
            # Every attempt is to draw the same.
            sampling = replace(sampling, seed=self._random.getrandbits(63))
        # Samples of one prompt may go to different workers.
        request = replace(request, sampling=sampling, fork_group=None)
        call = Call(request, source, self._clock.now_ns(), keys=self._keys_of(request))
        if self.vision.must_encode(call):
            self._enter(call, Phase.ENCODING)
            self.vision.begin(call, call.since_ns)
        self._calls.add(call)
        self._spans.enter(request, request_spans.QUEUE)
        self.outbox.send(source, messages.Admitted(request_id))
        self._start_waiting()

    # --- starting requests ---

    def _start_waiting(self) -> None:
        """Gives requests to workers, in their order, as far as there is room."""
        while not self._is_resting and (call := self._calls.first()) is not None:
            if not self._start(call):
                return

    def _keys_of(self, request: Request) -> tuple[PrefixKey, ...]:
        """Keys of the prefixes that a prefill worker might find, whoever has computed them."""
        members = self.registry.members(DECODE)
        if not members or not self.pools.has_tiers:
            return ()
        return prompt_keys(request, members[0].card.engine_limits)

    def _num_cached(self, call: Call) -> int:
        """Tokens of a prompt that are probably stored."""
        if not call.keys:
            return 0
        limits = self.registry.members(DECODE)[0].card.engine_limits
        return self._known.num_usable(call.keys) * limits.block_size

    def _start(self, call: Call) -> bool:
        """Begins an attempt, or has its images encoded; False if there is no room."""
        if self.vision.must_encode(call):
            now_ns = self._clock.now_ns()
            self._calls.leave_line(call, now_ns)
            self.vision.begin(call, now_ns)
            return True
        place = self.pools.place
        placement = call.placement = place(call.num_tokens, self._num_cached(call), call.avoided)
        if placement is None:
            return False
        assert placement.decode is not None
        self._calls.begin(call)
        self._enter(call, Phase.RESERVING)
        reserve = messages.Reserve(call.attempt_id, call.num_tokens)
        self.outbox.send(placement.decode.node_id, reserve)
        return True

    def _enter(self, call: Call, phase: Phase) -> None:
        call.enter(phase, self._clock.now_ns())

    # --- progress ---

    def _on_progress(self, source: NodeId, message: Message) -> None:
        """A worker says something of one attempt."""
        attempt_id = getattr(message, "request_id", None)
        if attempt_id is None:
            return
        if attempt_id in self.vision:
            encoded = self.vision.on_message(source, attempt_id, message)
            self._line_up([] if encoded is None else [encoded])
            return
        call = self._calls.of_attempt(attempt_id)
        if call is None or not call.is_at(source):
            self._drop_stale(source, attempt_id)
            return
        match message:
            case messages.Reserved() if call.phase is Phase.RESERVING:
                self._on_reserved(call)
            case messages.Held(_, ref) if call.phase is Phase.PREFILLING:
                self._on_held(call, ref)
            case messages.HandedOver() if call.phase is Phase.PULLING:
                assert call.placement is not None
                call.placement.prefill = None
                self._enter(call, Phase.DECODING)
            case messages.HandOffLost(_, detail):
                self._avoid_holder(call)
                self._restart(call, detail)
            case messages.Failed(_, detail):
                self._restart(call, f"{source}: {detail}")
            case messages.Refused(_, reason, detail, param):
                self._on_refused(call, source, reason, detail, param)
            case _:
                pass

    def _on_reserved(self, call: Call) -> None:
        placement = call.placement
        assert placement is not None and placement.decode is not None
        decode = placement.decode.node_id
        self._calls.count_start(call)
        where = {member.node_id.role: str(member.node_id) for member in placement.members}
        self._spans.enter(call.request, request_spans.ATTEMPT, number=call.attempt, **where)
        if placement.prefill is None:
            self._enter(call, Phase.DECODING)
            self.outbox.send(decode, messages.Submit(call.current(), self.vision.refs(call)))
            return
        self._enter(call, Phase.PREFILLING)
        prefill = messages.Prefill(call.current(), decode, self.vision.refs(call))
        self.outbox.send(placement.prefill.node_id, prefill)

    def _line_up(self, encoded: list[Call]) -> None:
        """The images of these requests are waited for no more."""
        for call in encoded:
            self._calls.line_up(call, self._clock.now_ns())
        if encoded:
            self._start_waiting()

    def _on_held(self, call: Call, ref: HandOffRef) -> None:
        prefill, decode = call.pair()
        assert call.placement is not None
        self.pools.finish_work(call.placement)
        self._enter(call, Phase.PULLING)
        take_over = messages.TakeOver(call.current(), ref, prefill.card.address)
        self.outbox.send(decode.node_id, take_over)

    def _on_refused(
        self, call: Call, source: NodeId, reason: RefusalReason, detail: str, param: str | None
    ) -> None:
        if reason is RefusalReason.BUSY:
            # Nothing is wrong with the request or the worker: it waits for its turn again.
            self._requeue(call)
            self._is_resting = True
            self.outbox.set_timer(RETRY, _RETRY_NS)
        elif reason is RefusalReason.INVALID:
            self._leave_workers(call)
            self._end(call, reason.value)
            refused = messages.Refused(call.request.request_id, reason, detail, param)
            self.outbox.send(call.frontend, refused)
        else:
            self._restart(call, f"{source}: {detail}")

    def _on_tokens(self, source: NodeId, deltas: tuple[TokenDelta, ...]) -> None:
        by_frontend: dict[NodeId, list[TokenDelta]] = {}
        for delta in deltas:
            call = self._calls.of_attempt(delta.request_id)
            if call is None or not call.is_at(source):
                self._drop_stale(source, delta.request_id)
                continue
            call.tokens.extend(delta.token_ids)
            if call.num_cached is None:
                call.num_cached = delta.num_cached_tokens
                self._known.add(call.keys)
            told = structs.replace(
                delta,
                request_id=call.request.request_id,
                num_cached_tokens=call.num_cached,
            )
            by_frontend.setdefault(call.frontend, []).append(told)
            if delta.finish_reason is not None:
                self._leave_workers(call, ended_at=source)
                self._end(call)
        for frontend, some in by_frontend.items():
            self.outbox.send(frontend, messages.Tokens(tuple(some)))
        self._start_waiting()

    def _drop_stale(self, source: NodeId, attempt_id: str) -> None:
        self.num_stale += 1
        if self.registry.get(source) is not None:
            self.outbox.send(source, messages.Abort(attempt_id))

    # --- ends and restarts ---

    def _leave_workers(self, call: Call, ended_at: NodeId | None = None) -> None:
        """Gives back what the current attempt has at its workers."""
        self._calls.end_attempt(call)
        if call.phase is Phase.ENCODING:
            self.vision.abandon(call)
        placement, call.placement = call.placement, None
        if placement is None:
            return
        self.pools.finish(placement)
        for member in placement.members:
            is_there = self.registry.get(member.node_id) is member
            if is_there and member.node_id != ended_at:
                self.outbox.send(member.node_id, messages.Abort(call.attempt_id))

    def _end(self, call: Call, fault: str = "") -> None:
        self._calls.remove(call)
        self._spans.end(call.request.request_id, fault)

    def _requeue(self, call: Call) -> None:
        """The attempt is over without an end of the request."""
        self._leave_workers(call)
        self._calls.requeue(call, self._clock.now_ns())
        self._spans.enter(call.request, request_spans.QUEUE)

    def _avoid_holder(self, call: Call) -> None:
        """A context could not be had from a prefill worker: the next attempt prefers others."""
        if call.placement is not None and call.placement.prefill is not None:
            call.avoided.add(call.placement.prefill.node_id)

    def _restart(self, call: Call, detail: str) -> None:
        """The attempt has failed by no fault of the request."""
        self.num_restarted += 1
        call.num_failures += 1
        call.last_fault = detail
        self._spans.end(call.request.request_id, detail)
        self._requeue(call)
        if call.num_failures >= self._options.attempts_max:
            self._give_up(call, f"{call.num_failures} attempts failed; the last one: {detail}")

    def _give_up(self, call: Call, detail: str) -> None:
        self._end(call, detail)
        self.outbox.send(call.frontend, messages.Failed(call.request.request_id, detail))

    # --- members ---

    def _on_join(self, source: NodeId, generation: int, card: messages.MemberCard) -> None:
        known = self.registry.get(source)
        if known is not None and known.generation != generation:
            self._lose(known, f"{source} was started anew")
            known = None
        try:
            member = known or self.registry.join(source, generation, card, self._clock.now_ns())
        except JoinRefusedError as error:
            self.outbox.send(source, messages.Rejected(generation, str(error)))
            return
        # Before anything else: it takes no work that comes before.
        self.outbox.send(source, messages.Welcome(generation, self._options.heartbeat_ns))
        self._pool_of(member).refresh(member)
        self._start_waiting()

    def _on_heartbeat(self, source: NodeId, beat: messages.Heartbeat) -> None:
        member = self.registry.heartbeat(
            source, beat.generation, beat.status, beat.is_draining, self._clock.now_ns()
        )
        if member is None:
            self.outbox.send(source, messages.Fenced(beat.generation))
            return
        self._pool_of(member).refresh(member)

    def _pool_of(self, member: Member) -> WorkerPools | VisionPool:
        return self.vision if member.node_id.role == VISION else self.pools

    def _load(self, member: Member) -> dict[str, float]:
        is_vision = member.node_id.role == VISION
        return self.vision.load(member) if is_vision else self.pools.loads(member)

    def _lose(self, member: Member, detail: str) -> None:
        """A worker's life is over: its requests start again elsewhere."""
        self.registry.remove(member.node_id)
        if member.node_id.role == VISION:
            self._line_up(self.vision.lose(member, self._clock.now_ns()))
            return
        self.pools.lose(member)
        for call in [c for c in self._calls if c.is_at(member.node_id)]:
            self._restart(call, detail)

    def _sweep(self) -> None:
        now_ns = self._clock.now_ns()
        for member in self.registry.silent(now_ns):
            self._lose(
                member,
                f"{member.node_id} was silent for {s_of_ns(now_ns - member.seen_ns):.1f} s",
            )
        for call in self._calls:
            is_waiting_for_answer = call.phase in (Phase.RESERVING, Phase.PULLING)
            if is_waiting_for_answer and now_ns - call.since_ns >= self._options.answer_ns:
                if call.phase is Phase.PULLING:
                    self._avoid_holder(call)
                self._restart(call, f"no answer while {call.phase.value}")
        self._line_up(self.vision.sweep(now_ns, self._options.answer_ns))
        self._give_up_stranded(now_ns)

    def _give_up_stranded(self, now_ns: int) -> None:
        """Requests do not wait for ever for workers that nobody has seen."""
        missing = self.pools.missing_roles
        if not missing:
            self._stranded_since_ns = None
            return
        if self._stranded_since_ns is None:
            self._stranded_since_ns = now_ns
        if now_ns - self._stranded_since_ns >= self._options.stranded_ns:
            for call in self._calls.waiting:
                fault = f" ({call.last_fault})" if call.last_fault else ""
                self._give_up(call, f"there is no {' and no '.join(missing)} worker{fault}")

    def _on_undeliverable(self, destination: NodeId, lost: object) -> None:
        match lost:
            case messages.Encode(name):
                self.vision.on_undeliverable(name)
                return
            case messages.Reserve(attempt_id):
                pass
            case messages.Prefill(request) | messages.TakeOver(request) | messages.Submit(request):
                attempt_id = request.request_id
            case _:
                return
        call = self._calls.of_attempt(attempt_id)
        if call is not None:
            self._restart(call, f"{destination} cannot be reached")
