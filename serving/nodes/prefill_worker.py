"""The prefill part of a worker: a prompt and its first token are computed here, and the context
waits in host memory until a decode worker has pulled it.

    Prefill -> the engine's steps -> Tokens -> the context is read from the device -> Held
    ReadBlocks -> Blocks, as often as it takes -> HandOffDone

What the device holds is free as soon as the context has been read. A held context belongs to one
decode worker, under a lease that every `ReadBlocks` renews; after that, or when it was pulled, its
reference names nothing. A reference of an earlier life of this worker never names anything.

*Why the first token goes to the client before the context moves*: it is known, and so the time to
it does not depend on the way to the decode worker.
"""

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from msgspec.structs import replace

from serving.core.hand_off import blocks_of, goes_on, prefill_part
from serving.core.kv_transfer import KVRead
from serving.core.request import Request, TokenDelta
from serving.engine.engine import Engine
from serving.nodes import messages, request_spans
from serving.nodes.node import Outbox
from serving.nodes.request_spans import RequestSpans
from serving.nodes.values import HandOffProblem, HandOffRef, NodeId

LEASE = "lease "
_PAST_MAX = 1024
"""References that are over and of which it is still known why."""


@dataclass(slots=True)
class _Prefilling:
    """A request whose prompt is being computed, or its context read."""

    request: Request
    taker: NodeId


@dataclass(slots=True)
class _Held:
    request_id: str
    ref: HandOffRef
    taker: NodeId
    context: KVRead


class PrefillWorker:
    """Holds contexts; its effects go into the worker's outbox.

    Args:
        fingerprint: what KV bytes depend on.
        lease_ns: how long a context is held without being asked for.
        generation: of the life that the worker has as a member now.
        spans: of the worker's requests.

    Attributes:
        num_given: contexts that were pulled.
        num_lost: contexts that nobody pulled in time.
        refused: references that were refused, by reason.
    """

    def __init__(
        self,
        node_id: NodeId,
        outbox: Outbox,
        engine: Engine,
        fingerprint: bytes,
        lease_ns: int,
        generation: Callable[[], int],
        spans: RequestSpans,
    ) -> None:
        self.num_given = self.num_lost = 0
        self.refused: dict[str, int] = {}
        self._node_id = node_id
        self._outbox = outbox
        self._engine = engine
        self._fingerprint = fingerprint
        self._lease_ns = lease_ns
        self._generation = generation
        self._spans = spans
        self._prefilling: dict[str, _Prefilling] = {}
        self._reading: dict[int, str] = {}
        self._held: dict[int, _Held] = {}
        self._past: OrderedDict[int, HandOffProblem] = OrderedDict()
        self._num_held = 0

    @property
    def num_held(self) -> int:
        """Contexts that wait to be pulled."""
        return len(self._held)

    def begin(self, request: Request, taker: NodeId) -> Request:
        """The request that the engine is to run in place of this one."""
        self._prefilling[request.request_id] = _Prefilling(request, taker)
        self._engine.hand_offs.watch(request.request_id)
        return prefill_part(request)

    def forget(self, request_id: str) -> None:
        """Nobody wants this request any more; contexts that are held are left to their leases."""
        if self._prefilling.pop(request_id, None) is not None:
            self._engine.hand_offs.forget(request_id)

    def take(self, deltas: list[TokenDelta]) -> list[TokenDelta]:
        """The deltas of a step as clients are to see them. Call it before the next plan."""
        if not self._prefilling:
            return deltas
        return [self._take(delta) if delta.finish_reason else delta for delta in deltas]

    def on_read(self, read: KVRead) -> messages.Held | None:
        """Takes a context from the device; what is held now, unless nobody wants it any more."""
        request_id = self._reading.pop(read.transfer_id, None)
        if request_id is None or request_id not in self._prefilling:
            return None
        prefilling = self._prefilling.pop(request_id)
        request = prefilling.request
        num_tokens = len(request.prompt_token_ids) + len(request.resumed_token_ids)
        self._num_held += 1
        ref = HandOffRef(
            self._node_id,
            self._generation(),
            self._num_held,
            num_tokens,
            blocks_of(num_tokens, self._engine.limits.block_size),
        )
        self._held[ref.number] = _Held(request_id, ref, prefilling.taker, read)
        self._renew(ref.number)
        return messages.Held(request_id, ref)

    def is_reading(self, read: KVRead) -> bool:
        """Whether a transfer was asked for here."""
        return read.transfer_id in self._reading

    def on_read_blocks(self, source: NodeId, message: messages.ReadBlocks) -> None:
        """Sends a part of a context, or says why not."""
        held = self._look_up(source, message.ref)
        if isinstance(held, _Held) and message.fingerprint != self._fingerprint:
            held = HandOffProblem.LAYOUT
        if isinstance(held, HandOffProblem):
            self.refused[held.value] = self.refused.get(held.value, 0) + 1
            self._outbox.send(source, messages.BlocksRefused(message.ref, held))
            return
        self._renew(held.ref.number)
        stop = message.first + message.count
        context = held.context
        part = KVRead(
            context.transfer_id,
            tuple(group[message.first : stop] for group in context.groups),
            context.states if stop >= held.ref.num_blocks else context.states[:0],
        )
        self._outbox.send(source, messages.Blocks(message.ref, message.first, part))

    def on_done(self, source: NodeId, ref: HandOffRef) -> None:
        """A context was pulled."""
        if isinstance(self._look_up(source, ref), _Held):
            self._end(ref.number, HandOffProblem.CONSUMED)
            self.num_given += 1

    def on_timer(self, name: str) -> None:
        """A lease is over."""
        number = int(name.removeprefix(LEASE))
        if number in self._held:
            self._end(number, HandOffProblem.EXPIRED)
            self.num_lost += 1

    def reset(self) -> None:
        """Everything is dropped; the next life begins."""
        for request_id in list(self._prefilling):
            self.forget(request_id)
        self._held.clear()
        self._past.clear()

    def _take(self, delta: TokenDelta) -> TokenDelta:
        prefilling = self._prefilling.get(delta.request_id)
        if prefilling is None:
            return delta
        transfer = self._engine.hand_offs.take(delta.request_id)
        context_max = self._engine.limits.context_max
        if transfer is None or not goes_on(prefilling.request, delta, context_max):
            self.forget(delta.request_id)
            return delta
        self._reading[transfer.transfer_id] = delta.request_id
        self._spans.move(delta.request_id, request_spans.HAND_OFF)
        self._outbox.execute(transfer)
        return replace(delta, finish_reason=None)

    def _look_up(self, source: NodeId, ref: HandOffRef) -> _Held | HandOffProblem:
        if ref.generation != self._generation() or ref.holder != self._node_id:
            return HandOffProblem.STALE
        held = self._held.get(ref.number)
        if held is None:
            return self._past.get(ref.number, HandOffProblem.UNKNOWN)
        if source != held.taker:
            return HandOffProblem.FOREIGN
        return held

    def _renew(self, number: int) -> None:
        self._outbox.set_timer(f"{LEASE}{number}", self._lease_ns)

    def _end(self, number: int, why: HandOffProblem) -> None:
        is_given = why is HandOffProblem.CONSUMED
        self._spans.end(self._held.pop(number).request_id, "" if is_given else why.value)
        self._past[number] = why
        if len(self._past) > _PAST_MAX:
            self._past.popitem(last=False)
