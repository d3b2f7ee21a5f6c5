"""Goal: the grammar of tool calls allows the calls that fit the tools' schemas, in the spelling
that the prompt format gives them, and no others; only strict tools are refused for their schemas.

Method: blocks of calls written out by hand and by the prompt renderer, against grammars over the
vocabulary of the released model series; each wrong block differs from a right one in one place.
"""

import json
from typing import Any

import deepseek_recipe as recipe
import pytest

from serving.core.grammar import DSML, GrammarCompiler
from serving.core.request import TOOL_KINDS, ConstraintKind, OutputConstraint
from serving.core.tool_grammar import ToolGrammarError, tool_calls_grammar
from tests.serving.core.vocabularies import accepts, large

CLOSE = f"</{DSML} invoke>\n"


def tool(name: str, parameters: Any = None, *, strict: bool = False) -> dict[str, Any]:
    return {
        "type": "function",
        "function": {"name": name, "parameters": parameters, "strict": strict},
    }


def schema(properties: dict[str, Any], *required: str, **more: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": list(required), **more}


def parameter(name: str, value: str, *, is_raw: bool) -> str:
    return (
        f'<{DSML} parameter name="{name}" string="{"true" if is_raw else "false"}">{value}'
        f"</{DSML} parameter>\n"
    )


def call(name: str, *parameters: str) -> str:
    body = "".join(parameters) or "\n"
    return f'<{DSML} invoke name="{name}">\n{body}{CLOSE}'


def is_legal(compiler: GrammarCompiler, tools: list[Any], calls: str) -> bool:
    constraint = OutputConstraint(ConstraintKind.TOOL_CALL_REQUIRED, json.dumps(tools))
    return accepts(compiler, compiler.compile(constraint), f"{calls}</{DSML} calls>")


STRICT = tool(
    "f",
    schema(
        {
            "city": {"type": "string"},
            "days": {"type": "integer"},
            "unit": {"enum": ["C", "F"]},
            "where": {"$ref": "#/$defs/place"},
        },
        "city", "days", "unit", "where",
        additionalProperties=False,
        **{"$defs": {"place": schema({"x": {"type": "number"}}, "x", additionalProperties=False)}},
    ),
    strict=True,
)  # fmt: skip
RIGHT = (
    parameter("city", 'Par"is </b>\nnew line', is_raw=True),
    parameter("days", "3", is_raw=False),
    parameter("unit", "C", is_raw=True),
    parameter("where", '{"x": 1.5}', is_raw=False),
)


def test_a_strict_tool() -> None:
    assert is_legal(large(), [STRICT], call("f", *RIGHT))
    assert is_legal(large(), [STRICT], call("f", *RIGHT) + call("f", *RIGHT))


@pytest.mark.parametrize("kind", TOOL_KINDS)
def test_a_single_call(kind: ConstraintKind) -> None:
    constraint = OutputConstraint(kind, json.dumps([tool("f")]), has_one_call=True)
    grammar = large().compile(constraint)
    begin, end = f"<{DSML} calls>\n", f"</{DSML} calls>"
    opening = begin if kind is ConstraintKind.TOOL_CALL else ""
    assert accepts(large(), grammar, f"{opening}{call('f')}{end}")
    assert not accepts(large(), grammar, f"{opening}{call('f')}{call('f')}{end}")
    assert not accepts(large(), grammar, f"{opening}{call('f')}{end}{begin}{call('f')}{end}")
    wrong = [
        (0, parameter("city", "3", is_raw=False)),
        (0, parameter("town", "Paris", is_raw=True)),
        (1, parameter("days", "3.5", is_raw=False)),
        (1, parameter("days", "3", is_raw=True)),
        (2, parameter("unit", "K", is_raw=True)),
        (3, parameter("where", '{"x": "1"}', is_raw=False)),
        (3, parameter("where", '{"x": 1, "y": 2}', is_raw=False)),
    ]
    for index, line in wrong:
        lines = [*RIGHT[:index], line, *RIGHT[index + 1 :]]
        assert not is_legal(large(), [STRICT], call("f", *lines)), line
    for index in range(4):
        assert not is_legal(large(), [STRICT], call("f", *RIGHT[:index], *RIGHT[index + 1 :]))
    assert not is_legal(large(), [STRICT], call("g", *RIGHT))
    assert not is_legal(large(), [STRICT], "")


def test_only_the_tools_given_may_be_called() -> None:
    none = schema({}, additionalProperties=False)
    tools = [tool("a", none), tool("b", none)]
    assert is_legal(large(), tools, call("b") + call("a"))
    assert not is_legal(large(), tools, call("c"))
    assert not is_legal(large(), tools, call("a", parameter("x", "1", is_raw=False)))


def test_optional_parameters() -> None:
    tools = [tool("f", schema({"a": {"type": "string"}, "b": {"type": ["string", "null"]}}))]
    a = parameter("a", "", is_raw=True)
    for lines in ((), (a,), (a, parameter("b", "x", is_raw=True))):
        assert is_legal(large(), tools, call("f", *lines)), lines
    assert is_legal(large(), tools, call("f", parameter("b", "null", is_raw=False)))
    assert not is_legal(large(), tools, call("f", parameter("b", "3", is_raw=False)))
    assert not is_legal(large(), tools, call("f", a, a))


def test_a_tool_without_declared_parameters_takes_any() -> None:
    lines = [parameter("q", "[1, 2]", is_raw=False), parameter("r", "x", is_raw=True)]
    for parameters in (None, {"type": "object"}):
        assert is_legal(large(), [tool("f", parameters)], call("f", *lines))
        assert is_legal(large(), [tool("f", parameters)], call("f"))
        broken = parameter("q", "[1, 2", is_raw=False)
        assert not is_legal(large(), [tool("f", parameters)], call("f", broken))


def test_raw_strings_keep_length_and_pattern() -> None:
    cases = [
        ({"type": "string", "maxLength": 3}, ["", "abc"], ["abcd"]),
        ({"type": "string", "minLength": 2}, ["ab", "ab\nc"], ["a"]),
        ({"type": "string", "pattern": "^[a-c]+$"}, ["abc"], ["abd", ""]),
        ({"type": "string", "pattern": "b+"}, ["abbc", "b"], ["ac"]),
        ({"const": "x/y"}, ["x/y"], ["x"]),
    ]
    for value, inside, outside in cases:
        tools = [tool("f", schema({"s": value}, "s"), strict=True)]
        for text in inside:
            assert is_legal(large(), tools, call("f", parameter("s", text, is_raw=True))), text
        for text in outside:
            assert not is_legal(large(), tools, call("f", parameter("s", text, is_raw=True))), text


def test_only_strict_tools_are_refused_for_their_schema() -> None:
    odd = schema({"x": {"type": "integer", "not": {"const": 3}}}, "x")
    assert is_legal(large(), [tool("f", odd)], call("f", parameter("x", "4", is_raw=False)))
    broken = tool("f", schema({"x": {"type": "integr"}}, "x"))
    assert is_legal(large(), [broken], call("f", parameter("x", "4", is_raw=False)))
    assert is_legal(large(), [broken], call("f", parameter("y", "4", is_raw=True)))
    assert not is_legal(large(), [broken], call("g"))
    constraint = OutputConstraint(
        ConstraintKind.TOOL_CALL, json.dumps([tool("f", odd, strict=True)]), param="tools"
    )
    with pytest.raises(ValueError, match="not"):
        large().compile(constraint)


def one_value(value: Any, more: dict[str, Any] | None = None, *, strict: bool = True) -> list[Any]:
    return [tool("f", schema({"x": value}, "x", **(more or {})), strict=strict)]


def test_each_choice_of_a_parameter_keeps_its_own_limits() -> None:
    short = {"anyOf": [{"type": "string", "maxLength": 2}, {"type": "null"}]}
    number = {"anyOf": [{"type": "integer"}, {"type": "null"}]}
    words = {"anyOf": [{"$ref": "#/$defs/w"}, {"anyOf": [{"const": "b"}, {"type": "null"}]}]}
    definitions = {"$defs": {"w": {"type": "string", "enum": ["a"]}}}
    typed = {"type": "string", "anyOf": [{"pattern": "^a+$"}, {"pattern": "^b+$"}]}
    cases = [
        (short, "ab", True, True), (short, "abc", True, False), (short, "null", False, True),
        (number, "3", False, True), (number, "three", True, False),
        (words, "a", True, True), (words, "b", True, True), (words, "c", True, False),
        (words, "null", False, True),
        (typed, "aa", True, True), (typed, "b", True, True), (typed, "ab", True, False),
    ]  # fmt: skip
    for strict in (True, False):
        for value, text, is_raw, expected in cases:
            tools = one_value(value, definitions, strict=strict)
            calls = call("f", parameter("x", text, is_raw=is_raw))
            assert is_legal(large(), tools, calls) == expected, (value, text)


def test_raw_strings_keep_their_format() -> None:
    cases = [
        ("email", ["a.b+c@d-e.org"], ["a", "a@b", "a b@c.d"]),
        ("hostname", ["a", "a-1.example"], ["-a", "a..b", "a_b"]),
        ("ipv4", ["0.10.199.255"], ["1.2.3", "1.2.3.256", "01.2.3.4"]),
        ("ipv6", ["::", "::1", "1::", "1:2::7:8", "1:2:3:4:5:6:7:8", "1:2:3:4:5:6:7::"],
         ["1", "1:2:3:4:5:6:7", "1::2::3", "1:2:3:4:5:6:7:8:9", "12345::", ":1"]),
        ("uuid", ["01234567-89ab-CDEF-0123-456789abcdef"], ["01234567"]),
    ]  # fmt: skip
    for name, inside, outside in cases:
        tools = one_value({"type": "string", "format": name})
        for text in (*inside, *outside):
            calls = call("f", parameter("x", text, is_raw=True))
            assert is_legal(large(), tools, calls) == (text in inside), text


def test_a_strict_tool_is_refused_for_what_it_cannot_be_held_to() -> None:
    definitions = {"n": {"anyOf": [{"$ref": "#/$defs/n"}, {"$ref": "#/$defs/n"}]}}
    cases = [
        (one_value({"type": "string", "not": {"const": "x"}}), "not, which"),
        (one_value({"type": "string", "format": "date"}), "format is 'date'"),
        (one_value({"type": "string", "format": "uuid", "maxLength": 3}), "together"),
        (one_value({"type": "string", "maxLength": 2, "anyOf": [{"maxLength": 3}]}), "beside"),
        (one_value({"oneOf": [{"type": "string"}, {"const": "x"}]}), "oneOf"),
        (one_value({"$ref": "#/$defs/n"}, {"$defs": definitions}), "more than"),
        (one_value({"type": "string"}, {"minProperties": 2}), "minProperties"),
    ]
    for tools, detail in cases:
        with pytest.raises(ToolGrammarError, match=detail):
            tool_calls_grammar(json.dumps(tools), 5, is_opened=True)
        tools[0]["function"]["strict"] = False
        assert not is_legal(large(), tools, call("g")), detail


def test_references_of_a_tool_that_is_not_strict_may_lead_nowhere() -> None:
    tools = one_value({"$ref": "https://example.org/x"}, strict=False)
    assert is_legal(large(), tools, call("f", parameter("x", "y", is_raw=True)))


@pytest.mark.parametrize(
    ("parameters", "detail"),
    [
        (schema({}, "x"), "requires"),
        (schema({"x": {"$ref": "#/$defs/y"}}, "x"), "leads nowhere"),
        (schema({"x": {"$ref": "#/properties/x"}}, "x"), "back to itself"),
        (schema({"x": {"type": "string", "pattern": "a", "maxLength": 2}}, "x"), "together"),
    ],
)
def test_definitions_of_no_use(parameters: Any, detail: str) -> None:
    text = json.dumps([tool("f", parameters, strict=True)])
    with pytest.raises(ToolGrammarError, match=detail):
        tool_calls_grammar(text, 5, is_opened=True)


def test_the_renderer_writes_calls_that_the_grammar_allows() -> None:
    place = {"x": 1.5}
    arguments = {"city": 'Par"is', "days": 3, "unit": "C", "where": place}
    calls = [recipe.ToolCall("1", "f", json.dumps(arguments)), recipe.ToolCall("2", "n", "{}")]
    messages = [
        recipe.UserMessage("-"),
        recipe.AssistantMessage("Well.", None, calls),
        recipe.ToolMessage("-", "1"),
        recipe.ToolMessage("-", "2"),
    ]
    conversation = recipe.Conversation(messages, thinking_mode=False)
    prompt = recipe.DeepseekV41Encoding().render_conversation(conversation).prompt
    written = prompt[prompt.index("Well.") : prompt.index("<｜end▁of▁sentence｜>")]
    tools = [STRICT, tool("n", schema({}, additionalProperties=False))]
    grammar = large().compile(OutputConstraint(ConstraintKind.TOOL_CALL, json.dumps(tools)))
    assert accepts(large(), grammar, written), written
