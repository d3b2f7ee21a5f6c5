"""The workers of a cluster as two pools: which of them can be given requests, and who gets one.

Joins the members that there are (`registry.py`) with the policies that choose among them
(`core/balance_prefill.py`, `core/balance_decode.py`). A worker that leaves or fails is no longer
chosen, though what it has it may finish.
"""

from collections.abc import Collection
from dataclasses import dataclass

from serving.core.balance_decode import DecodeBalancer, DecodeDispatch
from serving.core.balance_prefill import NoWorkerError, PrefillBalancer, PrefillDispatch, Prompt
from serving.core.cost import PrefillCost
from serving.nodes.registry import Member, Registry
from serving.nodes.values import NodeId

PREFILL, DECODE = "prefill", "decode"

PLACES_MAX = 256
"""Workers of one role."""

_BY_TOKENS = PrefillCost(0.0, 1.0, 0.0)
"""What prefill costs as long as nobody has measured it: as much as there are tokens."""


@dataclass(slots=True)
class Placement:
    """The workers of one attempt at a request, and what is counted for it there.

    `work` is counted until the prompt is computed, `room` to the end. A worker that the attempt
    does not need, or not any more, is None: `prefill` is from the start where the prompt is to be
    computed by the decode worker itself.
    """

    prefill: Member | None
    work: PrefillDispatch | None
    decode: Member | None
    room: DecodeDispatch | None

    @property
    def members(self) -> list[Member]:
        """The workers that the attempt needs."""
        return [member for member in (self.prefill, self.decode) if member is not None]


class WorkerPools:
    """Both pools. A policy is made when the first worker of its role comes.

    Args:
        local_prefill_ms: prompts whose prefill is predicted to take no longer are computed where
            they decode, since to move them would cost more; 0 for none.
    """

    def __init__(self, registry: Registry, local_prefill_ms: float = 0.0) -> None:
        self._registry = registry
        self._local_prefill_ms = local_prefill_ms
        self._cost = _BY_TOKENS
        self._prefill: PrefillBalancer | None = None
        self._decode: DecodeBalancer | None = None
        self._is_usable: dict[NodeId, bool] = {}

    @property
    def missing_roles(self) -> list[str]:
        """Roles without a worker that can be given requests."""
        usable = {node_id.role for node_id, is_usable in self._is_usable.items() if is_usable}
        return [role for role in (PREFILL, DECODE) if role not in usable]

    def refresh(self, member: Member) -> None:
        """Looks whether a worker, who may have just come, can be given requests now."""
        self._make_policy(member)
        is_usable = member.is_available
        if self._is_usable.get(member.node_id, False) != is_usable:
            self._is_usable[member.node_id] = is_usable
            self._policy(member).set_available(member.place, is_usable)

    def lose(self, member: Member) -> None:
        """A worker is gone."""
        if self._is_usable.pop(member.node_id, False):
            self._policy(member).set_available(member.place, False)

    @property
    def has_tiers(self) -> bool:
        """Whether a prefill worker finds what others have computed."""
        members = self._registry.members(PREFILL)
        return any(m.status is not None and m.status.offload is not None for m in members)

    def place(
        self, num_tokens: int, num_cached: int = 0, avoided: Collection[NodeId] = ()
    ) -> Placement | None:
        """Counts a request of so many tokens at two workers, now; None if there is no room.

        `num_cached` of the tokens need not be computed, and prefill workers that are `avoided` are
        taken only if there are no others.
        """
        if self._prefill is None or self._decode is None:
            return None
        try:
            room = self._decode.choose(num_tokens)
        except NoWorkerError:
            return None
        decode = self._member_at(DECODE, room.worker)
        num_cached = min(num_cached, num_tokens)
        work_ms = self._cost.chunk_ms(num_tokens - num_cached, num_cached)
        if work_ms <= self._local_prefill_ms:
            return Placement(None, None, decode, room)
        try:
            members = self._registry.members(PREFILL)
            places = [member.place for member in members if member.node_id in avoided]
            work = self._prefill.choose(Prompt(num_tokens, num_cached, avoided=places))
        except NoWorkerError:
            self._decode.finished(room)
            return None
        prefill = self._member_at(PREFILL, work.worker)
        return Placement(prefill, work, decode, room)

    def finish_work(self, placement: Placement) -> None:
        """The prompt is computed, or given up."""
        if placement.work is not None and self._prefill is not None:
            self._prefill.finished(placement.work)
        placement.work = None

    def finish(self, placement: Placement) -> None:
        """The attempt is over."""
        self.finish_work(placement)
        if placement.room is not None and self._decode is not None:
            self._decode.finished(placement.room)
        placement.room = None

    def loads(self, member: Member) -> dict[str, float]:
        """What is counted at a worker, under names."""
        place = member.place
        if member.node_id.role == PREFILL and self._prefill is not None:
            return {"work_ms": float(self._prefill.load_ms[place])}
        if member.node_id.role == DECODE and self._decode is not None:
            return {
                "requests": int(self._decode.num_requests[place]),
                "context_tokens": int(self._decode.num_tokens[place]),
            }
        return {}

    def _make_policy(self, member: Member) -> None:
        card, role = member.card, member.node_id.role
        if role == PREFILL and self._prefill is None:
            self._cost = card.prefill_cost or _BY_TOKENS
            policy = self._prefill = PrefillBalancer(PLACES_MAX, self._cost)
        elif role == DECODE and self._decode is None:
            limits = card.engine_limits
            num_tokens = (limits.num_blocks - 1) * limits.block_size
            policy = self._decode = DecodeBalancer(PLACES_MAX, limits.num_slots - 1, num_tokens)
        else:
            return
        for place in range(PLACES_MAX):
            policy.set_available(place, False)

    def _policy(self, member: Member) -> PrefillBalancer | DecodeBalancer:
        policy = self._prefill if member.node_id.role == PREFILL else self._decode
        assert policy is not None, f"{member.node_id} has come without a policy"
        return policy

    def _member_at(self, role: str, place: int) -> Member:
        return next(m for m in self._registry.members(role) if m.place == place)
