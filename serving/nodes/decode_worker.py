"""The decode part of a worker: room is kept for a request before its prompt is computed, its
context is pulled from whoever has computed it, and it goes on here.

    Reserve -> Reserved
    TakeOver -> ReadBlocks -> Blocks, part by part -> HandOffDone, HandedOver -> in the engine

Blocks of the context that are here already, from its beginning on, are held and not pulled.

A context comes whole or not at all: if one part is refused, or does not come in time, the parts
that came are dropped and the router is told. It then has the prompt computed again, by whom it
sees fit.
"""

from dataclasses import dataclass, field

import numpy as np

from serving.core.hand_off import HandedContext, blocks_of
from serving.core.request import Request
from serving.engine.engine import Engine
from serving.nodes import messages, request_spans
from serving.nodes.node import Outbox
from serving.nodes.request_spans import RequestSpans
from serving.nodes.values import HandOffRef, NodeId

PULL = "pull "
PART_BLOCKS = 64
"""Blocks that are asked for at a time."""


@dataclass(slots=True)
class _Pull:
    """`num_come` blocks are here, of which `num_held` were so before."""

    source: NodeId
    request: Request
    ref: HandOffRef
    num_held: int
    num_come: int
    parts: list[tuple[np.ndarray, ...]] = field(default_factory=list[tuple[np.ndarray, ...]])


@dataclass(frozen=True, slots=True, eq=False)
class Arrived:
    """A request whose context is here. `source` is who asked for it."""

    source: NodeId
    request: Request
    context: HandedContext


class DecodeWorker:
    """Keeps room and pulls contexts; its effects go into the worker's outbox.

    Args:
        fingerprint: what KV bytes depend on.
        timeout_ns: how long a part may take to come.
        spans: of the worker's requests.

    Attributes:
        num_taken: contexts that came whole.
        num_lost: contexts that did not.
        num_spared: blocks that need not be pulled.
    """

    def __init__(
        self,
        outbox: Outbox,
        engine: Engine,
        fingerprint: bytes,
        timeout_ns: int,
        spans: RequestSpans,
    ) -> None:
        self.num_taken = self.num_lost = self.num_spared = 0
        self._outbox = outbox
        self._engine = engine
        self._fingerprint = fingerprint
        self._timeout_ns = timeout_ns
        self._spans = spans
        # Blocks that are kept for each request, until the engine has it.
        self._reserved: dict[str, int] = {}
        # Blocks of its context that are not pulled.
        self._held: dict[str, list[int]] = {}
        self._pulls: dict[str, _Pull] = {}

    @property
    def num_reserved(self) -> int:
        """Requests that room is kept for."""
        return len(self._reserved)

    @property
    def num_pulling(self) -> int:
        """Contexts that are on their way."""
        return len(self._pulls)

    def on_reserve(self, source: NodeId, message: messages.Reserve) -> None:
        """Keeps room for a request, or says that there is none."""
        request_id = message.request_id
        if request_id not in self._reserved:
            status = self._engine.status()
            num_blocks = blocks_of(message.num_tokens + 1, self._engine.limits.block_size)
            num_kept = sum(self._reserved.values())
            has_slot = len(self._reserved) < status.num_free_slots - status.num_waiting
            if not has_slot or num_blocks > status.num_free_blocks - num_kept:
                detail = (
                    f"{status.num_free_slots} slots and {status.num_free_blocks} blocks are free, "
                    f"and {num_kept} of these are kept for {len(self._reserved)} requests"
                )
                busy = messages.RefusalReason.BUSY
                self._outbox.send(source, messages.Refused(request_id, busy, detail))
                return
            self._reserved[request_id] = num_blocks
        self._outbox.send(source, messages.Reserved(request_id))

    def on_take_over(self, source: NodeId, message: messages.TakeOver) -> None:
        """Begins to pull a context."""
        request_id = message.request.request_id
        if request_id in self._pulls:
            return  # A duplicate.
        self._spans.enter(message.request, request_spans.HAND_OFF, holder=str(message.ref.holder))
        self._outbox.connect(message.ref.holder, message.address)
        held = self._held[request_id] = self._engine.hold_present(message.request)
        if request_id in self._reserved:
            self._reserved[request_id] -= len(held)
        self.num_spared += len(held)
        num_held = len(held)
        pull = _Pull(source, message.request, message.ref, num_held, num_held)
        self._pulls[request_id] = pull
        self._ask(request_id)

    def on_blocks(self, message: messages.Blocks) -> Arrived | None:
        """Takes a part of a context; all of it, once that is here."""
        found = self._find(message.ref)
        if found is None or found[1].num_come != message.first:
            return None  # Late, or a duplicate.
        request_id, pull = found
        groups, states = message.part.groups, message.part.states
        pull.parts.append(groups)
        pull.num_come += len(groups[0]) if groups else 0
        if pull.num_come < pull.ref.num_blocks:
            self._ask(request_id)
            return None
        if not len(states):
            self._lose(request_id, f"{pull.ref.holder} sends no state")
            return None
        del self._pulls[request_id]
        self.num_taken += 1
        self._outbox.send(pull.ref.holder, messages.HandOffDone(pull.ref))
        self._outbox.send(pull.source, messages.HandedOver(request_id))
        whole = tuple(np.concatenate(group) for group in zip(*pull.parts, strict=True))
        context = HandedContext(pull.ref.num_tokens, whole, states[0], pull.num_held)
        return Arrived(pull.source, pull.request, context)

    def on_refused(self, message: messages.BlocksRefused) -> None:
        """A reference is not served."""
        found = self._find(message.ref)
        if found is not None:
            self._lose(found[0], f"{message.ref.holder} refuses it: {message.problem.value}")

    def on_undeliverable(self, message: object) -> None:
        """A message of this worker has not left."""
        if isinstance(message, messages.ReadBlocks):
            found = self._find(message.ref)
            if found is not None:
                self._lose(found[0], f"{message.ref.holder} cannot be reached")

    def on_timer(self, name: str) -> None:
        """A part has not come in time."""
        request_id = name.removeprefix(PULL)
        pull = self._pulls.get(request_id)
        if pull is not None:
            self._lose(request_id, f"{pull.ref.holder} does not answer")

    def forget(self, request_id: str) -> None:
        """The engine has this request, or nobody wants it any more: no room is kept for it."""
        self._give_back(request_id)
        pull = self._pulls.pop(request_id, None)
        if pull is not None:
            self._outbox.send(pull.ref.holder, messages.HandOffDone(pull.ref))

    def reset(self) -> None:
        """Everything is dropped."""
        for request_id in [*self._reserved, *self._held]:
            self._give_back(request_id)
        self._pulls.clear()

    def _ask(self, request_id: str) -> None:
        pull = self._pulls[request_id]
        count = min(PART_BLOCKS, pull.ref.num_blocks - pull.num_come)
        ask = messages.ReadBlocks(pull.ref, self._fingerprint, pull.num_come, count)
        self._outbox.send(pull.ref.holder, ask)
        self._outbox.set_timer(PULL + request_id, self._timeout_ns)

    def _find(self, ref: HandOffRef) -> tuple[str, _Pull] | None:
        return next(((name, pull) for name, pull in self._pulls.items() if pull.ref == ref), None)

    def _lose(self, request_id: str, detail: str) -> None:
        pull = self._pulls.pop(request_id)
        self._give_back(request_id)
        self.num_lost += 1
        self._spans.end(request_id, detail)
        self._outbox.send(pull.source, messages.HandOffLost(request_id, detail))

    def _give_back(self, request_id: str) -> None:
        """Room is kept for this request no longer."""
        self._reserved.pop(request_id, None)
        self._engine.hand_offs.release(self._held.pop(request_id, []))
