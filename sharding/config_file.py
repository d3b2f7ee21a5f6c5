"""Strict TOML into frozen dataclasses: every key known, every type right, every error named.

A configuration is a frozen dataclass whose fields are the allowed keys; a nested dataclass is a
table. Nothing is converted silently: an unknown key, a missing key and a value of a wrong type
each raise `ConfigError` with the file, the dotted key, what was given and what was allowed.

Understood field types: bool, int, float (an integer is accepted), str, `Literal`, `Enum` (by
value), `tuple[T, ...]` and `tuple[A, B]` (a TOML array), `Mapping[str, T]` (a table with free
keys), `T | None` (the key may be left out when the field has a default), unions of these, and
dataclasses. A field with a default may be left out. Checks that span fields belong into the
dataclass's own `__post_init__`; a ValueError from there is reported with the table's name.
"""

import dataclasses
import difflib
import enum
import tomllib
import types
import typing
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, TypeGuard, cast

_SCALARS: dict[object, str] = {
    bool: "true or false",
    int: "an integer",
    float: "a number",
    str: "text",
}


class ConfigError(ValueError):
    """A configuration that cannot be used. The message is one line, made for a person."""


def check(is_good: bool, name: str, received: object, expected: str) -> None:
    """For `__post_init__` of option classes: raise ValueError unless `is_good`."""
    if not is_good:
        raise ValueError(f"{name}: received {received}; expected {expected}")


def load[T](path: str | Path, cls: type[T]) -> T:
    """Reads the TOML file `path` into the dataclass `cls`.

    Raises:
        ConfigError: the file cannot be read, is not TOML, or does not fit `cls`.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such file; expected a TOML configuration") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read: {error}") from None
    return parse(text, cls, source=str(path))


def parse[T](text: str, cls: type[T], *, source: str) -> T:
    """Reads TOML text into the dataclass `cls`; `source` names the text in errors.

    Raises:
        ConfigError: the text is not TOML or does not fit `cls`.
    """
    try:
        values = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{source}: not valid TOML: {error}") from None
    return from_mapping(values, cls, source=source)


def from_mapping[T](values: Mapping[str, Any], cls: type[T], *, source: str) -> T:
    """Checks plain values, as TOML gives them, against the dataclass `cls` and builds it.

    Raises:
        ConfigError: an unknown or missing key, or a wrong type or value.
    """
    return cast(T, _build(values, cls, _Place(source, "")))


def override[T](config: T, changes: Mapping[str, Any], *, source: str = "override") -> T:
    """A copy of the dataclass `config` with the values of dotted keys replaced.

    Keys are like `server.port`; values are as TOML gives them and are checked like a file.

    Raises:
        ConfigError: no such key, or a wrong type or value.
    """
    values = to_mapping(config)
    for dotted, value in changes.items():
        *parents, last = dotted.split(".")
        table = values
        for parent in parents:
            below = table.setdefault(parent, {})
            if not isinstance(below, dict):
                raise ConfigError(f"{source}: {dotted}: {parent} is a value, not a table of keys")
            table = cast(dict[str, Any], below)
        table[last] = value
    return from_mapping(values, type(config), source=source)


def override_from_text[T](config: T, assignments: Iterable[str], *, source: str = "--set") -> T:
    """A copy of `config` changed by texts such as `server.port=8001`, as a command line has them.

    The right side is a TOML value. Where the key wants text, quotes may be left out, so
    `model.path=/some/folder` and `model.name=7` both mean text.

    Raises:
        ConfigError: no `=`, no such key, or a wrong type or value.
    """
    changes: dict[str, Any] = {}
    for assignment in assignments:
        key, equals, text = assignment.partition("=")
        key = key.strip()
        if not equals or not key:
            raise ConfigError(
                f"{source}: received {assignment!r}; expected key=value, for example server.port=1"
            )
        changes[key] = _value_of_text(text.strip(), _hint_of_key(type(config), key, source))
    return override(config, changes, source=source)


def to_mapping(config: object) -> dict[str, Any]:
    """The plain values of a configuration, as TOML would hold them; None fields are left out."""
    assert dataclasses.is_dataclass(config) and not isinstance(config, type), config
    return {
        field.name: _plain(value)
        for field in dataclasses.fields(config)
        if (value := getattr(config, field.name)) is not None
    }


@dataclasses.dataclass(frozen=True)
class _Place:
    """Where in a file we are: for messages."""

    source: str
    key: str

    def below(self, name: str) -> "_Place":
        return _Place(self.source, f"{self.key}.{name}" if self.key else name)

    def error(self, message: str) -> ConfigError:
        where = f"{self.source}: {self.key}" if self.key else self.source
        return ConfigError(f"{where}: {message}")


def _build(values: object, cls: type, place: _Place) -> object:
    if not isinstance(values, Mapping):
        raise place.error(
            f"received {_shown(values)}; expected a table with keys {_keys_text(cls)}"
        )
    given = cast(Mapping[str, Any], values)
    hints = typing.get_type_hints(cls)
    fields = {field.name: field for field in dataclasses.fields(cls) if field.init}
    for name in given:
        if name not in fields:
            raise _unknown_key(name, fields, place)
    arguments: dict[str, Any] = {}
    for name, field in fields.items():
        if name in given:
            arguments[name] = _convert(given[name], hints[name], place.below(name))
        elif field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
            raise place.below(name).error(f"missing; expected {_hint_text(hints[name])}")
    try:
        return cls(**arguments)
    except ConfigError:
        raise
    except ValueError as error:
        raise place.error(str(error)) from None


def _unknown_key(name: str, allowed: Iterable[str], place: _Place) -> ConfigError:
    names = sorted(allowed)
    near = difflib.get_close_matches(name, names, n=1)
    meant = f" (did you mean {near[0]}?)" if near else ""
    return place.below(name).error(
        f"unknown key{meant}; allowed here: {', '.join(names) or 'none'}"
    )


def _convert(value: object, hint: object, place: _Place) -> object:
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return _convert_union(value, hint, arguments, place)
    if origin is tuple:
        return _convert_tuple(value, hint, arguments, place)
    if isinstance(origin, type) and issubclass(origin, Mapping):
        if not isinstance(value, Mapping):
            raise place.error(f"received {_shown(value)}; expected {_hint_text(hint)}")
        table = cast(Mapping[str, Any], value)
        return {key: _convert(item, arguments[1], place.below(key)) for key, item in table.items()}
    if dataclasses.is_dataclass(hint):
        return _build(value, cast(type, hint), place)
    if origin is typing.Literal or _is_enum(hint):
        return _convert_choice(value, hint, place)
    if hint not in _SCALARS:
        raise TypeError(f"{place.key}: fields of type {hint} cannot be read from a file")
    if hint is float and type(value) is int:
        return float(value)
    # `type is` rather than isinstance: True would pass for the integer 1.
    if type(value) is not hint:
        raise place.error(f"received {_shown(value)}; expected {_hint_text(hint)}")
    return value


def _convert_choice(value: object, hint: object, place: _Place) -> object:
    members: dict[Any, object]
    if _is_enum(hint):
        members = {member.value: member for member in hint}
    else:
        members = {item: item for item in typing.get_args(hint)}
    for key, member in members.items():
        if type(key) is type(value) and key == value:
            return member
    raise place.error(f"received {_shown(value)}; expected {_hint_text(hint)}")


def _convert_union(value: object, hint: object, options: tuple[Any, ...], place: _Place) -> object:
    options = tuple(option for option in options if option is not types.NoneType)
    if len(options) == 1:
        return _convert(value, options[0], place)
    for option in options:
        try:
            return _convert(value, option, place)
        except ConfigError:
            continue
    raise place.error(f"received {_shown(value)}; expected {_hint_text(hint)}")


def _convert_tuple(value: object, hint: object, items: tuple[Any, ...], place: _Place) -> object:
    if not isinstance(value, list | tuple):
        raise place.error(f"received {_shown(value)}; expected {_hint_text(hint)}")
    given = cast(list[object], value)
    if len(items) == 2 and items[1] is Ellipsis:
        items = (items[0],) * len(given)
    if len(given) != len(items):
        raise place.error(f"received {len(given)} items; expected {len(items)}: {_hint_text(hint)}")
    return tuple(
        _convert(item, kind, place.below(str(index)))
        for index, (item, kind) in enumerate(zip(given, items, strict=True))
    )


def _hint_of_key(cls: type, dotted: str, source: str) -> object:
    """The annotation of a dotted key; anything below a free-keyed table has its item type."""
    hint: object = cls
    place = _Place(source, "")
    for name in dotted.split("."):
        if typing.get_origin(hint) in (typing.Union, types.UnionType):
            options = [option for option in typing.get_args(hint) if option is not types.NoneType]
            hint = options[0] if len(options) == 1 else None
        origin = typing.get_origin(hint)
        if isinstance(origin, type) and issubclass(origin, Mapping):
            hint = typing.get_args(hint)[1]
        elif dataclasses.is_dataclass(hint):
            hints = typing.get_type_hints(hint)
            allowed = {field.name for field in dataclasses.fields(cast(Any, hint)) if field.init}
            if name not in allowed:
                raise _unknown_key(name, allowed, place)
            hint = hints[name]
        else:
            raise place.error("is a value, not a table of keys")
        place = place.below(name)
    return hint


def _value_of_text(text: str, hint: object) -> object:
    try:
        value: object = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text
    wants_text_only = _flat_types(hint) == {str}
    return text if wants_text_only and not isinstance(value, str) else value


def _flat_types(hint: object) -> set[object]:
    """The scalar types that a hint admits, None aside."""
    arguments = typing.get_args(hint)
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        found = (_flat_types(option) for option in arguments if option is not types.NoneType)
        return set[object]().union(*found)
    if typing.get_origin(hint) is typing.Literal:
        return {type(item) for item in arguments}
    if _is_enum(hint):
        return {type(member.value) for member in hint}
    return {hint}


def _is_enum(hint: object) -> TypeGuard[type[enum.Enum]]:
    return isinstance(hint, type) and issubclass(hint, enum.Enum)


def _plain(value: object) -> object:
    if isinstance(value, enum.Enum):
        return value.value
    if dataclasses.is_dataclass(cast(Any, value)):
        return to_mapping(value)
    if isinstance(value, tuple):
        return [_plain(item) for item in cast(tuple[object, ...], value)]
    if isinstance(value, Mapping):
        table = cast(Mapping[str, object], value)
        return {key: _plain(item) for key, item in table.items()}
    return value


def _hint_text(hint: object) -> str:
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return " or ".join(_hint_text(item) for item in arguments if item is not types.NoneType)
    if origin is typing.Literal:
        return "one of " + ", ".join(_shown(item) for item in arguments)
    if _is_enum(hint):
        return "one of " + ", ".join(_shown(member.value) for member in hint)
    if origin is tuple and arguments[-1] is Ellipsis:
        return f"an array, each item {_hint_text(arguments[0])}"
    if origin is tuple:
        return "an array of " + ", ".join(_hint_text(item) for item in arguments)
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return f"a table, each value {_hint_text(arguments[1])}"
    if dataclasses.is_dataclass(hint):
        return f"a table with keys {_keys_text(cast(type, hint))}"
    return _SCALARS[hint]


def _keys_text(cls: type) -> str:
    return ", ".join(field.name for field in dataclasses.fields(cls) if field.init)


def _shown(value: object) -> str:
    """A value as TOML spells it, cut to a length that keeps the message on one line."""
    if isinstance(value, bool):
        return "true" if value else "false"
    text = f'"{value}"' if isinstance(value, str) else repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
