"""Tool definitions -> the grammar of the calls that the model may make of them.

The model writes a call as marked-up text, `D` standing for its one DSML token:

    <D calls>
    <D invoke name="f">
    <D parameter name="city" string="true">Paris</D parameter>
    <D parameter name="days" string="false">3</D parameter>
    </D invoke>
    </D calls>

A value that is marked as a string stands there raw, without quotes or escapes; any other is JSON.
Parameters come in the order of the schema, the required ones all of them.

A tool with `strict` is held to its schema, whatever that takes, or refused. Of any other tool the
keywords that cannot be enforced are passed over, and in the end the whole schema, because its
client asked for no guarantee.
"""

import json
import re
from collections.abc import Mapping
from typing import Any, cast

from llguidance import regex_to_lark

from serving.core.lark_text import ConstraintTextError, check_schema, lark_literal

WHITESPACE_PATTERN = r"([ ]|\n[ \t]{0,40})?"
"""White space between the parts of JSON: bounded, since a model may write blanks for ever."""

_ANY_TEXT = r"(.|\n)*"
_Schema = Mapping[str, Any]


class ToolGrammarError(ValueError):
    """A tool definition that cannot be turned into a grammar."""


def tool_calls_grammar(
    tools_json: str, dsml_token_id: int, *, is_opened: bool, has_one_call: bool = False
) -> str:
    """The Lark grammar of one block of calls.

    Args:
        tools_json: JSON list of function tools, as Chat Completions takes them.
        dsml_token_id: the token `D`.
        is_opened: the block's first line is in the prompt already; otherwise the grammar begins
            right after the first `D`.
        has_one_call: the block holds one call; otherwise one or more.

    Raises:
        ToolGrammarError: a definition has no usable form.
    """
    tools: list[_Schema] = [_object(tool)["function"] for tool in json.loads(tools_json)]
    if not tools:
        raise ToolGrammarError("there are no tools; expected at least one")
    rules: dict[str, str] = {}
    writer = _Writer(f"<[{dsml_token_id}]>", rules)
    invokes = [writer.invoke(index, tool) for index, tool in enumerate(tools)]
    opening = "" if is_opened else '" calls>\\n" '
    calls = "invoke" if has_one_call else "invoke+"
    rules["start"] = f'{opening}{calls} "</" {writer.dsml} " calls>"'
    rules["invoke"] = " | ".join(invokes)
    lines = [f"{name}: {body}" for name, body in rules.items()]
    return "%llguidance {}\n" + "\n".join(lines) + "\n"


def without_schemas(tools_json: str) -> str | None:
    """The tools without their parameters, any of which are allowed then.

    None if one of them is strict, or if there is nothing to leave out.
    """
    tools = [_object(tool) for tool in json.loads(tools_json)]
    functions = [_object(tool.get("function")) for tool in tools]
    if any(function.get("strict") for function in functions):
        return None
    if not any(function.get("parameters") for function in functions):
        return None
    return json.dumps([{"function": function | {"parameters": None}} for function in functions])


def with_bounded_whitespace(schema: Any, *, lenient: bool = False) -> Any:
    """A JSON schema with the options of the grammar compiler written into it."""
    if isinstance(schema, bool):
        schema = {} if schema else {"enum": []}  # These are schemas too: anything, and nothing.
    options: dict[str, Any] = {"whitespace_pattern": WHITESPACE_PATTERN}
    if lenient:
        options["lenient"] = True
    return _object(schema) | {"x-guidance": options}


class _Writer:
    """Writes rules and terminals into `rules`, each under a name of its own."""

    def __init__(self, dsml: str, rules: dict[str, str]) -> None:
        self.dsml = dsml
        self._rules = rules

    def invoke(self, index: int, tool: _Schema) -> str:
        """The rule of a call of one tool; returns its name."""
        name = f"invoke_{index}"
        is_strict = bool(tool.get("strict"))
        parameters = _object(tool.get("parameters"))
        _check_parameters(tool["name"], parameters)
        properties = _object(parameters.get("properties"))
        required: set[str] = set(cast(list[str], parameters.get("required") or []))
        unknown = required - properties.keys()
        if is_strict and unknown:
            raise ToolGrammarError(
                f"tool {tool['name']!r} requires {sorted(unknown)}, which are not among its "
                "properties"
            )
        if properties:
            parts = [
                self._parameter(f"{name}_{number}", key, schema, parameters, is_strict)
                + ("" if key in required else "?")
                for number, (key, schema) in enumerate(properties.items())
            ]
        elif parameters.get("additionalProperties", not is_strict):
            parts = [self._free_parameters(name)]
        else:
            parts = []
        # A call without parameters has an empty line in their place.
        body = " ".join([*parts, '"\\n"?'] if required.isdisjoint(properties) else parts)
        opening = lark_literal(f' invoke name="{tool["name"]}">\n')
        self._rules[name] = f'"<" {self.dsml} {opening} {body} "</" {self.dsml} " invoke>\\n"'
        return name

    def _parameter(self, name: str, key: str, schema: Any, root: _Schema, is_strict: bool) -> str:
        """The rule of one parameter line, its line end included; returns its name."""
        definitions = {name: root[name] for name in ("$defs", "definitions") if name in root}
        resolved = _resolve(schema, root)
        ways: list[str] = []
        if _may_be(resolved, "string"):
            raw = self._raw_value(f"{name}_RAW".upper(), resolved, is_strict)
            ways.append(f"{lark_literal(_head(key, is_raw=True))} {raw}")
        if _may_be(resolved, "other"):
            whole = schema if isinstance(schema, bool) else definitions | _object(schema)
            bounded = with_bounded_whitespace(whole, lenient=not is_strict)
            value = f"%json {json.dumps(bounded)}"
            ways.append(f'{lark_literal(_head(key, is_raw=False))} {value} "</"')
        self._rules[f"{name}_value"] = " | ".join(ways)
        self._rules[name] = f'"<" {self.dsml} {name}_value {self.dsml} " parameter>\\n"'
        return name

    def _raw_value(self, name: str, schema: _Schema, is_strict: bool) -> str:
        """A raw string with the `</` behind it, as a terminal.

        The end belongs to the terminal because a terminal takes all the text it can: it stops
        only at the DSML token, which is no text.
        """
        values = _choices(schema)
        if values is not None:
            return "(" + " | ".join(lark_literal(f"{value}</") for value in values) + ")"
        if is_strict and schema.get("pattern") and _has_length(schema):
            raise ToolGrammarError("pattern together with minLength or maxLength")
        pattern = _ANY_TEXT
        if schema.get("pattern"):
            pattern = _whole(schema["pattern"])
        elif _has_length(schema):
            low, high = schema.get("minLength", 0), schema.get("maxLength", "")
            pattern = rf"(.|\n){{{low},{high}}}"
        self._rules[name] = f"/{regex_to_lark(pattern, 'dw')}<\\//"
        return name

    def _free_parameters(self, name: str) -> str:
        """Parameters of any name and value."""
        key = name.upper()
        self._rules[f"{key}_NAME"] = r'/ parameter name="[^"<>\n]{1,128}" string="/'
        self._rules[f"{key}_RAW"] = r"/true\">(.|\n)*<\//"
        value = f"%json {json.dumps(with_bounded_whitespace({}))}"
        self._rules[f"{name}_value"] = f'{key}_RAW | "false\\">" {value} "</"'
        line = f'"<" {self.dsml} {key}_NAME {name}_value {self.dsml} " parameter>\\n"'
        self._rules[f"{name}_line"] = line
        return f"{name}_line*"


def _object(value: Any) -> dict[str, Any]:
    """A JSON value as an object, an empty one if it is none."""
    return cast(dict[str, Any], value) if isinstance(value, dict) else {}


def _check_parameters(name: str, parameters: _Schema) -> None:
    try:
        check_schema(parameters)
    except ConstraintTextError as error:
        raise ToolGrammarError(f"the parameters of tool {name!r}: {error}") from None


def _head(key: str, *, is_raw: bool) -> str:
    return f' parameter name="{key}" string="{"true" if is_raw else "false"}">'


def _resolve(schema: Any, root: _Schema) -> _Schema:
    """The schema that a chain of local references leads to."""
    for _ in range(16):
        resolved = _object(schema)
        reference: object = resolved.get("$ref")
        if not isinstance(reference, str):
            return resolved
        found: Any = root
        for part in reference.removeprefix("#/").split("/"):
            found = _object(found).get(part)
        if found is None:
            raise ToolGrammarError(f"{reference} leads nowhere; expected #/$defs/NAME")
        schema = found
    raise ToolGrammarError("a parameter's $ref leads back to itself")


def _may_be(schema: _Schema, what: str) -> bool:
    """Whether a value of the schema may be a string (`string`), or anything else (`other`)."""
    kinds = schema.get("type")
    values = _enumerated(schema)
    if values is not None:
        return any(isinstance(value, str) == (what == "string") for value in values)
    if kinds is None:
        return True
    kinds = [kinds] if isinstance(kinds, str) else kinds
    return any((kind == "string") == (what == "string") for kind in kinds)


def _enumerated(schema: _Schema) -> list[Any] | None:
    if "const" in schema:
        return [schema["const"]]
    values: Any = schema.get("enum")
    return cast(list[Any], values) if isinstance(values, list) else None


def _choices(schema: _Schema) -> list[str] | None:
    """The strings that an enumeration allows, None if the schema has none."""
    values = _enumerated(schema)
    return None if values is None else [value for value in values if isinstance(value, str)]


def _has_length(schema: _Schema) -> bool:
    return "minLength" in schema or "maxLength" in schema


def _whole(pattern: str) -> str:
    """A pattern that may match anywhere -> one for the whole string."""
    begins = pattern.startswith("^")
    ends = re.search(r"(?<!\\)(\\\\)*\$$", pattern) is not None
    core = pattern[1 if begins else 0 : -1 if ends else None]
    return f"{'' if begins else _ANY_TEXT}({core}){'' if ends else _ANY_TEXT}"
