"""The commands that manage API keys and read usage records: `serving keys` and `serving usage`."""

import argparse
from collections.abc import Callable
from dataclasses import asdict, astuple, fields
from pathlib import Path

import msgspec

from serving.frontend.auth import Scope, SqliteKeyStore
from serving.frontend.usage import UsageSum, read_records, read_sums
from sharding.config_file import ConfigError

Say = Callable[[str], None]


def run_keys(options: argparse.Namespace, database: Path, now_s: int, say: Say) -> int:
    """Adds, lists or revokes keys; returns the exit code.

    Raises:
        ConfigError: the database cannot be used, or there is no such key.
    """
    store = SqliteKeyStore(database)
    if options.action == "add":
        scopes = [Scope(name) for name in options.scope or ["use"]]
        key_id, secret = store.add(options.tenant, scopes, now_s, shares_cache=options.shares_cache)
        say(f"Key {key_id} of {options.tenant}; it is shown this once:")
        say(secret)
    elif options.action == "revoke":
        if not store.revoke(options.key_id, now_s):
            raise ConfigError(f"no key {options.key_id} in force; see: python -m serving keys list")
        say(f"Key {options.key_id} is revoked; a running server goes by it after SIGHUP")
    else:
        say(f"{'key':10}{'tenant':24}{'scopes':12}state")
        for entry in store.entries():
            scopes = ",".join(sorted(scope.value for scope in entry.scopes))
            state = "in force" if entry.revoked_s is None else "revoked"
            say(f"{entry.key_id:10}{entry.tenant:24}{scopes:12}{state}")
    return 0


def run_usage(options: argparse.Namespace, database: Path, say: Say) -> int:
    """Shows sums per day and tenant, or writes every record to a file; returns the exit code.

    Raises:
        ConfigError: the database cannot be read, or the file cannot be written.
    """
    if options.jsonl is None:
        names = [field.name.removeprefix("num_") for field in fields(UsageSum)]
        for row in (names, *(astuple(item) for item in read_sums(database))):
            say("  ".join(f"{value!s:>16}" for value in row))
        return 0
    try:
        with options.jsonl.open("wb") as file:
            for record in read_records(database):
                file.write(msgspec.json.encode(asdict(record)) + b"\n")
    except OSError as error:
        raise ConfigError(f"{options.jsonl}: cannot be written: {error.strerror}") from None
    return 0
