"""How much of what the hardware and the libraries can do is left of it in the storage tiers.

Both sides of a ratio are run in turn, many times, and the fastest of each counts: that tells the
work and not what else the machine does. Where nothing waits for a disk or another process, it is
processor time that counts. Payloads are blocks as large as those of the released model: 114 KB.

- `disk_read_over_raw`, `disk_write_over_raw`: the disk tier against plain reads and writes of as
  many bytes in files of the same size, written through to the disk (fsync), and read from it: the
  page cache is emptied of them. `cached_read_over_raw` is the same with files in the page cache.
- `ec_encode_over_lib`, `ec_decode_over_lib`: fragments with their heads and checksums made of
  payloads, and payloads made of fragments that are checked, against pyeclib alone; decoding is
  without two fragments of data.
- `degraded_over_healthy`: reads over twelve storage nodes, processes of their own, before and after
  two of them are killed.
- `host_over_memcpy`: payloads copied into the shared memory of the host tier and out of it, against
  plain copies. `host_checked_over_memcpy` is the same with what workers do besides: a header and a
  checksum are made on the way in, and looked at on the way out.
"""

import json
import os
import random
import secrets
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from pyeclib.ec_iface import ECDriver

from serving.kv.erasure_tier import ErasureTier
from serving.kv.fragments import StripeCodec, good_pieces
from serving.kv.host_tier import HostTier, SharedArena
from serving.kv.orbax_tier import OrbaxTier
from serving.kv.segment_index import Row
from serving.kv.store import (
    HEADER_SIZE,
    Buffer,
    Header,
    Name,
    PayloadKind,
    check,
    encode,
    encode_into,
    layout_id,
    read_header,
    tenant_id,
)
from serving.kv.stripe_repair import RepairOptions
from serving.kv.stripes import Coding
from serving.transport.driver import SystemClock

PAYLOAD_BYTES = 890 * 128
NUM_PAYLOADS = 140
ROUNDS = 7
NUM_NODES = 12


def figures() -> dict[str, Any]:
    """All figures, and how many bytes a second each side of them does."""
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder)
        for work in (partial(disk, path), coding, partial(degraded, path), partial(host, path)):
            measured = work()
            print(json.dumps(measured), flush=True)
            found |= measured
    return found


def payloads(count: int, first: int = 0) -> list[Buffer]:
    """Payloads of random bytes, numbered from `first` on."""
    made: list[Buffer] = []
    body = random.Random(first).randbytes(PAYLOAD_BYTES)
    for number in range(first, first + count):
        header = Header(name(number), layout_id(b""), tenant_id(""), 0, PAYLOAD_BYTES)
        made.append(bytes(encode(header, [body[number % 97 :], body[: number % 97]])))
    return made


def name(number: int) -> Name:
    """What payload `number` is stored under."""
    return Name(PayloadKind.BLOCK, number.to_bytes(16))


def compare(
    num_bytes: int,
    ours: Callable[[int], object],
    others: Callable[[int], object],
    clock: Callable[[], float],
    before: Callable[[], object] = lambda: None,
    num_rounds: int = ROUNDS,
) -> tuple[float, dict[str, float]]:
    """Our rate over the other one, and both in gigabytes a second; each is called with the round.

    `before` is called before each.
    """
    best = {"ours": float("inf"), "other": float("inf")}
    for number in range(num_rounds):
        for side, work in (("ours", ours), ("other", others)):
            before()
            began = clock()
            work(number % ROUNDS)
            best[side] = min(best[side], clock() - began)
    rates = {side: round(num_bytes / seconds / 1e9, 3) for side, seconds in best.items()}
    return round(best["other"] / best["ours"], 3), rates


def disk(path: Path) -> dict[str, Any]:
    """The disk tier against plain files."""
    tier = OrbaxTier(path / "segments", 1 << 34, SystemClock())
    data = [payloads(NUM_PAYLOADS, NUM_PAYLOADS * number) for number in range(ROUNDS)]
    size = sum(map(len, data[0]))

    def write_raw(number: int) -> None:
        with (path / f"raw{number}").open("wb") as file:
            file.write(b"".join(data[number]))
            file.flush()
            os.fsync(file.fileno())

    def read_raw(number: int) -> bytes:
        return (path / f"raw{number}").read_bytes()

    def read(number: int) -> None:
        found = tier.read([name(NUM_PAYLOADS * number + index) for index in range(NUM_PAYLOADS)])
        assert None not in found

    def empty_page_cache() -> None:
        for file in (*path.glob("raw*"), *path.glob("segments/*/payloads.bin")):
            descriptor = os.open(file, os.O_RDONLY)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)

    written = compare(size, lambda number: tier.write(data[number]), write_raw, time.perf_counter)
    rounds = 4 * ROUNDS
    cold = compare(size, read, read_raw, time.perf_counter, empty_page_cache, rounds)
    cached = compare(size, read, read_raw, time.process_time, num_rounds=rounds)
    tier.close()
    return {
        "disk_write_over_raw": written[0],
        "disk_read_over_raw": cold[0],
        "cached_read_over_raw": cached[0],
        "disk_write_gb_s": written[1],
        "disk_read_gb_s": cold[1],
        "cached_read_gb_s": cached[1],
    }


def coding() -> dict[str, Any]:
    """The code as the tier uses it against the library alone."""
    chosen = Coding()
    codec = StripeCodec(chosen)
    alone = ECDriver(k=chosen.num_data, m=chosen.num_parity, ec_type="isa_l_rs_cauchy")
    data = list(map(bytes, payloads(NUM_PAYLOADS)))
    rows = [Row.of(payload) for payload in data]
    stripe = "0" * 32
    size = sum(map(len, data))

    def make(_: int) -> object:
        return [(head.encode(), pieces) for head, pieces in codec.encode_stripe(stripe, rows, data)]

    encoded, encode_rates = compare(
        size,
        make,
        lambda _: [alone.encode(payload) for payload in data],
        time.process_time,
        num_rounds=4 * ROUNDS,
    )
    fragments = codec.encode_stripe(stripe, rows, data)
    left = [fragments[number] for number in range(2, chosen.num_fragments)]
    columns = [[pieces[index] for _, pieces in left] for index in range(NUM_PAYLOADS)]

    def read(_: int) -> object:
        # As they come: fragment by fragment, each from a node of its own.
        found: list[dict[int, bytes]] = [{} for _ in rows]
        for head, pieces in left:
            assert all(good_pieces(pieces, head.checksums))
            for known, piece in zip(found, pieces, strict=True):
                known[head.fragment] = piece
        decoded = list(map(codec.decode, found))
        assert [read_header(payload).name for payload in decoded] == [row.name for row in rows]
        return decoded

    decoded, decode_rates = compare(
        size,
        read,
        lambda _: [alone.decode(column) for column in columns],
        time.process_time,
        num_rounds=4 * ROUNDS,
    )
    return {
        "ec_encode_over_lib": encoded,
        "ec_decode_over_lib": decoded,
        "ec_encode_gb_s": encode_rates,
        "ec_decode_gb_s": decode_rates,
    }


@contextmanager
def storage_nodes(path: Path) -> Iterator[tuple[dict[str, str], list[subprocess.Popen[str]]]]:
    """Storage nodes in processes of their own: their addresses, and the processes."""
    addresses = {f"n{number:02d}": f"ipc://{path}/n{number:02d}.s" for number in range(NUM_NODES)}
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", "serving", "node", "--role", "storage", "--name", node]
            + ["--set", f"kv.directory='{path}'", "--listen", address],
            stdout=subprocess.PIPE,
            text=True,
        )
        for node, address in addresses.items()
    ]
    try:
        for process in processes:
            assert process.stdout is not None and "ready" in process.stdout.readline()
        yield addresses, processes
    finally:
        for process in processes:
            process.kill()
            process.wait()
            if process.stdout is not None:
                process.stdout.close()


def degraded(path: Path) -> dict[str, Any]:
    """Reads over all nodes, and without two of them."""
    with storage_nodes(path) as (addresses, processes):
        # Fragments of nodes that are away are to stay away.
        tier = ErasureTier(
            addresses,
            Coding(),
            1 << 34,
            None,
            SystemClock(),
            random.Random(secrets.token_bytes(32)),
            repair=RepairOptions(after_s=1e6),
        )
        data = payloads(NUM_PAYLOADS)
        began = time.perf_counter()
        tier.write(data)
        written_s = time.perf_counter() - began
        names = [name(number) for number in range(NUM_PAYLOADS)]
        healthy_s = fastest(tier, names)
        for process in processes[:2]:
            process.send_signal(signal.SIGKILL)
        while tier.counts().num_nodes_away < 2:
            time.sleep(0.1)
        degraded_s = fastest(tier, names)
        assert tier.counts().num_degraded
        tier.close()
    size = sum(map(len, data)) / 1e9
    return {
        "degraded_over_healthy": round(healthy_s / degraded_s, 3),
        "nodes_read_gb_s": {
            "healthy": round(size / healthy_s, 3),
            "degraded": round(size / degraded_s, 3),
        },
        "nodes_write_gb_s": round(size / written_s, 3),
    }


def fastest(tier: ErasureTier, names: Sequence[Name]) -> float:
    """Seconds of the fastest of many reads."""
    best = float("inf")
    for _ in range(3 * ROUNDS):
        began = time.perf_counter()
        assert None not in tier.read(names)
        best = min(best, time.perf_counter() - began)
    return best


def host(path: Path) -> dict[str, Any]:
    """Into shared memory and out of it, as the processes do it, against plain copies."""
    arena = SharedArena.create(path / "arena", 64 * 2**20)
    tier = HostTier(arena)
    data = payloads(NUM_PAYLOADS)
    parts = [memoryview(payload)[HEADER_SIZE:] for payload in data]
    headers = [
        Header(name(number), layout_id(b""), tenant_id(""), 0, PAYLOAD_BYTES)
        for number in range(NUM_PAYLOADS)
    ]
    places = [tier.reserve(header.name, header.size, header.tenant, 0) for header in headers]
    found = [bytearray(header.size) for header in headers]

    def there_and_back(_: int) -> None:
        for place, payload, target in zip(places, data, found, strict=True):
            assert place is not None
            tier.read(place)[:] = payload
            target[:] = tier.read(place)

    def checked(_: int) -> None:
        for header, place, part, target in zip(headers, places, parts, found, strict=True):
            assert place is not None
            encode_into(tier.read(place), header, [part])
            target[:] = tier.read(place)
            check(target)

    plain = bytearray(sum(map(len, parts)))
    views = [memoryview(plain)[n * PAYLOAD_BYTES :][:PAYLOAD_BYTES] for n in range(NUM_PAYLOADS)]
    copies = [bytearray(PAYLOAD_BYTES) for _ in parts]

    def copy(_: int) -> None:
        for part, view, target in zip(parts, views, copies, strict=True):
            view[:] = part
            target[:] = view

    size = 2 * NUM_PAYLOADS * PAYLOAD_BYTES
    rounds = 4 * ROUNDS
    plainly = compare(size, there_and_back, copy, time.process_time, num_rounds=rounds)
    with_checks = compare(size, checked, copy, time.process_time, num_rounds=rounds)
    arena.close()
    return {
        "host_over_memcpy": plainly[0],
        "host_checked_over_memcpy": with_checks[0],
        "host_gb_s": plainly[1],
        "host_checked_gb_s": with_checks[1],
    }
