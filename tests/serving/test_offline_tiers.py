"""Goal: offline generation stores what it computes and goes on from what is stored, with the tokens
of a cold run, also when the tiers are late, gone or full of something else.

Method: engines around simulated devices, which share nothing but a cache in threads of this
process; the process of its own is started once.
"""

import dataclasses
import os
import random
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from serving.config import ClusterOptions, KVOptions
from serving.core.request import Request, SamplingParams
from serving.engine.engine import Engine, run_step
from serving.kv.link import CacheLink
from serving.kv.offload import CacheCall, FetchPrefix, OfferPrefix, OffloadLimits
from serving.kv.store import (
    HEADER_SIZE,
    Buffer,
    Name,
    PayloadForm,
    PayloadKind,
    encode,
    layout_id,
    read_header,
)
from serving.kv_process import ask
from serving.offline_tiers import OfflineTiers, kv_arguments, open_link, run_requests
from serving.transport.driver import SystemClock
from tests.serving.engine.checked_engine import BUCKETS, make_limits
from tests.serving.engine.prompts import prompt_of
from tests.serving.engine.simulated_device import VOCAB_SIZE, SimulatedDevice, expected_tokens
from tests.serving.kv.cache_parts import Cache, MemoryStore, ShiftedClock, running

ROOT = Path(__file__).parents[2]
LIMITS = make_limits(num_snapshots=8, in_flight_max=2)
# Four tokens of eight bytes in two halves; a slot remembers seven lengths by four numbers.
FORM = PayloadForm(layout_id(b"offline"), (16, 16), 7 * 4 * 8)


class Run:
    """One engine and its way to the tiers."""

    def __init__(self, cache: Any, wait_s: float = 20.0, **changes: Any) -> None:
        engine_limits = dataclasses.replace(LIMITS, **changes)
        self.engine = Engine(engine_limits, BUCKETS, random.Random(1))
        self.device = SimulatedDevice(engine_limits, BUCKETS)
        limits = OffloadLimits(wait_ns=round(wait_s * 1e9), faults_max=2)
        self.tiers = OfflineTiers(self.engine, self.device, cache, limits, SystemClock())

    def generate(self, prompts: Sequence[Sequence[int]], **changes: Any) -> list[int]:
        """Checks the tokens of all prompts; how many of each were not computed."""
        sampling = SamplingParams(max_tokens=7, temperature=0, seed=3)
        requests = [
            Request(str(index), tuple(prompt), sampling, **changes)
            for index, prompt in enumerate(prompts)
        ]
        tokens: dict[str, list[int]] = {request.request_id: [] for request in requests}
        cached: dict[str, int] = {}
        work = [(request, None) for request in requests]
        for delta in run_requests(self.engine, self.device, work, self.tiers):
            tokens[delta.request_id] += delta.token_ids
            cached[delta.request_id] = delta.num_cached_tokens
        for request in requests:
            expected = expected_tokens(request, 3, LIMITS.context_max)
            assert tokens[request.request_id] == expected
        status = self.engine.status()
        assert status.num_free_blocks == status.num_blocks
        assert status.num_free_slots == status.num_slots
        assert not self.tiers.has_requests
        return [cached[request.request_id] for request in requests]


PROMPTS = [prompt_of(30), prompt_of(25, 1), prompt_of(9, 2)]


def at_rest(cache: Cache) -> None:
    cache.settle()
    numbers = cache.fetcher.numbers()
    assert numbers["host_pinned"] == numbers["leases"] == numbers["writes"] == 0


def test_another_run_goes_on_from_what_one_has_computed(tmp_path: Path) -> None:
    with running(tmp_path, form=FORM) as cache:
        first = Run(cache.link)
        assert first.generate(PROMPTS) == [0, 0, 0]
        at_rest(cache)
        assert first.tiers.status().num_stored_blocks >= 7 + 6 + 2
        second = Run(cache.link)
        assert second.generate([*PROMPTS, prompt_of(3)]) == [28, 24, 8, 0]
        status = second.tiers.status()
        assert (status.num_hits, status.num_waiting) == (3, 0)
        # A tenant of another salt sees nothing of it.
        assert Run(cache.link).generate(PROMPTS, cache_salt="other") == [0, 0, 0]
        at_rest(cache)


def test_more_prompts_than_are_asked_for_at_one_time(tmp_path: Path) -> None:
    # No two begin alike: what one of them leaves on the device is nothing to another.
    draws = random.Random(7)
    prompts = [draws.choices(range(VOCAB_SIZE), k=10 + index % 5) for index in range(70)]
    with running(tmp_path, form=FORM) as cache:
        # One after the other: steps take no time here, so that what many compute leaves the device
        # before it can be stored.
        first = Run(cache.link)
        for prompt in prompts:
            first.generate([prompt])
        at_rest(cache)
        # There is room for eight states; those of more wait beside the device.
        run = Run(cache.link)
        assert run.generate(prompts) == [(len(prompt) - 1) // 4 * 4 for prompt in prompts]
        status = run.tiers.status()
        assert (status.num_hits, status.num_misses, status.num_skipped) == (70, 0, 0)
        assert status.num_unused == 0


class Silent:
    """Tiers that never answer."""

    def __init__(self) -> None:
        self.calls: list[CacheCall] = []

    def call(self, call: CacheCall, reply: Any) -> None:
        self.calls.append(call)


def test_tiers_that_do_not_answer_are_not_waited_for() -> None:
    silent = Silent()
    run = Run(silent, wait_s=0.05)
    assert run.generate(PROMPTS) == [0, 0, 0]
    assert run.tiers.status().num_late >= 1 and run.tiers.status().is_open
    # Left alone by now.
    num_calls = len(silent.calls)
    assert run.generate([prompt_of(30, 5)]) == [0]
    assert len(silent.calls) == num_calls


def test_a_prefix_that_comes_late_touches_nothing(tmp_path: Path) -> None:
    """Storage answers after the request has been computed and its blocks hold something else."""
    with running(tmp_path, form=FORM) as cache:
        Run(cache.link).generate(PROMPTS[:1])
        at_rest(cache)
        store = cache.store
    store.gate.clear()
    with running(tmp_path, store, form=FORM) as cache:
        run = Run(cache.link, wait_s=0.2)
        assert run.generate(PROMPTS[:1]) == [0]
        assert run.tiers.status().num_late == 1
        before = run.device._pool.copy()
        store.gate.set()
        for _ in range(100):
            run.tiers.after_step()
            threading.Event().wait(0.01)
            if cache.fetcher.numbers()["fetch_hits"]:
                break
        at_rest(cache)
        run.tiers.after_step()
        assert (run.device._pool == before).all()
        assert run.generate([prompt_of(30, 7)]) == [0]


def test_requests_of_a_run_that_broke_are_forgotten() -> None:
    run = Run(Silent(), wait_s=20)
    sampling = SamplingParams(max_tokens=1)
    run.tiers.add([(Request("a", tuple(prompt_of(30)), sampling), None)])
    assert run.tiers.ready() == [] and run.tiers.has_requests
    run.tiers.drop()
    assert not run.tiers.has_requests and run.tiers.status().num_waiting == 0


REGIONS = {
    "magic": 0,
    "version": 4,
    "kind": 6,
    "zero": 7,
    "time": 8,
    "size": 16,
    "key": 24,
    "layout": 40,
    "tenant": 56,
    "checksum": 64,
    "first group": HEADER_SIZE,
    "second group": HEADER_SIZE + 16,
    "last byte": -1,
}


@pytest.mark.parametrize("kind", PayloadKind)
def test_a_bit_that_flips_anywhere_is_computed_instead(tmp_path: Path, kind: PayloadKind) -> None:
    with running(tmp_path, form=FORM) as cache:
        for region, offset in REGIONS.items():
            Run(cache.link).generate(PROMPTS[:1])
            at_rest(cache)
            host = cache.fetcher._host
            flipped = [name for name in host._entries if name.kind == kind]
            for name in flipped:
                data = host.read(host._entries[name].place)
                data[offset] ^= 1
                data.release()
            cache.store.payloads.clear()
            run = Run(cache.link)
            assert flipped and run.generate(PROMPTS[:1]) == [0], region
            assert run.tiers.status().num_faults == 1, region
            at_rest(cache)


def spoil(store: MemoryStore, change: Callable[[bytes], bytes]) -> None:
    for name, data in store.payloads.items():
        if name.kind == PayloadKind.BLOCK:
            store.payloads[name] = change(data)


def of_another_layout(data: bytes) -> bytes:
    """A whole and undamaged payload under the same key."""
    header = read_header(data)._replace(layout=layout_id(b"another"))
    return bytes(encode(header, [data[HEADER_SIZE:]]))


def of_another_key(data: bytes) -> bytes:
    header = read_header(data)
    name = Name(header.name.kind, bytes(16))
    return bytes(encode(header._replace(name=name), [data[HEADER_SIZE:]]))


def shorter(data: bytes) -> bytes:
    return data[:-1]


@pytest.mark.parametrize("change", [of_another_layout, of_another_key, shorter])
def test_what_storage_has_under_a_key_by_mistake_is_computed(
    tmp_path: Path, change: Callable[[bytes], bytes]
) -> None:
    with running(tmp_path, form=FORM) as cache:
        Run(cache.link).generate(PROMPTS)
        at_rest(cache)
        store = cache.store
    spoil(store, change)
    with running(tmp_path, store, form=FORM) as cache:
        run = Run(cache.link)
        assert run.generate(PROMPTS) == [0, 0, 0]
        assert run.tiers.status().num_faults == 3
        at_rest(cache)
        # It was computed, and what was wrong is forgotten: the next one hits.
        assert Run(cache.link).generate(PROMPTS) == [28, 24, 8]


class Leaky(MemoryStore):
    """Says that it has what is gone when it is to be read."""

    is_leaking = False

    def read(self, names: Sequence[Name]) -> list[Buffer | None]:
        return [None] * len(names) if self.is_leaking else super().read(names)


def test_what_is_evicted_between_match_and_fetch_is_computed(tmp_path: Path) -> None:
    store = Leaky()
    with running(tmp_path, store, form=FORM) as cache:
        Run(cache.link).generate(PROMPTS)
        at_rest(cache)
    store.is_leaking = True
    with running(tmp_path, store, form=FORM) as cache:
        run = Run(cache.link)
        assert run.generate(PROMPTS) == [0, 0, 0]
        assert run.tiers.status().num_faults == 3
        at_rest(cache)


def test_blocks_that_are_evicted_between_fetch_and_swap_in_are_computed(tmp_path: Path) -> None:
    """The beginning was on the device when the rest was asked for, and is not when it comes."""
    with running(tmp_path, form=FORM) as cache:
        Run(cache.link).generate(PROMPTS[:1])
        at_rest(cache)
        store = cache.store
    with running(tmp_path, store, form=FORM) as cache:
        run = Run(cache.link, num_blocks=17)
        run.generate([PROMPTS[0][:10]])
        at_rest(cache)
        store.gate.clear()
        sampling = SamplingParams(max_tokens=7, temperature=0, seed=3)
        request = Request("late", tuple(PROMPTS[0]), sampling)
        run.tiers.add([(request, None)])
        assert run.tiers.ready() == []
        # Somebody else fills the device, and gets it all back.
        others = [Request(str(n), tuple(prompt_of(50, n + 3)), sampling) for n in range(2)]
        for other in others:
            run.engine.admit(other)
            while run.engine.has_work:
                run_step(run.engine, run.device)
        store.gate.set()
        deltas = list(run_requests(run.engine, run.device, [], run.tiers))
        tokens = [token for delta in deltas for token in delta.token_ids]
        assert tokens == expected_tokens(request, 3, LIMITS.context_max)
        assert deltas[-1].num_cached_tokens == 0
        status = run.tiers.status()
        assert (status.num_hits, status.num_unused) == (1, 1)
        at_rest(cache)


def test_equal_requests_race_fetch_against_compute(tmp_path: Path) -> None:
    """Some compute what others fetch, in two engines at once and within each."""
    with running(tmp_path, form=FORM) as cache:
        Run(cache.link).generate(PROMPTS[:2])
        at_rest(cache)
        runs = [Run(cache.link, wait_s=wait_s) for wait_s in (20.0, 0.001)]
        failures: list[BaseException] = []

        def work(run: Run) -> None:
            try:
                for _ in range(3):
                    run.generate([*PROMPTS, *PROMPTS[::-1], *PROMPTS])
            except BaseException as failure:
                failures.append(failure)

        threads = [threading.Thread(target=work, args=(run,)) for run in runs]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert failures == []
        at_rest(cache)


def _await(link: CacheLink, call: CacheCall) -> None:
    arrived = threading.Event()
    link.call(call, lambda _: arrived.set())
    assert arrived.wait(30)


def store_and_die(address: str) -> None:
    """What a worker does before it is killed, holding a lease."""
    link = CacheLink(address, FORM, SystemClock())
    link.start()
    run = Run(link)
    run.generate(PROMPTS)
    request = Request("a", tuple(PROMPTS[0]), SamplingParams(max_tokens=1))
    keys = run.engine.transfers.keys_of(request)
    link._release = lambda *_: None  # type: ignore[method-assign]
    # Calls are taken in turn: once this one is answered, all places are reserved. They are filled
    # on other threads.
    _await(link, OfferPrefix(1, keys, ""))
    while ask(address, "stats")["writes"]:
        threading.Event().wait(0.05)
    _await(link, FetchPrefix("a", keys, 0, 0, ""))
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.timeout(300)
def test_a_worker_that_is_killed_leaves_what_it_has_stored(tmp_path: Path) -> None:
    clock = ShiftedClock()
    with running(tmp_path, form=FORM, clock=clock) as cache:
        script = "import sys; from tests.serving.test_offline_tiers import store_and_die\n"
        script += "store_and_die(sys.argv[1])"
        command = [sys.executable, "-c", script, cache.fetcher.address]
        died = subprocess.run(command, check=False, env={**os.environ, "PYTHONPATH": str(ROOT)})
        assert died.returncode == -signal.SIGKILL
        assert Run(cache.link).generate(PROMPTS) == [28, 24, 8]
        # Its lease ends by itself.
        assert cache.fetcher.numbers()["leases"] == 1
        clock.ahead_ns = 61 * 10**9
        at_rest(cache)


@pytest.mark.timeout(300)
def test_a_process_of_its_own_ends_with_the_line(tmp_path: Path) -> None:
    options = KVOptions(storage="memory", host_bytes=1 << 20, memory_directory=str(tmp_path))
    assert 'kv.storage="memory"' in kv_arguments(options, ClusterOptions())
    with open_link(options, ClusterOptions(), FORM) as link:
        Run(link).generate(PROMPTS)
        (arena,) = tmp_path.glob("deepinfer-kv-*")
        running_one = KVOptions(storage="memory", address=link.address)
        with open_link(running_one, ClusterOptions(), FORM) as other:
            assert Run(other).generate(PROMPTS) == [28, 24, 8]
        assert ask(link.address, "stats")["host_payloads"] > 0
    assert not arena.exists()
