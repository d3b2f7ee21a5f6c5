"""The text of Lark grammars and JSON schemas: literals, and how deep a definition may lead.

The grammar compiler follows names recursively, with about 3 KiB of stack a step, and an overflow
ends the process. So the length of the longest chain that a constraint could form is bounded before
the compiler sees it. A *level* is one step of such a chain:

- in Lark, a definition or a bracket;
- in a JSON schema, an object or list inside another, a `$ref` leading to all levels of its target.

The bound is on what a chain could be at most, since the longest one is costly to find.
"""

import json
import re
from typing import Any, cast

LEVELS_MAX = 1000
"""Levels of one constraint. In 8 MiB of stack every form of chain survives 1,500."""

DEFINITIONS_MAX = 1000
"""Rules of a grammar in GBNF: the time to translate them grows with their square."""

# At each place one alternative at most fits: they begin with different letters.
_LEXEME = re.compile(
    r"""
    (?P<skip> (?:\#|//)[^\n]* | "(?:\\.|[^"\\\n])*" | /(?:\\.|[^/\\])+/ )
    | (?P<special> <[^<>\s]+> )
    | (?P<json> %(?:json|regex|llguidance) )
    | (?P<definition> : )
    | (?P<bracket> [(\[{] )
    """,
    re.VERBOSE,
)
_BLANKS = re.compile(r"[ \t\r\n]*")
_DECODER = json.JSONDecoder()


class ConstraintTextError(ValueError):
    """A grammar or schema that is refused before it is compiled."""


def lark_literal(text: str) -> str:
    """A text as a literal of Lark, which takes JSON's escapes but no U+007F as it is."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def check_gbnf(text: str) -> None:
    """Raises ConstraintTextError: too many rules to be translated."""
    num_rules = text.count("::=")
    if num_rules > DEFINITIONS_MAX:
        raise ConstraintTextError(
            f"it has {num_rules} rules; expected at most {DEFINITIONS_MAX}: join some of them"
        )


def check_lark(text: str) -> None:
    """Refuse a grammar that leads too deep, or that names tokens instead of text.

    Raises:
        ConstraintTextError: as said.
        json.JSONDecodeError: an inline schema is no JSON.
    """
    num_definitions = num_brackets = num_schema_levels = position = 0
    while (lexeme := _LEXEME.search(text, position)) is not None:
        position = lexeme.end()
        match lexeme.lastgroup:
            case "special":
                raise ConstraintTextError(
                    f"it refers to the token {lexeme[0][:40]}; expected text only: special tokens "
                    "and token ids are never part of an answer's text"
                )
            case "json":
                blanks = _BLANKS.match(text, position)
                assert blanks is not None
                value, position = _DECODER.raw_decode(text, blanks.end())
                if lexeme[0] == "%json":
                    num_schema_levels += schema_levels(value)
            case "definition":
                num_definitions += 1
            case "bracket":
                num_brackets += 1
            case _:
                pass
    num_levels = num_definitions + num_brackets + num_schema_levels
    if num_levels > LEVELS_MAX:
        raise ConstraintTextError(
            f"it has {num_definitions} definitions, {num_brackets} brackets and "
            f"{num_schema_levels} levels of schemas; expected at most {LEVELS_MAX} together: "
            "join some of them"
        )


def check_schema(schema: Any) -> None:
    """Raises ConstraintTextError: the schema leads too deep."""
    num_levels = schema_levels(schema)
    if num_levels > LEVELS_MAX:
        raise ConstraintTextError(
            f"it and the definitions that it refers to have {num_levels} nested levels together; "
            f"expected at most {LEVELS_MAX}: refer to fewer definitions, or flatter ones"
        )


def schema_levels(schema: Any) -> int:
    """The most levels that a chain through a JSON schema can have."""
    whole = _depth(schema)
    references = _references(schema)
    # With a base of its own, a part of the schema may refer to anything.
    is_plain = not any(key in references for key in ("$id", "id"))
    num_levels, depths = whole, {id(schema): whole}
    for reference in references.get("$ref", set()) | references.get("$dynamicRef", set()):
        target = _target(schema, reference) if is_plain else None
        target = schema if target is None else target
        # Many spellings may lead to one target, and that may be large.
        if id(target) not in depths:
            depths[id(target)] = _depth(target)
        num_levels += depths[id(target)]
    return num_levels


def _depth(value: Any) -> int:
    """Objects and lists inside one another."""
    depth, level = 0, [value]
    while any(isinstance(part, dict | list) for part in level):
        depth += 1
        level = [child for part in level for child in _children(part)]
    return depth


def _references(schema: Any) -> dict[str, set[str]]:
    """The texts under each key that refers to schemas or says where they are."""
    found: dict[str, set[str]] = {}
    waiting = [schema]
    while waiting:
        value = waiting.pop()
        if isinstance(value, dict):
            for key in ("$ref", "$dynamicRef", "$id", "id"):
                text = cast(dict[str, Any], value).get(key)
                if isinstance(text, str):
                    found.setdefault(key, set()).add(text)
        waiting += _children(value)
    return found


def _target(schema: Any, reference: str) -> Any:
    """What a local reference leads to, None if it is of another form or leads nowhere."""
    if not reference.startswith("#/") or "%" in reference:
        return None
    found = schema
    for part in reference[2:].split("/"):
        name = part.replace("~1", "/").replace("~0", "~")
        if isinstance(found, list) and name.isdecimal() and int(name) < len(cast(Any, found)):
            found = cast(list[Any], found)[int(name)]
        elif isinstance(found, dict):
            found = cast(dict[str, Any], found).get(name)
        else:
            return None
    return found


def _children(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return list(cast(dict[str, Any], value).values())
    return cast(list[Any], value) if isinstance(value, list) else []
