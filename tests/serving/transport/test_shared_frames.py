"""Goal: large frames go through shared memory as they were, nothing of it stays whoever dies, and
what is none of it is refused. Method: two ends over one folder, with a clock of the test's.
"""

import os
from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np
import pytest

from serving.transport.codec import Frame, WireError
from serving.transport.shared_frames import MIN_BYTES, SharedFrames
from tests.serving.kv.storage_parts import small_disk
from tests.serving.kv.test_whereabouts import StillClock

LARGE = np.arange(2 * MIN_BYTES, dtype=np.uint32)


def views(frames: Sequence[Frame]) -> list[memoryview]:
    """What a socket would give."""
    return [memoryview(bytes(frame)) for frame in frames]


def test_large_frames_come_as_they_were_and_are_gone_then(tmp_path: Path) -> None:
    clock = StillClock()
    one, other = SharedFrames(tmp_path, clock), SharedFrames(tmp_path, clock)
    frames: list[Frame] = [b"head", memoryview(LARGE), b"", memoryview(LARGE[:7].copy())]
    for number in range(3):
        sent = one.put(frames)
        assert len(sent) == 2 and sent[1] == b"head" and len(list(tmp_path.iterdir())) == 1
        taken = other.take(views([*sent]))
        assert list(tmp_path.iterdir()) == []
        assert [bytes(frame) for frame in taken] == [bytes(frame) for frame in frames]
        assert memoryview(taken[1]).readonly
        assert (one.num_put, other.num_taken) == (number + 1, number + 1)
        assert one.num_waiting == 1
    one.close()
    assert one.num_waiting == 0


def test_small_frames_and_those_without_room_stay_where_they_are(tmp_path: Path) -> None:
    clock = StillClock()
    one = SharedFrames(tmp_path / "missing", clock)
    for frames in ([b"head"], [b"head", b"x" * (MIN_BYTES - 1)], [b"head", memoryview(LARGE)]):
        assert one.put(frames) is frames
        assert list(one.take(views(frames))) == views(frames)
    with small_disk(tmp_path / "disk", "16k"):
        one = SharedFrames(tmp_path / "disk", clock)
        frames = [b"head", memoryview(LARGE)]
        assert one.put(frames) is frames and one.num_put == 0
        assert list((tmp_path / "disk").iterdir()) == []


def test_what_nobody_takes_is_taken_back(tmp_path: Path) -> None:
    clock = StillClock()
    one = SharedFrames(tmp_path, clock)
    lost, late = one.put([b"a", memoryview(LARGE)]), one.put([b"b", memoryview(LARGE)])
    clock.s += 61
    kept = one.put([b"c", memoryview(LARGE)])
    assert one.num_waiting == 1
    for sent in (lost, late):
        with pytest.raises(WireError, match="No such file"):
            one.take(views([*sent]))
    assert len(one.take(views([*kept]))) == 2
    # Whoever comes next removes what one has left that was killed.
    one.put([b"d", memoryview(LARGE)])
    (path,) = tmp_path.iterdir()
    SharedFrames(tmp_path, clock)
    assert path.exists()
    os.close(one._sent.pop().descriptor)  # pyright: ignore[reportPrivateUsage]
    SharedFrames(tmp_path, clock)
    assert not path.exists()


def test_places_that_are_none_are_refused(tmp_path: Path) -> None:
    one = SharedFrames(tmp_path, StillClock())
    (tmp_path / "secret").write_bytes(b"x" * MIN_BYTES)
    mark, _ = one.put([b"head", memoryview(LARGE)])
    prefix, name = bytes(mark)[:7], next(tmp_path.glob("deepinfer-*")).name
    for place in (
        ["../secret", [4]],
        ["secret", [MIN_BYTES]],
        [name, [-1, LARGE.nbytes + 1]],
        [name, []],
        [name, [1 << 50]],
        [name],
    ):
        with pytest.raises(WireError):
            one.take(views([prefix + msgspec.msgpack.encode(place), b"head"]))
    assert (tmp_path / name).exists()
    with pytest.raises(WireError, match="has not the 5 bytes"):
        one.take(views([prefix + msgspec.msgpack.encode([name, [5]]), b"head"]))
    one.close()
