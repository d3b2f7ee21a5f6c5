"""Goal: the cache process of a server starts, answers, dies and comes back, and what it cannot use
is said in one line. Method: real processes in the memory mode, which needs no model.
"""

import os
import signal
import threading
from pathlib import Path
from typing import Any

import pytest

from serving.config import KVOptions
from serving.kv.eviction import TenantLimits
from serving.kv.store import tenant_id
from serving.kv_config import TenantOptions
from serving.kv_process import CacheProcess, ask, default_address, limits_by_tenant, run_cache
from sharding.config_file import ConfigError


def options(path: Path, **changes: Any) -> KVOptions:
    chosen = {"storage": "memory", "memory_directory": str(path), "host_bytes": 2**16, **changes}
    return KVOptions(**chosen)


def arguments(path: Path) -> list[str]:
    changes = ("kv.storage='memory'", f"kv.memory_directory='{path}'", "kv.host_bytes=65536")
    return [part for change in changes for part in ("--set", change)]


def arenas(path: Path) -> list[Path]:
    return list(path.glob("deepinfer-kv-*"))


def test_a_process_that_is_killed_comes_back_and_leaves_no_memory(tmp_path: Path) -> None:
    process = CacheProcess(options(tmp_path), arguments(tmp_path))
    try:
        process.wait_until_ready()
        numbers = ask(process.address, "stats")
        assert numbers["host_bytes_max"] == 65536 and numbers["host_payloads"] == 0
        (arena,) = arenas(tmp_path)
        os.kill(process.pid, signal.SIGKILL)
        # Waits until the next one has bound the address.
        assert ask(process.address, "stats", timeout_s=60.0) == numbers
        (other,) = arenas(tmp_path)
        assert other != arena
    finally:
        process.stop()
    assert arenas(tmp_path) == []
    assert not Path(process.address.removeprefix("ipc://")).parent.exists()


def test_it_ends_with_its_server(tmp_path: Path) -> None:
    address = f"ipc://{tmp_path}/s"
    done = threading.Event()

    def run() -> None:
        run_cache(options(tmp_path), address, lambda: True)
        done.set()

    threading.Thread(target=run, daemon=True).start()
    assert done.wait(20) and arenas(tmp_path) == []


def test_what_cannot_be_used_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"shared memory cannot be had: .*kv.host_bytes"):
        run_cache(options(tmp_path, host_bytes=2**60), f"ipc://{tmp_path}/s")
    with pytest.raises(ConfigError, match=r"tcp://127.0.0.1:no: cannot listen there"):
        run_cache(options(tmp_path), "tcp://127.0.0.1:no")
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"kv.directory: .*file"):
        run_cache(options(tmp_path, storage="disk", directory=str(tmp_path / "file")), "ipc://x")
    assert arenas(tmp_path) == []
    with pytest.raises(ConfigError, match="does not answer"):
        ask(f"ipc://{tmp_path}/nobody", "stats", timeout_s=0.05)
    with pytest.raises(ConfigError, match=r"expected ipc://PATH"):
        ask("nonsense", "stats")


def test_a_process_that_cannot_start_is_an_error(tmp_path: Path) -> None:
    process = CacheProcess(options(tmp_path), [*arguments(tmp_path), "--set", "kv.storage='off'"])
    with pytest.raises(ConfigError, match="ended with code 2"):
        process.wait_until_ready()
    process.stop()


def test_limits_of_tenants_go_by_their_salts(tmp_path: Path) -> None:
    chosen = options(tmp_path, tenants={"acme": TenantOptions(5, 6), "a salt": TenantOptions(7)})
    salt = "0" * 32
    limits = limits_by_tenant(chosen, {"acme": salt}.get)
    assert limits == {
        tenant_id(f"32:{salt}any of its own"): TenantLimits(5, 6),
        tenant_id("a salt"): TenantLimits(7),
    }


def test_addresses(tmp_path: Path) -> None:
    disk = options(tmp_path, storage="disk", directory=str(tmp_path))
    assert default_address(disk) == f"ipc://{tmp_path}/cache.sock"
    deep = options(tmp_path, storage="disk", directory=str(tmp_path / ("x" * 100)))
    for other in (deep, options(tmp_path)):
        address = default_address(other)
        assert len(address) < 100 and address != default_address(other)
        Path(address.removeprefix("ipc://")).parent.rmdir()
