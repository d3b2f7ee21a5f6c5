"""Which decode worker generates the tokens of a request.

Workers of a pool step together, because their experts are spread over all of them, so the slowest
one sets the pace. What a step costs a worker grows with its requests (products, experts) and with
their context (index keys, memory). Both are balanced at once: a request goes where the sum of the
squares of the two loads, each relative to its mean over the pool, grows least. A request much
shorter than the mean then goes where there are few requests, however much context they have, and a
long one where there is little context.

*Why squares*: the growth of a square is steeper the higher the load, so the dimension in which a
worker is ahead decides; and the sum falls exactly when loads move together.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Protocol, override

import numpy as np

from serving.core.balance_prefill import NoWorkerError


@dataclass(frozen=True, slots=True)
class DecodeDispatch:
    """A request counted at a worker: give it back when the request has left.

    Attributes:
        worker: index of the worker.
        num_tokens: context that is reserved for it, in tokens.
        generation: how often the worker had come or gone; requests of an earlier life are not
            taken off a later one.
    """

    worker: int
    num_tokens: int
    generation: int = 0


class DecodePolicy(Protocol):
    """How requests are given to decode workers."""

    def choose(self, num_tokens: int, num_expected: int = 0) -> DecodeDispatch:
        """Counts a request at a worker with room for it, now.

        Raises:
            NoWorkerError: no worker has room for it.
        """
        ...

    def finished(self, dispatch: DecodeDispatch) -> None:
        """A request has left its worker."""
        ...

    def is_current(self, dispatch: DecodeDispatch) -> bool:
        """Whether the worker has not gone since: what is reserved there is still reserved."""
        ...

    def set_available(self, worker: int, is_available: bool) -> None:
        """A worker has come or gone. One that is gone has nothing left."""
        ...


class DecodeLoads(ABC):
    """Requests and reserved context of each worker, and which have room for one more.

    Args:
        num_workers: workers, numbered from 0; all are available at first.
        requests_max: requests that a worker can run at a time.
        tokens_max: tokens of context that a worker's memory holds.

    Raises:
        ValueError: one of them is below 1.
    """

    def __init__(self, num_workers: int, requests_max: int, tokens_max: int) -> None:
        if min(num_workers, requests_max, tokens_max) < 1:
            raise ValueError(
                f"num_workers, requests_max and tokens_max are {num_workers}, {requests_max}, "
                f"{tokens_max}; expected at least 1"
            )
        self.tokens_max = tokens_max
        self._requests_max = requests_max
        self._num_requests = np.zeros(num_workers, np.int64)
        self._num_tokens = np.zeros(num_workers, np.int64)
        self._generations = [0] * num_workers
        # A worker that is away has no room.
        self._room = np.full(num_workers, requests_max, np.int64)

    @property
    def num_requests(self) -> np.ndarray:
        """[num_workers] int64 copy: requests that are counted."""
        return self._num_requests.copy()

    @property
    def num_tokens(self) -> np.ndarray:
        """[num_workers] int64 copy: context that is reserved."""
        return self._num_tokens.copy()

    def choose(self, num_tokens: int, num_expected: int = 0) -> DecodeDispatch:
        """Counts a request at a worker, now, so that the next one sees it.

        Args:
            num_tokens: context of the request.
            num_expected: tokens that it is expected to generate, if anything is known of it.

        Raises:
            NoWorkerError: no worker has room for it.
        """
        reserved = num_tokens + num_expected
        has_room = self._num_requests < self._room
        has_room &= self._num_tokens <= self.tokens_max - reserved
        if not has_room.any():
            raise NoWorkerError(
                f"no decode worker has room for {reserved} tokens; expected a request to end first"
            )
        worker = self._pick(has_room, reserved)
        self._num_requests[worker] += 1
        self._num_tokens[worker] += reserved
        return DecodeDispatch(worker, reserved, self._generations[worker])

    def finished(self, dispatch: DecodeDispatch) -> None:
        """A request has left its worker. Of a worker that went away nothing is left."""
        worker = dispatch.worker
        if self.is_current(dispatch):
            self._num_requests[worker] -= 1
            self._num_tokens[worker] -= dispatch.num_tokens
            assert self._num_requests[worker] >= 0, f"worker {worker} has lost a request too many"

    def is_current(self, dispatch: DecodeDispatch) -> bool:
        """Whether the worker has not gone since: what is reserved there is still reserved."""
        return dispatch.generation == self._generations[dispatch.worker]

    def set_available(self, worker: int, is_available: bool) -> None:
        """A worker has come or gone. One that is gone has nothing left."""
        self._generations[worker] += 1
        self._room[worker] = self._requests_max if is_available else 0
        self._num_requests[worker] = 0
        self._num_tokens[worker] = 0

    @abstractmethod
    def _pick(self, has_room: np.ndarray, num_tokens: int) -> int:
        """One of the workers with room, [num_workers] bool, of which there is at least one."""


class DecodeBalancer(DecodeLoads):
    """The policy of production: both dimensions at once."""

    @override
    def _pick(self, has_room: np.ndarray, num_tokens: int) -> int:
        num_workers = len(has_room)
        mean_requests = (self._num_requests.sum() + 1) / num_workers
        mean_tokens = (self._num_tokens.sum() + num_tokens) / num_workers
        growth = (2 * self._num_requests + 1) / mean_requests**2
        # In units of the mean before squaring: a context may have a million tokens.
        share = num_tokens / mean_tokens
        growth += (2 / mean_tokens * self._num_tokens + share) * share
        return int(np.where(has_room, growth, np.inf).argmin())
