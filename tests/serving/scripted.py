"""An executor without a device, for tests of everything above it: what it samples after position
`p` is `token_at(p + 1)`, so that every answer can be worked out by hand. Masks are obeyed, log
probabilities are made up, and other controls are passed over.
"""

import threading
from collections.abc import Callable

import numpy as np

from serving.core.buckets import StepKind
from serving.core.controls import LogprobColumns, StepReport
from serving.core.step_plan import StepPlan, StepResult


class ScriptedExecutor:
    """Runs plans on the host.

    Args:
        token_at: absolute position -> token id.
        failing_step: index of a step whose collection raises.
        gate: when given, every collection waits for it to be set.
        step_s: time that each step takes, in seconds.
    """

    def __init__(
        self,
        token_at: Callable[[int], int],
        failing_step: int | None = None,
        gate: threading.Event | None = None,
        step_s: float = 0.0,
    ) -> None:
        self.plans: list[StepPlan] = []
        self._token_at = token_at
        self._failing_step = failing_step
        self._gate = gate
        self._sleep = threading.Event()
        self._step_s = step_s
        self._collected = 0

    def submit(self, plan: StepPlan) -> None:
        self.plans.append(plan)

    def collect(self) -> StepResult:
        plan = self.plans[self._collected]
        self._collected += 1
        if self._gate is not None:
            self._gate.wait()
        if self._step_s:
            self._sleep.wait(self._step_s)
        if plan.step_index == self._failing_step:
            raise RuntimeError("the device is on fire")
        tokens = []
        for start, count in zip(plan.starts.tolist(), plan.num_tokens.tolist(), strict=True):
            after = [self._token_at(start + offset + 1) for offset in range(count)]
            tokens += after[-1:] if plan.kind is StepKind.PREFILL else after
        sampled = np.array(tokens, np.int32)
        if plan.controls is None:
            return StepResult(plan.step_index, sampled)
        masks = plan.controls.masks
        if masks is not None:
            pairs = zip(sampled.tolist(), masks, strict=True)
            sampled = np.array([_legal(token, mask) for token, mask in pairs], np.int32)
        report = StepReport(_made_up_logprobs(sampled), _made_up_logprobs(plan.token_ids + 1))
        return StepResult(plan.step_index, sampled, report)


def _legal(token: int, mask: np.ndarray) -> int:
    """The token, or the first one above it, around the end, that the mask allows."""
    legal = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))
    return min(legal.tolist(), key=lambda other: (other < token, other))


def _made_up_logprobs(tokens: np.ndarray) -> LogprobColumns:
    """Minus a hundredth of each token; the likeliest are the token and those after it."""
    top_tokens = tokens[:, None] + np.arange(20)
    values = -tokens[:, None] / 100 - np.arange(20)
    return LogprobColumns(values[:, 0].astype(np.float32), top_tokens, values.astype(np.float32))
