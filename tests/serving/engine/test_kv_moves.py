"""Goal: transfers reach the cache in order, what was read comes back under its number, and arrays
that do not fit are refused before anything is written. Method: a cache that is a list of calls.
"""

from typing import Any

import numpy as np
import pytest

from serving.core.kv_transfer import KVTransfer
from serving.engine.kv_moves import KVForm, KVMoves

FORM = KVForm("words", (3, 5), 7)


def numbers(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


class Calls:
    """Compiled moves of a cache that is a tuple of what was done to it."""

    class Read:
        def __init__(self, cache: Any, count: int) -> None:
            self._seen, self._count = len(cache), count

        def wait(self) -> tuple[tuple[np.ndarray, ...], np.ndarray]:
            return (np.full((self._count, 1), self._seen, np.uint8),), np.zeros((0, 7), np.uint8)

    def read(self, cache: Any, blocks: np.ndarray, slots: np.ndarray) -> "Calls.Read":
        return Calls.Read(cache, len(blocks))

    def write(
        self,
        cache: Any,
        blocks: np.ndarray,
        groups: tuple[np.ndarray, ...],
        slots: np.ndarray,
        states: np.ndarray,
    ) -> Any:
        return (*cache, (blocks.tolist(), slots.tolist()))

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
    moves = KVMoves(Calls(), FORM)
    cache = moves.move((), KVTransfer(1, read_blocks=numbers(4)))
    cache = moves.move(cache, KVTransfer(2, write_blocks=numbers(1, 2), write_groups=blocks(2)))
    cache = moves.move(cache, KVTransfer(3, read_blocks=numbers(5, 6)))
    first, second = moves.collect(), moves.collect()
    assert (first.transfer_id, second.transfer_id) == (1, 3)
    # The first read comes before its own transfer is over, the second after two others.
    assert first.groups[0].tolist() == [[0]]
    assert second.groups[0].tolist() == [[2], [2]]
    assert cache == (([], []), ([1, 2], []), ([], []))
    with pytest.raises(IndexError):
        moves.collect()


def test_the_host_learns_the_token_classes_of_states() -> None:
    rings = Rings()
    moves = KVMoves(Calls(), FORM, rings)
    states = np.arange(14, dtype=np.uint8).reshape(2, 7)
    moves.move((), KVTransfer(1, write_slots=numbers(3, 8), write_states=states))
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
    moves = KVMoves(Calls(), FORM)
    with pytest.raises(ValueError, match=r"transfer 7 brings arrays of shapes .*; expected"):
        moves.move((), transfer)


def test_sizes() -> None:
    assert FORM.block_bytes == 8
