"""Which prefill worker computes a prompt.

Work is counted in predicted milliseconds of the tokens that are not cached: any worker can fetch
any stored prefix, so where a prefix lies hardly matters and how much is left to compute does.

Prompts fall into four classes by the length of their whole context. Workers compute in the order of
arrival, so a short prompt must not stand behind a long one; therefore each class has its own group
of workers. The groups are divided anew each round by the work that each class brought in the last
one. They may share a worker at their borders: a worker's *quota* for a class is the share of its
time that is meant for it, and its *quota load* is the work of the class over that share. A prompt
goes to the worker of its group with the lowest quota load, and counts there from that moment on, so
that the next prompt sees it.

A fixed division leaves some workers idle while others have a queue. So a prompt may go to a worker
of another group if that one would have finished it sooner by more than a margin.

*Why the rounds are not timed*: a round is over when a given amount of work was handed out, so the
balancer needs no clock and adapts faster under more load.
"""

from bisect import bisect_right
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from serving.core.cost import PrefillCost
from serving.core.prefix_holders import PrefixHolders

CLASS_BOUNDS = (16 * 1024, 64 * 1024, 256 * 1024)
"""Contexts, in tokens, from which on a prompt belongs to the next class."""

NUM_CLASSES = len(CLASS_BOUNDS) + 1


def length_class(num_tokens: int) -> int:
    """The class of a prompt by its whole context, cached tokens included: 0 to 3."""
    return bisect_right(CLASS_BOUNDS, num_tokens)


class NoWorkerError(RuntimeError):
    """No worker is available, or none has room."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """What a balancer knows of a prompt.

    Attributes:
        num_tokens: of the whole context.
        num_cached: of them, in a stored prefix that any worker can fetch.
        keys: one per block of the context, each naming the prefix up to its end; for policies that
            look at where copies are. May be empty.
        avoided: workers that have failed it; the policy of production takes them only if there are
            no others.
    """

    num_tokens: int
    num_cached: int = 0
    keys: Sequence[Hashable] = ()
    avoided: Sequence[int] = ()


@dataclass(frozen=True, slots=True)
class PrefillDispatch:
    """A prompt counted at a worker: give it back when its prefill is over.

    Attributes:
        worker: index of the worker.
        length_class: of the prompt.
        work_ms: predicted time of the tokens to compute.
        generation: how often the worker had come or gone; work of an earlier life is not
            taken off a later one.
    """

    worker: int
    length_class: int
    work_ms: float
    generation: int = 0


class PrefillPolicy(Protocol):
    """How prompts are given to prefill workers."""

    def choose(self, prompt: Prompt) -> PrefillDispatch:
        """Counts the prompt at a worker, now.

        Raises:
            NoWorkerError: no worker is available.
        """
        ...

    def finished(self, dispatch: PrefillDispatch) -> None:
        """A prompt was computed, or is given up."""
        ...

    def set_available(self, worker: int, is_available: bool) -> None:
        """A worker has come or gone. One that is gone has nothing left to do."""
        ...


class PrefillBalancer:
    """The policy of production.

    Args:
        num_workers: workers, numbered from 0; all are available at first.
        cost: fitted model of a worker's steps.
        round_ms: work per worker after which the groups are divided anew.
        spill_ms: a worker of another group takes a prompt if it would be done with it sooner by
            more than this; infinite keeps the groups apart.
        holders: what workers have in host memory; among workers that are equal within `tie_ms`
            the one with the most of the prompt is taken.

    Raises:
        ValueError: a number of workers below 1, or a time below 0.
    """

    def __init__(
        self,
        num_workers: int,
        cost: PrefillCost,
        round_ms: float = 2_000.0,
        spill_ms: float = 100.0,
        holders: PrefixHolders | None = None,
        tie_ms: float = 1.0,
    ) -> None:
        if num_workers < 1:
            raise ValueError(f"num_workers is {num_workers}; expected at least 1")
        if not (round_ms > 0 and spill_ms >= 0 and tie_ms >= 0):
            raise ValueError(
                f"round_ms, spill_ms and tie_ms are {round_ms}, {spill_ms}, {tie_ms}; expected a "
                "round above 0 and margins of at least 0"
            )
        self._cost = cost
        self._round_ms = round_ms
        self._spill_ms = spill_ms
        self._holders = holders
        self._tie_ms = tie_ms
        self._is_available = np.ones(num_workers, bool)
        self._generations = [0] * num_workers
        # Work handed out and not finished: by class and worker, and over all classes.
        self._class_load = np.zeros((NUM_CLASSES, num_workers))
        self._load = np.zeros(num_workers)
        self._demand = np.zeros(NUM_CLASSES)
        self._demand_before = np.zeros(NUM_CLASSES)
        self._divide()

    @property
    def quotas(self) -> np.ndarray:
        """[4, num_workers] float64 copy: the share of each worker's time meant for each class."""
        return self._quotas.copy()

    @property
    def load_ms(self) -> np.ndarray:
        """[num_workers] float64 copy: predicted work handed out and not finished."""
        return self._load.copy()

    def choose(self, prompt: Prompt) -> PrefillDispatch:
        """Counts the prompt at the worker with the lowest quota load, now.

        Raises:
            NoWorkerError: no worker is available.
        """
        which = length_class(prompt.num_tokens)
        work_ms = self._cost.chunk_ms(prompt.num_tokens - prompt.num_cached, prompt.num_cached)
        # What a worker would be done with after this prompt, by its share for the class and in all.
        done_ms = self._load + work_ms
        scores = (self._class_load[which] + work_ms) * self._inverse_quotas[which]
        np.maximum(scores, done_ms, out=scores)
        np.minimum(scores, done_ms + self._handicaps, out=scores)
        if prompt.avoided:
            others = scores.copy()
            others[list(prompt.avoided)] = np.inf
            scores = scores if np.isinf(others).all() else others
        worker = int(scores.argmin())
        if scores[worker] == np.inf:
            raise NoWorkerError("no prefill worker is available; start one, or wait for one")
        if self._holders is not None and prompt.keys:
            near = scores <= scores[worker] + self._tie_ms
            if np.count_nonzero(near) > 1:
                depths = self._holders.depths(prompt.keys)
                worker = int(np.where(near, depths, -1).argmax())
        self._class_load[which, worker] += work_ms
        self._load[worker] += work_ms
        self._demand[which] += work_ms
        if self._demand.sum() >= self._round_ms * max(np.count_nonzero(self._is_available), 1):
            self.end_round()
        return PrefillDispatch(worker, which, work_ms, self._generations[worker])

    def finished(self, dispatch: PrefillDispatch) -> None:
        """A prompt was computed, or is given up. Of a worker that went away nothing is left."""
        which, worker = dispatch.length_class, dispatch.worker
        if dispatch.generation != self._generations[worker]:
            return
        left = max(self._class_load[which, worker] - dispatch.work_ms, 0.0)
        self._class_load[which, worker] = left
        # Summed anew, so that rounding does not pile up over millions of prompts.
        self._load[worker] = self._class_load[:, worker].sum()

    def set_available(self, worker: int, is_available: bool) -> None:
        """A worker has come or gone; the groups are divided among those that are there."""
        self._is_available[worker] = is_available
        self._generations[worker] += 1
        self._class_load[:, worker] = 0.0
        self._load[worker] = 0.0
        self._divide()

    def end_round(self) -> None:
        """Divides the workers by the work of the round that ends here."""
        self._demand_before, self._demand = self._demand, np.zeros(NUM_CLASSES)
        self._divide()

    def _divide(self) -> None:
        """Lays the classes side by side on a line as long as there are workers.

        Each class gets a stretch in proportion to its demand, the short ones first, and a worker
        is the stretch of length 1 at its place. Before there is any demand every worker serves
        every class; a class without demand has no group and takes any worker, as a spill.
        """
        num_workers = len(self._is_available)
        self._quotas = np.zeros((NUM_CLASSES, num_workers))
        here = np.flatnonzero(self._is_available)
        total = self._demand_before.sum()
        if total:
            ends = np.cumsum(self._demand_before) / total * len(here)
            places = np.arange(len(here))
            for which in range(NUM_CLASSES):
                start = ends[which - 1] if which else 0.0
                overlap = np.minimum(ends[which], places + 1) - np.maximum(start, places)
                self._quotas[which, here] = np.maximum(overlap, 0.0)
        else:
            self._quotas[:, here] = 1.0
        with np.errstate(divide="ignore"):
            self._inverse_quotas = 1.0 / self._quotas
        self._handicaps = np.where(self._is_available, self._spill_ms, np.inf)
