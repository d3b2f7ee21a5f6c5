"""Goal: transfers reach the cache in order, what was read comes back under its number, and arrays
that do not fit are refused before anything is written. Method: a cache that is a list of calls.
"""

from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest

from serving.core.kv_transfer import KVTransfer
from serving.engine.kv_moves import CacheOwner, KVForm, KVMoves

FORM = KVForm("some\nwords", (3, 5), 7)


def numbers(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


class Sizes(NamedTuple):
    groups: tuple[int, ...]
    state: int


class Copied:
    """Data on a device."""

    def __init__(self, data: np.ndarray) -> None:
        self.data = data

    def block_until_ready(self) -> None:
        pass


def make_moves(classes: Any = None) -> KVMoves:
    moves = KVMoves.of(Calls(), ["some", "words"], (1, 2), lambda: 0, classes)
    assert moves.form == FORM
    return moves


def plan_of(step_index: int, *blocks_used: int) -> Any:
    return SimpleNamespace(step_index=step_index, block_tables=numbers(*blocks_used))


class Calls:
    """Compiled moves of a cache that is a tuple of what was done to it."""

    class Read:
        def __init__(self, cache: Any, count: int) -> None:
            self._seen, self._count = len(cache), count

        def wait(self) -> tuple[tuple[np.ndarray, ...], np.ndarray]:
            return (np.full((self._count, 1), self._seen, np.uint8),), np.zeros((0, 7), np.uint8)

    def read(self, cache: Any, blocks: np.ndarray, slots: np.ndarray) -> "Calls.Read":
        return Calls.Read(cache, len(blocks))

    sizes = Sizes(FORM.group_bytes, FORM.state_bytes)
    copies_wait = False

    def put(self, group: int, data: np.ndarray) -> Any:
        return Copied(data)

    def write_group(self, cache: Any, group: int, blocks: np.ndarray, data: Any) -> Any:
        assert data.data.shape == (len(blocks), FORM.group_bytes[group])
        return (*cache, (group, blocks.tolist()))

    def write_states(self, cache: Any, slots: np.ndarray, states: np.ndarray) -> Any:
        return (*cache, ("state", slots.tolist())) if len(slots) else cache

    def classes(self, states: np.ndarray) -> np.ndarray:
        return states[:, :2].astype(np.int32)


class Rings:
    """Remembers the classes that slots were given."""

    def __init__(self) -> None:
        self.classes: dict[int, list[int]] = {}

    def set_classes(self, slots: np.ndarray, classes: np.ndarray) -> None:
        self.classes.update(zip(slots.tolist(), classes.tolist(), strict=True))


def blocks(count: int) -> tuple[np.ndarray, ...]:
    return tuple(np.zeros((count, size), np.uint8) for size in FORM.group_bytes)


def test_a_read_sees_what_was_written_before_it() -> None:
    moves = make_moves()
    cache = moves.move((), KVTransfer(1, read_blocks=numbers(4)))
    cache = moves.move(cache, KVTransfer(2, write_blocks=numbers(1, 2), write_groups=blocks(2)))
    assert cache == ()
    cache = moves.move(cache, KVTransfer(3, read_blocks=numbers(5, 2)))
    first, second = moves.collect(), moves.collect()
    assert (first.transfer_id, second.transfer_id) == (1, 3)
    # The first read comes before its own transfer is over, the second after two others.
    assert first.groups[0].tolist() == [[0]]
    assert second.groups[0].tolist() == [[2], [2]]
    assert cache == ((0, [1, 2]), (1, [1, 2]))
    with pytest.raises(IndexError):
        moves.collect()


def test_the_host_learns_the_token_classes_of_states() -> None:
    rings = Rings()
    moves = make_moves(rings)
    states = np.arange(14, dtype=np.uint8).reshape(2, 7)
    cache = moves.move((), KVTransfer(1, write_slots=numbers(3, 8), write_states=states))
    assert cache == (("state", [3, 8]),)
    moves.move((), KVTransfer(2, write_blocks=numbers(1), write_groups=blocks(1)))
    assert rings.classes == {3: [0, 1], 8: [7, 8]}


@pytest.mark.parametrize(
    "transfer",
    [
        KVTransfer(7, write_blocks=numbers(1), write_groups=blocks(2)),
        KVTransfer(7, write_blocks=numbers(1), write_groups=blocks(1)[:1]),
        KVTransfer(7, write_blocks=numbers(1), write_groups=blocks(1)[::-1]),
        KVTransfer(7, write_groups=blocks(1)),
        KVTransfer(7, write_slots=numbers(1), write_states=np.zeros((1, 6), np.uint8)),
    ],
)
def test_arrays_that_do_not_fit_are_refused(transfer: KVTransfer) -> None:
    moves = make_moves()
    with pytest.raises(ValueError, match=r"transfer 7 brings arrays of shapes .*; expected"):
        moves.move((), transfer)


class Parted:
    """A step in three parts."""

    programs = (1, 2, 3)

    def __call__(self, weights: str, cache: Any, before: Any = None, after: Any = None) -> Any:
        for number in self.programs:
            cache = cache if before is None else before(number - 1, cache)
            cache = (*cache, f"part {number - 1}")
            if after is not None and number < len(self.programs):
                after(number - 1, Copied(numbers()))
        return f"result {weights}", cache


def test_blocks_arrive_for_the_part_that_reads_them() -> None:
    owner, step = CacheOwner(), Parted()
    owner.cache, owner.kv_moves = (), make_moves()
    owner.move(KVTransfer(1, write_blocks=numbers(1, 2), write_groups=blocks(2)))
    other, own = plan_of(5, 3, 4), plan_of(6, 2, 9)
    assert owner.run_step(other, step, "a") == "result a"
    parts = ("part 0", "part 1", "part 2")
    assert owner.cache == parts and owner.swap_in_times(other) is None
    owner.run_step(own, step, "b")
    assert owner.cache[3:] == ("part 0", (0, [1, 2]), "part 1", (1, [1, 2]), "part 2")
    times = owner.swap_in_times(own)
    assert times is not None and owner.swap_in_times(own) is None
    # Without parts everything is there before.
    owner.move(KVTransfer(2, write_blocks=numbers(7), write_groups=blocks(1)))
    owner.run_step(plan_of(7, 7), lambda weights, cache: (weights, (*cache, "whole")), "c")
    assert owner.cache[8:] == ((0, [7]), (1, [7]), "whole")
    plain = CacheOwner()
    plain.cache = ()
    assert plain.run_step(own, step, "d") == "result d" and plain.swap_in_times(own) is None


def test_sizes() -> None:
    assert FORM.block_bytes == 8
