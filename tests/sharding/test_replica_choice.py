"""A step's tokens are shared among replicas so that no device has more than it must; nothing is
lost. Small cases are worked out by hand, and numpy and jax give the same."""

import jax.numpy as jnp
import numpy as np
import pytest

from sharding.replica_choice import moe_lb, share_tokens, whole_tokens


def test_a_replica_fills_up_what_the_other_experts_leave() -> None:
    # Device 0: experts 0 and 1; device 1: experts 2 and 0. Expert 0 has 30 tokens.
    slots = np.array([[0, 1, 2, 0]])
    shared = share_tokens(np.array([[30, 10, 20]]), slots, 2, iterations=40)
    assert shared.of_device[0] == pytest.approx([30, 30], abs=0.1)
    assert shared.of_slot[0] == pytest.approx([20, 10, 20, 10], abs=0.1)


def test_a_device_that_is_full_without_the_expert_gets_none_of_it() -> None:
    slots = np.array([[0, 1, 2, 0]])
    shared = share_tokens(np.array([[30, 100, 20]]), slots, 2, iterations=40)
    assert shared.of_slot[0] == pytest.approx([0, 100, 20, 30], abs=0.1)


def test_balance_passes_through_several_devices() -> None:
    # Device 0 can only give to 1, and 1 only to 2: all of 90 tokens settle at 30 each.
    slots = np.array([[0, 3, 0, 1, 1, 4]])
    shared = share_tokens(np.array([[40, 40, 0, 5, 5]]), slots, 3, iterations=60)
    assert shared.of_device[0] == pytest.approx([30, 30, 30], abs=0.2)


def test_an_expert_without_tokens_changes_nothing() -> None:
    slots = np.array([[0, 1, 1, 0]])
    shared = share_tokens(np.array([[0, 0]]), slots, 2)
    assert np.array_equal(shared.of_device, [[0, 0]])


def test_jax_shares_like_numpy(rng: np.random.Generator) -> None:
    slots = np.array([[0, 1, 2, 3, 4, 0, 1, 2], [4, 3, 2, 1, 0, 4, 3, 0]])
    loads = rng.integers(0, 100, (2, 5))
    ours = share_tokens(loads, slots, 4)
    theirs = share_tokens(jnp.asarray(loads), jnp.asarray(slots), 4, xp=jnp)
    np.testing.assert_allclose(theirs.of_device, ours.of_device, rtol=1e-3, atol=1e-2)


def test_whole_tokens_keep_the_sum_of_every_expert(rng: np.random.Generator) -> None:
    slots = np.array([[0, 1, 2, 0, 1, 0]])
    loads = np.array([[7, 5, 3]])
    part = rng.dirichlet([1, 1, 1]) * 7, rng.dirichlet([1, 1]) * 5
    of_slot = np.array([[part[0][0], part[1][0], 3, part[0][1], part[1][1], part[0][2]]])
    whole = whole_tokens(of_slot, slots)
    assert np.abs(whole - of_slot).max() < 1
    assert [int(whole[slots == expert].sum()) for expert in range(3)] == loads[0].tolist()


def test_moe_lb_is_the_sum_of_peaks_over_the_sum_of_means() -> None:
    assert moe_lb(np.array([[8, 6, 2], [5, 6, 9]])) == pytest.approx(17 / (16 / 3 + 20 / 3))
    assert moe_lb(np.zeros((2, 3))) == 1.0
