"""Measures the small model: exact answers per task, and what its drafts are worth.

    python scripts/evaluate_tiny.py [--model DIR] [--json FILE] [--count N] [--seed N]

Answers come from `serving.offline.LLM`, greedy, with the quantised cache. Tokens per step come from
the compiled steps with drafts, for the same questions. Prints a Markdown table.
"""

import argparse
import json
import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import jax
from tokenizers import Tokenizer

from deepinfer_jax import checkpoint
from scripts.tiny_model.evaluation import Case, Score, make_cases, mean_accepted, score, table
from scripts.tiny_model.prompts import Codec
from scripts.tiny_model.speculative import DraftingModel
from serving import LLM, SamplingParams

DEFAULT_MODEL = Path(__file__).resolve().parents[1] / "deepinfer_jax" / "checkpoints" / "small-v41"
NUM_TOKENS_MAX = 96


def main() -> None:
    """Evaluates and prints."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--model", type=Path, default=DEFAULT_MODEL)
    parser.add_argument("--json", type=Path, help="file that takes the figures")
    parser.add_argument("--count", type=int, default=50, help="questions per task and mode")
    parser.add_argument("--seed", type=int, default=7)
    options = parser.parse_args()
    cases = make_cases(Codec(options.model / "tokenizer.json"), options.seed, options.count)
    scores = exact_matches(options.model, cases)
    accepted = accepted_per_step(options.model, cases)
    file_bytes, resident = sizes(options.model)
    figures = {
        "exact_match": {f"{s.task}{'_thinking' * s.is_thinking}": s.share for s in scores},
        "num_cases": options.count,
        "accepted_per_step": accepted,
        "file_bytes": file_bytes,
        "resident_over_file": resident / file_bytes,
    }
    lines = [
        *table(scores),
        "",
        f"Tokens per decode step with drafts: {accepted:.2f}",
        f"Weights: {file_bytes} bytes, in memory {resident / file_bytes:.3f} times that",
    ]
    sys.stdout.write("\n".join(lines) + "\n")
    if options.json is not None:
        options.json.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")


def exact_matches(model: Path, cases: list[Case]) -> list[Score]:
    """Scores of the answers that offline generation gives."""
    # One shape of each kind is enough here, and quicker to compile than those of a server.
    shapes = {"prefill_tokens": [512], "decode_rows": [16], "max_context": 1024}
    llm = LLM(model, options={f"engine.{name}": value for name, value in shapes.items()})
    sampling = SamplingParams(max_tokens=NUM_TOKENS_MAX, temperature=0.0)
    outputs = llm.generate([case.prompt for case in cases], sampling, progress=True)
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))

    def text_of(token_ids: list[int]) -> str:
        return tokenizer.decode(token_ids, skip_special_tokens=False)

    return score(cases, [output.token_ids for output in outputs], text_of)


def accepted_per_step(model: Path, cases: list[Case], num_rows: int = 8) -> float:
    """Tokens per decode step over all cases, all drafts verified in every step."""
    drafting = DraftingModel(model, num_rows=num_rows)
    tokens, steps = [], []
    for first in range(0, len(cases), num_rows):
        prompts = [case.prompt for case in cases[first : first + num_rows]]
        for answer in drafting.generate(prompts, NUM_TOKENS_MAX):
            # The first token comes from the prompt's own step.
            tokens.append(len(answer.token_ids) - 1)
            steps.append(answer.num_steps)
    return mean_accepted(tokens, steps)


def sizes(model: Path) -> tuple[int, int]:
    """Bytes of the weights in the file and, loaded with all parts, in memory."""
    parameters = checkpoint.load(model, checkpoint.read_config(model), parts={"text", "draft"})
    resident = sum(leaf.nbytes for leaf in jax.tree.leaves(parameters))
    return (model / checkpoint.WEIGHTS_FILE).stat().st_size, resident


if __name__ == "__main__":
    main()
