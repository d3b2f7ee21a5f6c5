"""Which workers there are, as the router knows them: who may join, and who has fallen silent.

A worker joins with a card, and lives as a member as long as its heartbeats come. Each life has a
*generation*, drawn by the worker; when a life is over, for whatever reason, what still comes of it
is told so, and the worker has to join anew. So a process that was stopped for a while, and whose
work was given to others meanwhile, never does any of it twice.

Nothing here outlives the router: its successor begins with nobody, and workers, whose heartbeats it
does not know, join again.
"""

from dataclasses import dataclass

from serving.nodes.values import MemberCard, NodeId, NodeStatus

VISION = "vision"
WORKER_ROLES = ("prefill", "decode", VISION)


class JoinRefusedError(ValueError):
    """A worker that cannot be a member."""


@dataclass(slots=True)
class Member:
    """A worker that is there. `place` is its number within its role, which names keep for ever."""

    node_id: NodeId
    generation: int
    card: MemberCard
    place: int
    seen_ns: int
    status: NodeStatus | None = None
    is_draining: bool = False

    @property
    def state(self) -> str:
        """`available`, `draining` or `failed`."""
        if self.status is not None and self.status.failure is not None:
            return "failed"
        return "draining" if self.is_draining else "available"

    @property
    def is_available(self) -> bool:
        """Whether it can be given requests."""
        return self.state == "available"


class Registry:
    """The members.

    Args:
        code_version: of this program; members must have the same.
        lost_ns: a member that is silent for so long is lost.
        places_max: workers of one role, over all time.
    """

    def __init__(self, code_version: str, lost_ns: int, places_max: int) -> None:
        self._code_version = code_version
        self._lost_ns = lost_ns
        self._places_max = places_max
        self._members: dict[NodeId, Member] = {}
        self._places: dict[NodeId, int] = {}

    def members(self, role: str | None = None) -> list[Member]:
        """Those that are there, of one role or of all."""
        found = self._members.values()
        return [member for member in found if role in (None, member.node_id.role)]

    def get(self, node_id: NodeId) -> Member | None:
        """A member; None if it is not there."""
        return self._members.get(node_id)

    def join(self, node_id: NodeId, generation: int, card: MemberCard, now_ns: int) -> Member:
        """Takes in a worker. An earlier life of the same node is over.

        Raises:
            JoinRefusedError: its role, program, model or size does not go with the others.
        """
        self._check(node_id, card)
        places = [other for other in self._places if other.role == node_id.role]
        place = self._places.setdefault(node_id, len(places))
        if place >= self._places_max:
            del self._places[node_id]
            raise JoinRefusedError(
                f"{node_id} would be {node_id.role} worker number {place + 1}; expected at most "
                f"{self._places_max}; give names of earlier ones again, or restart the router"
            )
        member = Member(node_id, generation, card, place, now_ns)
        self._members[node_id] = member
        return member

    def heartbeat(
        self, node_id: NodeId, generation: int, status: NodeStatus, is_draining: bool, now_ns: int
    ) -> Member | None:
        """Takes a sign of life; None if that life is over, or nobody knows of it."""
        member = self._members.get(node_id)
        if member is None or member.generation != generation:
            return None
        member.seen_ns, member.status = now_ns, status
        # A worker that has begun to leave does not come back in this life.
        member.is_draining |= is_draining
        return member

    def remove(self, node_id: NodeId) -> None:
        """The life of a member is over."""
        self._members.pop(node_id, None)

    def silent(self, now_ns: int) -> list[Member]:
        """Members that have not been heard of for too long; they stay until they are removed."""
        return [m for m in self._members.values() if now_ns - m.seen_ns >= self._lost_ns]

    def _check(self, node_id: NodeId, card: MemberCard) -> None:
        if node_id.role not in WORKER_ROLES:
            raise JoinRefusedError(
                f"{node_id} has the role {node_id.role!r}; expected one of "
                f"{', '.join(WORKER_ROLES)}"
            )
        if card.code_version != self._code_version:
            raise JoinRefusedError(
                f"{node_id} runs code {card.code_version} and the router {self._code_version}; "
                "expected the same; install one version on all nodes"
            )
        for other in self._members.values():
            if other.node_id == node_id:
                continue
            if other.card.features != card.features:
                raise JoinRefusedError(
                    f"{node_id} has features of images of {_name_of(card.features)} and "
                    f"{other.node_id} of {_name_of(other.card.features)}; expected the same model "
                    "and number format on all workers"
                )
            if card.limits is None or other.card.limits is None:
                continue
            if other.card.fingerprint != card.fingerprint:
                raise JoinRefusedError(
                    f"{node_id} has KV of {card.fingerprint.hex()[:16]} and {other.node_id} of "
                    f"{other.card.fingerprint.hex()[:16]}; expected the same model, cache format "
                    "and layout on all workers"
                )
            is_same_role = other.node_id.role == node_id.role
            if _sizes(card, is_same_role) != _sizes(other.card, is_same_role):
                raise JoinRefusedError(
                    f"{node_id} has {_sizes_text(card)} and {other.node_id} "
                    f"{_sizes_text(other.card)}; expected the same in one role, and the same "
                    "context in all"
                )


def _name_of(features: bytes) -> str:
    return features.hex()[:16] or "no model"


def _sizes(card: MemberCard, is_same_role: bool) -> tuple[int, ...]:
    limits = card.engine_limits
    pools = (limits.num_slots, limits.num_blocks) if is_same_role else ()
    return limits.context_max, limits.vocab_size, *pools


def _sizes_text(card: MemberCard) -> str:
    limits = card.engine_limits
    return (
        f"a context of {limits.context_max} tokens, {limits.num_slots - 1} slots and "
        f"{limits.num_blocks - 1} blocks"
    )
