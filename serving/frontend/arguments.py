"""The arguments of the commands, apart from what performs them.

*Why*: asking for help has to be quick, so nothing is imported here.
"""

import argparse
from pathlib import Path
from typing import Any

COMMANDS = {
    "run": "serve HTTP, the default",
    "generate": "offline generation",
    "plan": "what a model takes",
    "simulate": "a fleet in virtual time",
    "keys": "API keys",
    "usage": "what tenants took",
    "node": "a node of the KV tiers",
    "cache": "ask what the KV tiers keep",
}


def make_parser() -> tuple[argparse.ArgumentParser, Any]:
    """The parser of the command line, and what takes further commands."""
    parser = argparse.ArgumentParser(prog="python -m serving")
    commands = parser.add_subparsers(dest="command", required=True)
    run = commands.add_parser(
        "run",
        prog="python -m serving [run]",
        description="Serves a DeepSeek-V4.1-Flash checkpoint over HTTP until stopped.",
        epilog=f"Commands: {', '.join(f'{name} ({what})' for name, what in COMMANDS.items())}; see "
        "python -m serving COMMAND --help.",
    )
    run.add_argument("--host", help="address to listen on (default 127.0.0.1)")
    run.add_argument("--port", type=int, help="port to listen on (default 8000; 0: a free one)")
    generate = commands.add_parser(
        "generate", description="Generates for the prompts of a file, without a server."
    )
    generate.add_argument("--prompts", type=Path, required=True, help="JSON Lines file to read")
    generate.add_argument("--out", type=Path, required=True, help="JSON Lines file to write")
    plan = commands.add_parser(
        "plan", description="Counts weights, cache and work per token from a config.json alone."
    )
    plan.add_argument("--json", type=Path, metavar="FILE", help="also write every number here")
    _add_mesh_options(plan)
    for command in (run, generate, plan):
        command.add_argument(
            "--model",
            metavar="DIR",
            help="checkpoint directory"
            + (" (default: the released model)" if command is plan else ""),
        )
        command.add_argument(
            "--cache-format", choices=("kvq", "noq"), help="KV cache quantised (default) or not"
        )
    simulate = commands.add_parser(
        "simulate", description="Replays a trace on a fleet of GPUs in virtual time."
    )
    _add_simulate(simulate)
    administration = add_administration(commands)
    for command in (run, generate, *administration):
        command.add_argument("--config", metavar="FILE", help="TOML file with serving options")
    for command in (run, generate, simulate, *administration):
        add_changes(command)
    return parser, commands


def _add_mesh_options(plan: argparse.ArgumentParser) -> None:
    mesh = plan.add_argument_group("on a mesh", "Does the model fit, whom can it serve, how fast?")
    mesh.add_argument("--sharding", metavar="FILE", help="a shipped plan's name, or a .toml file")
    mesh.add_argument("--hardware", help="kind of device: h100, h200 (default) or b200")
    mesh.add_argument("--context", type=int, metavar="N", help="tokens of a sequence (8192)")
    mesh.add_argument("--users", type=int, metavar="N", help="sequences that run at once")
    mesh.add_argument(
        "--traffic", type=Path, metavar="FILE", help="requests (.toml or .jsonl) to size pools for"
    )


def _add_simulate(command: argparse.ArgumentParser) -> None:
    command.add_argument("--trace", type=Path, required=True, help="trace file to replay")
    command.add_argument(
        "--config", type=Path, metavar="FILE", help="TOML file with the fleet (default: of H200s)"
    )
    command.add_argument(
        "--costs", type=Path, metavar="FILE", help="cost of steps, as scripts/fit_cost.py writes it"
    )
    command.add_argument("--workers", metavar="NpMd", help="GPUs of each role, such as 64p64d")
    command.add_argument("--policy", default="production", help="who gets a request")
    command.add_argument("--seed", type=int, default=0, help="of everything that is drawn")
    command.add_argument("--rate", type=float, metavar="R", help="requests a second")
    command.add_argument(
        "--load", type=float, metavar="L", help="the same as a share of the balanced bound"
    )
    command.add_argument("--seconds", type=float, metavar="S", help="length (default: the trace)")
    command.add_argument("--report", type=Path, metavar="R.json", help="write all figures here")
    command.add_argument("--plot", type=Path, metavar="R.png", help="draw loads over time here")


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
