"""Goal: every name gives its own pair of policies.
Method: the types behind each name.
"""

import random

import pytest

from serving.core.prefix_holders import PrefixHolders
from serving.sim.policies import POLICIES, make_policies
from tests.serving.sim.small_fleet import FLEET


def test_every_name_is_a_pair_of_its_own() -> None:
    pairs = {
        name: make_policies(name, FLEET, PrefixHolders(8), 512, random.Random(1))
        for name in POLICIES
    }
    assert {name: type(prefill).__name__ for name, (prefill, _) in pairs.items()} == {
        "production": "PrefillBalancer",
        "round_robin": "RoundRobinPrefill",
        "random": "RandomPrefill",
        "two_choices": "TwoChoicesPrefill",
        "least_requests": "LeastRequestsPrefill",
        "dynamo": "CreditPrefill",
        "sglang": "AffinityPrefill",
    }
    assert {type(decode).__name__ for _, decode in pairs.values()} == {
        "DecodeBalancer",
        "RoundRobinDecode",
        "RandomDecode",
        "TwoChoicesDecode",
        "LeastRequestsDecode",
        "LeastContextDecode",
    }


def test_another_name_is_refused() -> None:
    with pytest.raises(ValueError, match="policy: received 'best'; expected one of production, "):
        make_policies("best", FLEET, PrefixHolders(8), 512, random.Random(1))
