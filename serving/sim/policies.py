"""The named pairs of a prefill and a decode policy that a run can be asked for."""

import random
from collections.abc import Sequence

from serving.core import balance_baselines as baselines
from serving.core.balance_decode import DecodeBalancer, DecodePolicy
from serving.core.balance_prefill import PrefillBalancer, PrefillPolicy
from serving.core.cost import PrefillCost
from serving.core.prefix_holders import PrefixHolders
from serving.sim.options import FleetOptions

POLICIES: Sequence[str] = (
    "production",
    "round_robin",
    "random",
    "two_choices",
    "least_requests",
    "dynamo",
    "sglang",
)
"""What `--policy` may name. The last two stand for the published rules of those routers."""


def make_policies(
    name: str,
    options: FleetOptions,
    holders: PrefixHolders,
    block_tokens: int,
    source: random.Random,
) -> tuple[PrefillPolicy, DecodePolicy]:
    """The two policies of a name.

    Args:
        holders: what prefill workers have in host memory.
        block_tokens: tokens of one of their blocks.
        source: of what a policy draws.

    Raises:
        ValueError: the name is none of `POLICIES`.
    """
    counts, decode = options.counts, options.decode
    num_prefill = counts.prefill
    sizes = (counts.decode, decode.requests_max, decode.context_max)
    match name:
        case "production":
            p = options.prefill
            cost = PrefillCost(p.base_ms, p.token_ms, p.pair_ms)
            prefill = PrefillBalancer(num_prefill, cost, p.round_ms, p.spill_ms, holders)
            return prefill, DecodeBalancer(*sizes)
        case "round_robin":
            return baselines.RoundRobinPrefill(num_prefill), baselines.RoundRobinDecode(*sizes)
        case "random":
            return (
                baselines.RandomPrefill(num_prefill, source),
                baselines.RandomDecode(*sizes, source),
            )
        case "two_choices":
            return (
                baselines.TwoChoicesPrefill(num_prefill, source),
                baselines.TwoChoicesDecode(*sizes, source),
            )
        case "least_requests":
            return (
                baselines.LeastRequestsPrefill(num_prefill),
                baselines.LeastRequestsDecode(*sizes),
            )
        case "dynamo":
            return (
                baselines.CreditPrefill(num_prefill, holders, block_tokens),
                baselines.LeastContextDecode(*sizes),
            )
        case "sglang":
            return (
                baselines.AffinityPrefill(num_prefill, holders, block_tokens),
                baselines.LeastRequestsDecode(*sizes),
            )
        case _:
            raise ValueError(f"policy: received {name!r}; expected one of {', '.join(POLICIES)}")
