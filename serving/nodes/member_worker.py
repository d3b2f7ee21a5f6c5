"""A mesh worker that is one of several: it computes prompts for others, or goes on with what others
have computed.

Which of the two it is asked for is the router's affair; its role only says what it is meant for. A
router that does not find it worth while to move a context submits the whole request to one worker,
as a frontend does that has only one.

When its life as a member is over (`membership.py`) everything it has is dropped: the router has
given it to others.
"""

import random
from collections import deque
from dataclasses import dataclass
from typing import Any, override

from serving.core.grammar import Grammar
from serving.core.request import Request, RequestError, TokenDelta
from serving.engine.engine import Engine
from serving.nodes import feature_pulls, membership, messages, request_spans
from serving.nodes.decode_worker import PULL, Arrived, DecodeWorker
from serving.nodes.feature_pulls import FeaturePulls
from serving.nodes.membership import Membership
from serving.nodes.mesh_worker import MeshWorker
from serving.nodes.messages import Message, RefusalReason
from serving.nodes.prefill_worker import LEASE, PrefillWorker
from serving.nodes.values import FeatureRef, HandOffCounts, MemberCard, NodeId, NodeStatus

_WORK = (messages.Submit, messages.Prefill, messages.Reserve, messages.TakeOver)


@dataclass(frozen=True, slots=True)
class MemberOptions:
    """Of what cluster a worker is a member.

    Attributes:
        router: whom it joins.
        card: what it says of itself.
        lease_ns: how long it holds a context that nobody asks for.
        pull_timeout_ns: how long it waits for a part of a context.
    """

    router: NodeId
    card: MemberCard
    lease_ns: int
    pull_timeout_ns: int


class MemberWorker(MeshWorker):
    """A node around one `Engine`, as `MeshWorker`, and a member of a cluster.

    Args:
        options: of the cluster.
        random_source: of the generations of its lives.
        rest: further arguments of `MeshWorker`.
    """

    def __init__(
        self,
        node_id: NodeId,
        engine: Engine,
        step_timeout_ns: int,
        options: MemberOptions,
        random_source: random.Random,
        **rest: Any,
    ) -> None:
        super().__init__(node_id, engine, step_timeout_ns, **rest)
        self._adopting = engine
        self._membership = Membership(
            self.outbox, options.router, options.card, self.status, self._reset, random_source
        )
        card, lease_ns = options.card, options.lease_ns
        self._prefill = PrefillWorker(
            node_id,
            self.outbox,
            engine,
            card.fingerprint,
            lease_ns,
            lambda: self._membership.generation,
            self._spans,
        )
        self._decode = DecodeWorker(
            self.outbox, engine, card.fingerprint, options.pull_timeout_ns, self._spans
        )
        self._pulls = FeaturePulls(self.outbox, engine, card.features, options.pull_timeout_ns)
        self._arriving: dict[str, Arrived] = {}
        self._ready: deque[tuple[Arrived, Grammar | None]] = deque()

    def start(self) -> None:
        """Begins to join; the caller performs the effects."""
        self._membership.start()

    def drain(self) -> None:
        """Takes nothing more; `is_idle` says when it has finished what it has."""
        self._membership.drain()

    @property
    def is_member(self) -> bool:
        """Whether the router has taken it in."""
        return self._membership.is_member

    @property
    @override
    def is_idle(self) -> bool:
        has_context = self._prefill.num_held or self._decode.num_pulling or self._arriving
        has_context = has_context or self._pulls.num_pulling
        return not (has_context or self._ready or self._decode.num_reserved) and super().is_idle

    def status(self) -> NodeStatus:
        """How it is now."""
        prefill, decode = self._prefill, self._decode
        counts = HandOffCounts(
            num_held=prefill.num_held,
            num_reserved=decode.num_reserved,
            num_pulling=decode.num_pulling,
            num_ready=len(self._ready) + len(self._arriving),
            num_given=prefill.num_given,
            num_taken=decode.num_taken,
            num_lost=prefill.num_lost + decode.num_lost,
            num_spared_blocks=decode.num_spared,
            refused=dict(prefill.refused),
        )
        offload = None if self._offload is None else self._offload.status()
        features = self._pulls.counts()
        return NodeStatus(self._failure, self._engine.status(), counts, offload, features)

    @override
    def on_message(self, source: NodeId, message: Message) -> None:
        if isinstance(message, _WORK) and not self._membership.is_member:
            return  # For an earlier life, whose work the router gives to others.
        match message:
            case messages.Welcome() | messages.Rejected() | messages.Fenced():
                self._membership.on_message(message)
            case messages.Prefill(request, taker, features):
                if not self._has_context(request.request_id):
                    self._pull(source, self._prefill.begin(request, taker), features)
            case messages.Submit(request, features):
                # What was kept for it is now what it takes.
                self._decode.forget(request.request_id)
                self._pull(source, request, features)
            case messages.Features():
                self._go_on(self._pulls.on_features(message))
            case messages.FeaturesRefused(digest):
                self._go_on(self._pulls.on_refused(digest))
            case messages.Reserve():
                self._decode.on_reserve(source, message)
            case messages.TakeOver(request):
                if not self._has_context(request.request_id):
                    self._decode.on_take_over(source, message)
            case messages.Blocks():
                self._on_arrived(self._decode.on_blocks(message))
            case messages.BlocksRefused():
                self._decode.on_refused(message)
            case messages.ReadBlocks():
                self._prefill.on_read_blocks(source, message)
            case messages.HandOffDone(ref):
                self._prefill.on_done(source, ref)
            case messages.BlocksRead(read) if self._prefill.is_reading(read):
                held = self._prefill.on_read(read)
                if held is not None:
                    self.outbox.send(self._owners.pop(held.request_id), held)
            case messages.Undeliverable(_, messages.ReadFeatures(digest)):
                self._go_on(self._pulls.on_refused(digest))
            case messages.Undeliverable(_, lost):
                self._decode.on_undeliverable(lost)
            case _:
                super().on_message(source, message)

    @override
    def on_timer(self, name: str) -> None:
        if name == membership.TIMER:
            self._membership.on_timer()
        elif name.startswith(LEASE):
            self._prefill.on_timer(name)
        elif name.startswith(PULL):
            self._decode.on_timer(name)
        elif name.startswith(feature_pulls.TIMER):
            self._go_on(self._pulls.on_timer(name))
        else:
            super().on_timer(name)

    @override
    def _take(self, deltas: list[TokenDelta]) -> list[TokenDelta]:
        deltas = self._prefill.take(deltas)
        self._adopt_ready()
        return deltas

    @override
    def _fetch(self, source: NodeId, request: Request, grammar: Grammar | None) -> None:
        arrived = self._arriving.pop(request.request_id, None)
        if arrived is None:
            super()._fetch(source, request, grammar)
            return
        self._spans.enter(arrived.request, request_spans.HAND_OFF)
        self._ready.append((arrived, grammar))
        self._adopt_ready()
        self._advance()

    @override
    def _on_grammar(self, computed: messages.Computed) -> None:
        if computed.error is not None:
            for request_id in self._compiling[self._compilations[computed.key]]:
                self._forget(request_id)
        super()._on_grammar(computed)

    @override
    def _admit(self, request: Request, grammar: Grammar | None) -> messages.Refused | None:
        refused = super()._admit(request, grammar)
        if refused is not None:
            self._forget(request.request_id)
        return refused

    @override
    def _on_abort(self, request_id: str) -> None:
        self._forget(request_id)
        super()._on_abort(request_id)

    @override
    def _fail(self, detail: str) -> None:
        owners = {entry.request.request_id: entry.source for entry, _ in self._ready}
        owners |= {name: entry.source for name, entry in self._arriving.items()}
        owners |= {request.request_id: source for source, request in self._pulls.drain()}
        for request_id, owner in owners.items():
            self.outbox.send(owner, messages.Failed(request_id, detail))
        self._drop_contexts()
        # A process that is started anew has a device again.
        self.outbox.quit(detail)
        super()._fail(detail)

    def _has_context(self, request_id: str) -> bool:
        """Whether the context of a request is here already."""
        is_ready = any(entry.request.request_id == request_id for entry, _ in self._ready)
        is_coming = request_id in self._arriving or request_id in self._pulls
        return is_ready or is_coming or request_id in self._owners

    def _pull(self, source: NodeId, request: Request, refs: tuple[FeatureRef, ...]) -> None:
        """A request goes on once the features of its images are here, or cannot be had."""
        is_new = request.request_id not in self._pulls
        if is_new and not (self._failure is None and self._pulls.begin(source, request, refs)):
            self._on_submit(source, request)

    def _go_on(self, requests: list[tuple[NodeId, Request]]) -> None:
        for source, request in requests:
            self._on_submit(source, request)

    def _on_arrived(self, arrived: Arrived | None) -> None:
        """A context is here whole: the request goes on once its grammar is there, too."""
        if arrived is None:
            return
        request = arrived.request
        self._arriving[request.request_id] = arrived
        self._on_submit(arrived.source, request)

    def _adopt_ready(self) -> None:
        """Let the engine go on with requests whose contexts are here, as far as it has room."""
        while self._ready and self._failure is None:
            arrived, grammar = self._ready[0]
            request_id = arrived.request.request_id
            try:
                transfer = self._adopting.adopt(arrived.request, arrived.context, grammar)
            except RequestError as error:
                self._ready.popleft()
                self._decode.forget(request_id)
                invalid = RefusalReason.INVALID
                refused = messages.Refused(request_id, invalid, str(error), error.param)
                self._refuse(arrived.source, refused)
                continue
            if transfer is None:
                return
            self._ready.popleft()
            self._decode.forget(request_id)
            self._owners[request_id] = arrived.source
            self._spans.move(request_id, request_spans.DECODE)
            self.outbox.execute(transfer)

    def _forget(self, request_id: str) -> None:
        self._prefill.forget(request_id)
        self._decode.forget(request_id)
        self._pulls.forget(request_id)
        self._arriving.pop(request_id, None)
        self._ready = deque(
            entry for entry in self._ready if entry[0].request.request_id != request_id
        )

    def _drop_contexts(self) -> None:
        self._arriving.clear()
        self._ready.clear()
        self._prefill.reset()
        self._decode.reset()
        self._pulls.reset()

    def _reset(self) -> None:
        """Drops everything; what steps in flight still compute is for nobody."""
        self._spans.end_all("its life as a member is over")
        self._drop_contexts()
        compiling = [name for waiting in self._compiling.values() for name in waiting]
        for request_id in [*self._owners, *compiling, *self._fetching]:
            super()._on_abort(request_id)
