"""Goal: no constraint leads the grammar compiler so deep that the stack runs out, and none names a
token; texts become literals that stand for themselves.

Method: the longest chains of each kind are compiled and followed in a thread with 8 MiB of stack,
which would end the test's process; one step more is refused.
"""

import json
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from serving.core.grammar import GrammarError, mask_words
from serving.core.lark_text import (
    DEFINITIONS_MAX,
    LEVELS_MAX,
    ConstraintTextError,
    check_gbnf,
    check_lark,
    lark_literal,
    schema_levels,
)
from serving.core.request import ConstraintKind, OutputConstraint
from tests.serving.core.vocabularies import SMALL, accepts, ids_of, large

STACK_BYTES = 8 * 2**20


def lark_chain(length: int, name: str) -> str:
    """`length` definitions; the last one is the letter a."""
    links = (f"{name}{number}: {name}{number + 1}\n" for number in range(length - 2))
    return f'start: {name}0\n{"".join(links)}{name}{length - 2}: "a"'


def gbnf_chain(length: int) -> str:
    links = (f"t{number} ::= t{number + 1}\n" for number in range(length - 2))
    return f'root ::= t0\n{"".join(links)}t{length - 2} ::= "a"'


def schema_chain(length: int) -> dict[str, Any]:
    """Objects in objects by reference, three levels each."""
    chain: dict[str, Any] = {
        f"d{number}": {"properties": {"a": {"$ref": f"#/$defs/d{number + 1}"}}, "required": ["a"]}
        for number in range(length)
    }
    return {"$ref": "#/$defs/d0", "$defs": chain | {f"d{length}": {"type": "boolean"}}}


def plain_chain(length: int) -> dict[str, Any]:
    chain = {f"d{number}": {"$ref": f"#/$defs/d{number + 1}"} for number in range(length)}
    return {"$ref": "#/$defs/d0", "$defs": chain | {f"d{length}": {"type": "boolean"}}}


def tools_of(schema: dict[str, Any]) -> str:
    """A strict tool whose one parameter has the schema."""
    parameters = {
        "properties": {"x": {"type": "array", "items": {"$ref": schema["$ref"]}}},
        "required": ["x"],
        "$defs": schema["$defs"],
    }
    return json.dumps([{"function": {"name": "f", "strict": True, "parameters": parameters}}])


CHAINS: dict[str, tuple[ConstraintKind, Callable[[int], str], int]] = {
    "rules": (ConstraintKind.GRAMMAR, lambda n: lark_chain(n, "t"), LEVELS_MAX),
    "terminals": (ConstraintKind.GRAMMAR, lambda n: lark_chain(n, "T"), LEVELS_MAX),
    "GBNF": (ConstraintKind.GRAMMAR, gbnf_chain, DEFINITIONS_MAX),
    "references": (ConstraintKind.JSON, lambda n: json.dumps(plain_chain(n)), LEVELS_MAX - 4),
    "objects": (ConstraintKind.JSON, lambda n: json.dumps(schema_chain(n)), 331),
    "schema in Lark": (
        ConstraintKind.GRAMMAR,
        lambda n: f"start: %json {json.dumps(schema_chain(n))}",
        331,
    ),
    "tool": (ConstraintKind.TOOL_CALL_REQUIRED, lambda n: tools_of(schema_chain(n)), 330),
}


def in_thread[T](work: Callable[[], T]) -> T:
    """What `work` gives in a thread with the stack that a process usually has."""
    given: list[T] = []
    before = threading.stack_size(STACK_BYTES)
    try:
        thread = threading.Thread(target=lambda: given.append(work()))
        thread.start()
    finally:
        threading.stack_size(before)
    thread.join()
    return given[0]


@pytest.mark.parametrize("kind", CHAINS)
def test_the_longest_chains_survive_and_longer_ones_are_refused(kind: str) -> None:
    constraint_kind, text_of, longest = CHAINS[kind]
    compiler = large() if kind == "tool" else SMALL

    def follow() -> int:
        grammar = compiler.compile(OutputConstraint(constraint_kind, text_of(longest)))
        state = grammar.start()
        begin = {
            ConstraintKind.JSON: "t" if kind == "references" else '{"a":{"a":',
            ConstraintKind.GRAMMAR: '{"a":{"a":' if "schema" in kind else "a",
            ConstraintKind.TOOL_CALL_REQUIRED: "<",
        }[constraint_kind]
        ids = ids_of(compiler, begin)
        masks = np.zeros((len(ids) + 1, mask_words(compiler._vocab_size)), np.int32)
        state.fill_masks(ids, masks)
        state.advance(ids)
        return len(ids)

    assert in_thread(follow) > 0
    with pytest.raises(GrammarError, match=f"expected at most {LEVELS_MAX}") as caught:
        constraint = OutputConstraint(constraint_kind, text_of(longest + 4), param="guided")
        compiler.compile(constraint)
    assert caught.value.param == "guided"


def test_far_too_many_rules_are_refused_before_they_are_translated() -> None:
    with pytest.raises(ConstraintTextError, match="15000 rules"):
        check_gbnf(gbnf_chain(15_000))
    with pytest.raises(GrammarError, match="15000 rules"):
        SMALL.compile(OutputConstraint(ConstraintKind.GRAMMAR, gbnf_chain(15_000)))


def test_what_counts_as_a_level() -> None:
    # A wide schema is no deep one, and what nothing refers to leads nowhere.
    wide: dict[str, Any] = {f"p{number}": {"type": "string"} for number in range(5000)}
    assert schema_levels({"properties": wide}) == 3
    assert schema_levels({"$defs": wide}) == 3
    assert schema_levels({"$ref": "#/$defs/a", "$defs": {"a": {"items": {}}}}) == 4 + 2
    assert schema_levels({"$ref": "#/$defs/a~1b", "$defs": {"a/b": {}}}) == 3 + 1
    assert schema_levels({"anyOf": [{"$ref": "#/anyOf/1"}, {}]}) == 3 + 1
    # Each spelling counts, since the compiler takes each for another definition.
    spellings = [{"$ref": "#/anyOf/1"}, {"$ref": "#/anyOf/01"}, {"items": {}}]
    assert schema_levels({"anyOf": spellings}) == 4 + 1 + 1
    # Where it is not clear what is meant, the whole schema counts.
    assert schema_levels({"$ref": "#a", "$defs": {"a": {"$anchor": "a"}}}) == 3 + 3
    assert schema_levels({"$ref": "#/$defs/a", "$defs": {"a": {"$id": "x"}}}) == 3 + 3
    assert schema_levels(True) == 0


def test_texts_and_comments_count_nothing() -> None:
    quiet = r"""
    start: "(((:" /[(:\/]+/ "\"((" // (((( <think> "
    a: "b" # "<[3]>
    """
    for count in (1, 400):
        check_lark(quiet * count)
    with pytest.raises(ConstraintTextError, match=r"1002 definitions, 0 brackets and 0 levels"):
        check_lark(quiet * 501)
    with pytest.raises(json.JSONDecodeError):
        check_lark("start: %json {")


@pytest.mark.parametrize(
    "text",
    ["start: <[30-40]>+", "start: <think>", 'start: "a" <a"b> "c"', "start: /a\nb/ <[*]>",
     'start: %json {"const": "<[3]>"} <[3]>', "root ::= x\nstart: x\nx: <[1]>"],
)  # fmt: skip
def test_tokens_cannot_be_named(text: str) -> None:
    with pytest.raises(GrammarError, match="refers to the token <") as caught:
        SMALL.compile(OutputConstraint(ConstraintKind.GRAMMAR, text, param="guided_grammar"))
    assert caught.value.param == "guided_grammar"


def test_literals_stand_for_themselves() -> None:
    controls = [chr(code) for code in (*range(32), 0x7F, 0x80, 0x85, 0x9F, 0x2028, 0xFEFF)]
    for text in ('"', "\\", "/", *controls):
        literal = f"start: {lark_literal(f'a{text}b')}"
        grammar = SMALL.compile(OutputConstraint(ConstraintKind.GRAMMAR, literal))
        ids = ids_of(SMALL, f"a{text}b")
        assert grammar.start().num_legal(ids) == len(ids), repr(text)
        assert not accepts(SMALL, grammar, "ab"), repr(text)
