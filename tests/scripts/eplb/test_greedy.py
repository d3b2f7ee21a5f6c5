"""The baseline does what its description says, on cases small enough to follow by hand."""

import numpy as np

from scripts.eplb.greedy import evenly_shared, greedy_placement, num_moved
from sharding.placement import Placement


def test_redundant_slots_go_to_the_largest_load_per_replica() -> None:
    placement = greedy_placement(np.array([[90.0, 40.0, 20.0, 10.0]]), 2, 2)
    # 90 is halved, then thirded, since 45 is above 40.
    assert np.bincount(placement.slots[0]).tolist() == [3, 1, 1, 1]


def test_replicas_are_packed_by_load_onto_the_least_loaded_device() -> None:
    placement = greedy_placement(np.array([[50.0, 40.0, 30.0, 20.0]]), 2, 0)
    assert placement.slots.tolist() == [[0, 3, 1, 2]]


def test_tokens_are_shared_evenly() -> None:
    placement = Placement(np.array([[0, 1, 0, 2]]), 3, 2)
    assert evenly_shared(np.array([[10, 4, 6]]), placement).tolist() == [[9.0, 11.0]]


def test_the_order_inside_a_device_is_no_move() -> None:
    before = Placement(np.array([[0, 1, 2, 3]]), 4, 2)
    assert num_moved(before, Placement(np.array([[1, 0, 3, 2]]), 4, 2)) == 0
    assert num_moved(before, Placement(np.array([[2, 1, 0, 3]]), 4, 2)) == 2
