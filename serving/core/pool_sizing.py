"""How many workers of each kind a stream of requests needs, from what one worker can do.

By Little's law a pool is as large as the work that arrives in the time it stays: prefill by tokens
that no cache holds, decode by requests that run at once, vision by image tokens, storage by the
bytes that are kept and read. Means only: `headroom` is the part of a pool that is left free for
what comes above them.
"""

import math
from dataclasses import dataclass
from typing import NamedTuple


@dataclass(frozen=True)
class Traffic:
    """A stream of requests, by means.

    Attributes:
        requests_per_s: arrivals.
        prompt_tokens, output_tokens: of a request.
        hit_ratio: part of the prompt tokens whose cache is found in storage.
        image_tokens: of a request, among its prompt tokens.
        kept_s: how long a cached prefix is kept.
        image_tokens_per_s: what one vision worker encodes.
        headroom: part of every pool that is left free.

    Raises:
        ValueError: a number is out of its range.
    """

    requests_per_s: float
    prompt_tokens: float
    output_tokens: float
    hit_ratio: float = 0.0
    image_tokens: float = 0.0
    kept_s: float = 3600.0
    image_tokens_per_s: float = 50_000.0
    headroom: float = 0.2

    def __post_init__(self) -> None:
        for name in ("requests_per_s", "prompt_tokens", "output_tokens", "image_tokens_per_s"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} is {getattr(self, name)}; expected more than 0")
        for name in ("image_tokens", "kept_s"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"{name} is {getattr(self, name)}; expected 0 or more")
        for name in ("hit_ratio", "headroom"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; expected 0 to below 1")


class PoolSizes(NamedTuple):
    """Workers of each kind, and what storage must hold and deliver.

    Attributes:
        prefill_workers, decode_workers, vision_workers: whole workers.
        running_requests: that decode at once, on average.
        storage_bytes: of cached prefixes.
        storage_read_bytes_per_s, storage_write_bytes_per_s: on average.
    """

    prefill_workers: int
    decode_workers: int
    vision_workers: int
    running_requests: float
    storage_bytes: float
    storage_read_bytes_per_s: float
    storage_write_bytes_per_s: float

    def text(self) -> str:
        """A sentence for each pool."""
        return (
            f"Pools: {self.prefill_workers} prefill, {self.decode_workers} decode and "
            f"{self.vision_workers} vision workers (prefill : decode = "
            f"{self.prefill_workers / self.decode_workers:.2f}); "
            f"{self.running_requests:,.0f} requests decode at once.\n"
            f"Storage: {self.storage_bytes / 1e12:.2f} TB kept, "
            f"{self.storage_read_bytes_per_s / 1e9:.2f} GB/s read, "
            f"{self.storage_write_bytes_per_s / 1e9:.2f} GB/s written."
        )


def size_pools(
    traffic: Traffic,
    *,
    prefill_tokens_per_s: float,
    users_per_worker: int,
    decode_step_s: float,
    cache_bytes_per_token: float,
) -> PoolSizes:
    """Pools for `traffic`, given what one worker of each kind does.

    A request decodes for one step of `decode_step_s` for every output token.
    """
    t = traffic
    free = 1 - t.headroom
    new_tokens_per_s = t.requests_per_s * t.prompt_tokens * (1 - t.hit_ratio)
    running = t.requests_per_s * t.output_tokens * decode_step_s
    written = cache_bytes_per_token * (new_tokens_per_s + t.requests_per_s * t.output_tokens)
    read = cache_bytes_per_token * t.requests_per_s * t.prompt_tokens * t.hit_ratio
    images = t.requests_per_s * t.image_tokens / t.image_tokens_per_s
    return PoolSizes(
        prefill_workers=max(math.ceil(new_tokens_per_s / prefill_tokens_per_s / free), 1),
        decode_workers=max(math.ceil(running / users_per_worker / free), 1),
        vision_workers=math.ceil(images / free),
        running_requests=running,
        storage_bytes=written * t.kept_s,
        storage_read_bytes_per_s=read,
        storage_write_bytes_per_s=written,
    )
