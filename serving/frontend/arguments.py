"""The arguments of the commands for keys and usage, apart from what performs them.

*Why*: asking for help has to be quick, so nothing is imported here.
"""

import argparse
from pathlib import Path
from typing import Any


def add_administration(commands: Any) -> list[argparse.ArgumentParser]:
    """Adds `keys` and `usage` to a parser's commands; returns the parsers that take options."""
    keys = commands.add_parser("keys", description="Manages the API keys of a server.")
    actions = keys.add_subparsers(dest="action", required=True)
    add = actions.add_parser("add", description="Makes a key for a tenant and shows it once.")
    add.add_argument("tenant", help="whose calls the key makes")
    add.add_argument(
        "--scope",
        action="append",
        choices=("use", "admin"),
        help="what it allows; may be given twice (default: use)",
    )
    add.add_argument(
        "--shares-cache",
        action="store_true",
        help="the tenant, if it is new, shares cached prefixes with others that do, too",
    )
    listing = actions.add_parser("list", description="Lists the keys, never their secrets.")
    revoke = actions.add_parser("revoke", description="Ends a key.")
    revoke.add_argument("key_id", help="as keys list shows it")
    usage = commands.add_parser("usage", description="Shows usage per day and tenant.")
    usage.add_argument("--jsonl", type=Path, metavar="FILE", help="write every record here instead")
    return [add, listing, revoke, usage]


def add_config(command: argparse.ArgumentParser) -> None:
    """Add the flags of a serving configuration."""
    command.add_argument("--config", metavar="FILE", help="TOML file with serving options")
    add_changes(command)


def add_changes(command: argparse.ArgumentParser) -> None:
    """Add the flag that changes single options of a configuration."""
    command.add_argument(
        "--set",
        metavar="KEY=VALUE",
        action="append",
        default=[],
        help="change one option of the configuration, such as engine.max_context=8192",
    )
