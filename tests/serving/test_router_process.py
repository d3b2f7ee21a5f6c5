"""Goal: a router says that it waits for workers, and ends when it cannot listen, or with whoever
has started it. What it does with workers is tested in `tests/e2e/test_cluster.py`.

Method: real processes without workers.
"""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.serving.test_node_process import CONFIG, MODEL_DIR, ROOT


def start(folder: Path, *flags: str) -> "subprocess.Popen[str]":
    path = folder / "cluster.toml"
    server = f'[model]\npath = "{MODEL_DIR}"\n[server]\nport = 0\ndatabase = "{folder}/s.sqlite3"\n'
    path.write_text(server + CONFIG.format(folder=folder))
    (folder / "key").write_text("k" * 32)
    command = [sys.executable, "-m", "serving", "node", "--role", "router", "--name", "router"]
    return subprocess.Popen(
        [*command, "--config", str(path), *flags],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_it_waits_for_workers_and_ends_with_its_parent(tmp_path: Path) -> None:
    # No process has a parent of that number.
    node = start(tmp_path, "--parent", "-1")
    out, error = node.communicate(timeout=60)
    assert node.returncode == 1, error
    assert f"Routing at ipc://{tmp_path}/router.sock; waiting for workers" in out


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("cluster.router=tcp://nowhere", "router: cannot listen at tcp://nowhere"),
        ("cluster.key_file=/no/such", "/no/such: cannot be read"),
        ("model.path=/no/model", "/no/model"),
    ],
)
def test_what_it_cannot_use_is_one_line(tmp_path: Path, change: str, said: str) -> None:
    node = start(tmp_path, "--set", change)
    _, error = node.communicate(timeout=60)
    assert node.returncode == 2
    assert said in error and len(error.splitlines()) == 1 and error.startswith("serving: ")
