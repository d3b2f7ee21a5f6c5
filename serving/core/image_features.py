"""Images that were encoded elsewhere: their features, on the host.

Features are rows [num_tokens, row_bytes] uint8, the bytes of an embedding for each token of the
image. They depend on the model and the picture alone, so a digest names them wherever they are.
"""

from collections import OrderedDict

import numpy as np


class FeatureCache:
    """Features by digest, the least recently used gone first.

    Args:
        bytes_max: all of them together; one that is larger by itself is not kept.

    Attributes:
        num_bytes: of what is there.
        num_evicted: features that had to go.
    """

    def __init__(self, bytes_max: int) -> None:
        self.num_bytes = self.num_evicted = 0
        self._bytes_max = bytes_max
        self._rows: OrderedDict[bytes, np.ndarray] = OrderedDict()

    def __len__(self) -> int:
        return len(self._rows)

    def get(self, digest: bytes) -> np.ndarray | None:
        """The features of an image, which are used now; None if they are not there."""
        rows = self._rows.get(digest)
        if rows is not None:
            self._rows.move_to_end(digest)
        return rows

    def put(self, digest: bytes, rows: np.ndarray) -> None:
        """Keeps features, in place of those that were not used for longest."""
        if digest in self._rows:
            self._rows.move_to_end(digest)
            return
        if rows.nbytes > self._bytes_max:
            self.num_evicted += 1
            return
        self._rows[digest] = rows
        self.num_bytes += rows.nbytes
        while self.num_bytes > self._bytes_max:
            _, oldest = self._rows.popitem(last=False)
            self.num_bytes -= oldest.nbytes
            self.num_evicted += 1

    def clear(self) -> None:
        """Forgets all of them."""
        self._rows.clear()
        self.num_bytes = 0


class FeatureShelf:
    """Features that requests of an engine have brought along, until a step uses them.

    A step takes them away, so they are gone with it. An image without features is computed by the
    step itself: also one that is computed a second time because its sequence was preempted.
    """

    def __init__(self) -> None:
        self._by_request: dict[str, dict[bytes, np.ndarray]] = {}

    @property
    def num_bytes(self) -> int:
        """Of what is there; features of two requests count twice."""
        held = self._by_request.values()
        return sum(rows.nbytes for features in held for rows in features.values())

    def put(self, request_id: str, digest: bytes, rows: np.ndarray) -> None:
        """Keeps the features of an image of a request."""
        self._by_request.setdefault(request_id, {})[digest] = rows

    def take(self, request_id: str, digest: bytes, is_last: bool) -> np.ndarray | None:
        """The features of an image, if they are there; `is_last` if it has no other use of them."""
        features = self._by_request.get(request_id)
        if features is None:
            return None
        if not is_last:
            return features.get(digest)
        rows = features.pop(digest, None)
        if not features:
            del self._by_request[request_id]
        return rows

    def clear(self) -> None:
        """All requests are over."""
        self._by_request.clear()

    def drop(self, request_id: str) -> None:
        """A request is over, or nobody wants it any more."""
        self._by_request.pop(request_id, None)
