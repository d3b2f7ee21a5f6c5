"""Goal: what goes first is the oldest of the owner who has most, so that nobody loses an equal
share to others; with one owner it is a plain order of use.

Method: orders worked out by hand.
"""

from serving.core.shared_lru import SharedLru


def fill(*pairs: tuple[int, str]) -> SharedLru:
    order = SharedLru()
    for number, owner in pairs:
        order.add(number, owner)
    return order


def test_one_owner() -> None:
    order = fill((1, "a"), (2, "a"), (3, "a"))
    order.use(1)
    assert (len(order), sorted(order)) == (3, [1, 2, 3])
    order.remove(2)
    assert [order.pop(), order.pop()] == [3, 1] and not len(order)


def test_the_owner_of_most_gives_way() -> None:
    order = fill((1, "small"), (2, "small"), *((number, "greedy") for number in range(10, 15)))
    assert [order.pop() for _ in range(3)] == [10, 11, 12]
    order.add(20, "greedy")
    order.add(21, "greedy")
    assert [order.pop(), order.pop()] == [13, 14], "the small one's are older, and stay"
    order.clear()
    assert not len(order)
    order.add(1, "a")
    assert order.pop() == 1
