"""Goal: the commands find the cache process, print what it says, and refuse what they cannot do.
Method: `main` with a cache on a thread of this process.
"""

import json
from pathlib import Path

import pytest

from serving.__main__ import EXIT_BAD_INPUT, main
from tests.serving.kv.cache_parts import keys_of, running


def said(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> dict[str, int]:
    assert main(["cache", *arguments]) == 0
    return json.loads(capsys.readouterr().out)


def test_a_cache_is_asked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with running(tmp_path) as cache:
        address = ["--address", cache.fetcher.address]
        cache.put(keys_of(2), salt="a")
        cache.put(keys_of(3, 50), salt="b")
        assert said(["stats", *address], capsys)["host_payloads"] == 7
        assert said(["flush", *address], capsys) == {}
        assert said(["verify", "--set", f"kv.address='{address[1]}'"], capsys) == {"corrupt": 0}
        assert said(["purge", "--salt", "a", *address], capsys) == {"purged": 3}
        assert said(["purge", *address], capsys) == {"purged": 4}
        assert said(["stats", *address], capsys)["storage_payloads"] == 0


def test_what_cannot_be_done_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for arguments, expected in (
        (["cache", "stats"], "which cache process?"),
        (["cache", "pin"], "pin needs --server and --prompt-file"),
        (["cache", "warm", "--server", "http://x", "--prompt-file", "/no"], "cannot be read"),
        (
            ["cache", "pin", "--server", "http://127.0.0.1:9", "--prompt-file", __file__],
            "http://127.0.0.1:9/admin/cache: no answer",
        ),
        (["node", "--role", "cache"], "kv.storage is 'off'"),
        (["cache", "stats", "--address", "nonsense"], "expected ipc://PATH"),
    ):
        assert main(arguments) == EXIT_BAD_INPUT
        error = capsys.readouterr().err
        assert expected in error and error.count("\n") == 1
