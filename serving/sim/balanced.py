"""The bound that a fleet is measured against: all its work spread evenly, with nobody idle.

Prefill: the predicted time of all tokens that are not cached, in steps that are always full, over
all workers. Decode: all steps of all requests, with the mean context, on workers that always run as
many requests as the service level and their memory allow. The pool that takes longer sets the rate.
"""

from dataclasses import dataclass

import numpy as np

from serving.core.cost import PrefillCost
from serving.sim.options import DecodeOptions, FleetOptions


@dataclass(frozen=True, slots=True)
class BalancedBound:
    """Requests a second that each pool could serve, and both together."""

    prefill_rps: float
    decode_rps: float

    @property
    def rps(self) -> float:
        """What the fleet could serve."""
        return min(self.prefill_rps, self.decode_rps)

    @classmethod
    def of(
        cls,
        options: FleetOptions,
        num_prompt: np.ndarray,
        num_cached: np.ndarray,
        num_output: np.ndarray,
    ) -> "BalancedBound":
        """The bound for requests with these tokens, [M] each."""
        p, counts, num_requests = options.prefill, options.counts, len(num_prompt)
        cost = PrefillCost(p.base_ms, p.token_ms, p.pair_ms)
        num_left = num_prompt - num_cached
        work_ms = cost.token_ms * num_left.sum() + cost.pair_ms * float(
            np.sum(num_left * num_cached + num_left * num_left / 2, dtype=np.float64)
        )
        # A full step does work for all of its time but the base.
        prefill_s = work_ms * p.step_ms / (p.step_ms - p.base_ms) / 1e3 / counts.prefill
        steps = np.ceil(np.maximum(num_output - 1, 0) / options.decode.tokens_per_step)
        num_steps = float(steps.sum())
        if num_steps:
            context = float(((num_prompt + num_output / 2) * steps).sum() / num_steps)
            rows, step_ms = best_rows(options.decode, context, options.target.itl_ms)
            decode_s = num_steps / rows * step_ms / 1e3 / counts.decode
        else:
            decode_s = 0.0
        return cls(
            num_requests / prefill_s if prefill_s else float("inf"),
            num_requests / decode_s if decode_s else float("inf"),
        )


def best_rows(decode: DecodeOptions, context: float, itl_ms: float) -> tuple[int, float]:
    """Requests that a worker should run, and the time of its step then.

    As many as leave the mean time between tokens within `itl_ms` and fit into memory; one if even
    that is too slow.
    """
    rows_max = max(min(decode.requests_max, int(decode.context_max // max(context, 1.0))), 1)
    per_row_ms = decode.row_ms + decode.context_ms * context
    rows = rows_max
    if per_row_ms:
        rows = int((itl_ms * decode.tokens_per_step - decode.base_ms) / per_row_ms)
    rows = min(max(rows, 1), rows_max)
    return rows, decode.step_ms(rows, rows * context)
