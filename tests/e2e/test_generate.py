"""Goal: offline generation gives the golden greedy tokens, in both cache formats and from both the
command line and Python.

Method: the golden prompt through the whole path, from a file of rows to a file of outputs.
"""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np

from serving import LLM, SamplingParams
from tests.e2e.server import ROOT, SMALL_ENGINE


def test_command_line_gives_the_golden_tokens_with_a_quantised_cache(
    golden: Path, tmp_path: Path
) -> None:
    greedy = np.load(golden / "greedy.npz")
    prompt = greedy["prompt"].tolist()
    rows = [
        {"prompt_token_ids": prompt, "max_tokens": 40, "temperature": 0, "ignore_eos": True},
        {"prompt": "Hello", "max_tokens": 3},
        {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4, "seed": 3},
        {"prompt_token_ids": prompt, "max_tokens": 40, "temperature": 0, "ignore_eos": True},
    ]
    source, out = tmp_path / "prompts.jsonl", tmp_path / "out.jsonl"
    source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    done = subprocess.run(
        [sys.executable, "-m", "serving", "generate", "--model", str(golden / "tiny-v41")]
        + ["--prompts", str(source), "--out", str(out), *SMALL_ENGINE],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert "4/4" in done.stderr, "the progress bar"
    outputs = [json.loads(line) for line in out.read_text().splitlines()]
    assert outputs[0]["token_ids"] == greedy["tokens_kvq"].tolist()
    assert outputs[3]["token_ids"] == outputs[0]["token_ids"]
    assert outputs[0]["finish_reason"] == "length" and outputs[0]["prompt_tokens"] == len(prompt)
    assert len(outputs[1]["token_ids"]) <= 3 and len(outputs[2]["token_ids"]) <= 4
    assert all(set(row) == set(outputs[0]) for row in outputs)


def test_python_gives_the_golden_tokens_with_an_unquantised_cache(golden: Path, llm: LLM) -> None:
    greedy = np.load(golden / "greedy.npz")
    params = SamplingParams(max_tokens=40, temperature=0, ignore_eos=True)
    first, second = llm.generate([greedy["prompt"], greedy["prompt"][:5].tolist()], params)
    assert first.token_ids == greedy["tokens_noq"].tolist()
    assert len(second.token_ids) == 40 and second.token_ids != first.token_ids
