"""Goal: a grammar allows exactly the tokens of texts that have the wanted form, never moves by a
token that was only looked at, and refuses what it cannot enforce by naming the field.

Method: texts inside and outside each kind of constraint, with the small tokenizer of the golden
checkpoint and with the vocabulary of the released model series; masks are compared token by token
with what a fresh state says of each single token, and random walks along masks with an
independent judge (the JSON parser, the regular expressions of Python).
"""

import json
import re
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from serving.core.grammar import (
    DSML,
    TEXT_MAX,
    THINK_END,
    GrammarCompiler,
    GrammarError,
    GrammarState,
    mask_words,
)
from serving.core.request import ConstraintKind, OutputConstraint
from tests.serving.core.vocabularies import (
    EOS,
    SMALL,
    SMALL_JSON,
    SMALL_VOCAB,
    accepts,
    encode,
    ids_of,
    large,
)

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "age": {"type": "integer", "minimum": 0},
        "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 2},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}


def json_constraint(schema: object, *, after_thinking: bool = False) -> OutputConstraint:
    return OutputConstraint(ConstraintKind.JSON, json.dumps(schema), after_thinking)


def mask_of(state: GrammarState, vocab_size: int = SMALL_VOCAB) -> np.ndarray:
    """[V] bool, the tokens that may come next."""
    masks = np.zeros((1, mask_words(vocab_size)), np.int32)
    state.fill_masks([], masks)
    return unpacked(masks)[0, :vocab_size]


def unpacked(masks: np.ndarray) -> np.ndarray:
    return np.unpackbits(masks.view(np.uint8), axis=1, bitorder="little").astype(bool)


@pytest.mark.parametrize(
    ("constraint", "inside", "outside"),
    [
        (
            OutputConstraint(ConstraintKind.JSON, ""),
            ["{}", '{"a": [1, {"b": null}]}', '{\n  "a": 1\n}', '{"a":"</think>"}'],
            ["[1]", "3", "", " {}", "{} ", '{"a":1', '{"a":  1}', '{"a":1}{}'],
        ),
        (
            json_constraint(PERSON),
            ['{"name": "x", "age": 3}', '{"name":"x","age":3,"tags":["a","b"]}'],
            ['{"name":"x"}', '{"name":"x","age":-1}', '{"name":"x","age":3,"z":1}',
             '{"name":"x","age":3,"tags":["a","b","a"]}', '{"name":"x","age":3,"tags":["c"]}'],
        ),
        (json_constraint(True), ["3", '"x"', "null"], ["x"]),
        (
            OutputConstraint(ConstraintKind.REGEX, "[a-c]{2,3}|yes"),
            ["ab", "abc", "yes"],
            ["a", "abcd", "xab", "ye"],
        ),
        (
            OutputConstraint(ConstraintKind.GRAMMAR, 'start: "(" start ")" | "x"'),
            ["x", "((x))"],
            ["", "((x)"],
        ),
        (
            OutputConstraint(ConstraintKind.GRAMMAR, 'root ::= "(" root ")" | "x"'),
            ["x", "((x))"],
            ["", "((x)"],
        ),
        (OutputConstraint(ConstraintKind.GRAMMAR, '?start: "a" "b"?'), ["a", "ab"], ["b"]),
    ],
)  # fmt: skip
def test_texts_inside_and_outside(
    constraint: OutputConstraint, inside: list[str], outside: list[str]
) -> None:
    for compiler in (SMALL, large()):
        grammar = compiler.compile(constraint)
        for text in inside:
            # Letter by letter, so that a marker inside JSON is its text and not its token.
            ids = [*(token for letter in text for token in ids_of(compiler, letter)), EOS]
            assert grammar.start().num_legal(ids) == len(ids), text
        for text in outside:
            assert not accepts(compiler, grammar, text), text


@pytest.mark.parametrize("name", ["small", "large"])
def test_special_tokens_are_never_legal_however_they_are_spelled(name: str) -> None:
    compiler = SMALL if name == "small" else large()
    special = set(compiler._added.values()) - {EOS}
    (end,) = (text for text, token in compiler._added.items() if token == EOS)
    for spelling in (end, THINK_END):
        for kind, text in (
            (ConstraintKind.REGEX, re.escape(spelling)),
            (ConstraintKind.REGEX, f"a{re.escape(spelling)}b"),
            (ConstraintKind.GRAMMAR, f'start: "{spelling}"'),
            (ConstraintKind.JSON, json.dumps({"const": spelling})),
        ):
            state, ids = compiler.compile(OutputConstraint(kind, text)).start(), []
            while not state.may_end:
                legal = np.flatnonzero(mask_of(state, compiler._vocab_size)).tolist()
                assert EOS not in legal and special.isdisjoint(legal)
                ids.append(legal[0])
                state.advance(ids[-1:])
            assert spelling in compiler._tokenizer.decode_str(ids)


def test_white_space_is_bounded() -> None:
    state = SMALL.compile(OutputConstraint(ConstraintKind.JSON, "")).start()
    blanks = ids_of(SMALL, "\n") + 200 * ids_of(SMALL, " ")
    state.advance(ids_of(SMALL, "{"))
    assert state.num_legal(blanks) == 41
    assert state.num_legal(ids_of(SMALL, "\n\n")) < len(ids_of(SMALL, "\n\n"))


def test_the_end_is_legal_where_the_text_may_end() -> None:
    state = SMALL.compile(OutputConstraint(ConstraintKind.REGEX, "ab?")).start()
    a, b = ids_of(SMALL, "a")[0], ids_of(SMALL, "b")[0]
    for token, legal in ((a, [a]), (b, sorted([b, EOS])), (EOS, [EOS])):
        assert np.flatnonzero(mask_of(state)).tolist() == legal
        assert state.may_end is (EOS in legal)
        state.advance([token])


def test_every_bit_of_a_mask() -> None:
    state = SMALL.compile(json_constraint(PERSON)).start()
    state.advance(ids_of(SMALL, '{"na'))
    expected = [state.num_legal([token]) == 1 for token in range(SMALL_VOCAB)]
    np.testing.assert_array_equal(mask_of(state), expected)
    assert 0 < sum(expected) < SMALL_VOCAB


def test_masks_of_drafts_leave_the_state_alone() -> None:
    grammar = SMALL.compile(json_constraint(PERSON))
    drafts = ids_of(SMALL, '{"name": "')
    state, follower = grammar.start(), grammar.start()
    masks = np.zeros((len(drafts) + 1, mask_words(SMALL_VOCAB)), np.int32)
    for _ in range(2):
        masks[:] = 0
        state.fill_masks(drafts, masks)
        for number, mask in enumerate(unpacked(masks)[:, :SMALL_VOCAB]):
            ahead = grammar.start()
            ahead.advance(drafts[:number])
            np.testing.assert_array_equal(mask, mask_of(ahead), err_msg=str(number))
    # Of five drafts two are accepted; the state goes on from there.
    state.advance(drafts[:2])
    follower.advance(drafts[:1])
    follower.advance(drafts[1:2])
    np.testing.assert_array_equal(mask_of(state), mask_of(follower))


def test_drafts_are_cut_at_the_first_illegal_one() -> None:
    state = SMALL.compile(json_constraint(PERSON)).start()
    good, bad = ids_of(SMALL, '{"name": '), ids_of(SMALL, "x")
    assert state.num_legal([*good, *bad, *good]) == len(good)
    assert state.num_legal(bad) == 0 and state.num_legal([]) == 0
    with pytest.raises(ValueError, match="not all legal"):
        state.fill_masks(bad, np.zeros((2, mask_words(SMALL_VOCAB)), np.int32))
    # The failed look ahead has not moved it.
    assert state.num_legal(good) == len(good)


def test_a_draft_may_end_the_text() -> None:
    state = SMALL.compile(OutputConstraint(ConstraintKind.REGEX, "a")).start()
    a = ids_of(SMALL, "a")[0]
    masks = np.zeros((3, mask_words(SMALL_VOCAB)), np.int32)
    assert state.num_legal([a, EOS]) == 2
    state.fill_masks([a, EOS], masks)
    assert [np.flatnonzero(row).tolist() for row in unpacked(masks)] == [[a], [EOS], [EOS]]
    assert np.flatnonzero(mask_of(state)).tolist() == [a]
    assert state.num_legal([EOS]) == 0 and state.num_legal([a, EOS, EOS]) == 2
    state.advance([a, EOS])
    assert state.may_end and state.num_legal([EOS]) == 0
    with pytest.raises(GrammarError):
        state.advance([EOS])


def test_an_end_that_comes_too_early_is_an_error() -> None:
    state = SMALL.compile(OutputConstraint(ConstraintKind.REGEX, "ab")).start()
    with pytest.raises(GrammarError, match="left its grammar"):
        state.advance([*ids_of(SMALL, "a"), EOS])


def test_thinking_is_free_until_it_ends() -> None:
    state = SMALL.compile(OutputConstraint(ConstraintKind.JSON, "", after_thinking=True)).start()
    thinking, brace = encode(SMALL, "so [{ then"), ids_of(SMALL, "{")[0]
    end = encode(SMALL, THINK_END)
    assert state.num_legal(thinking) == len(thinking)
    masks = np.zeros((len(thinking) + 1, mask_words(SMALL_VOCAB)), np.int32)
    state.fill_masks(thinking, masks)
    assert (np.argwhere(~unpacked(masks))[:, 1] == EOS).all(), "anything but the end"
    # The answer would be none of the form.
    assert not state.may_end and not unpacked(masks)[:, EOS].any()
    assert state.num_legal([*thinking, EOS, *thinking]) == len(thinking)
    state.advance(thinking)
    # Drafts across the boundary: free up to the marker, constrained right after it.
    drafts = [*thinking[:1], *end, brace]
    assert state.num_legal([*drafts, *ids_of(SMALL, "x")]) == len(drafts)
    masks = np.zeros((4, mask_words(SMALL_VOCAB)), np.int32)
    state.fill_masks(drafts, masks)
    assert (np.argwhere(~unpacked(masks)[:2])[:, 1] == EOS).all()
    assert (
        np.flatnonzero(unpacked(masks)[2]).tolist()
        == np.flatnonzero(
            mask_of(SMALL.compile(OutputConstraint(ConstraintKind.JSON, "")).start())
        ).tolist()
    )
    assert state.num_legal(thinking) == len(thinking), "drafts are not tokens yet"
    state.advance(end)
    assert not state.is_free and not state.may_end
    assert state.num_legal(thinking) == 0
    # A second marker is no boundary, and its token stands for no text.
    assert state.num_legal(end) == 0
    state.advance(ids_of(SMALL, '{"'))
    assert state.num_legal(end) == 0 and state.num_legal(ids_of(SMALL, "</")) > 0


def test_a_mask_that_would_hold_up_everybody_is_refused() -> None:
    def optional(count: int) -> OutputConstraint:
        names = [f"a{number}" for number in range(count)]
        rules = "\n".join(f'{name}: "a" | "b"' for name in names)
        return OutputConstraint(ConstraintKind.GRAMMAR, f"start: {'? '.join(names)}?\n{rules}")

    with pytest.raises(GrammarError, match="too complex"):
        large().compile(optional(300))
    assert accepts(large(), large().compile(optional(30)), "abab")
    wide = {"type": "object", "properties": {f"k{n}": {"type": "integer"} for n in range(480)}}
    assert accepts(large(), large().compile(json_constraint(wide)), '{"k7": 1, "k479": 2}')


def test_only_calls_that_need_not_be_made_may_be_left_out_by_thinking() -> None:
    tools = json.dumps([{"type": "function", "function": {"name": "f"}}])
    for kind, text in ((ConstraintKind.TOOL_CALL, tools), (ConstraintKind.REGEX, "ab")):
        state = large().compile(OutputConstraint(kind, text, after_thinking=True)).start()
        is_free = kind is ConstraintKind.TOOL_CALL
        assert (state.is_free, state.may_end, state.num_legal([EOS])) == (is_free,) * 3
        if not is_free:
            with pytest.raises(GrammarError, match="before its answer"):
                state.advance([EOS])


@given(st.data())
def test_the_boundary_may_fall_anywhere(data: st.DataObject) -> None:
    grammar = SMALL.compile(json_constraint(PERSON, after_thinking=True))
    ids = encode(SMALL, 'ab</think>{"name": "x", "age": 3}')
    state, index = grammar.start(), 0
    while index < len(ids):
        count = data.draw(st.integers(1, 6))
        drafts = ids[index : index + count]
        masks = np.zeros((len(drafts) + 1, mask_words(SMALL_VOCAB)), np.int32)
        assert state.num_legal(drafts) == len(drafts)
        state.fill_masks(drafts, masks)
        for draft, mask in zip(drafts, unpacked(masks), strict=False):
            assert mask[draft]
        accepted = data.draw(st.integers(1, len(drafts)))
        state.advance(drafts[:accepted])
        index += accepted
    assert state.may_end


@given(st.integers(0, 2**32 - 1))
def test_walks_along_masks_end_in_the_language(seed: int) -> None:
    rng = np.random.default_rng(seed)
    pattern = r"[a-c]{1,3}(x|yy){2}[0-9]{1,4}"
    flags = {"type": "array", "items": {"type": "boolean"}, "maxItems": 3}
    walks: dict[str, tuple[OutputConstraint, Callable[[str], object]]] = {
        "regex": (
            OutputConstraint(ConstraintKind.REGEX, pattern),
            lambda text: re.fullmatch(pattern, text),
        ),
        "json": (json_constraint(flags), json.loads),
    }
    for name, (constraint, judge) in walks.items():
        state, ids = SMALL.compile(constraint).start(), []
        while not (ids and ids[-1] == EOS):
            assert len(ids) < 300, name
            ids.append(int(rng.choice(np.flatnonzero(mask_of(state)))))
            state.advance(ids[-1:])
        text = SMALL._tokenizer.decode_str(ids[:-1])
        assert judge(text) is not None, text


def test_states_of_one_grammar_do_not_meet() -> None:
    grammar = SMALL.compile(OutputConstraint(ConstraintKind.REGEX, "ab"))
    first, second = grammar.start(), grammar.start()
    first.advance(ids_of(SMALL, "a"))
    assert first.num_legal(ids_of(SMALL, "b")) == 1
    assert second.num_legal(ids_of(SMALL, "b")) == 0


def test_an_equal_constraint_is_compiled_once() -> None:
    one, two = (SMALL.compile(OutputConstraint(ConstraintKind.REGEX, "abc")) for _ in range(2))
    assert one is two
    other = SMALL.compile(OutputConstraint(ConstraintKind.REGEX, "abc", after_thinking=True))
    assert other is not one and not other.start().may_end


TOOLS = [
    {"type": "function", "function": {"name": "f", "strict": True, "parameters": {
        "type": "object", "properties": {"x": {"type": "string"}}, "required": ["x"]}}}
]  # fmt: skip
CALL = (
    f'<{DSML} invoke name="f">\n<{DSML} parameter name="x" string="true">a "b"\n</{DSML} '
    f"parameter>\n</{DSML} invoke>\n</{DSML} calls>"
)


def test_tool_calls() -> None:
    text = json.dumps(TOOLS)
    may = large().compile(OutputConstraint(ConstraintKind.TOOL_CALL, text))
    must = large().compile(OutputConstraint(ConstraintKind.TOOL_CALL_REQUIRED, text))
    block = f"Hm. <{DSML} calls>\n{CALL}"
    assert accepts(large(), may, block) and accepts(large(), may, "No call < needed.")
    assert accepts(large(), must, CALL) and not accepts(large(), must, "No call needed.")
    for wrong in (block + "x", block.replace('name="f"', 'name="g"'), block[:-1]):
        assert not accepts(large(), may, wrong), wrong
    thinking = OutputConstraint(ConstraintKind.TOOL_CALL, text, after_thinking=True)
    # A call that is only thought of is text like any other.
    thought = f"I could <{DSML} calls> x{THINK_END}"
    assert accepts(large(), large().compile(thinking), thought + block)
    assert not accepts(large(), large().compile(thinking), thought + block + "x")


@pytest.mark.parametrize(
    ("kind", "text", "detail"),
    [
        (ConstraintKind.JSON, '{"type": "objectt"}', "objectt"),
        (ConstraintKind.JSON, '{"not": {"type": "object"}}', "not"),
        (ConstraintKind.JSON, "{", "double quotes"),
        (ConstraintKind.JSON, "3", "no JSON object"),
        (ConstraintKind.JSON, "false", "atisf"),
        (ConstraintKind.JSON, '{"items":' * 3000 + "{}" + "}" * 3000, "recursion"),
        (ConstraintKind.JSON, '{"$ref": "#/$defs/x"}', "x"),
        (ConstraintKind.REGEX, "[a-", "unclosed"),
        (ConstraintKind.REGEX, "a(?=b)", "look-ahead"),
        (ConstraintKind.GRAMMAR, "start: (", "Expected"),
        (ConstraintKind.GRAMMAR, "root ::= (", "Expected"),
        (ConstraintKind.GRAMMAR, 'rule ::= "a"', "root"),
        (ConstraintKind.GRAMMAR, "root ::= other", "other"),
        (ConstraintKind.TOOL_CALL, json.dumps(TOOLS), f"no {DSML} token"),
        (ConstraintKind.REGEX, "a" * (TEXT_MAX + 1), str(TEXT_MAX)),
    ],
)
def test_what_cannot_be_enforced_is_refused(kind: ConstraintKind, text: str, detail: str) -> None:
    with pytest.raises(GrammarError, match=re.escape(detail)) as caught:
        SMALL.compile(OutputConstraint(kind, text, param="guided_json"))
    assert caught.value.param == "guided_json"
    assert len(str(caught.value)) < 500 and "<state>" not in str(caught.value)


def test_bad_tools_are_refused() -> None:
    for text in ("[]", "3", '[{"function": {}}]'):
        with pytest.raises(GrammarError, match="tools"):
            large().compile(OutputConstraint(ConstraintKind.TOOL_CALL, text, param="tools"))


def test_a_grammar_that_explodes_fails_by_itself() -> None:
    grammar = SMALL.compile(OutputConstraint(ConstraintKind.REGEX, "((a{1,100}){1,100}){1,100}"))
    state = grammar.start()
    masks = np.zeros((1, mask_words(SMALL_VOCAB)), np.int32)
    with pytest.raises(GrammarError, match="too complex"):
        for _ in range(50):
            state.advance(ids_of(SMALL, "a"))
            state.fill_masks([], masks)


def test_a_token_that_is_not_legal_is_an_error() -> None:
    state = SMALL.compile(OutputConstraint(ConstraintKind.REGEX, "ab")).start()
    with pytest.raises(GrammarError, match="left its grammar"):
        state.advance(ids_of(SMALL, "b"))


def test_masks_of_a_wrong_shape_are_refused() -> None:
    state = SMALL.compile(OutputConstraint(ConstraintKind.REGEX, "ab")).start()
    for masks in (np.zeros((1, 9), np.int32), np.zeros((1, 10)), np.zeros((2, 10), np.int32)):
        with pytest.raises(ValueError, match="expected int32"):
            state.fill_masks([], masks)


def test_bad_tokenizers() -> None:
    with pytest.raises(ValueError, match="tokenizer"):
        GrammarCompiler("{}", SMALL_VOCAB, EOS)
    with pytest.raises(ValueError, match="tokenizer"):
        GrammarCompiler(SMALL_JSON.read_text(encoding="utf-8"), 100, EOS)
