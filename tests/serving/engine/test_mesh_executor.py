"""Goal: a mesh of eight devices answers like one device, whatever requests ask for. Method: a file
of prompts through `python -m serving generate` on both, on five layers of the golden checkpoint.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.deepinfer_jax import short_model

pytestmark = pytest.mark.multi_device

_SIZES = {
    "max_context": 128,
    "num_blocks": 3,
    "prefill_tokens": "[16]",
    "prefill_rows": 2,
    "decode_rows": "[2]",
    "prefix_snapshots": 2,
}


def _rows() -> list[dict[str, Any]]:
    """Twenty prompts, so that some devices have two rows, some wait and some have controls."""
    rng = np.random.default_rng(9)
    rows: list[dict[str, Any]] = []
    for number in range(20):
        ids = rng.integers(3, 300, int(rng.integers(1, 40))).tolist()
        row: dict[str, Any] = {"prompt_token_ids": ids, "max_tokens": 6, "temperature": 0}
        if number % 3 == 1:
            row |= {"temperature": 0.9, "seed": number, "top_k": 20}
        if number % 5 == 2:
            row |= {"frequency_penalty": 1.5, "logit_bias": {"7": 3.0}}
        if number % 7 == 3:
            row |= {"logprobs": 2}
        rows.append(row)
    return rows


def _generated(directory: Path, sharding: str) -> list[dict[str, Any]]:
    out = directory / f"{sharding}.jsonl"
    options = [f"engine.{name}={value}" for name, value in _SIZES.items()]
    command = [sys.executable, "-m", "serving", "generate", "--model", str(directory)]
    command += ["--prompts", str(directory / "rows.jsonl"), "--out", str(out)]
    command += [word for option in (f"sharding={sharding}", *options) for word in ("--set", option)]
    # Quick code takes longer to compile than it runs here.
    flags = "--xla_backend_optimization_level=0"
    done = subprocess.run(
        command,
        env=os.environ | {"XLA_FLAGS": flags},
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in out.read_text().splitlines()]


def test_answers_of_eight_devices_are_those_of_one(tmp_path: Path) -> None:
    short_model.write(tmp_path)
    lines = [json.dumps(row) for row in _rows()]
    (tmp_path / "rows.jsonl").write_text("\n".join(lines) + "\n")
    many, one = _generated(tmp_path, "cpu8"), _generated(tmp_path, "single")
    assert len(many) == len(one) == len(lines)
    for received, expected in zip(many, one, strict=True):
        assert received["token_ids"] == expected["token_ids"]
        chosen = [entry["logprob"] for entry in received.get("logprobs") or ()]
        wanted = [entry["logprob"] for entry in expected.get("logprobs") or ()]
        np.testing.assert_allclose(chosen, wanted, rtol=0, atol=1e-3)
    assert any(row.get("logprobs") for row in many)
