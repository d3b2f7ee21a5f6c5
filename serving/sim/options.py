"""What a simulated fleet is made of: one frozen dataclass per table of its TOML file.

Two tables say how long steps take; they come from measurements or from the planner, and have no
defaults. Everything else has. `--workers 64p8d2v` is read here too.
"""

import re
from dataclasses import dataclass, field

from serving.core.balance_prefill import NUM_CLASSES
from sharding.config_file import check

_POSITIVE = "a number above 0"


@dataclass(frozen=True, slots=True)
class PrefillOptions:
    """Prefill workers, one a GPU, in units that step together.

    Attributes:
        base_ms, token_ms, pair_ms: the terms of `core.cost.PrefillCost` for one worker.
        unit: workers of a unit; they share experts, so the slowest sets the pace of a step.
        step_ms: time that the chunks of a step may take; chunks are cut to fit it.
        round_ms, spill_ms: of `core.balance_prefill.PrefillBalancer`.
    """

    base_ms: float
    token_ms: float
    pair_ms: float
    unit: int = 8
    step_ms: float = 200.0
    round_ms: float = 2_000.0
    spill_ms: float = 100.0

    def __post_init__(self) -> None:
        check(self.unit >= 1, "unit", self.unit, "at least 1")
        check(self.step_ms > self.base_ms, "step_ms", self.step_ms, "more than base_ms")


@dataclass(frozen=True, slots=True)
class DecodeOptions:
    """Decode workers, one a GPU, in units that step together.

    A step takes `base_ms` and, on the slowest worker of the unit, `row_ms` for each request and
    `context_ms` for each token of context.

    Attributes:
        tokens_per_step: tokens that a step gives a request on average, accepted drafts included.
        tokens_spread: standard deviation of that between requests.
        unit: workers of a unit.
        requests_max: requests that a worker runs at a time.
        context_max: tokens of context that a worker's memory holds.
        expected_output: tokens for which room is reserved before anything is known of a request.
    """

    base_ms: float
    row_ms: float
    context_ms: float
    tokens_per_step: float = 1.0
    tokens_spread: float = 0.0
    unit: int = 64
    requests_max: int = 256
    context_max: int = 64_000_000
    expected_output: int = 512

    def __post_init__(self) -> None:
        for name in ("base_ms", "row_ms", "context_ms", "tokens_spread"):
            check(getattr(self, name) >= 0, name, getattr(self, name), "at least 0")
        check(self.base_ms + self.row_ms > 0, "base_ms", self.base_ms, f"{_POSITIVE}, or row_ms")
        check(self.tokens_per_step >= 1, "tokens_per_step", self.tokens_per_step, "at least 1")
        for name in ("unit", "requests_max", "context_max"):
            check(getattr(self, name) >= 1, name, getattr(self, name), "at least 1")
        check(self.expected_output >= 0, "expected_output", self.expected_output, "at least 0")

    def step_ms(self, num_requests: float, num_tokens: float) -> float:
        """Time of a step in which the slowest worker has this many requests and this context."""
        return self.base_ms + self.row_ms * num_requests + self.context_ms * num_tokens


@dataclass(frozen=True, slots=True)
class VisionOptions:
    """Vision workers: an image of `image_tokens` takes `image_tokens * token_ms`, one at a time."""

    token_ms: float = 0.01
    image_tokens: int = 1_000

    def __post_init__(self) -> None:
        check(self.token_ms > 0, "token_ms", self.token_ms, _POSITIVE)
        check(self.image_tokens >= 1, "image_tokens", self.image_tokens, "at least 1")


@dataclass(frozen=True, slots=True)
class LinkOptions:
    """Network, in gigabytes (10^9) a second.

    Attributes:
        gpus_per_machine: GPUs that share a machine's link.
        machine_gb_s: of a machine; 400 Gb/s are 50.
        between_gb_s: of all links between prefill and decode together; 0 for one fabric.
        between_ms: delay from prefill to decode.
        kv_bytes_per_token: what a token of context takes.
        state_bytes: what a sequence takes besides.
    """

    gpus_per_machine: int = 8
    machine_gb_s: float = 50.0
    between_gb_s: float = 0.0
    between_ms: float = 0.0
    kv_bytes_per_token: int = 890
    state_bytes: int = 2_916_136

    def __post_init__(self) -> None:
        check(self.gpus_per_machine >= 1, "gpus_per_machine", self.gpus_per_machine, "at least 1")
        check(self.machine_gb_s > 0, "machine_gb_s", self.machine_gb_s, _POSITIVE)
        for name in ("between_gb_s", "between_ms", "kv_bytes_per_token", "state_bytes"):
            check(getattr(self, name) >= 0, name, getattr(self, name), "at least 0")


@dataclass(frozen=True, slots=True)
class StoreOptions:
    """The store of prefixes that every worker can fetch from.

    Attributes:
        read_gb_s: of the whole store.
        fetch_ms: delay of a fetch besides its bytes.
        tokens_max: tokens it keeps, the least recently used going first; 0 for no limit.
        visible: prefixes can be used once they are `computed`; `dispatched` lets a prompt use
            those of prompts before it that are still being computed, which no real store can.
        host_tokens: tokens of which each prefill worker keeps a copy in host memory, so that it
            need not fetch them; 0 for none.
    """

    read_gb_s: float = 1_000.0
    fetch_ms: float = 2.0
    tokens_max: int = 0
    visible: str = "computed"
    host_tokens: int = 2_000_000

    def __post_init__(self) -> None:
        check(self.read_gb_s > 0, "read_gb_s", self.read_gb_s, _POSITIVE)
        for name in ("fetch_ms", "tokens_max", "host_tokens"):
            check(getattr(self, name) >= 0, name, getattr(self, name), "at least 0")
        allowed = ("computed", "dispatched")
        check(self.visible in allowed, "visible", self.visible, "computed or dispatched")


@dataclass(frozen=True, slots=True)
class FailureOptions:
    """What breaks: seconds between two faults of one thing on average, 0 for never.

    Attributes:
        prefill_mean_s, decode_mean_s: of each worker.
        repair_s: until a worker is back, empty.
        detect_ms: until it is noticed that a worker is gone.
        network_mean_s, network_s: of the network between the pools, and how long it is cut.
        store_mean_s, store_s: of the store of prefixes, and how long it does not answer.
    """

    prefill_mean_s: float = 0.0
    decode_mean_s: float = 0.0
    repair_s: float = 60.0
    detect_ms: float = 1_000.0
    network_mean_s: float = 0.0
    network_s: float = 5.0
    store_mean_s: float = 0.0
    store_s: float = 5.0

    def __post_init__(self) -> None:
        means = ("prefill_mean_s", "decode_mean_s", "network_mean_s", "store_mean_s")
        for name in (*means, "detect_ms"):
            check(getattr(self, name) >= 0, name, getattr(self, name), "at least 0")
        for name in ("network_s", "store_s"):
            check(getattr(self, name) > 0, name, getattr(self, name), _POSITIVE)
        is_later = self.repair_s * 1e3 > self.detect_ms
        check(is_later, "repair_s", self.repair_s, f"more than detect_ms, {self.detect_ms}")


@dataclass(frozen=True, slots=True)
class TargetOptions:
    """The service level: time to the first token by length class, and mean time between tokens."""

    ttft_ms: tuple[float, ...] = (2_000.0, 4_000.0, 15_000.0, 60_000.0)
    itl_ms: float = 50.0

    def __post_init__(self) -> None:
        is_right = len(self.ttft_ms) == NUM_CLASSES and all(ms > 0 for ms in self.ttft_ms)
        check(is_right, "ttft_ms", self.ttft_ms, f"{NUM_CLASSES} numbers above 0")
        check(self.itl_ms > 0, "itl_ms", self.itl_ms, _POSITIVE)


@dataclass(frozen=True, slots=True)
class FleetOptions:
    """Everything but the trace, the policy and the seed. `workers` is like `64p64d`."""

    prefill: PrefillOptions
    decode: DecodeOptions
    workers: str = "64p64d"
    vision: VisionOptions = field(default_factory=VisionOptions)
    links: LinkOptions = field(default_factory=LinkOptions)
    store: StoreOptions = field(default_factory=StoreOptions)
    failures: FailureOptions = field(default_factory=FailureOptions)
    target: TargetOptions = field(default_factory=TargetOptions)

    def __post_init__(self) -> None:
        WorkerCounts.of(self.workers)

    @property
    def counts(self) -> "WorkerCounts":
        """How many workers of each role."""
        return WorkerCounts.of(self.workers)


@dataclass(frozen=True, slots=True)
class WorkerCounts:
    """How many workers of each role, one GPU each."""

    prefill: int
    decode: int
    vision: int = 0

    @classmethod
    def of(cls, text: str) -> "WorkerCounts":
        """Reads a text such as `64p64d` or `64p64d4v`.

        Raises:
            ValueError: another form, or no prefill or no decode worker.
        """
        found = re.fullmatch(r"(\d{1,6})p(\d{1,6})d(?:(\d{1,6})v)?", text)
        if not found or not int(found[1]) or not int(found[2]):
            raise ValueError(
                f"workers: received {text!r}; expected a number of prefill and one of decode "
                "workers, both at least 1, such as 64p64d, or 64p64d4v with vision workers"
            )
        return cls(int(found[1]), int(found[2]), int(found[3] or 0))
