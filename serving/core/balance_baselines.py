"""Other ways to choose workers, to measure the balancers against in the same harness.

Four that know nothing of prompts: in turn, at random, the better of two at random, and the one with
the fewest requests. Two that look at where copies of a prefix are, after the published rules of two
routers: `CreditPrefill` adds up blocks to compute and blocks at work, with credit for copies by how
near they are (NVIDIA Dynamo's cost); `AffinityPrefill` follows the copies while queues are even,
and the shortest queue when they are not (SGLang's cache-aware policy).
"""

import random
from abc import ABC, abstractmethod
from typing import override

import numpy as np

from serving.core.balance_decode import DecodeLoads
from serving.core.balance_prefill import (
    NoWorkerError,
    PrefillDispatch,
    Prompt,
    length_class,
)
from serving.core.prefix_holders import PrefixHolders


class PrefillCounts(ABC):
    """Prompts and their tokens in flight at each worker, which is what the baselines look at.

    Raises:
        ValueError: fewer than one worker.
    """

    def __init__(self, num_workers: int) -> None:
        if num_workers < 1:
            raise ValueError(f"num_workers is {num_workers}; expected at least 1")
        self._num_prompts = np.zeros(num_workers, np.int64)
        self._num_tokens = np.zeros(num_workers, np.int64)
        self._is_available = np.ones(num_workers, bool)
        self._generations = [0] * num_workers

    def choose(self, prompt: Prompt) -> PrefillDispatch:
        """Counts the prompt at a worker, now; work is in tokens here, since nothing is predicted.

        Raises:
            NoWorkerError: no worker is available.
        """
        if not self._is_available.any():
            raise NoWorkerError("no prefill worker is available; start one, or wait for one")
        worker = self._pick(prompt)
        num_tokens = prompt.num_tokens - prompt.num_cached
        self._num_prompts[worker] += 1
        self._num_tokens[worker] += num_tokens
        which = length_class(prompt.num_tokens)
        return PrefillDispatch(worker, which, num_tokens, self._generations[worker])

    def finished(self, dispatch: PrefillDispatch) -> None:
        """A prompt was computed, or is given up."""
        worker = dispatch.worker
        if dispatch.generation == self._generations[worker]:
            self._num_prompts[worker] -= 1
            self._num_tokens[worker] -= int(dispatch.work_ms)

    def set_available(self, worker: int, is_available: bool) -> None:
        """A worker has come or gone. One that is gone has nothing left to do."""
        self._is_available[worker] = is_available
        self._generations[worker] += 1
        self._num_prompts[worker] = 0
        self._num_tokens[worker] = 0

    @abstractmethod
    def _pick(self, prompt: Prompt) -> int:
        """One of the available workers, of which there is at least one."""


def _next_of(usable: np.ndarray, last: int) -> int:
    """The first usable worker after `last`, around the end."""
    after = np.flatnonzero(usable)
    later = after[after > last]
    return int(later[0] if len(later) else after[0])


def _better_of_two(usable: np.ndarray, loads: np.ndarray, source: random.Random) -> int:
    """The one with less load of two different usable workers, or the only one."""
    some = np.flatnonzero(usable).tolist()
    pair = source.sample(some, 2) if len(some) > 1 else some
    return min(pair, key=lambda worker: (loads[worker], worker))


def _least(usable: np.ndarray, loads: np.ndarray) -> int:
    """The usable worker with the least load, the first of equals."""
    return int(np.where(usable, loads, np.inf).argmin())


class RoundRobinPrefill(PrefillCounts):
    """Workers in turn."""

    _last = -1

    @override
    def _pick(self, prompt: Prompt) -> int:
        self._last = _next_of(self._is_available, self._last)
        return self._last


class RandomPrefill(PrefillCounts):
    """Any worker; `source` decides."""

    def __init__(self, num_workers: int, source: random.Random) -> None:
        super().__init__(num_workers)
        self._source = source

    @override
    def _pick(self, prompt: Prompt) -> int:
        return self._source.choice(np.flatnonzero(self._is_available).tolist())


class TwoChoicesPrefill(RandomPrefill):
    """Of two workers at random the one with fewer prompts."""

    @override
    def _pick(self, prompt: Prompt) -> int:
        return _better_of_two(self._is_available, self._num_prompts, self._source)


class LeastRequestsPrefill(PrefillCounts):
    """The worker with the fewest prompts."""

    @override
    def _pick(self, prompt: Prompt) -> int:
        return _least(self._is_available, self._num_prompts)


class CreditPrefill(PrefillCounts):
    """The lowest sum of blocks to compute and blocks at work, less a credit for copies.

    Args:
        holders: what each worker has in host memory.
        block_tokens: tokens that one key stands for.
        host_credit: how much of a block in the worker's host memory need not be computed, 0 to 1.
        stored_credit: the same for a block that only the shared store has.
    """

    def __init__(
        self,
        num_workers: int,
        holders: PrefixHolders,
        block_tokens: int,
        host_credit: float = 1.0,
        stored_credit: float = 0.75,
    ) -> None:
        super().__init__(num_workers)
        self._holders = holders
        self._block_tokens = block_tokens
        self._host_credit = host_credit
        self._stored_credit = stored_credit

    @override
    def _pick(self, prompt: Prompt) -> int:
        held = np.minimum(self._holders.depths(prompt.keys) * self._block_tokens, prompt.num_cached)
        spared = held * self._host_credit + (prompt.num_cached - held) * self._stored_credit
        cost = self._num_tokens + (prompt.num_tokens - spared)
        return _least(self._is_available, cost)


class AffinityPrefill(PrefillCounts):
    """The worker with the longest copy while queues are even, else the shortest queue.

    Queues are uneven when the longest is more than `queue_gap` prompts and `queue_ratio` times
    longer than the shortest. A copy counts if it is at least `match_min` of the prompt; without
    one, the worker with the fewest copies of all is taken.
    """

    def __init__(
        self,
        num_workers: int,
        holders: PrefixHolders,
        block_tokens: int,
        match_min: float = 0.3,
        queue_gap: int = 64,
        queue_ratio: float = 1.5,
    ) -> None:
        super().__init__(num_workers)
        self._holders = holders
        self._block_tokens = block_tokens
        self._match_min = match_min
        self._queue_gap = queue_gap
        self._queue_ratio = queue_ratio
        self._num_placed = np.zeros(num_workers, np.int64)

    @override
    def _pick(self, prompt: Prompt) -> int:
        usable = self._is_available
        queues = self._num_prompts[usable]
        longest, shortest = int(queues.max()), int(queues.min())
        if longest - shortest > self._queue_gap and longest > self._queue_ratio * shortest:
            worker = _least(usable, self._num_prompts)
        else:
            depths = np.where(usable, self._holders.depths(prompt.keys), -1)
            worker = int(depths.argmax())
            if depths[worker] * self._block_tokens < self._match_min * prompt.num_tokens:
                worker = _least(usable, self._num_placed)
        # Stands for the size of the worker's copies: it does not follow evictions.
        self._num_placed[worker] += prompt.num_tokens - prompt.num_cached
        return worker


class RoundRobinDecode(DecodeLoads):
    """Workers with room in turn."""

    _last = -1

    @override
    def _pick(self, has_room: np.ndarray, num_tokens: int) -> int:
        self._last = _next_of(has_room, self._last)
        return self._last


class RandomDecode(DecodeLoads):
    """Any worker with room; `source` decides."""

    def __init__(
        self, num_workers: int, requests_max: int, tokens_max: int, source: random.Random
    ) -> None:
        super().__init__(num_workers, requests_max, tokens_max)
        self._source = source

    @override
    def _pick(self, has_room: np.ndarray, num_tokens: int) -> int:
        return self._source.choice(np.flatnonzero(has_room).tolist())


class TwoChoicesDecode(RandomDecode):
    """Of two workers with room at random the one with fewer requests."""

    @override
    def _pick(self, has_room: np.ndarray, num_tokens: int) -> int:
        return _better_of_two(has_room, self._num_requests, self._source)


class LeastRequestsDecode(DecodeLoads):
    """The worker with the fewest requests."""

    @override
    def _pick(self, has_room: np.ndarray, num_tokens: int) -> int:
        return _least(has_room, self._num_requests)


class LeastContextDecode(DecodeLoads):
    """The worker with the least context at work, which is Dynamo's count of decode blocks."""

    @override
    def _pick(self, has_room: np.ndarray, num_tokens: int) -> int:
        return _least(has_room, self._num_tokens)
