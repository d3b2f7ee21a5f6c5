"""Goal: what a configuration names is opened, and what cannot be used is said in one line.

Method: every kind of storage in this process; nodes as processes are in the end-to-end tests.
"""

import contextlib
import threading
from pathlib import Path
from typing import Any

import pytest

from serving.kv.cluster_key import ClusterKey
from serving.kv.store import BlockStore
from serving.kv_config import ErasureOptions, KVOptions, MooncakeOptions, ObjectOptions
from serving.kv_process import ask
from serving.kv_storage import check_address, open_storage, read_key, run_storage_node
from sharding.config_file import ConfigError
from tests.serving.kv.storage_parts import check_payloads, names, payload, running_nodes
from tests.serving.kv.test_object_tier import free_port

KEY = ClusterKey(b"a secret of the cluster")


def options(path: Path, **changes: Any) -> KVOptions:
    return KVOptions(**{"directory": str(path), **changes})


def check_storage(store: BlockStore | None) -> None:
    assert store is not None
    store.write([payload(1)])
    check_payloads(store.read(names(1)), [1])
    store.close()


def test_every_kind_is_opened(tmp_path: Path) -> None:
    with contextlib.ExitStack() as stack:
        assert open_storage(options(tmp_path, storage="memory"), None, stack) is None
        check_storage(open_storage(options(tmp_path, storage="disk"), None, stack))
        objects = ObjectOptions(f"file://{tmp_path}/objects/")
        check_storage(
            open_storage(options(tmp_path, storage="object", object=objects), None, stack)
        )
    with running_nodes(tmp_path, 5, KEY) as nodes, contextlib.ExitStack() as stack:
        erasure = ErasureOptions(nodes.addresses, data_fragments=3, parity_fragments=2)
        chosen = options(tmp_path, storage="erasure", erasure=erasure)
        check_storage(open_storage(chosen, KEY, stack))


def test_a_storage_node_runs_until_it_is_stopped(tmp_path: Path) -> None:
    address = f"ipc://{tmp_path}/a.s"
    chosen = options(tmp_path, erasure=ErasureOptions({"a": address}))
    thread = threading.Thread(target=run_storage_node, args=(chosen, "a", None, KEY))
    thread.start()
    assert ask(address, "stats", key=KEY)["fragments"] == 0
    with pytest.raises(ConfigError, match="a is used by another storage node"):
        run_storage_node(chosen, "a", f"ipc://{tmp_path}/b.s", KEY)
    ask(address, "stop", key=KEY)
    thread.join(20)
    assert not thread.is_alive()


def test_what_cannot_be_used_is_named(tmp_path: Path) -> None:
    def refused(chosen: KVOptions, expected: str) -> None:
        with contextlib.ExitStack() as stack, pytest.raises(ConfigError, match=expected):
            open_storage(chosen, None, stack)

    far = ErasureOptions({"a": "tcp://10.0.0.1:7"})
    refused(options(tmp_path, storage="erasure", erasure=far), "expected cluster.key_file")
    wrong = ErasureOptions({"a": "nonsense"})
    refused(options(tmp_path, storage="erasure", erasure=wrong), "kv.erasure.nodes: .*expected")
    objects = ObjectOptions("nonsense://x")
    refused(options(tmp_path, storage="object", object=objects), "kv.storage = 'object': nonsense")
    master = MooncakeOptions(master=f"127.0.0.1:{free_port()}")
    refused(options(tmp_path, storage="mooncake", mooncake=master), "kv.storage = 'mooncake': ")
    (tmp_path / "file").write_text("")
    refused(options(tmp_path / "file", storage="disk"), "kv.directory: .*file")
    for name, address, folder, expected in (
        ("a", None, tmp_path, "where does storage node 'a' listen"),
        ("a", "tcp://10.0.0.1:7", tmp_path, "expected cluster.key_file"),
        ("a", "ipc:///nowhere/at/all", tmp_path, "cannot listen there"),
        ("file", f"ipc://{tmp_path}/a.s", tmp_path, "kv.directory: .*file"),
    ):
        with pytest.raises(ConfigError, match=expected):
            run_storage_node(options(folder), name, address, None)
    with pytest.raises(ConfigError, match="expected a directory for the node"):
        run_storage_node(KVOptions(), "a", f"ipc://{tmp_path}/a.s", None)


def test_addresses_of_other_machines_need_a_key(tmp_path: Path) -> None:
    for address in ("ipc://x", "tcp://127.0.0.1:1", "tcp://localhost:1"):
        check_address(address, None)
    for address in ("tcp://0.0.0.0:1", "tcp://*:1", "tcp://node.example:1"):
        check_address(address, KEY)
        with pytest.raises(ConfigError, match="other machines can reach it"):
            check_address(address, None)
    assert read_key("") is None
    ClusterKey.write(tmp_path / "key")
    assert read_key(str(tmp_path / "key")) is not None
