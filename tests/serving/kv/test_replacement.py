"""Goal: what is used stays, what comes back stays, and the end of a prefix goes before its start.
Method: small queues by hand, and a long random run against what must always hold.
"""

import random

from serving.kv.replacement import S3Fifo


def anything(name: object) -> bool:
    return True


def drain(order: S3Fifo[int]) -> list[int]:
    gone = []
    while (victim := order.victim(anything)) is not None:
        gone.append(victim)
        order.remove(victim)
    return gone


def filled(count: int) -> S3Fifo[int]:
    order: S3Fifo[int] = S3Fifo()
    for name in range(count):
        order.add(name, 10)
    return order


def test_what_was_not_used_goes_first_in_the_order_it_came() -> None:
    order = filled(6)
    order.touch(0)
    order.touch(2)
    assert order.num_bytes == 60
    # The used ones get another round each.
    assert drain(order) == [1, 3, 4, 5, 0, 2]
    assert order.num_bytes == len(order) == 0


def test_a_name_stays_until_it_is_removed() -> None:
    order = filled(2)
    assert order.victim(anything) == order.victim(anything) == 0


def test_what_may_not_go_is_passed_over_and_ends_the_search() -> None:
    order = filled(3)
    assert order.victim(lambda name: name == 2) == 2
    assert order.victim(lambda name: False) is None
    assert sorted(drain(order)) == [0, 1, 2]


def test_what_comes_back_goes_after_what_comes_once() -> None:
    order = filled(4)
    order.remove(0)
    order.add(0, 10)
    for name in range(10, 13):
        order.add(name, 10)
    assert drain(order)[-1] == 0


def test_the_end_of_a_prefix_goes_first() -> None:
    order: S3Fifo[int] = S3Fifo()
    for name in reversed(range(5)):
        order.add(name, 10)
    for name in reversed(range(3)):
        order.touch(name)
    assert drain(order) == [4, 3, 2, 1, 0]


def test_a_long_random_run_keeps_its_books() -> None:
    rng = random.Random(7)
    order: S3Fifo[int] = S3Fifo()
    sizes: dict[int, int] = {}
    for _ in range(20_000):
        name = rng.randrange(60)
        if name not in sizes:
            sizes[name] = rng.randrange(1, 50)
            order.add(name, sizes[name])
        elif rng.random() < 0.5:
            order.touch(name)
        else:
            order.remove(name)
            del sizes[name]
        while order.num_bytes > 600:
            victim = order.victim(lambda name: name % 7 != 0)
            assert victim is not None and victim % 7
            order.remove(victim)
            del sizes[victim]
        assert order.num_bytes == sum(sizes.values()) and set(order) == set(sizes)
    # Queues do not grow with what was removed.
    assert len(order._small) + len(order._main) <= 2 * len(sizes) + 65
