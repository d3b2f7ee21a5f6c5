"""Quotas of tenants: what one may ask for in a minute, and hold at one time.

Rates are token buckets that fill continuously and hold one minute's worth. What a call will take
is reserved before any work is done: its prompt as input, its limit of generated tokens as output.
When it ends, what it did not take is given back, and what was cached moves from input to cached.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from serving.clock import Clock, s_of_ns
from serving.config import QuotaOptions
from serving.frontend.errors import ApiError, bad_request

_MINUTE_S = 60.0


class Bucket:
    """An amount that fills at `per_minute` up to that much, and that may be overdrawn."""

    def __init__(self, per_minute: int, now_ns: int) -> None:
        self.per_minute = per_minute
        self._level = float(per_minute)
        self._seen_ns = now_ns

    def level(self, now_ns: int) -> float:
        """What there is now; negative after an overdraft."""
        filled = s_of_ns(now_ns - self._seen_ns) / _MINUTE_S * self.per_minute
        self._level = min(self._level + filled, float(self.per_minute))
        self._seen_ns = now_ns
        return self._level

    def wait_s(self, amount: float, now_ns: int) -> float:
        """Seconds until `amount` is there; 0 if it is. More than fits counts as a full bucket."""
        missing = min(amount, self.per_minute) - self.level(now_ns)
        return max(missing, 0.0) / self.per_minute * _MINUTE_S

    def go_on_from(self, other: "Bucket", now_ns: int) -> None:
        """Begins as `other` stands: what was taken of it is gone, an overdraft is to be filled."""
        level = other.level(now_ns)
        taken = other.per_minute - max(level, 0.0)
        self._level = max(self.per_minute - taken, 0.0) + min(level, 0.0)

    def take(self, amount: float) -> None:
        """Takes an amount out, or puts a negative one back."""
        self._level = min(self._level - amount, float(self.per_minute))


@dataclass(slots=True)
class _Tenant:
    options: QuotaOptions
    buckets: dict[str, Bucket] = field(default_factory=dict[str, Bucket])
    num_running: int = 0
    num_held_tokens: int = 0
    num_held_bytes: int = 0


@dataclass(slots=True)
class Reservation:
    """What one call has been granted. `num_output_tokens` is an upper bound."""

    tenant: str
    num_input_tokens: int
    num_output_tokens: int
    num_bytes: int = 0
    is_over: bool = False


@dataclass(frozen=True, slots=True)
class KVCosts:
    """Bytes of KV memory that a token takes, and a sequence besides. Zeros where it is unknown."""

    token_bytes: float = 0.0
    sequence_bytes: int = 0


class Quotas:
    """Grants calls within the quotas of their tenants.

    Args:
        options: by tenant; those under `default` are for every tenant that has none of its own.
        costs: what the model keeps.
    """

    def __init__(
        self, options: Mapping[str, QuotaOptions], clock: Clock, costs: KVCosts | None = None
    ) -> None:
        self._options = options
        self._costs = costs or KVCosts()
        self._clock = clock
        self._tenants: dict[str, _Tenant] = {}

    def reload(self, options: Mapping[str, QuotaOptions]) -> None:
        """Other quotas from now on; what was taken or is running stays counted."""
        self._options = options
        for name, tenant in self._tenants.items():
            tenant.options, before = self._of(name), tenant.buckets
            tenant.buckets = self._buckets(tenant.options)
            for kind in tenant.buckets.keys() & before.keys():
                tenant.buckets[kind].go_on_from(before[kind], self._clock.now_ns())

    def context_max(self, tenant: str) -> int | None:
        """The longest prompt and answer together; None for what the engine takes."""
        return self._of(tenant).context_max or None

    def check(
        self, tenant: str, num_input_tokens: int = 0, num_output_tokens: int = 0
    ) -> dict[str, int]:
        """What a call of so many tokens would take of each bucket, if there may be one now.

        Raises:
            ApiError: 429.
        """
        state, now_ns = self._state(tenant), self._clock.now_ns()
        options = state.options
        if options.concurrent_max and state.num_running >= options.concurrent_max:
            detail = f"{options.concurrent_max} calls of {tenant} are running; expected no more"
            raise _too_many(detail, 1.0)
        wanted = {
            "requests": 1,
            "tokens": num_input_tokens + num_output_tokens,
            "input_tokens": num_input_tokens,
            "output_tokens": num_output_tokens,
        }
        waits = {
            name: bucket.wait_s(wanted.get(name, 0), now_ns)
            for name, bucket in state.buckets.items()
        }
        for name, seconds in waits.items():
            if seconds > 0:
                limit = state.buckets[name].per_minute
                what = name.replace("_", " ")
                raise _too_many(f"The quota of {tenant} is {limit} {what} a minute", seconds)
        return wanted

    def reserve(
        self,
        tenant: str,
        num_input_tokens: int,
        num_output_tokens: int,
        num_sequences: int = 1,
    ) -> Reservation:
        """Grants a call of so many prompt tokens and at most so many generated ones.

        Its samples and prompts are `num_sequences` in all.

        Raises:
            ApiError: 429, the quota is used up for now; 400, it never allows for such a call.
        """
        state = self._state(tenant)
        options, num_tokens = state.options, num_input_tokens + num_output_tokens
        costs = self._costs
        num_bytes = round(num_tokens * costs.token_bytes) + num_sequences * costs.sequence_bytes
        for what, limit, held, num in (
            ("tokens", options.held_tokens_max, state.num_held_tokens, num_tokens),
            ("bytes of KV memory", options.held_bytes_max, state.num_held_bytes, num_bytes),
        ):
            if limit and num > limit:
                raise bad_request(
                    f"prompt and answer may have {num} {what}; the quota of {tenant} is {limit} "
                    "at one time",
                    "max_tokens",
                )
            if limit and held + num > limit:
                detail = f"{held} {what} of {tenant} are held and {num} more"
                raise _too_many(f"{detail} exceed the quota of {limit}", 1.0)
        wanted = self.check(tenant, num_input_tokens, num_output_tokens)
        for name, bucket in state.buckets.items():
            bucket.take(wanted.get(name, 0))
        state.num_running += 1
        state.num_held_tokens += num_tokens
        state.num_held_bytes += num_bytes
        return Reservation(tenant, num_input_tokens, num_output_tokens, num_bytes)

    def settle(self, reservation: Reservation, num_cached: int, num_generated: int) -> None:
        """Corrects the counts when a call has ended; a second time has no effect."""
        if reservation.is_over:
            return
        reservation.is_over = True
        state = self._state(reservation.tenant)
        state.num_running -= 1
        state.num_held_tokens -= reservation.num_input_tokens + reservation.num_output_tokens
        state.num_held_bytes -= reservation.num_bytes
        unused = reservation.num_output_tokens - num_generated
        corrections = {
            "tokens": -(num_cached + unused),
            "input_tokens": -num_cached,
            "cached_tokens": num_cached,
            "output_tokens": -unused,
        }
        for name, amount in corrections.items():
            if name in state.buckets:
                state.buckets[name].take(amount)

    def headers(self, tenant: str) -> list[tuple[bytes, bytes]]:
        """Limits, what is left of them and when they are full again, as clients expect them."""
        found: list[tuple[bytes, bytes]] = []
        now_ns = self._clock.now_ns()
        for name, bucket in self._state(tenant).buckets.items():
            left = max(math.floor(bucket.level(now_ns)), 0)
            reset_s = bucket.wait_s(bucket.per_minute, now_ns)
            values = {"limit": bucket.per_minute, "remaining": left, "reset": f"{reset_s:.3f}s"}
            end = name.replace("_", "-")
            found += [
                (f"x-ratelimit-{kind}-{end}".encode(), str(value).encode())
                for kind, value in values.items()
            ]
        return found

    def _of(self, tenant: str) -> QuotaOptions:
        return self._options.get(tenant) or self._options.get("default") or QuotaOptions()

    def _state(self, name: str) -> _Tenant:
        state = self._tenants.get(name)
        if state is None:
            options = self._of(name)
            state = self._tenants[name] = _Tenant(options, self._buckets(options))
        return state

    def _buckets(self, options: QuotaOptions) -> dict[str, Bucket]:
        limits = {
            "requests": options.requests_per_minute,
            "tokens": options.tokens_per_minute,
            "input_tokens": options.input_tokens_per_minute,
            "cached_tokens": options.cached_tokens_per_minute,
            "output_tokens": options.output_tokens_per_minute,
        }
        now_ns = self._clock.now_ns()
        return {name: Bucket(limit, now_ns) for name, limit in limits.items() if limit}


def _too_many(detail: str, wait_s: float) -> ApiError:
    seconds = max(math.ceil(wait_s), 1)
    return ApiError(429, detail, code="rate_limit_exceeded", retry_after_s=seconds)
