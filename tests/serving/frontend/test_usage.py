"""Goal: one record per call on disk, whatever ends the call or the server; sums and exports of it.

Method: a log in a temporary folder, and servers that die in a process of their own.
"""

import asyncio
import sqlite3
import subprocess
import sys
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

import serving.frontend.usage as usage_module
from serving.frontend.usage import CRASH, OPEN, UsageLog, UsageRecord, read_records, read_sums
from sharding.config_file import ConfigError

ROOT = Path(__file__).parents[3]
DAY_S = 86_400


def record(name: str, tenant: str = "acme", started_s: int = DAY_S, tokens: int = 0) -> UsageRecord:
    return UsageRecord(name, tenant, "m", "/v1/completions", started_s, 5, 1, 2, tokens)


def test_records_are_there_when_the_wait_is_over(tmp_path: Path) -> None:
    path = tmp_path / "below" / "usage.sqlite3"

    async def test() -> None:
        with UsageLog(path) as log:
            await asyncio.gather(*(log.begin(record(f"r{i}")) for i in range(20)))
            assert list(read_records(path)) == []
            log.write_soon(record("r1", tokens=3))
            await log.end(replace(record("r1", tokens=4), finish_reason="stop"))
            (first,) = read_records(path)
            assert (first.request_id, first.num_generated_tokens) == ("r1", 4)
            await log.end(replace(record("r1", tokens=9), finish_reason="abort"))
            log.write_soon(replace(record("r2", tokens=7), finish_reason="abort"))
        ended = {item.request_id: item for item in read_records(path)}
        assert ended["r1"].num_generated_tokens == 4, "a complete record stays as it is"
        assert ended["r2"].finish_reason == "abort", "what was put in is written at the end"

    asyncio.run(test())


def test_second_record_of_one_call_is_refused(tmp_path: Path) -> None:
    async def test() -> None:
        with UsageLog(tmp_path / "u") as log:
            await log.begin(record("a"))
            with pytest.raises(sqlite3.IntegrityError):
                await log.begin(record("a"))
            await log.end(replace(record("a"), finish_reason="stop"))

    asyncio.run(test())
    assert [item.request_id for item in read_records(tmp_path / "u")] == ["a"]


DYING = """
import asyncio, os, sys
from pathlib import Path
from serving.frontend.usage import UsageLog, UsageRecord
async def main():
    with UsageLog(Path(sys.argv[1])) as log:
        row = UsageRecord("dead", "acme", "m", "/v1/completions", 86400, 5, 0)
        await log.begin(row)
        await log.end(UsageRecord("dead", "acme", "m", "/x", 86400, 5, 0, 0, 3))
        os.kill(os.getpid(), 9)
asyncio.run(main())
"""


def test_calls_of_a_killed_server_are_completed_by_the_next(tmp_path: Path) -> None:
    path = tmp_path / "usage.sqlite3"
    killed = subprocess.run([sys.executable, "-c", DYING, str(path)], cwd=ROOT, timeout=60)
    assert killed.returncode == -9
    assert list(read_records(path)) == []

    async def test() -> None:
        with UsageLog(path) as living:
            (dead,) = read_records(path)
            assert (dead.finish_reason, dead.num_generated_tokens) == (CRASH, 3)
            await living.begin(record("alive"))
            with UsageLog(path):
                assert len(list(read_records(path))) == 1, "a living server's calls are left alone"
            await living.end(replace(record("alive"), finish_reason="length"))

    asyncio.run(test())
    assert [item.request_id for item in read_records(path)] == ["dead", "alive"]
    assert not list(tmp_path.glob("*.lock"))


def test_sums_per_day_and_tenant(tmp_path: Path) -> None:
    path = tmp_path / "u"

    async def test() -> None:
        with UsageLog(path) as log:
            for name, tenant, started_s in (
                ("a", "acme", DAY_S),
                ("b", "acme", 2 * DAY_S - 1),
                ("c", "acme", 2 * DAY_S),
                ("d", "other", DAY_S),
                ("open", "acme", DAY_S),
            ):
                row = record(name, tenant, started_s, 10)
                await log.begin(row)
                await log.end(replace(row, finish_reason=OPEN if name == "open" else "stop"))
            sums = [(s.day, s.tenant, s.num_calls, s.num_generated_tokens) for s in read_sums(path)]
            assert sums == [
                ("1970-01-02", "acme", 2, 20),
                ("1970-01-02", "other", 1, 10),
                ("1970-01-03", "acme", 1, 10),
            ]

    asyncio.run(test())


def test_a_file_from_before_there_were_prices(tmp_path: Path) -> None:
    path = tmp_path / "old"
    with closing(sqlite3.connect(path)) as database, database:
        columns = ", ".join(f"{name} TEXT" for name in (*usage_module._COLUMNS[:-1], "server"))
        database.execute(f"CREATE TABLE usage ({columns})")
        values = ["old", "acme", *["1"] * 10, "stop", "s"]
        database.execute(f"INSERT INTO usage VALUES ({', '.join('?' * 14)})", values)

    async def test() -> None:
        with UsageLog(path) as log:
            row = replace(record("new"), cost=0.25)
            await log.begin(row)
            await log.end(replace(row, finish_reason="stop"))

    asyncio.run(test())
    assert [(row.request_id, row.cost) for row in read_records(path)] == [("old", 0), ("new", 0.25)]
    assert sum(row.cost for row in read_sums(path)) == 0.25


def test_unusable_files(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no such file"):
        read_sums(tmp_path / "none")
    bad = tmp_path / "bad"
    bad.write_text("no database " * 100)
    with pytest.raises(ConfigError, match="cannot be read"):
        list(read_records(bad))
    with pytest.raises(ConfigError, match="cannot be used for usage"), UsageLog(bad):
        pass
