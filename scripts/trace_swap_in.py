"""The overlap of swap-in with the forward pass, in a trace of the profiler.

    python scripts/trace_swap_in.py [--tokens N] [--directory DIR] [--json FILE]

Stores nine tenths of a prompt, goes on from it with an empty device while jax traces, and prints
for each layer group when its blocks were copied, for how long, and which parts of the model
computed meanwhile. The trace itself stays in DIR. A copy that a CPU makes is the call that asks for
it; on other devices copies are events of their own, which this does not read.
"""

import argparse
import json
import re
import sys
import tempfile
import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from jax.profiler import ProfileData

ROOT = Path(__file__).parents[1]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from scripts.read_trace import Operation, operations_of  # noqa: E402

_COPY = "kv_swap_in"
_PART = re.compile(r"_part(\d+)$")


@dataclass(frozen=True, slots=True)
class Copy:
    """The copy of one layer group's blocks, and what computed meanwhile; times in nanoseconds.

    `parts` of the step that ran during the copy, and `hidden_ns` of it in which one did.
    """

    group: int
    start_ns: float
    copy_ns: float
    hidden_ns: float = 0.0
    parts: tuple[int, ...] = ()


def main() -> None:
    """Traces, prints a table and the hidden share."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=int, default=2048, help="of the prompt (256 to 4000)")
    parser.add_argument("--directory", type=Path, help="for the trace; default: a new one")
    parser.add_argument("--json", type=Path, help="write the figures there")
    args = parser.parse_args()
    if not 256 <= args.tokens <= 4000:
        parser.error(f"--tokens is {args.tokens}; expected 256 to 4000")
    from scripts.kv_bench.swap_in import opened

    directory = args.directory or Path(tempfile.mkdtemp(prefix="trace-"))
    with opened() as bench:
        bench.trace(args.tokens, directory)
    copies = copies_in(directory)
    start_ns = copies[0].start_ns
    print(f"{'group':>5} {'begins ms':>9} {'copy ms':>8} {'hidden ms':>9}  parts meanwhile")
    for copy in copies:
        print(
            f"{copy.group:5d} {(copy.start_ns - start_ns) / 1e6:9.3f} {copy.copy_ns / 1e6:8.3f} "
            f"{copy.hidden_ns / 1e6:9.3f}  {', '.join(map(str, copy.parts)) or '-'}"
        )
    hidden = hidden_share(copies)
    print(f"hidden: {hidden:.3f} of the copies\ntrace: {directory}")
    if args.json:
        figures = {"swap_in_hidden": hidden, "copies": [asdict(copy) for copy in copies]}
        args.json.write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")


def copies_in(directory: Path) -> list[Copy]:
    """The copies of the newest trace below a folder, in their order."""
    # About types of the reader in jaxlib; nothing that whoever reads a trace could change.
    warnings.filterwarnings("ignore", "builtin type", DeprecationWarning)
    files = sorted(directory.glob("plugins/profile/*/*.xplane.pb"))
    assert files, f"{directory}: no trace in it"
    profile = ProfileData.from_file(str(files[-1]))
    return list(overlaps(_copies(profile), operations_of(profile)))


def overlaps(copies: Iterable[Copy], operations: Iterable[Operation]) -> Iterator[Copy]:
    """The copies with what the parts of a step did meanwhile."""
    running = [
        (int(match[1]), operation.start_ns, operation.end_ns)
        for operation in operations
        if (match := _PART.search(operation.program)) is not None
    ]
    for copy in copies:
        end_ns = copy.start_ns + copy.copy_ns
        inside = [
            (part, max(start, copy.start_ns), min(end, end_ns))
            for part, start, end in running
            if start < end_ns and end > copy.start_ns
        ]
        hidden_ns = _covered([(start, end) for _, start, end in inside])
        parts = tuple(sorted({part for part, _, _ in inside}))
        yield Copy(copy.group, copy.start_ns, copy.copy_ns, hidden_ns, parts)


def hidden_share(copies: Sequence[Copy]) -> float:
    """How much of all copies was made while a part computed."""
    return sum(copy.hidden_ns for copy in copies) / sum(copy.copy_ns for copy in copies)


def _covered(spans: list[tuple[float, float]]) -> float:
    """How much time lies in any of the spans."""
    total, ended = 0.0, float("-inf")
    for start, end in sorted(spans):
        total += max(end - max(start, ended), 0.0)
        ended = max(ended, end)
    return total


def _copies(profile: Any) -> list[Copy]:
    found = [
        Copy(int(dict(event.stats)["group"]), event.start_ns, event.duration_ns)
        for plane in profile.planes
        for line in plane.lines
        for event in line.events
        if event.name == _COPY
    ]
    return sorted(found, key=lambda copy: copy.start_ns)


if __name__ == "__main__":
    main()
