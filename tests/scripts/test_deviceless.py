"""Goal: kernels compile for GPUs that are not there, and what ptxas says of them is read right.
Method: planted reports; where the extra `gpu-aot` is installed, one real kernel in a process of its
own.
"""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from pallas_kernels.targets import H200
from scripts import deviceless

ROOT = Path(__file__).resolve().parents[2]
HAS_COMPILER = importlib.util.find_spec("jax_cuda13_plugin") is not None


def plant(folder: Path, name: str, spill: int, registers: int, program: str) -> None:
    (folder / f"{name}.ptxas").write_text(
        f"0 bytes stack frame, {spill} bytes spill stores, {spill} bytes spill loads\n"
        f"ptxas info : Used {registers} registers, used 2 barriers\n"
    )
    (folder / f"{name}.ptx").write_text(program)
    (folder / f"{name}.resources.txt").write_text(f"Resources(smem_scratch_bytes={registers}00,")


def test_reports_of_several_kernels_are_added_up(tmp_path: Path) -> None:
    plant(tmp_path, "a", 0, 90, "wgmma.mma_async.sync.aligned.m64n8k16")
    plant(tmp_path, "b", 12, 40, "wgmma.mma_async.sync.aligned.m64n8k16")
    facts = deviceless._facts(tmp_path, 1.5)
    assert facts == deviceless.KernelFacts(2, 90, 24, 9000, "wgmma.mma_async", 0, 1.5)
    plant(tmp_path, "c", 0, 10, "fma.rn.f32")
    assert deviceless._facts(tmp_path, 1.5).num_without == 1


def test_no_kernel_has_no_facts(tmp_path: Path) -> None:
    assert deviceless._facts(tmp_path, 0.0) == deviceless.KernelFacts(0, 0, 0, 0, None, 0, 0.0)


@pytest.mark.skipif(HAS_COMPILER, reason="the extra gpu-aot is installed")
def test_without_the_extra_it_says_what_to_install() -> None:
    with pytest.raises(RuntimeError, match="no compiler for NVIDIA H200: .*extra gpu-aot"):
        deviceless.compile_for(H200, lambda: None, ())


@pytest.mark.skipif(not HAS_COMPILER, reason="needs the extra gpu-aot")
@pytest.mark.timeout(280)
def test_dense_kernels_compile_without_a_spill(tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    command = [sys.executable, str(ROOT / "scripts" / "kernel_report.py")]
    command += ["--op", "scaled_matmul", "--target", "h200", "--json", str(report)]
    environment = os.environ | {"JAX_PLATFORMS": "cpu"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    rows = json.loads(report.read_text())
    assert rows and all(row["spills"] == 0 for row in rows)
    assert {row["tensor_core"] for row in rows} == {"wgmma.mma_async"}
