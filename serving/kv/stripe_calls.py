"""Reads and writes of stripes on many nodes at one time.

A read asks everybody who holds a fragment and goes on with the first answers that are enough: the
slowest nodes, and those that fail, are not waited for. Each piece is checked when it arrives; a
damaged one counts as none.
"""

import itertools
import queue
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from serving.clock import Clock, ns_of_s, s_of_ns
from serving.kv import storage_wire, wire
from serving.kv.fragments import CorruptFragmentError, FragmentHead, good_pieces, read_head
from serving.kv.node_links import Answered, NodeLinks
from serving.kv.store import Buffer
from serving.kv.stripes import Coding

_TELL_S = 10.0

Placed = Mapping[str, int]
"""Nodes of a stripe, with the fragment that each holds or is to hold."""

_Answer = tuple[str, storage_wire.Reply | None, Sequence[bytes]]


@dataclass(slots=True)
class Gathered:
    """What a read has brought.

    Attributes:
        pieces: (stripe, number of the payload) -> fragment -> piece; at least as many as it takes,
            or all that could be had.
        damaged: (node, stripe) of pieces that were not what was written.
    """

    pieces: dict[tuple[str, int], dict[int, bytes]] = field(
        default_factory=dict[tuple[str, int], dict[int, bytes]]
    )
    damaged: set[tuple[str, str]] = field(default_factory=set[tuple[str, str]])


@dataclass(slots=True)
class Scattered:
    """Where fragments are now, and who refused theirs."""

    placed: dict[str, int] = field(default_factory=dict[str, int])
    refused: dict[str, str] = field(default_factory=dict[str, str])


class StripeCalls:
    """Calls over `links`, for several threads at one time."""

    def __init__(self, links: NodeLinks, coding: Coding, clock: Clock) -> None:
        self._links = links
        self._coding = coding
        self._clock = clock

    def gather(
        self,
        wanted: Mapping[str, Sequence[int]],
        holders: Mapping[str, Placed],
        timeout_s: float,
    ) -> Gathered:
        """Pieces of payloads, which `wanted` names by stripe, from those who hold them."""
        result = Gathered()
        by_node: dict[str, list[tuple[str, list[int]]]] = {}
        for stripe, numbers in wanted.items():
            for number in numbers:
                result.pieces[stripe, number] = {}
            for node in holders[stripe]:
                by_node.setdefault(node, []).append((stripe, list(numbers)))
        num_open = len(result.pieces)
        messages = {node: storage_wire.Get(0, items) for node, items in by_node.items()}
        for node, reply, frames in self._ask_all(messages, {}, timeout_s):
            if isinstance(reply, storage_wire.Pieces) and len(frames) == len(reply.found):
                asked = dict(by_node[node])
                for found, data in zip(reply.found, frames, strict=True):
                    numbers = asked.get(found[0], ())
                    num_open -= self._take(node, numbers, found, data, holders, result)
            if not num_open:
                break
        return result

    def _take(
        self,
        node: str,
        numbers: Sequence[int],
        found: tuple[str, int, list[int], list[bytes]],
        data: bytes,
        holders: Mapping[str, Placed],
        result: Gathered,
    ) -> int:
        """Keep the good pieces of one fragment; how many payloads are complete by that."""
        stripe, fragment, sizes, checksums = found
        if holders.get(stripe, {}).get(node) != fragment or len(numbers) != len(sizes):
            return 0
        ends = list(itertools.accumulate(sizes))
        found_pieces = [data[end - size : end] for size, end in zip(sizes, ends, strict=True)]
        num_complete = 0
        # One that was cut has another checksum.
        good = good_pieces(found_pieces, checksums)
        for number, piece, is_good in zip(numbers, found_pieces, good, strict=True):
            if not is_good:
                result.damaged.add((node, stripe))
                continue
            pieces = result.pieces[stripe, number]
            if len(pieces) < self._coding.num_data:
                pieces[fragment] = piece
                num_complete += len(pieces) == self._coding.num_data
        return num_complete

    def copy(
        self, stripe: str, holders: Placed, num_needed: int, timeout_s: float
    ) -> dict[int, tuple[FragmentHead, list[bytes]]]:
        """`num_needed` whole fragments, or as many as can be had; damaged ones are left out."""
        found: dict[int, tuple[FragmentHead, list[bytes]]] = {}
        messages = {node: storage_wire.Copy(0, stripe) for node in holders}
        for _, reply, frames in self._ask_all(messages, {}, timeout_s):
            if isinstance(reply, storage_wire.Whole) and len(frames) == 2:
                try:
                    head = read_head(frames[0])
                    found[head.fragment] = head, _split(head, frames[1])
                except CorruptFragmentError:
                    continue
            if len(found) >= num_needed:
                break
        return found

    def scatter(
        self,
        stripe: str,
        fragments: Mapping[str, tuple[bytes, Sequence[Buffer]]],
        places: Placed,
        num_min: int,
        timeout_s: float,
        grace_s: float,
    ) -> Scattered:
        """Have fragments written, for each node a head and pieces.

        Returns when all have answered; `grace_s` after `num_min` have written theirs; or when the
        time is over.
        """
        result = Scattered()
        messages = {node: storage_wire.Put(0, stripe) for node in fragments}
        # As one, since hundreds of small frames cost more than a copy.
        data = {node: (head, b"".join(pieces)) for node, (head, pieces) in fragments.items()}
        answers = self._ask_all(messages, data, timeout_s)
        for node, reply, _ in answers:
            if isinstance(reply, wire.Answer) and reply.error is None:
                result.placed[node] = places[node]
            else:
                error = reply.error if isinstance(reply, wire.Answer) else None
                result.refused[node] = error or "no answer"
            if len(result.placed) == num_min:
                answers.hurry(grace_s)
        silent = [node for node in places if node not in result.placed]
        result.refused = {**dict.fromkeys(silent, "no answer"), **result.refused}
        return result

    def tell(self, nodes: Iterable[str], message: Callable[[], storage_wire.Request]) -> None:
        """Send a message to nodes and wait for nobody."""
        for node in nodes:
            self._links.call(node, message(), (), _ignore, _TELL_S)

    def ask(
        self, nodes: Iterable[str], message: Callable[[], storage_wire.Request], timeout_s: float
    ) -> dict[str, wire.Answer]:
        """The answers of those nodes that give one in time."""
        answers = self._ask_all({node: message() for node in nodes}, {}, timeout_s)
        return {node: reply for node, reply, _ in answers if isinstance(reply, wire.Answer)}

    def _ask_all(
        self,
        messages: Mapping[str, storage_wire.Request],
        data: Mapping[str, Sequence[Buffer]],
        timeout_s: float,
    ) -> "_Answers":
        answers = _Answers(self._clock, len(messages), timeout_s)
        for node, message in messages.items():
            self._links.call(node, message, data.get(node, ()), answers.expect(node), timeout_s)
        return answers


class _Answers:
    """The answers to one round of calls, as they come, until all are there or time is over."""

    def __init__(self, clock: Clock, num_open: int, timeout_s: float) -> None:
        self._clock = clock
        self._num_open = num_open
        self._deadline_ns = clock.now_ns() + ns_of_s(timeout_s)
        self._queue: queue.SimpleQueue[_Answer] = queue.SimpleQueue()

    def expect(self, node: str) -> Answered:
        """What to call with the answer of a node."""
        return lambda reply, frames: self._queue.put((node, reply, frames))

    def hurry(self, seconds: float) -> None:
        """Wait no longer than this from now on."""
        self._deadline_ns = min(self._deadline_ns, self._clock.now_ns() + ns_of_s(seconds))

    def __iter__(self) -> Iterator[_Answer]:
        while self._num_open:
            left_s = max(0.0, s_of_ns(self._deadline_ns - self._clock.now_ns()))
            try:
                answer = self._queue.get(timeout=left_s)
            except queue.Empty:
                return
            self._num_open -= 1
            yield answer


def _ignore(reply: storage_wire.Reply | None, frames: Sequence[bytes]) -> None:
    """Whatever comes of it is heard with the next changes."""


def _split(head: FragmentHead, data: bytes) -> list[bytes]:
    """The pieces of a fragment.

    Raises:
        CorruptFragmentError: one of them is damaged.
    """
    pieces: list[bytes] = []
    at = 0
    for number, size in enumerate(head.piece_sizes):
        piece = data[at : at + size]
        if not head.is_good(number, piece):
            raise CorruptFragmentError(f"piece {number} of {head.stripe} is damaged")
        pieces.append(piece)
        at += size
    return pieces
