"""Replays a slice of the Mooncake conversation trace against a running server with `aiperf`.

aiperf wants other versions of some packages than this project, so it has an environment of its own:

    python -m venv /tmp/aiperf && /tmp/aiperf/bin/pip install aiperf
    python -m serving &
    python scripts/replay_mooncake.py --aiperf /tmp/aiperf/bin/aiperf \\
        --trace conversation_trace.jsonl --url http://127.0.0.1:8000 --model small-v41 \\
        --tokenizer deepinfer_jax/checkpoints/small-v41 [--requests 100] [--json FILE]

A small model on a few cores cannot take prompts of a hundred thousand tokens. So lengths are
divided by `--shrink`, and the blocks of 512 tokens that the trace names are shrunk likewise:
who shares which part of a prompt with whom stays as it was. Times are stretched by `--slower`.
`--json FILE` writes the figures, and a table beside it.
"""

import argparse
import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

_TOKENIZER_NAME = "local/served"

BLOCK_TOKENS = 512
"""What each of a row's `hash_ids` stands for in the trace."""

ROWS = {
    "time_to_first_token": "time to first token (ms)",
    "inter_token_latency": "between tokens (ms)",
    "request_latency": "whole request (ms)",
    "input_sequence_length": "prompt (tokens)",
    "output_sequence_length": "answer (tokens)",
}
TOTALS = {
    "request_count": "requests",
    "error_request_count": "failed",
    "request_throughput": "requests a second",
    "output_token_throughput": "output tokens a second",
}


def slice_of(
    rows: Iterable[dict[str, Any]], num_rows: int, shrink: int, slower: float
) -> Iterator[dict[str, Any]]:
    """The first rows of a trace, `shrink` times as short and `slower` times as far apart."""
    for _, row in zip(range(num_rows), rows, strict=False):
        num_input = max(row["input_length"] // shrink, 1)
        num_blocks = -(-num_input // (BLOCK_TOKENS // shrink))
        yield {
            "timestamp": round(row["timestamp"] * slower),
            "input_length": num_input,
            "output_length": max(row["output_length"] // shrink, 1),
            "hash_ids": row["hash_ids"][:num_blocks],
        }


def figures_of(export: dict[str, Any]) -> dict[str, float]:
    """What is kept of aiperf's own export."""
    found: dict[str, float] = {}
    for name in ROWS:
        for key in ("avg", "p50", "p99"):
            if name in export:
                found[f"{name}_{key}"] = export[name][key]
    for name in TOTALS:
        found[name] = (export.get(name) or {}).get("avg", 0.0)
    return found


def table_of(figures: dict[str, float], what: str) -> str:
    """The figures for a person, in Markdown."""
    lines = ["# A slice of the Mooncake conversation trace, replayed by aiperf", "", what, ""]
    lines += ["| | mean | median | p99 |", "| --- | ---: | ---: | ---: |"]
    for name, text in ROWS.items():
        cells = (f"{figures.get(f'{name}_{key}', 0.0):.1f}" for key in ("avg", "p50", "p99"))
        lines.append(f"| {text} | {' | '.join(cells)} |")
    lines += ["", "| | |", "| --- | ---: |"]
    lines += [f"| {text} | {figures[name]:.2f} |" for name, text in TOTALS.items()]
    return "\n".join(lines) + "\n"


def _tokenizer_cache(model: Path, directory: Path) -> Path:
    """A cache as a hub's client keeps it, with the tokenizer and nothing of the model: aiperf takes
    tokenizers by name from there, and does not know this kind of model.
    """
    cache, commit = directory / "hub", "0" * 40
    repository = cache / "hub" / f"models--{_TOKENIZER_NAME.replace('/', '--')}"
    snapshot = repository / "snapshots" / commit
    snapshot.mkdir(parents=True)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(commit)
    shutil.copy(model / "tokenizer.json", snapshot)
    settings = {"tokenizer_class": "PreTrainedTokenizerFast"}
    (snapshot / "tokenizer_config.json").write_text(json.dumps(settings))
    return cache


def replay(options: argparse.Namespace, directory: Path) -> dict[str, float]:
    """Runs aiperf; the figures of its export."""
    trace = directory / "slice.jsonl"
    with options.trace.open(encoding="utf-8") as file:
        rows = slice_of(map(json.loads, file), options.requests, options.shrink, options.slower)
        trace.write_text("".join(json.dumps(row) + "\n" for row in rows))
    flags = {
        "--model": options.model,
        "--url": options.url,
        "--endpoint-type": "chat",
        "--tokenizer": _TOKENIZER_NAME,
        "--input-file": str(trace),
        "--custom-dataset-type": "mooncake_trace",
        "--prompt-input-tokens-block-size": str(BLOCK_TOKENS // options.shrink),
        "--output-artifact-dir": str(directory / "out"),
        "--ui-type": "none",
        "--random-seed": "1",
        # Otherwise a small model ends its answers where it likes, and not where the trace does.
        "--extra-inputs": json.dumps(
            {"ignore_eos": True, "temperature": 0, "thinking": {"type": "disabled"}}
        ),
    }
    command = [str(options.aiperf), "profile", "--streaming", "--fixed-schedule"]
    command += ["--use-server-token-count", "--no-gpu-telemetry", "--no-server-metrics"]
    command += [part for pair in flags.items() for part in pair]
    cache = _tokenizer_cache(options.tokenizer, directory)
    environment = os.environ | {"HF_HOME": str(cache), "HF_HUB_OFFLINE": "1"}
    if subprocess.run(command, check=False, env=environment).returncode:
        raise SystemExit("aiperf failed; what it said stands above")
    (export,) = (directory / "out").rglob("profile_export_aiperf.json")
    return figures_of(json.loads(export.read_text()))


def main() -> None:
    """Replays, prints and writes."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--aiperf", type=Path, required=True, help="the program")
    parser.add_argument("--trace", type=Path, required=True, help="the trace, as published")
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="of the server")
    parser.add_argument("--model", default="small-v41", help="name of the served model")
    parser.add_argument("--tokenizer", type=Path, required=True, help="folder with a tokenizer")
    parser.add_argument("--requests", type=int, default=100, help="rows of the trace")
    parser.add_argument("--shrink", type=int, default=32, help="lengths are divided by it")
    parser.add_argument("--slower", type=float, default=4.0, help="times are multiplied by it")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        figures = replay(options, Path(directory))
    what = (
        f"The first {options.requests} requests of the trace, lengths divided by "
        f"{options.shrink}, times multiplied by {options.slower:g}; model {options.model}."
    )
    table = table_of(figures, what)
    print(table)
    if options.json:
        options.json.write_text(json.dumps(figures, indent=2) + "\n")
        options.json.with_suffix(".md").write_text(table)


if __name__ == "__main__":
    main()
