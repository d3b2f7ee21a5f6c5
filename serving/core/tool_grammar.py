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

A tool with `strict` is held to its schema, whatever that takes, or refused. Each of the choices of
an `anyOf` that may be a string is a raw value of its own. Of any other tool the
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

FORMS_MAX = 256
"""Choices of one parameter, those within others counted too."""

_UNIONS = ("anyOf", "oneOf")
_NOT_OF_STRINGS = ("allOf", "not", "if", "$dynamicRef")
"""Keywords that raw strings are not held to."""

_NOT_OF_PARAMETERS = (
    *_UNIONS,
    *_NOT_OF_STRINGS,
    "$ref",
    "dependentRequired",
    "dependentSchemas",
    "maxProperties",
    "minProperties",
    "patternProperties",
    "propertyNames",
)
"""Keywords that the parameters of a call as a whole are not held to."""

_ANNOTATIONS = {"title", "description", "default", "examples", "deprecated", "$comment"}

_BYTE = "(25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
_HEX = "[0-9a-fA-F]{1,4}"
_LABEL = "[a-zA-Z0-9]([a-zA-Z0-9-]{0,61}[a-zA-Z0-9])?"
_FORMATS = {
    "email": rf"[a-zA-Z0-9_+-]+(\.[a-zA-Z0-9_+-]+)*@{_LABEL}(\.{_LABEL})+",
    "hostname": rf"{_LABEL}(\.{_LABEL})*",
    "ipv4": rf"{_BYTE}(\.{_BYTE}){{3}}",
    # Eight groups, or fewer around one gap: none before it, or up to seven.
    "ipv6": "|".join(
        [
            f"{_HEX}(:{_HEX}){{7}}",
            f"::({_HEX}(:{_HEX}){{0,6}})?",
            *(f"({_HEX}:){{{n}}}(:{_HEX}){{1,{7 - n}}}" for n in range(1, 7)),
            f"({_HEX}:){{1,7}}:",
        ]
    ),
    "uuid": "[0-9a-fA-F]{8}(-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}",
}
"""What raw strings of each format are: those that strict tools may ask for."""

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

    None if one of them is strict, if there is nothing to leave out, or if it is no list.
    """
    try:
        sent = json.loads(tools_json)
    except ValueError:
        return None
    tools = [_object(tool) for tool in cast(list[Any], sent)] if isinstance(sent, list) else []
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
        unheld = [key for key in _NOT_OF_PARAMETERS if key in parameters]
        if is_strict and unheld:
            raise ToolGrammarError(
                f"the parameters of tool {tool['name']!r} have {', '.join(unheld)}, which cannot "
                "be held to; leave that out, or strict"
            )
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
        forms = _forms(schema, root, is_strict)
        raw = [
            self._raw_value(f"{name}_RAW_{number}".upper(), form, is_strict)
            for number, form in enumerate(forms)
            if _may_be(form, "string")
        ]
        ways: list[str] = []
        if raw:
            ways.append(f"{lark_literal(_head(key, is_raw=True))} ({' | '.join(raw)})")
        if not forms or any(_may_be(form, "other") for form in forms):
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
        if is_strict:
            _check_raw(schema)
        pattern = _ANY_TEXT
        if schema.get("pattern"):
            pattern = _whole(schema["pattern"])
        elif schema.get("format") in _FORMATS:
            pattern = f"({_FORMATS[schema['format']]})"
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
        beside = {key: value for key, value in resolved.items() if key != "$ref"}
        schema = _object(found) | beside
    raise ToolGrammarError("a parameter's $ref leads back to itself")


def _forms(schema: Any, root: _Schema, is_strict: bool) -> list[_Schema]:
    """What a value of a schema may be: without references, each choice of an `anyOf` by itself."""
    forms: list[_Schema] = []
    waiting: list[tuple[Any, _Schema]] = [(schema, {})]
    names: set[str] = set()
    # References make few choices into many, or lead back to themselves.
    for _ in range(FORMS_MAX):
        if not waiting:
            break
        value, beside = waiting.pop(0)
        if value is False:
            continue
        resolved = _resolve(value, root)
        both = (beside.keys() & resolved.keys()) - _ANNOTATIONS
        if is_strict and any(beside[key] != resolved[key] for key in both):
            raise ToolGrammarError(f"{', '.join(sorted(both))} in a choice and beside it")
        form = {**beside, **resolved}
        name = next((name for name in _UNIONS if isinstance(resolved.get(name), list)), None)
        if name is None:
            forms.append(form)
            continue
        names.add(name)
        waiting[:0] = [(choice, form) for choice in form.pop(name)]
    if waiting:
        raise ToolGrammarError(f"a parameter may be more than {FORMS_MAX} things")
    if is_strict and "oneOf" in names and sum(_may_be(form, "string") for form in forms) > 1:
        raise ToolGrammarError("several strings in oneOf; expected anyOf")
    return forms


def _check_raw(schema: _Schema) -> None:
    """Raises ToolGrammarError for a raw string that could not be held to its schema."""
    limits = [name for name in ("pattern", "format") if schema.get(name)]
    limits += ["minLength or maxLength"] * _has_length(schema)
    if len(limits) > 1:
        raise ToolGrammarError(f"{' together with '.join(limits)}")
    if schema.get("format") and schema["format"] not in _FORMATS:
        raise ToolGrammarError(
            f"format is {schema['format']!r}; expected one of {', '.join(_FORMATS)}"
        )
    unheld = [name for name in (*_NOT_OF_STRINGS, *_UNIONS) if name in schema]
    if unheld:
        raise ToolGrammarError(f"a string with {', '.join(unheld)}, which cannot be held to")


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
