"""Goal: a wrong result is told from a right one, figures are those of the case, and a machine
without a GPU is told so.
Method: a small case with the reference standing in for the kernel, as `auto` does on a CPU.
"""

import subprocess
import sys
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import numerics, roofline
from pallas_kernels.cases import find
from pallas_kernels.targets import H200
from scripts.device_check import Ceilings, check_case, largest_error

ROOT = Path(__file__).resolve().parents[2]
CEILINGS = Ceilings(bytes_per_s=1e12, flops_per_s=1e14)


def test_a_row_has_the_promised_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    case = find("scaled_matmul", "quick")[1]
    row = check_case(case, H200, CEILINGS, repeats=2)
    cost = roofline.cost(case)
    assert row["error"] == 0.0 and not row["is_wrong"]
    assert row["bytes_per_s"] == cost.num_bytes / (row["us"] * 1e-6)
    assert row["flops_per_s"] == cost.num_flops / (row["us"] * 1e-6)
    shares = (row["bytes_per_s"] / 1e12, row["flops_per_s"] / 1e14)
    assert row["of_ceiling"] == max(shares)
    monkeypatch.setitem(numerics.TOLERANCE, "scaled_matmul", -1.0)
    assert check_case(case, H200, CEILINGS, repeats=1)["is_wrong"]


def test_only_the_compared_tokens_count() -> None:
    meant = jnp.ones((2, 3))
    made = jnp.ones((5, 3)).at[4, 0].set(np.nan)
    assert largest_error(made, meant) == 0.0
    assert largest_error(made.at[1, 1].set(2.0), meant) == 1.0


def test_a_machine_without_a_gpu_is_told_so() -> None:
    command = [sys.executable, str(ROOT / "scripts" / "device_check.py")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 1 and done.stdout == ""
    assert "is not an H100, H200 or B200; there is nothing to check here" in done.stderr
