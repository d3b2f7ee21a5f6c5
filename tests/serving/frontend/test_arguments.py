"""Goal: the commands for keys and usage take what they need and refuse what they do not know, and
help names all commands.

Method: lines of arguments, parsed.
"""

import argparse
from pathlib import Path

import pytest

import serving.__main__ as command_line
from serving.frontend.arguments import COMMANDS, add_administration


def parse(*arguments: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    assert len(add_administration(parser.add_subparsers(dest="command"))) == 4
    return parser.parse_args(arguments)


def test_lines() -> None:
    added = parse("keys", "add", "acme", "--scope", "use", "--scope", "admin", "--shares-cache")
    assert (added.action, added.tenant, added.scope) == ("add", "acme", ["use", "admin"])
    assert added.shares_cache and not parse("keys", "add", "acme").shares_cache
    assert parse("keys", "revoke", "1f").key_id == "1f"
    assert parse("keys", "list").action == "list"
    assert parse("usage", "--jsonl", "a").jsonl == Path("a") and parse("usage").jsonl is None


@pytest.mark.parametrize(
    "line", [["keys"], ["keys", "add"], ["keys", "add", "a", "--scope", "all"], ["keys", "revoke"]]
)
def test_refusals(line: list[str]) -> None:
    with pytest.raises(SystemExit):
        parse(*line)


def test_help_names_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        command_line.main(["--help"])
    assert caught.value.code == 0
    text = " ".join(capsys.readouterr().out.split())
    (actions,) = command_line._parser()._subparsers._group_actions  # pyright: ignore
    assert list(actions.choices) and set(actions.choices) == set(COMMANDS)  # pyright: ignore
    for name, what in COMMANDS.items():
        assert f"{name} ({what})" in text
