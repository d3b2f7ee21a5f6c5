"""Goal: a configuration file either becomes exactly its dataclass or is refused with a message
that names file, key, value and what was allowed. Method: one dataclass with every kind of field,
read from TOML text; each wrong input stands beside its right one, and messages are compared.
"""

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import pytest

from sharding import config_file
from sharding.config_file import ConfigError


class Colour(enum.Enum):
    RED = "red"
    BLUE = "blue"


@dataclass(frozen=True)
class Server:
    port: int
    host: str = "127.0.0.1"
    drain_s: float = 5.0
    is_open: bool = False

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65535:
            raise ValueError(f"port is {self.port}; expected 0 to 65535")


@dataclass(frozen=True)
class Settings:
    server: Server
    colour: Colour = Colour.RED
    level: Literal["low", "high"] = "low"
    rows: tuple[int, ...] = (1, 8)
    pair: tuple[str, int] = ("a", 1)
    rules: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    path: str | None = None
    spare: Server | None = None
    either: int | str = 0


def read(text: str) -> Settings:
    return config_file.parse(text, Settings, source="a.toml")


def test_every_kind_of_field_is_read() -> None:
    settings = read(
        """
        colour = "blue"
        level = "high"
        rows = [2, 4]
        pair = ["b", 3]
        path = "x"
        either = "word"
        [server]
        port = 80
        drain_s = 2
        is_open = true
        [rules]
        batch = ["data", "expert"]
        [spare]
        port = 81
        """
    )
    assert settings == Settings(
        server=Server(80, drain_s=2.0, is_open=True),
        colour=Colour.BLUE,
        level="high",
        rows=(2, 4),
        pair=("b", 3),
        rules={"batch": ("data", "expert")},
        path="x",
        spare=Server(81),
        either="word",
    )
    assert type(settings.server.drain_s) is float


def test_defaults_fill_what_is_left_out() -> None:
    assert read("[server]\nport = 1") == Settings(server=Server(1))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[server]\nprot = 1", "a.toml: server.prot: unknown key (did you mean port?); allowed"),
        ("zzz = 1\n[server]\nport = 1", "a.toml: zzz: unknown key; allowed here: colour, either,"),
        ("[server]\nhost = 'h'", "a.toml: server.port: missing; expected an integer"),
        ("", "a.toml: server: missing; expected a table with keys port, host, drain_s, is_open"),
        ("server = 3", "a.toml: server: received 3; expected a table with keys port"),
        ("[server]\nport = '1'", 'a.toml: server.port: received "1"; expected an integer'),
        ("[server]\nport = true", "a.toml: server.port: received true; expected an integer"),
        ("[server]\nport = 1.0", "a.toml: server.port: received 1.0; expected an integer"),
        ("[server]\nport = 1\nis_open = 1", "is_open: received 1; expected true or false"),
        ("[server]\nport = 1\ndrain_s = 'x'", 'drain_s: received "x"; expected a number'),
        ("[server]\nport = 1\nhost = 1", "server.host: received 1; expected text"),
        ("[server]\nport = 70000", "a.toml: server: port is 70000; expected 0 to 65535"),
        ("colour = 'green'\n[server]\nport = 1", 'expected one of "red", "blue"'),
        ("level = 'mid'\n[server]\nport = 1", 'received "mid"; expected one of "low", "high"'),
        ("rows = 3\n[server]\nport = 1", "rows: received 3; expected an array, each item an int"),
        ("rows = [1, 'a']\n[server]\nport = 1", 'rows.1: received "a"; expected an integer'),
        ("pair = ['a']\n[server]\nport = 1", "pair: received 1 items; expected 2: an array of"),
        ("either = 1.5\n[server]\nport = 1", "received 1.5; expected an integer or text"),
        ("rules = 1\n[server]\nport = 1", "rules: received 1; expected a table, each value an"),
        ("[rules]\nx = 'y'\n[server]\nport = 1", 'rules.x: received "y"; expected an array'),
        ("[server]\nport = 1\n[spare]\nx = 1", "a.toml: spare.x: unknown key"),
        ("[server\nport = 1", "a.toml: not valid TOML: "),
    ],
)
def test_wrong_text_is_refused_by_name(text: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read(text)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_long_values_are_cut_in_messages() -> None:
    with pytest.raises(ConfigError) as caught:
        read(f"[server]\nport = '{'x' * 5000}'")
    assert len(str(caught.value)) < 200


def test_files_are_read_and_unreadable_ones_named(tmp_path: Path) -> None:
    good = tmp_path / "good.toml"
    good.write_text("[server]\nport = 9\n", encoding="utf-8")
    assert config_file.load(good, Settings).server.port == 9
    with pytest.raises(ConfigError, match=r"absent\.toml: no such file"):
        config_file.load(tmp_path / "absent.toml", Settings)
    with pytest.raises(ConfigError, match="cannot be read"):
        config_file.load(tmp_path, Settings)
    bad = tmp_path / "bad.toml"
    bad.write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match=r"bad\.toml: cannot be read"):
        config_file.load(bad, Settings)


def test_a_field_type_that_no_file_can_hold_is_a_programming_error() -> None:
    @dataclass(frozen=True)
    class Odd:
        value: set[int]

    with pytest.raises(TypeError, match="cannot be read from a file"):
        config_file.from_mapping({"value": 1}, Odd, source="x")


def test_override_replaces_and_checks() -> None:
    base = read("[server]\nport = 1\nhost = 'h'")
    changed = config_file.override(base, {"server.port": 2, "rules.batch": ["data"]})
    assert changed.server == Server(2, host="h")
    assert changed.rules == {"batch": ("data",)}
    assert base.server.port == 1
    assert config_file.override(base, {"spare.port": 3}).spare == Server(3)
    with pytest.raises(ConfigError, match=r"override: server\.prot: unknown key"):
        config_file.override(base, {"server.prot": 2})
    with pytest.raises(ConfigError, match="expected an integer"):
        config_file.override(base, {"server.port": "2"})
    with pytest.raises(ConfigError, match="level is a value, not a table"):
        config_file.override(base, {"level.x": 2})
    with pytest.raises(ConfigError, match="port is -1; expected 0"):
        config_file.override(base, {"server.port": -1})


def test_overrides_from_text_read_values_by_the_type_of_their_key() -> None:
    base = read("[server]\nport = 1")
    changed = config_file.override_from_text(
        base,
        [
            "server.port=2",
            "server.host=0.0.0.0",
            "server.drain_s = 1.5",
            "server.is_open=true",
            "colour=blue",
            "rows=[3, 4]",
            "path=7",
            'level="high"',
            'rules.batch=["data"]',
        ],
    )
    assert changed == Settings(
        server=Server(2, host="0.0.0.0", drain_s=1.5, is_open=True),
        colour=Colour.BLUE,
        level="high",
        rows=(3, 4),
        rules={"batch": ("data",)},
        path="7",
    )


@pytest.mark.parametrize(
    ("assignment", "message"),
    [
        ("server.port", "--set: received 'server.port'; expected key=value"),
        ("=3", "expected key=value"),
        ("server.prot=3", "--set: server.prot: unknown key (did you mean port?)"),
        ("server.port.x=3", "--set: server.port: is a value, not a table of keys"),
        ("server.port=many", '--set: server.port: received "many"; expected an integer'),
        ("server=3", "--set: server: received 3; expected a table"),
        ("colour=green", 'expected one of "red", "blue"'),
    ],
)
def test_wrong_assignments_are_refused_by_name(assignment: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        config_file.override_from_text(read("[server]\nport = 1"), [assignment])
    assert message in str(caught.value)


def test_plain_values_make_the_same_configuration_again() -> None:
    settings = read("rows = [5]\ncolour = 'blue'\n[server]\nport = 1\n[spare]\nport = 2")
    plain = config_file.to_mapping(settings)
    assert plain["colour"] == "blue" and "path" not in plain
    assert config_file.from_mapping(plain, Settings, source="x") == settings
