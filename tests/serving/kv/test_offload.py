"""Goal: tiers that fail are left alone and tried again, and sightings are counted within bounds.
Method: by hand.
"""

from serving.kv.offload import Breaker, Sightings


def test_a_breaker_opens_after_faults_in_a_row_only() -> None:
    breaker = Breaker(3)
    assert not breaker.fail() and not breaker.fail()
    breaker.succeed()
    assert not breaker.fail() and not breaker.fail() and breaker.allow()
    assert breaker.fail() and breaker.is_open and breaker.num_opened == 1
    assert not breaker.allow()


def test_an_open_breaker_lets_one_call_through_for_each_probe() -> None:
    breaker = Breaker(1)
    breaker.fail()
    breaker.probe()
    assert breaker.allow() and not breaker.allow()
    assert breaker.fail() and breaker.num_opened == 1
    breaker.probe()
    breaker.succeed()
    assert not breaker.is_open and breaker.allow() and breaker.allow()
    breaker.fail()
    assert breaker.num_opened == 2


def test_sightings_of_the_last_different_things() -> None:
    sightings = Sightings(2)
    assert [sightings.see(thing) for thing in "aababcca"] == [1, 2, 1, 3, 2, 1, 2, 1]
