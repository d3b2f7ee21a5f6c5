"""Which vision worker encodes an image.

An image costs by its tokens, and workers differ in speed, so an image goes where the tokens in
flight, its own included, are fewest for the worker's weight.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from serving.core.balance_prefill import NoWorkerError


@dataclass(frozen=True, slots=True)
class VisionDispatch:
    """An image counted at a worker: give it back when it was encoded.

    Attributes:
        worker: index of the worker.
        num_tokens: image tokens.
        generation: how often the worker had come or gone; images of an earlier life are not
            taken off a later one.
    """

    worker: int
    num_tokens: int
    generation: int = 0


class VisionBalancer:
    """Image tokens in flight of each worker.

    Args:
        weights: relative speed of each worker, above 0.

    Raises:
        ValueError: there is no worker, or a weight is not above 0.
    """

    def __init__(self, weights: Sequence[float]) -> None:
        if not weights or not all(weight > 0 for weight in weights):
            raise ValueError(f"weights are {list(weights)}; expected one above 0 for each worker")
        self._weights = np.array(weights, np.float64)
        self._speeds = self._weights.copy()
        self._num_tokens = np.zeros(len(weights), np.int64)
        self._generations = [0] * len(weights)

    @property
    def num_tokens(self) -> np.ndarray:
        """[num_workers] int64 copy: image tokens in flight."""
        return self._num_tokens.copy()

    def choose(self, num_tokens: int, holder: int | None = None) -> VisionDispatch:
        """Counts an image at a worker, now.

        Args:
            holder: the worker that is likely to have encoded it before, to which it goes then.

        Raises:
            NoWorkerError: no worker is available.
        """
        if not self._speeds.any():
            raise NoWorkerError("no vision worker is available; start one, or wait for one")
        if holder is not None and self._speeds[holder]:
            worker = holder
        else:
            with np.errstate(divide="ignore"):
                loads = (self._num_tokens + num_tokens) / self._speeds
            worker = int(loads.argmin())
        self._num_tokens[worker] += num_tokens
        return VisionDispatch(worker, num_tokens, self._generations[worker])

    def finished(self, dispatch: VisionDispatch) -> None:
        """An image was encoded, or is given up. Of a worker that went away nothing is left."""
        if dispatch.generation == self._generations[dispatch.worker]:
            self._num_tokens[dispatch.worker] -= dispatch.num_tokens

    def set_available(self, worker: int, is_available: bool, weight: float | None = None) -> None:
        """A worker has come, perhaps with another speed, or gone, and has nothing left to do then.

        Raises:
            ValueError: the weight is not above 0.
        """
        if weight is not None:
            if not weight > 0:
                raise ValueError(f"weight of worker {worker} is {weight}; expected one above 0")
            self._weights[worker] = weight
        self._generations[worker] += 1
        self._speeds[worker] = self._weights[worker] if is_available else 0.0
        self._num_tokens[worker] = 0
