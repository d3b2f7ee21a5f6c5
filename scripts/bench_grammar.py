"""Host time of structured outputs: one mask and one step forward per token, and compiling.

Texts that fit a JSON schema, any JSON object, a regular expression and a tool call are walked
token by token through `serving.core.grammar`, with the vocabulary of a checkpoint, as the engine
does for one sequence without drafts. The first walk of a grammar finds out what later ones reuse,
so both are shown; the figure is the median of later walks over all texts.

    python scripts/bench_grammar.py [--model DIR] [--rounds N] [--json FILE]
"""

import argparse
import json
import statistics
import time
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from deepinfer_jax.config import ModelConfig
from serving.config import DEFAULT_MODEL_DIR
from serving.core.grammar import Grammar, GrammarCompiler, mask_words
from serving.core.request import ConstraintKind, OutputConstraint

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 40},
        "sizes": {"type": "array", "items": {"type": "number"}},
        "kind": {"enum": ["small", "large"]},
    },
    "required": ["name", "sizes", "kind"],
    "additionalProperties": False,
}
TEXT = '{"name": "a word or two", "sizes": [1, 2.5, 33, 400], "kind": "large"}'
CASES = {
    "schema": (OutputConstraint(ConstraintKind.JSON, json.dumps(SCHEMA)), TEXT),
    "object": (OutputConstraint(ConstraintKind.JSON, ""), TEXT),
    "regex": (
        OutputConstraint(ConstraintKind.REGEX, "([a-z]+ ){3,40}[0-9]{4}"),
        "ab cd ef gh 2026",
    ),
}


def main() -> None:
    """Measures, prints a table and writes the figure."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--model", type=Path, default=DEFAULT_MODEL_DIR, help="checkpoint directory"
    )
    parser.add_argument("--rounds", type=int, default=20, help="walks of each text")
    parser.add_argument("--json", type=Path, help="write the figure there")
    args = parser.parse_args()
    figures = grammar_figures(args.model, args.rounds)
    if args.json:
        args.json.write_text(json.dumps(figures, indent=2) + "\n")


def grammar_figures(model: Path, num_rounds: int = 20) -> dict[str, float]:
    """Prints a table; the figure is `grammar_us_per_token`. Masks are as wide as the logits."""
    vocab_size = ModelConfig.from_hf(model / "config.json").vocab_size
    description = (model / "tokenizer.json").read_text(encoding="utf-8")
    tokenizer = Tokenizer.from_str(description)
    compiler = GrammarCompiler(description, vocab_size, eos_token_id=1)
    print(f"{'grammar':>8} {'tokens':>7} {'compile ms':>11} {'first us':>9} {'later us':>9}")
    later: list[float] = []
    for name, (constraint, text) in CASES.items():
        started = time.perf_counter()
        grammar = compiler.compile(constraint)
        compile_s = time.perf_counter() - started
        tokens = tokenizer.encode(text, add_special_tokens=False).ids
        walks = [walk(grammar, tokens, vocab_size) for _ in range(num_rounds + 1)]
        later += walks[1:]
        print(
            f"{name:>8} {len(tokens):7d} {compile_s * 1e3:11.2f} {walks[0] * 1e6:9.1f} "
            f"{statistics.median(walks[1:]) * 1e6:9.1f}"
        )
    return {"grammar_us_per_token": statistics.median(later) * 1e6}


def walk(grammar: Grammar, tokens: list[int], vocab_size: int) -> float:
    """Seconds per token of one text, the mask before each token included."""
    state = grammar.start()
    masks = np.zeros((1, mask_words(vocab_size)), np.int32)
    started = time.perf_counter()
    for token in tokens:
        state.fill_masks([], masks)
        state.advance([token])
    return (time.perf_counter() - started) / len(tokens)


if __name__ == "__main__":
    main()
