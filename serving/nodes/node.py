"""What a service is: a state machine that receives messages and leaves effects in an `Outbox`.

A node never waits, reads no time and returns nothing. Whoever drives it (an event loop or a
simulator) calls it with one message at a time and then performs the effects it left. The rules:
any message is handled in any state; duplicates are harmless; every queue has a bound, and a full
one answers *refused, because*; every wait has a timer; the work of one call is bounded.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from serving.core.kv_transfer import KVTransfer
from serving.core.step_plan import StepPlan
from serving.kv.offload import CacheCall
from serving.nodes.messages import Message
from serving.nodes.values import NodeId
from serving.observe import SpanNote


@dataclass(frozen=True, slots=True)
class Send:
    """Carry `message` to `destination`. It may be lost when that node is elsewhere.

    If that is known at once, `Undeliverable` follows.
    """

    destination: NodeId
    message: Message


@dataclass(frozen=True, slots=True)
class SetTimer:
    """Call `on_timer(name)` after `delay_ns`; setting a running timer again restarts it."""

    name: str
    delay_ns: int


@dataclass(frozen=True, slots=True)
class Execute:
    """Run `plan` on this node's executor; `StepDone` or `StepFailed` follows as a message.

    A transfer stands in line with the steps. `BlocksRead` follows if it reads anything, and
    `Crashed` if it fails.
    """

    plan: StepPlan | KVTransfer


@dataclass(frozen=True, slots=True)
class Compute:
    """Call `job`, slow pure work, away from the nodes; `Computed` with the same `key` follows.

    `timeout_ns` after its begin it is given up; so it is if it cannot begin soon.
    """

    key: str
    job: Callable[[], object]
    timeout_ns: int


@dataclass(frozen=True, slots=True)
class AskCache:
    """Make a call to the KV tiers; `CacheReplied` follows, or nothing does."""

    call: CacheCall


@dataclass(frozen=True, slots=True)
class Connect:
    """From now on `node_id` is reached at `address`."""

    node_id: NodeId
    address: str


@dataclass(frozen=True, slots=True)
class Quit:
    """This process cannot go on, because."""

    detail: str


@dataclass(frozen=True, slots=True)
class Trace:
    """Make a span of what this node has done for a call that is traced."""

    note: SpanNote


Effect = Send | SetTimer | Execute | Compute | AskCache | Connect | Quit | Trace


class Outbox:
    """The effects that a node asks for, in order, until its driver takes them."""

    def __init__(self) -> None:
        self._effects: list[Effect] = []

    def send(self, destination: NodeId, message: Message) -> None:
        """Asks for a message to be carried."""
        self._effects.append(Send(destination, message))

    def set_timer(self, name: str, delay_ns: int) -> None:
        """Asks for a call of `on_timer(name)` after `delay_ns`."""
        self._effects.append(SetTimer(name, delay_ns))

    def execute(self, plan: StepPlan | KVTransfer) -> None:
        """Asks for a plan or a transfer to be run on the device."""
        self._effects.append(Execute(plan))

    def compute(self, key: str, job: Callable[[], object], timeout_ns: int) -> None:
        """Asks for slow work to be done."""
        self._effects.append(Compute(key, job, timeout_ns))

    def ask_cache(self, call: CacheCall) -> None:
        """Asks something of the KV tiers."""
        self._effects.append(AskCache(call))

    def connect(self, node_id: NodeId, address: str) -> None:
        """Says where a node is."""
        self._effects.append(Connect(node_id, address))

    def quit(self, detail: str) -> None:
        """Asks for the end of this process."""
        self._effects.append(Quit(detail))

    def trace(self, note: SpanNote) -> None:
        """Asks for a span."""
        self._effects.append(Trace(note))

    def take(self) -> list[Effect]:
        """The effects since the last call, oldest first; the outbox is empty afterwards."""
        effects, self._effects = self._effects, []
        return effects


class Node(Protocol):
    """One service."""

    @property
    def node_id(self) -> NodeId:
        """Where others send messages to."""
        ...

    @property
    def outbox(self) -> Outbox:
        """Where this node leaves its effects."""
        ...

    def on_message(self, source: NodeId, message: Message) -> None:
        """Takes one message."""
        ...

    def on_timer(self, name: str) -> None:
        """Takes the end of a timer that this node set."""
        ...
