"""Goal: the commands for keys and usage do what they say, and name what they cannot do.

Method: the commands on a database in a temporary folder; what they say is kept in a list.
"""

import argparse
import asyncio
import json
from dataclasses import replace
from pathlib import Path

import pytest

from serving.frontend.administration import run_keys, run_usage
from serving.frontend.auth import Authenticator, Scope, SqliteKeyStore
from serving.frontend.usage import UsageLog, UsageRecord
from sharding.config_file import ConfigError


def keys(database: Path, action: str, **options: object) -> list[str]:
    lines: list[str] = []
    given = {"action": action, "scope": None, "shares_cache": False} | options
    assert run_keys(argparse.Namespace(**given), database, 5, lines.append) == 0
    return lines


def test_keys(tmp_path: Path) -> None:
    database = tmp_path / "db"
    assert len(keys(database, "list")) == 1, "the heading alone"
    head, secret = keys(database, "add", tenant="acme", scope=["use", "admin"])
    key_id = head.split()[1]
    headers = {"authorization": f"Bearer {secret}"}
    principal = Authenticator(SqliteKeyStore(database)).principal(headers, Scope.ADMIN)
    assert principal.tenant == "acme"
    listed = keys(database, "list")[1]
    assert key_id in listed and "acme" in listed and "in force" in listed and secret not in listed
    keys(database, "revoke", key_id=key_id)
    assert "revoked" in keys(database, "list")[1]
    with pytest.raises(ConfigError, match="no key"):
        keys(database, "revoke", key_id=key_id)


def test_usage(tmp_path: Path) -> None:
    database, out = tmp_path / "db", tmp_path / "out.jsonl"

    async def record() -> None:
        row = UsageRecord("a", "acme", "m", "/v1/completions", 0, 5, 0, 2, 7)
        with UsageLog(database) as log:
            await log.begin(row)
            await log.end(replace(row, finish_reason="stop"))

    asyncio.run(record())
    lines: list[str] = []
    assert run_usage(argparse.Namespace(jsonl=None), database, lines.append) == 0
    heading, row = (line.split() for line in lines)
    assert dict(zip(heading, row, strict=True)) == {
        "day": "1970-01-01",
        "tenant": "acme",
        "calls": "1",
        "prompt_tokens": "5",
        "cached_tokens": "2",
        "generated_tokens": "7",
        "reasoning_tokens": "0",
        "images": "0",
        "cost": "0.0",
    }
    assert run_usage(argparse.Namespace(jsonl=out), database, lines.append) == 0
    assert json.loads(out.read_text())["finish_reason"] == "stop"
    with pytest.raises(ConfigError, match="cannot be written"):
        run_usage(argparse.Namespace(jsonl=tmp_path / "no" / "out"), database, lines.append)
    with pytest.raises(ConfigError, match="no such file"):
        run_usage(argparse.Namespace(jsonl=None), tmp_path / "none", lines.append)
