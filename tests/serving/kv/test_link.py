"""Goal: what a line hands on was checked after it left shared memory, and a line whose other end is
gone keeps nobody waiting. Method: a fetcher that answers what it is told to.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import zmq

from serving.kv import wire
from serving.kv.host_tier import HostTier, Place, SharedArena
from serving.kv.link import CacheLink
from serving.kv.offload import CacheReply, FetchPrefix, PrefixFetched, StorePrefix
from serving.kv.store import Header, Name, PayloadKind, encode, tenant_id
from serving.transport.driver import SystemClock
from tests.serving.kv.cache_parts import (
    FORM,
    block_bytes,
    check_prefix,
    keys_of,
    read_of,
    running,
    state_bytes,
)

Answer = Callable[[wire.Message], wire.Message | None]


@contextmanager
def scripted(path: Path, answer: Answer) -> Iterator[tuple[CacheLink, list[wire.Message]]]:
    """A line to an other end that answers by `answer`, and what that end has received."""
    context, seen = zmq.Context(), []
    socket = context.socket(zmq.ROUTER)
    socket.bind(f"ipc://{path}/scripted")
    loop = wire.Loop(SystemClock())

    def receive(frames: list[bytes]) -> None:
        message = wire.decode(frames[1])
        seen.append(message)
        reply = answer(message)
        if reply is not None:
            socket.send_multipart([frames[0], wire.encode(reply)])

    loop.listen(socket, receive)
    thread = threading.Thread(target=loop.run)
    thread.start()
    link = CacheLink(f"ipc://{path}/scripted", FORM, SystemClock())
    link.start()
    try:
        yield link, seen
    finally:
        link.close()
        loop.stop()
        thread.join()
        socket.close(linger=0)
        context.term()


def ask(link: CacheLink, keys: list[bytes]) -> PrefixFetched:
    replies: list[CacheReply] = []
    arrived = threading.Event()

    def take(reply: CacheReply) -> None:
        replies.append(reply)
        arrived.set()

    link.call(FetchPrefix("r", tuple(keys), 0, 0, ""), take)
    assert arrived.wait(20)
    assert isinstance(replies[0], PrefixFetched)
    return replies[0]


def filled(path: Path, key: bytes) -> tuple[SharedArena, Place, Place]:
    """An arena with a block and a state."""
    arena = SharedArena.create(path / "arena", 4096)
    tier = HostTier(arena)
    places: list[Place] = []
    bodies = {
        PayloadKind.BLOCK: [block_bytes(key, group).tobytes() for group in range(2)],
        PayloadKind.STATE: [state_bytes(key).tobytes()],
    }
    for kind, parts in bodies.items():
        header = Header(Name(kind, key), FORM.layout, tenant_id(""), 1, sum(map(len, parts)))
        place = tier.reserve(header.name, header.size, header.tenant, 0)
        assert place is not None
        arena.payload(place)[:] = encode(header, parts)
        places.append(place)
    return arena, places[0], places[1]


def span(place: Place) -> wire.Span:
    return place.offset, place.size, place.generation


def test_a_place_that_is_another_s_by_now_is_not_used(tmp_path: Path) -> None:
    (key,) = keys_of(1)
    arena, block, state = filled(tmp_path, key)
    stale = wire.Fetched(0, 1, 5, str(arena.path), 4096, [span(block)], span(state))

    def answer(message: wire.Message) -> wire.Message | None:
        if not isinstance(message, wire.Fetch):
            return None
        stale.call = message.call
        return stale

    with scripted(tmp_path, answer) as (link, seen):
        check_prefix(ask(link, [key]), [key])
        arena.mark(block.offset, 77)
        reply = ask(link, [key])
        assert reply.prefix is None and "generation 77" in (reply.error or "")
        arena.mark(block.offset, block.generation)
        stale.blocks = [span(state)]
        assert "expected" in (ask(link, [key]).error or "")
        stale.blocks = []
        assert "0 places for 1 blocks" in (ask(link, [key]).error or "")
        stale.arena = str(tmp_path / "nowhere")
        assert "nowhere" in (ask(link, [key]).error or "")
    releases = [message for message in seen if isinstance(message, wire.Release)]
    assert [release.lease for release in releases] == [5] * len(releases)
    # Only bytes that were damaged are reported as such.
    assert [release.corrupt for release in releases if release.corrupt] == [[(1, key)]]
    arena.close()


def test_every_byte_of_memory_is_checked(tmp_path: Path) -> None:
    (key,) = keys_of(1)
    arena, block, state = filled(tmp_path, key)

    def answer(message: wire.Message) -> wire.Message | None:
        if not isinstance(message, wire.Fetch):
            return None
        places = [span(block)]
        return wire.Fetched(message.call, 1, 1, str(arena.path), 4096, places, span(state))

    with scripted(tmp_path, answer) as (link, _):
        for place in (block, state):
            for index in range(0, place.size, 7):
                arena.payload(place)[index] ^= 4
                assert ask(link, [key]).prefix is None
                arena.payload(place)[index] ^= 4
        check_prefix(ask(link, [key]), [key])
    arena.close()


def test_an_answer_to_nothing_is_given_back(tmp_path: Path) -> None:
    released = threading.Event()

    def answer(message: wire.Message) -> wire.Message | None:
        if isinstance(message, wire.Release):
            released.set()
        if isinstance(message, wire.Fetch):
            return wire.Fetched(message.call + 1000, 1, lease=9)
        return None

    with scripted(tmp_path, answer) as (link, seen):
        link.call(FetchPrefix("r", tuple(keys_of(1)), 0, 0, ""), lambda reply: None)
        assert released.wait(20)
    assert seen[-1] == wire.Release(9)


def test_a_place_for_nothing_is_left_and_the_rest_is_written(tmp_path: Path) -> None:
    keys = keys_of(2)
    with running(tmp_path) as cache:
        cache.put(keys[:1])
        # The first block and its state are there; both keys are offered all the same.
        cache.link.call(StorePrefix(tuple(keys), keys[-1], read_of(keys), ""), lambda reply: None)
        cache.settle()
        check_prefix(cache.fetch(keys), keys)


def test_no_other_end_is_no_answer_and_closing_does_not_wait(tmp_path: Path) -> None:
    link = CacheLink(f"ipc://{tmp_path}/nobody", FORM, SystemClock())
    link.start()
    for _ in range(1100):
        link.call(FetchPrefix("r", tuple(keys_of(1)), 0, 0, ""), lambda reply: None)
    link.close()
