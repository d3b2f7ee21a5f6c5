"""Simulated network links: bytes pass one after another at a fixed rate."""


class Link:
    """One link of `gb_s` gigabytes (10^9 bytes) a second.

    Raises:
        ValueError: the rate is not above 0.
    """

    def __init__(self, gb_s: float) -> None:
        if not gb_s > 0:
            raise ValueError(f"gb_s is {gb_s}; expected a number above 0")
        self._ns_per_byte = 1.0 / gb_s
        self._free_ns = 0.0

    def carry(self, now_ns: float, num_bytes: float) -> float:
        """When bytes that are ready at `now_ns` have passed, behind those that were given before.

        Nanoseconds; a rate of 1 GB/s is one byte in each.
        """
        self._free_ns = max(self._free_ns, now_ns) + num_bytes * self._ns_per_byte
        return self._free_ns
