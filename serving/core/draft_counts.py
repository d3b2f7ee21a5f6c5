"""What became of drafts, counted by their place after the last known token."""

import numpy as np


class DraftCounts:
    """Drafts that were verified and accepted since the start, of rows with up to `num_drafts`."""

    def __init__(self, num_drafts: int) -> None:
        # Rows that verified, and accepted, exactly so many: cheaper to add to than counts by place.
        self._verified = np.zeros(num_drafts + 1, np.int64)
        self._accepted = np.zeros(num_drafts + 1, np.int64)

    def add(self, num_verified: np.ndarray, num_accepted: np.ndarray) -> None:
        """Count one step: how many each row verified [R], and accepted [R]."""
        self._verified += np.bincount(num_verified, minlength=len(self._verified))
        self._accepted += np.bincount(num_accepted, minlength=len(self._accepted))

    @property
    def verified(self) -> tuple[int, ...]:
        """Drafts at each place that were verified."""
        return _at_least(self._verified)

    @property
    def accepted(self) -> tuple[int, ...]:
        """Drafts at each place that were accepted."""
        return _at_least(self._accepted)


def _at_least(num_rows: np.ndarray) -> tuple[int, ...]:
    """How many rows reached places 1 to N, of those [N + 1] that reached exactly place 0 to N."""
    return tuple(np.cumsum(num_rows[::-1])[::-1][1:].tolist())
