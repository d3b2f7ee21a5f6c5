"""Usage records: exactly one per accepted call, whatever ends it, on disk before its last byte.

A call's row is written when the engine has accepted it, before the client hears of that, and
completed before the client gets the last byte. While it runs, its counts are written about once
a second. So a server that dies leaves rows that are not complete; the next one that opens the file
completes them as `crash`, with the counts written last. Rows of servers that are still running are
left alone: each holds a lock file for as long as it lives.

Rows are written by one thread, all that wait in one transaction, so that many calls share the time
that the disk takes. The database is SQLite with a write-ahead log, synchronised at each commit.
"""

import asyncio
import contextlib
import fcntl
import logging
import queue
import secrets
import sqlite3
import threading
from collections.abc import Iterable, Iterator
from concurrent.futures import Future
from contextlib import closing
from dataclasses import dataclass, fields
from pathlib import Path
from typing import IO, Any

from sharding.config_file import ConfigError

_log = logging.getLogger(__name__)

OPEN = ""
"""The finish reason of a record that is not complete."""

CRASH = "crash"
"""The finish reason of a record whose server died."""

_BUSY_S = 10.0


@dataclass(frozen=True, slots=True)
class UsageRecord:
    """What one call took. Times are seconds since 1970, durations seconds.

    `num_generated_tokens` are those delivered, the one that ended an answer included;
    `num_cached_tokens` are those of the prompt that were not computed anew. `first_token_s` is 0
    if there was none. `cost` is in the currency of the configured prices.
    """

    request_id: str
    tenant: str
    model: str
    route: str
    started_s: int
    num_prompt_tokens: int
    num_images: int
    num_cached_tokens: int = 0
    num_generated_tokens: int = 0
    num_reasoning_tokens: int = 0
    first_token_s: float = 0.0
    duration_s: float = 0.0
    finish_reason: str = OPEN
    cost: float = 0.0


@dataclass(frozen=True, slots=True)
class UsageSum:
    """The sums of one tenant on one day (UTC, as `2026-01-31`)."""

    day: str
    tenant: str
    num_calls: int
    num_prompt_tokens: int
    num_cached_tokens: int
    num_generated_tokens: int
    num_reasoning_tokens: int
    num_images: int
    cost: float


_COLUMNS = tuple(field.name for field in fields(UsageRecord))
_SUMMED = tuple(field.name for field in fields(UsageSum))[3:]
_CREATE = (
    "CREATE TABLE IF NOT EXISTS usage (request_id TEXT PRIMARY KEY, tenant TEXT, model TEXT, "
    "route TEXT, started_s INTEGER, num_prompt_tokens INTEGER, num_images INTEGER, "
    "num_cached_tokens INTEGER, num_generated_tokens INTEGER, num_reasoning_tokens INTEGER, "
    "first_token_s REAL, duration_s REAL, finish_reason TEXT, server TEXT, cost REAL DEFAULT 0)"
)
_INSERT = (
    f"INSERT INTO usage ({', '.join(_COLUMNS)}, server) "
    f"VALUES ({', '.join('?' * (len(_COLUMNS) + 1))})"
)
# The condition keeps a record that is complete as it is, whoever comes late.
_UPDATE = (
    f"UPDATE usage SET {', '.join(f'{name} = ?' for name in _COLUMNS[1:])} "
    f"WHERE request_id = ? AND finish_reason = '{OPEN}'"
)

_Job = tuple[str, tuple[object, ...], Future[None] | None]


class UsageLog:
    """Writes the records of one server. Use as a context manager, on any thread.

    Raises:
        ConfigError: on entry, the file cannot be used.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._server = secrets.token_hex(8)
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._write, name="usage", daemon=True)

    def __enter__(self) -> "UsageLog":
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with closing(_opened(self._path)) as database:
                self._lock = _locked(_lock_path(self._path, self._server))
                _complete_records_of_dead_servers(database, self._path)
        except (OSError, sqlite3.Error) as error:
            raise ConfigError(f"{self._path}: cannot be used for usage records: {error}") from None
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._jobs.put(None)
        self._thread.join()
        _lock_path(self._path, self._server).unlink(missing_ok=True)
        self._lock.close()

    def begin(self, record: UsageRecord) -> "asyncio.Future[None]":
        """Writes a record that is not complete; the result is done when it is on disk.

        It ends with a `sqlite3.Error` if the record could not be written.
        """
        return self._put(_INSERT, (*_values(record), self._server))

    def write_soon(self, record: UsageRecord) -> None:
        """Writes a record as it is now, complete or not, without waiting for the disk."""
        self._jobs.put((_UPDATE, _updating(record), None))

    async def end(self, record: UsageRecord) -> None:
        """Completes a record; returns when it is on disk. A complete one stays as it is.

        Raises:
            sqlite3.Error: it could not be written.
        """
        await self._put(_UPDATE, _updating(record))

    def _put(self, statement: str, values: tuple[object, ...]) -> "asyncio.Future[None]":
        done: Future[None] = Future()
        self._jobs.put((statement, values, done))
        # Whoever waits may be cancelled; what is asked for is written all the same.
        return asyncio.shield(asyncio.wrap_future(done))

    def _write(self) -> None:
        with closing(_opened(self._path)) as database:
            is_open = True
            while is_open:
                jobs = _all_waiting(self._jobs)
                is_open = jobs[-1] is not None
                _commit(database, [job for job in jobs if job is not None])


def read_sums(path: Path) -> list[UsageSum]:
    """The sums of complete records per day and tenant, in that order.

    Raises:
        ConfigError: there is no such file, or it cannot be read.
    """
    sums = ", ".join(f"SUM({name})" for name in _SUMMED)
    statement = (
        f"SELECT date(started_s, 'unixepoch') AS day, tenant, COUNT(*), {sums} FROM usage "
        f"WHERE finish_reason != '{OPEN}' GROUP BY day, tenant ORDER BY day, tenant"
    )
    return [UsageSum(*row) for row in _rows(path, statement)]


def read_records(path: Path) -> Iterator[UsageRecord]:
    """Complete records, oldest first.

    Raises:
        ConfigError: there is no such file, or it cannot be read.
    """
    statement = (
        f"SELECT {', '.join(_COLUMNS)} FROM usage WHERE finish_reason != '{OPEN}' ORDER BY rowid"
    )
    for row in _rows(path, statement):
        yield UsageRecord(*row)


def _rows(path: Path, statement: str) -> Iterator[tuple[Any, ...]]:
    if not path.exists():
        raise ConfigError(f"{path}: no such file; a server makes it when it starts")
    try:
        with closing(_opened(path)) as database:
            yield from database.execute(statement)
    except sqlite3.Error as error:
        raise ConfigError(f"{path}: cannot be read: {error}") from None


def _opened(path: Path) -> sqlite3.Connection:
    database = sqlite3.connect(path, timeout=_BUSY_S)
    try:
        database.execute("PRAGMA journal_mode = WAL")
        database.execute("PRAGMA synchronous = FULL")
        database.execute(_CREATE)
        columns = {row[1] for row in database.execute("PRAGMA table_info(usage)")}
        if "cost" not in columns:  # A file from before there were prices.
            database.execute("ALTER TABLE usage ADD COLUMN cost REAL DEFAULT 0")
        database.commit()
    except sqlite3.Error:
        database.close()
        raise
    return database


def _updating(record: UsageRecord) -> tuple[object, ...]:
    values = _values(record)
    return (*values[1:], values[0])


def _values(record: UsageRecord) -> tuple[object, ...]:
    # Not `astuple`, which copies every value in turn.
    return tuple(getattr(record, name) for name in _COLUMNS)


def _all_waiting(jobs: "queue.SimpleQueue[_Job | None]") -> list[_Job | None]:
    """What has been put into a queue, at least one thing, up to the mark of the end."""
    found = [jobs.get()]
    with contextlib.suppress(queue.Empty):
        while found[-1] is not None:
            found.append(jobs.get_nowait())
    return found


def _commit(database: sqlite3.Connection, jobs: Iterable[_Job]) -> None:
    """Runs statements in one transaction; all of them fail if one does."""
    jobs = list(jobs)
    failure: sqlite3.Error | None = None
    try:
        with database:
            for statement, values, _ in jobs:
                database.execute(statement, values)
    except sqlite3.Error as error:
        _log.error("%d usage records could not be written: %s", len(jobs), error)
        failure = error
    for _, _, done in jobs:
        if done is None or done.cancelled():
            continue
        if failure is None:
            done.set_result(None)
        else:
            done.set_exception(failure)


def _lock_path(path: Path, server: str) -> Path:
    return path.with_name(f"{path.name}.{server}.lock")


def _locked(path: Path) -> IO[bytes]:
    """An open file with a lock that ends with the process. Raises OSError where it is held."""
    file = path.open("ab")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        file.close()
        raise
    return file


def _complete_records_of_dead_servers(database: sqlite3.Connection, path: Path) -> None:
    statement = f"SELECT DISTINCT server FROM usage WHERE finish_reason = '{OPEN}'"
    for (server,) in database.execute(statement).fetchall():
        lock_path = _lock_path(path, server)
        try:
            lock = _locked(lock_path)
        except BlockingIOError:
            continue  # It is alive.
        with lock, database:
            changed = database.execute(
                f"UPDATE usage SET finish_reason = '{CRASH}' "
                f"WHERE finish_reason = '{OPEN}' AND server = ?",
                (server,),
            )
            _log.warning("%d calls of a server that died: recorded", changed.rowcount)
            lock_path.unlink(missing_ok=True)
