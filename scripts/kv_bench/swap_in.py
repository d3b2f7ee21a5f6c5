"""Time to the first token of prompts that are stored for nine tenths, against computing them; how
much of their way to the device is hidden; and what storage takes for a token of the released model.

Both ways run the small model in turn. A stored prompt takes the whole way: match and fetch over the
wire from a cache in shared memory, checks, swap-in, and the rest of the prompt.
"""

import contextlib
import random
import statistics
import tempfile
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any

from deepinfer_jax.cache import CacheLayout
from deepinfer_jax.cache_bytes import byte_sizes
from deepinfer_jax.config import ModelConfig
from deepinfer_jax.precision import CacheFormat, Precision
from serving.cluster import make_engine
from serving.config import ServingConfig
from serving.core.kv_transfer import SwapInTimes
from serving.core.prefix_transfer import StagedPrefix
from serving.core.request import Request, SamplingParams
from serving.engine.engine import Engine
from serving.engine.kv_moves import TransferExecutor
from serving.kv.fetcher import Fetcher
from serving.kv.host_tier import SharedArena
from serving.kv.link import CacheLink
from serving.kv.offload import CacheReply, FetchPrefix, PrefixFetched, StorePrefix
from serving.kv.store import HEADER_SIZE, PayloadForm
from serving.loading import LoadedModel, load_model
from serving.transport.driver import SystemClock
from sharding.config_file import override

LENGTHS = (256, 512, 1024, 2048, 4000)
"""Tokens of the prompts."""

_STORED_SHARE = 0.9
_ROUNDS = 5
_SECONDS_MAX = 45.0
"""Of one length; then three rounds have to do."""

_BLOCK = 128
_PROMPTS_BETWEEN_STATES = (1000, 8000, 32_000)
_CONFIG = {
    "engine.max_context": 4096,
    "engine.num_blocks": 72,
    "engine.prefill_tokens": [512],
    "engine.prefill_rows": 1,
    "engine.decode_rows": [1],
    "engine.prefix_snapshots": 4,
    "kv.storage": "memory",
    "kv.model_revision": "bench",
}


def figures() -> dict[str, Any]:
    """The figures of this part, measured on the devices that there are."""
    measured: dict[str, Measured] = {}
    with opened() as bench:
        for length in LENGTHS:
            one = measured[str(length)] = bench.measure(length)
            print(
                f"{length:>6} tokens: computed {one.cold_ms:8.1f} ms, stored {one.hit_ms:8.1f} ms "
                f"({one.num_cached} tokens), copies {one.copy_ms:.2f} ms, "
                f"hidden {one.hidden_ms:.2f}; {one.num_rounds} rounds",
                flush=True,
            )
    ratios = {length: one.hit_ms / one.cold_ms for length, one in measured.items()}
    copy_ms = sum(one.copy_ms for one in measured.values())
    hidden_ms = sum(one.hidden_ms for one in measured.values())
    return {
        "ttft_hit_over_cold": {length: round(ratio, 3) for length, ratio in ratios.items()},
        "ttft_crossover_tokens": crossover(ratios),
        "swap_in_hidden": round(hidden_ms / copy_ms, 3) if copy_ms else None,
        "swap_in_copy_ms": {n: round(one.copy_ms, 3) for n, one in measured.items()},
        **stored_bytes_per_token(),
    }


def crossover(ratios: dict[str, float]) -> int | None:
    """The first measured length from which on a stored prompt is always faster; None if none is."""
    slower = [int(length) for length, ratio in ratios.items() if ratio >= 1]
    longer = [int(length) for length in ratios if int(length) > max(slower, default=0)]
    return min(longer, default=None)


def stored_bytes_per_token() -> dict[str, Any]:
    """What the storage tiers take for a token of the released model with a quantised cache.

    Blocks alone with bounded replay; without it also a state at the last block boundary of each
    prompt, here by the tokens that a prompt adds to what is stored.
    """
    import jax.numpy as jnp

    precision = Precision(jnp.bfloat16, CacheFormat.KVQ)
    sizes = byte_sizes(CacheLayout(ModelConfig.released(), precision, 3, 2).abstract())
    blocks = (sum(sizes.groups) + HEADER_SIZE) / _BLOCK
    state = sizes.state + HEADER_SIZE
    with_states = {str(n): round(blocks + state / n, 1) for n in _PROMPTS_BETWEEN_STATES}
    return {
        "stored_bytes_per_token_real": round(blocks, 1),
        "stored_bytes_per_token_real_with_states": with_states,
    }


@dataclass(frozen=True, slots=True)
class Measured:
    """Medians of one length."""

    cold_ms: float
    hit_ms: float
    num_cached: int
    copy_ms: float
    hidden_ms: float
    num_rounds: int


@contextlib.contextmanager
def opened() -> Iterator["Bench"]:
    """The small model with a cache in shared memory."""
    config = override(ServingConfig(), _CONFIG)
    print("loading and compiling the small model", flush=True)
    model = load_model(config, lambda line: None)
    assert model.facts.kv_form is not None
    with tempfile.TemporaryDirectory() as folder, cache(Path(folder), model.facts.kv_form) as link:
        yield Bench(config, model, link)


class Bench:
    """Engines that share nothing but an executor, and a cache."""

    def __init__(self, config: ServingConfig, model: LoadedModel, link: CacheLink) -> None:
        assert isinstance(model.executor, TransferExecutor)
        self._config, self._model, self._link = config, model, link
        self._executor = model.executor
        self._random = random.Random(5)

    def measure(self, length: int) -> Measured:
        """One length, both ways in turn."""
        request = self._stored_request(length)
        cold: list[float] = []
        hits: list[tuple[float, int, SwapInTimes | None]] = []
        ends = perf_counter() + _SECONDS_MAX
        # The first round warms up.
        while len(hits) < 3 or (len(hits) <= _ROUNDS and perf_counter() < ends):
            cold.append(self._first_token(request, is_stored=False)[0])
            hits.append(self._first_token(request, is_stored=True))
        del cold[0], hits[0]
        times = [swap_in for _, _, swap_in in hits if swap_in is not None]
        assert len(times) == len(hits), "what was stored was not used"
        return Measured(
            statistics.median(cold),
            statistics.median(ms for ms, _, _ in hits),
            hits[0][1],
            statistics.median(one.copy_ns for one in times) / 1e6,
            statistics.median(one.hidden_ns for one in times) / 1e6,
            len(hits),
        )

    def trace(self, length: int, directory: Path) -> None:
        """Trace the first token of a prompt that is stored for nine tenths."""
        import jax

        request = self._stored_request(length)
        self._first_token(request, is_stored=True)
        options = jax.profiler.ProfileOptions()
        options.python_tracer_level = 0
        with jax.profiler.trace(directory, profiler_options=options):
            self._first_token(request, is_stored=True)

    def _stored_request(self, length: int) -> Request:
        # Past the special tokens.
        tokens = [self._random.randrange(30, 256) for _ in range(length)]
        request = Request("a", tuple(tokens), SamplingParams(1, temperature=0.0))
        self._store(request)
        return request

    def _engine(self) -> Engine:
        engine = make_engine(self._config.engine, self._model.facts, random.Random(1))
        assert isinstance(engine, Engine)
        return engine

    def _store(self, request: Request) -> None:
        """Compute the stored share of a prompt, and hand it to the cache."""
        num_blocks = int(_STORED_SHARE * len(request.prompt_token_ids)) // _BLOCK
        engine = self._engine()
        engine.transfers.record()
        part = request.prompt_token_ids[: num_blocks * _BLOCK + 1]
        engine.admit(Request("part", part, request.sampling))
        self._run(engine)
        ((_, keys),) = engine.transfers.take_kept()
        transfer, blocks, has_state = engine.transfers.read(keys, keys[-1])
        assert blocks == keys and has_state
        self._executor.move(transfer)
        read = self._executor.collect_read()
        self._link.call(StorePrefix(blocks, keys[-1], read, ""), lambda _: None)
        while self._fetch(engine, request) is None:
            threading.Event().wait(0.01)

    def _first_token(
        self, request: Request, is_stored: bool
    ) -> tuple[float, int, SwapInTimes | None]:
        """Milliseconds to the first token, tokens that were not computed, and the swap-in."""
        engine = self._engine()
        begun = perf_counter()
        if is_stored:
            prefix = self._fetch(engine, request)
            transfer = None if prefix is None else engine.transfers.write(prefix)
            assert transfer is not None, "the stored prefix is gone"
            self._executor.move(transfer)
        engine.admit(request)
        num_cached, swap_in = self._run(engine)
        return (perf_counter() - begun) * 1e3, num_cached, swap_in

    def _fetch(self, engine: Engine, request: Request) -> StagedPrefix | None:
        keys = engine.transfers.keys_of(request)
        replies: list[CacheReply] = []
        arrived = threading.Event()

        def take(reply: CacheReply) -> None:
            replies.append(reply)
            arrived.set()

        self._link.call(FetchPrefix("a", keys, 0, 0, ""), take)
        arrived.wait()
        assert isinstance(replies[0], PrefixFetched)
        return replies[0].prefix

    def _run(self, engine: Engine) -> tuple[int, SwapInTimes | None]:
        num_cached, swap_in = 0, None
        while engine.has_work:
            while (plan := engine.plan()) is not None:
                self._model.executor.submit(plan)
            result = self._model.executor.collect()
            swap_in = result.swap_in or swap_in
            for delta in engine.commit(result):
                num_cached = delta.num_cached_tokens
        return num_cached, swap_in


@contextlib.contextmanager
def cache(folder: Path, form: PayloadForm) -> Iterator[CacheLink]:
    """A cache in shared memory on a thread of this process, and a line to it."""
    arena = SharedArena.create(Path("/dev/shm") / f"bench-kv-{folder.name}", 256 << 20)
    fetcher = Fetcher(f"ipc://{folder}/cache.sock", arena, None, SystemClock())
    thread = threading.Thread(target=fetcher.run)
    thread.start()
    link = CacheLink(fetcher.address, form, SystemClock())
    link.start()
    try:
        yield link
    finally:
        link.close()
        fetcher.stop()
        thread.join()
