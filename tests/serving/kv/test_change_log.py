"""Goal: whoever asks again and again knows what is held. Method: random changes, and a listener
that asks now and then, with pages of any size and a log that forgets.
"""

import random

import pytest

from serving.kv.change_log import ChangeLog


def test_changes_are_told_once() -> None:
    log = ChangeLog[int]()
    assert log.since(0, 10) == log.since(0, 1)
    log.add("a", 1)
    log.add("b", 2)
    changes = log.since(0, 10)
    assert changes.is_anew and changes.held == [("a", 1), ("b", 2)] and not changes.has_more
    assert log.since(changes.upto, 10).held == []
    assert log.remove("a") and not log.remove("a")
    log.add("b", 3)
    changes = log.since(changes.upto, 10)
    assert changes.gone == ["a"] and changes.held == [("b", 3)] and not changes.is_anew
    assert "b" in log and "a" not in log and log.get("b") == 3 and log.get("a") is None
    assert list(log) == ["b"] and list(log.items()) == [3] and len(log) == 1


@pytest.mark.parametrize("seed", range(4))
def test_a_listener_knows_what_is_held(seed: int) -> None:
    rng = random.Random(seed)
    log = ChangeLog[int](spare=8)
    known: dict[str, int] = {}
    since = 0
    for step in range(2000):
        name = str(rng.randrange(20))
        if rng.random() < 0.5:
            log.add(name, step)
        else:
            log.remove(name)
        if rng.random() < 0.1:
            while True:
                changes = log.since(since, rng.randint(1, 5))
                if changes.is_anew:
                    known.clear()
                for gone in changes.gone:
                    known.pop(gone, None)
                known.update(changes.held)
                since = changes.upto
                if not changes.has_more:
                    break
            assert known == {held: log.get(held) for held in log}
