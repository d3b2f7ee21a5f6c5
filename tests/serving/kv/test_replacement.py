"""Goal: what is used stays, what comes back stays, and the end of a prefix goes before its start.
Method: small queues by hand, and a long random run against what must always hold.
"""

import random

from serving.kv.replacement import Entry, S3Fifo


class Order:
    """An order of numbers."""

    def __init__(self) -> None:
        self.fifo: S3Fifo[Entry] = S3Fifo()
        self.entries: dict[int, Entry] = {}

    def add(self, name: int, size: int = 10) -> None:
        self.entries[name] = Entry(name, size)
        self.fifo.add(self.entries[name])

    def touch(self, name: int) -> None:
        self.fifo.touch(self.entries[name])

    def remove(self, name: int) -> None:
        self.fifo.remove(self.entries.pop(name))

    def victim(self, *staying: int) -> int | None:
        entry = self.fifo.victim(lambda entry: entry.name not in staying)
        return None if entry is None else next(n for n, e in self.entries.items() if e is entry)

    def drain(self) -> list[int]:
        gone = []
        while (name := self.victim()) is not None:
            gone.append(name)
            self.remove(name)
        return gone


def filled(count: int) -> Order:
    order = Order()
    for name in range(count):
        order.add(name)
    return order


def test_what_was_not_used_goes_first_in_the_order_it_came() -> None:
    order = filled(6)
    order.touch(0)
    order.touch(2)
    assert order.fifo.num_bytes == 60
    # The used ones get another round each.
    assert order.drain() == [1, 3, 4, 5, 0, 2]
    assert order.fifo.num_bytes == len(order.fifo) == 0


def test_a_name_stays_until_it_is_removed() -> None:
    order = filled(2)
    assert order.victim() == order.victim() == 0


def test_what_may_not_go_is_passed_over_and_ends_the_search() -> None:
    order = filled(3)
    assert order.victim(0, 1) == 2
    assert order.victim(0, 1, 2) is None
    assert sorted(order.drain()) == [0, 1, 2]


def test_what_comes_back_goes_after_what_comes_once() -> None:
    order = filled(4)
    order.remove(0)
    order.add(0)
    for name in range(10, 13):
        order.add(name)
    assert order.drain()[-1] == 0


def test_the_end_of_a_prefix_goes_first() -> None:
    order = Order()
    for name in reversed(range(5)):
        order.add(name)
    for name in reversed(range(3)):
        order.touch(name)
    assert order.drain() == [4, 3, 2, 1, 0]


def test_a_long_random_run_keeps_its_books() -> None:
    rng = random.Random(7)
    order = Order()
    for _ in range(20_000):
        name = rng.randrange(60)
        if name not in order.entries:
            order.add(name, rng.randrange(1, 50))
        elif rng.random() < 0.5:
            order.touch(name)
        else:
            order.remove(name)
        while order.fifo.num_bytes > 600:
            victim = order.victim(*range(0, 60, 7))
            assert victim is not None and victim % 7
            order.remove(victim)
        sizes = [entry.size for entry in order.entries.values()]
        assert order.fifo.num_bytes == sum(sizes) and len(order.fifo) == len(sizes)
    # Queues do not grow with what was removed.
    assert len(order.fifo._small) + len(order.fifo._main) <= 2 * len(order.entries) + 65
