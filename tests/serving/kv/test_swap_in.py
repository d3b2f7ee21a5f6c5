"""Goal: blocks are there when they are needed and never later than something else in their place;
what is hidden is worked out from when things happened. Method: a cache that is a list of calls,
copies and parts that are over when the test says so.
"""

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from serving.core.kv_transfer import KVTransfer, SwapInTimes
from serving.kv.swap_in import SwapIns, hidden_times


def numbers(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


class Thing:
    """On the device at the time `at`."""

    def __init__(self, device: "Device", at: int, is_broken: bool = False) -> None:
        self._device, self._at, self._is_broken = device, at, is_broken

    def block_until_ready(self) -> None:
        self._device.pass_to(self._at)
        if self._is_broken:
            raise RuntimeError("the device is lost")


class Device:
    """Copies and parts whose times are given; the clock shows the time of what was awaited last."""

    def __init__(self, copies_wait: bool = False, copied: tuple[int, ...] = ()) -> None:
        self.copies_wait = copies_wait
        self.log: list[Any] = []
        self._copied = list(copied)
        self._now = threading.local()

    def now_ns(self) -> int:
        return getattr(self._now, "ns", 0)

    def pass_to(self, at: int) -> None:
        self._now.ns = at

    def put(self, group: int, data: np.ndarray) -> Any:
        self.log.append(f"put {data[0, 0]}")
        return Thing(self, self._copied.pop(0) if self._copied else 0)

    def write_group(self, cache: Any, group: int, blocks: np.ndarray, data: Any) -> Any:
        assert isinstance(data, Thing)
        self.log.append((group, blocks.tolist()))
        return cache + 1

    def step(self, ends: tuple[int, ...], is_broken: bool = False) -> Callable[..., Any]:
        """A step of as many parts."""

        def run(cache: int, before: Any = None, after: Any = None) -> tuple[str, int]:
            for number, end in enumerate(ends):
                cache = cache if before is None else before(number, cache)
                self.log.append(f"part {number}")
                if after is not None and number < len(ends) - 1:
                    after(number, Thing(self, end, is_broken))
            return "result", cache

        return run


def transfer(number: int, *blocks: int) -> KVTransfer:
    groups = tuple(np.full((len(blocks), 2), 10 * number + g, np.uint8) for g in range(2))
    return KVTransfer(number, write_blocks=numbers(*blocks), write_groups=groups)


THREE = (10, 20, 30)


@pytest.mark.parametrize("copies_wait", [False, True])
def test_a_group_is_one_copy_and_one_scatter_before_its_part(copies_wait: bool) -> None:
    device = Device(copies_wait)
    swap_ins = SwapIns(device, (1, 2), device.now_ns)
    assert swap_ins.add(0, transfer(1, 4, 5, 6)) == 0
    result, cache, timeline = swap_ins.run(device.step(THREE), True, numbers(6, 0), (0,), {})
    assert (result, cache) == ("result", 2) and timeline is not None
    first, second = (0, [4, 5, 6]), (1, [4, 5, 6])
    late = ["part 0", "put 10", first, "part 1", "put 11", second, "part 2"]
    early = ["put 10", "put 11", "part 0", first, "part 1", second, "part 2"]
    assert device.log == (early if copies_wait else late)
    assert swap_ins.num_arriving == 0
    # It has come once.
    assert swap_ins.run(device.step(THREE), True, numbers(6), (7,), {}) == ("result", 7, None)


def test_blocks_wait_for_who_uses_them_and_never_longer() -> None:
    device = Device()
    swap_ins = SwapIns(device, (1, 2), device.now_ns)
    assert swap_ins.add(5, KVTransfer(1)) == 5 and swap_ins.num_arriving == 0
    for number, block in ((1, 4), (2, 5), (3, 6)):
        assert swap_ins.add(5, transfer(number, block)) == 5
    assert swap_ins.settle(5, numbers(1, 2)) == 5 and device.log == []
    # A step without parts, as that which overwrites a block that was given to someone else.
    assert swap_ins.run(device.step(()), False, numbers(9, 5), (0,), {}) == ("result", 2, None)
    assert device.log == ["put 20", (0, [5]), "put 21", (1, [5])]
    device.log.clear()
    # Written anew before the first content was used: in order.
    assert swap_ins.add(0, transfer(4, 6)) == 2 and swap_ins.num_arriving == 2
    assert device.log == ["put 30", (0, [6]), "put 31", (1, [6])]
    device.log.clear()
    assert swap_ins.settle(0, numbers(6, 4)) == 4 and swap_ins.num_arriving == 0
    assert [entry for entry in device.log if isinstance(entry, tuple)] == [
        (0, [4]),
        (1, [4]),
        (0, [6]),
        (1, [6]),
    ]


def test_two_prefixes_for_one_step_come_together() -> None:
    device = Device()
    swap_ins = SwapIns(device, (0, 2), device.now_ns)
    swap_ins.add(0, transfer(1, 4))
    swap_ins.add(0, transfer(2, 5, 6))
    swap_ins.run(device.step(THREE), True, numbers(5, 4), (0,), {})
    assert device.log[:5] == ["put 10", "put 20", (0, [4]), (0, [5, 6]), "part 0"]
    assert device.log[5:7] == ["part 1", "put 11"]


def test_times_are_noted_also_of_a_device_that_is_lost() -> None:
    for is_broken in (False, True):
        device = Device(copied=(14, 18))
        swap_ins = SwapIns(device, (1, 2), device.now_ns)
        swap_ins.add(0, transfer(1, 4))
        step = device.step((10, 20, 30), is_broken)
        *_, timeline = swap_ins.run(step, True, numbers(4), (0,), {})
        # The first copy is over 4 after part 0; the second before part 1.
        assert timeline is not None and timeline.times() == SwapInTimes(18, 14)
        assert (timeline.copied, timeline.computed) == ([14, 18], [10, 20])


@pytest.mark.parametrize(
    ("parts", "begun", "copied", "computed", "expected"),
    [
        # All while the part before runs.
        ((1, 2), (0, 0), (5, 9), (10, 20), (9, 9)),
        # The second copy is late by 5, the first begins only when its part could.
        ((1, 2), (10, 12), (14, 25), (10, 20), (15, 6)),
        # For the first part nothing is hidden.
        ((0,), (3,), (8,), (10,), (5, 0)),
        # What was copied already when it was asked for costs nothing.
        ((1, 1), (0, 4), (6, 5), (2,), (6, 2)),
        ((), (), (), (), (0, 0)),
    ],
)
def test_what_is_hidden(
    parts: Any, begun: Any, copied: Any, computed: Any, expected: tuple[int, int]
) -> None:
    assert hidden_times(parts, begun, copied, computed) == SwapInTimes(*expected)
