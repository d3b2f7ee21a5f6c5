"""Goal: a Mooncake Store is a storage tier like the others. Method: a real master on this machine,
and a client of it in this process; skipped where the library cannot be loaded.
"""

import importlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from serving.kv.mooncake_tier import MooncakeSetup, MooncakeTier
from serving.kv.store import StoreError, tenant_id
from serving.transport.driver import SystemClock
from tests.serving.kv.storage_parts import check_payloads, names, payload, wait_until
from tests.serving.kv.test_object_tier import free_port
from tests.serving.kv.test_orbax_tier import FixedClock

OTHER = tenant_id("b")


def missing_library() -> str | None:
    """Why the library cannot be loaded; None if it can."""
    try:
        importlib.import_module("mooncake.store")
    except ImportError as error:
        return str(error)
    return None


needs_mooncake = pytest.mark.skipif(
    missing_library() is not None, reason=f"no Mooncake: {missing_library()}"
)


@pytest.fixture(scope="module")
def master() -> Iterator[str]:
    port = free_port()
    program = Path(sys.executable).parent / "mooncake_master"
    flags = [f"--rpc_port={port}", f"--metrics_port={free_port()}", "--rpc_address=127.0.0.1"]
    process = subprocess.Popen(
        [program, *flags], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )

    def answers() -> bool:
        try:
            opened(f"127.0.0.1:{port}", segment_bytes=0).close()
        except StoreError:
            return False
        return True

    try:
        wait_until(answers, "the master answers")
        yield f"127.0.0.1:{port}"
    finally:
        process.kill()
        process.wait()


def opened(
    master: str, segment_bytes: int = 64 * 2**20, clock: FixedClock | None = None, ttl_s: int = 0
) -> MooncakeTier:
    setup = MooncakeSetup(master, segment_bytes=segment_bytes, call_s=20.0)
    return MooncakeTier(setup, clock or SystemClock(), ttl_s)


@needs_mooncake
def test_what_is_written_is_read_and_purged(master: str) -> None:
    tier = opened(master)
    try:
        tier.write([])
        tier.write([payload(1), payload(2, 200_000), payload(3, tenant=OTHER)])
        assert tier.contains(names(1, 2, 3, 4)) == [True, True, True, False]
        found = tier.read(names(1, 4, 2))
        assert found[1] is None and bytes(found[2] or b"") == payload(2, 200_000)
        check_payloads(found[:1], [1])
        assert tier.counts().num_read == 2 and tier.counts().num_written == 3
        assert tier.purge(OTHER) == 1 and tier.contains(names(3)) == [False]
        tier.forget(names(2, 9))
        assert tier.contains(names(1, 2)) == [True, False] and tier.verify() == []
        assert tier.purge(None) == 1 and tier.contains(names(1)) == [False]
    finally:
        tier.close()


@needs_mooncake
def test_what_is_damaged_or_too_old_is_a_miss(master: str) -> None:
    clock = FixedClock()
    tier = opened(master, clock=clock, ttl_s=60)
    try:
        tier.write([payload(1), payload(2)])
        # As if another's payload, and half of one, lay under these names.
        tier._store.remove(f"deepinfer-kv-1-{names(1)[0].key.hex()}", True)
        tier._store.put(f"deepinfer-kv-1-{names(1)[0].key.hex()}", payload(2))
        tier._store.put(f"deepinfer-kv-1-{names(3)[0].key.hex()}", payload(3)[:99])
        assert tier.verify() == names(1)
        assert tier.read(names(3)) == [None]
        assert tier.counts().num_corrupt == 2 and tier.contains(names(1, 3)) == [False, False]
        clock.seconds = 1061
        assert tier.read(names(2)) == [None] and tier.contains(names(2)) == [False]
        assert tier.counts().num_evicted == 1
    finally:
        tier.close()


@needs_mooncake
def test_a_store_without_room_takes_nothing(master: str) -> None:
    tier = opened(master, segment_bytes=0)
    try:
        with pytest.raises(StoreError, match="answers .* to a write"):
            tier.write([payload(1)])
        assert tier.counts().num_failed == 1
    finally:
        tier.close()


def test_a_master_that_is_not_there_is_named() -> None:
    for master in (f"127.0.0.1:{free_port()}", "nonsense"):
        with pytest.raises(StoreError, match=f"no master of Mooncake at '{master}'|be loaded"):
            MooncakeTier(MooncakeSetup(master), SystemClock())
