"""Goal: what a disk tier has written is read back whole or not at all, before and after a restart.

Method: a tier in a temporary directory; every region of a segment damaged, segments cut, half
written or missing, a disk that is full or read-only, and limits of bytes, tenants and time.
"""

import os
from pathlib import Path
from typing import Any

import pytest

from serving.kv import orbax_tier
from serving.kv.orbax_tier import OrbaxTier
from serving.kv.store import (
    Header,
    Name,
    PayloadKind,
    StoreError,
    check,
    encode,
    layout_id,
    tenant_id,
)
from tests.serving.kv.storage_parts import make_read_only, small_disk

A, B = tenant_id("a"), tenant_id("b")


class FixedClock:
    """Shows what it is told to."""

    def __init__(self) -> None:
        self.seconds = 1000

    def now_ns(self) -> int:
        return self.seconds * 10**9

    def unix_s(self) -> int:
        return self.seconds


def name(number: int) -> Name:
    return Name(PayloadKind.BLOCK, number.to_bytes(16))


def payload(number: int, size: int = 500, tenant: bytes = A, written_s: int = 1000) -> bytes:
    header = Header(name(number), layout_id(b""), tenant, written_s, size)
    return bytes(encode(header, [bytes([number % 251]) * size]))


def opened(directory: Path, bytes_max: int = 1 << 20, **options: Any) -> OrbaxTier:
    return OrbaxTier(directory, bytes_max, options.pop("clock", FixedClock()), **options)


def stored(tier: OrbaxTier, numbers: range) -> list[bool]:
    return tier.contains([name(number) for number in numbers])


def test_a_restart_keeps_what_was_written(tmp_path: Path) -> None:
    tier = opened(tmp_path)
    tier.write([payload(1), payload(2)])
    tier.write([payload(3), payload(2)])
    for again in (tier, opened(tmp_path)):
        found = again.read([name(n) for n in (3, 9, 1, 2)])
        assert found[1] is None
        assert [bytes(found[i] or b"") for i in (0, 2, 3)] == [payload(3), payload(1), payload(2)]
        assert again.counts().num_payloads == 3 and again.sizes() == {A: 3 * len(payload(1))}
    # What was stored already was not written again.
    assert tier.counts().num_written == 3
    assert len(list(tmp_path.iterdir())) == 2
    tier.close()


def test_damage_anywhere_in_a_segment_is_a_miss_and_nothing_else(tmp_path: Path) -> None:
    opened(tmp_path).write([payload(n, 100) for n in range(4)])
    (path,) = tmp_path.glob("*/payloads.bin")
    whole = path.read_bytes()
    for offset in range(0, len(whole), 13):
        damaged = bytearray(whole)
        damaged[offset] ^= 0x10
        tier_path = tmp_path.parent / f"damaged{offset}"
        segment = tier_path / path.parent.name
        segment.mkdir(parents=True)
        (segment / "payloads.bin").write_bytes(damaged)
        tier = opened(tier_path)
        found = tier.read([name(n) for n in range(4)])
        num_lost = sum(data is None for data in found)
        # One payload, or the index and with it the segment.
        assert num_lost == 1 if offset < 4 * len(payload(0, 100)) else num_lost in (0, 4)
        for number, data in enumerate(found):
            assert data is None or bytes(data) == payload(number, 100)
        assert tier.counts().num_corrupt == (1 if num_lost else 0)
        assert stored(tier, range(4)) == [data is not None for data in found]


@pytest.mark.parametrize("share", [0.0, 0.3, 0.9, 0.999])
def test_a_cut_segment_is_a_miss(tmp_path: Path, share: float) -> None:
    opened(tmp_path).write([payload(n) for n in range(4)])
    (path,) = tmp_path.glob("*/payloads.bin")
    tier = opened(tmp_path)
    os.truncate(path, int(path.stat().st_size * share))
    # Cut under a running tier: what is still there is good.
    for number, data in enumerate(tier.read([name(n) for n in range(4)])):
        assert data is None or bytes(data) == payload(number)
    again = opened(tmp_path)
    assert again.counts().num_payloads == 0 and not path.exists()


def test_a_write_that_was_interrupted_leaves_nothing(tmp_path: Path) -> None:
    tier = opened(tmp_path)
    tier.write([payload(1)])
    (tmp_path / "000000000002.orbax-checkpoint-tmp-3").mkdir()
    (tmp_path / "000000000003").mkdir()
    again = opened(tmp_path)
    assert again.counts().num_payloads == 1
    assert [path.name for path in tmp_path.iterdir()] == ["000000000001"]


@pytest.mark.parametrize("error", [OSError(28, "No space left"), OSError(30, "Read-only")])
def test_a_disk_that_takes_nothing_keeps_what_it_has(
    tmp_path: Path, error: OSError, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier = opened(tmp_path)
    tier.write([payload(1)])

    def fail(descriptor: int) -> None:
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(orbax_tier.os, "fsync", fail)
        with pytest.raises(StoreError, match="cannot be written"):
            tier.write([payload(2)])
    assert stored(tier, range(1, 3)) == [True, False] and tier.counts().num_failed == 1
    tier.write([payload(2)])
    assert stored(opened(tmp_path), range(1, 3)) == [True, True]


def test_a_directory_that_cannot_be_used_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match="file: cannot be used"):
        opened(tmp_path / "file")


def test_room_is_made_from_what_was_used_least(tmp_path: Path) -> None:
    tier = opened(tmp_path, bytes_max=4000)
    for number in range(4):
        tier.write([payload(2 * number), payload(2 * number + 1)])
        tier.read([name(0)])
    counts = tier.counts()
    assert counts.num_bytes <= 4000 and counts.num_evicted >= 4
    assert stored(tier, range(8))[6:] == [True, True]
    held = [name(n) for n in range(8) if stored(tier, range(n, n + 1)) == [True]]
    assert all(data is not None for data in tier.read(held))
    size = sum(path.stat().st_size for path in tmp_path.glob("*/payloads.bin"))
    assert size == counts.num_bytes


def test_within_a_prefix_the_end_goes_first(tmp_path: Path) -> None:
    tier = opened(tmp_path, bytes_max=1 << 20, tenant_bytes_max=2000)
    tier.write([payload(n) for n in range(3)])
    tier.write([payload(3)])
    assert stored(tier, range(4)) == [True, True, False, True]
    tier.read([name(0), name(1), name(3)])
    tier.write([payload(4)])
    assert stored(tier, range(5)) == [True, True, False, False, True]


def test_one_tenant_does_not_push_out_another(tmp_path: Path) -> None:
    tier = opened(tmp_path, tenant_bytes_max=1300)
    tier.write([payload(1, tenant=B)])
    for number in range(2, 6):
        tier.write([payload(number, tenant=A)])
    assert stored(tier, range(1, 6)) == [True, False, False, True, True]
    tier.write([payload(9, size=2000, tenant=A)])
    assert stored(tier, range(9, 10)) == [False] and stored(tier, range(1, 2)) == [True]


def test_time_to_live_counts_from_the_writing_across_restarts(tmp_path: Path) -> None:
    clock = FixedClock()
    opened(tmp_path, clock=clock, ttl_s=60).write([payload(1), payload(2, written_s=1050)])
    clock.seconds = 1061
    tier = opened(tmp_path, clock=clock, ttl_s=60)
    assert stored(tier, range(1, 3)) == [False, True]
    assert tier.read([name(1)]) == [None]
    tier.expire()
    assert tier.counts().num_payloads == 1 and tier.counts().num_evicted == 1
    # Writing does so, too: what is never used again does not stay for ever.
    clock.seconds = 1200
    tier.write([payload(3, written_s=1200)])
    assert tier.counts().num_payloads == 1 and len(list(tmp_path.iterdir())) == 1


def test_a_purge_leaves_no_byte_of_the_tenant(tmp_path: Path) -> None:
    tier = opened(tmp_path)
    secret = b"never to be seen again" * 10
    header = Header(name(7), layout_id(b""), B, 1000, len(secret))
    tier.write([payload(1), bytes(encode(header, [secret])), payload(2)])
    assert tier.purge(B) == 1 and tier.purge(B) == 0
    for again in (tier, opened(tmp_path)):
        assert stored(again, range(1, 3)) == [True, True] and again.sizes().keys() == {A}
    assert not any(secret in path.read_bytes() for path in tmp_path.glob("*/*") if path.is_file())
    assert tier.purge(None) == 2 and list(tmp_path.iterdir()) == []


def test_verifying_finds_and_forgets_what_is_damaged(tmp_path: Path) -> None:
    tier = opened(tmp_path)
    tier.write([payload(n) for n in range(3)])
    assert tier.verify() == []
    (path,) = tmp_path.glob("*/payloads.bin")
    data = bytearray(path.read_bytes())
    data[len(payload(0)) + 100] ^= 1
    path.write_bytes(data)
    assert tier.verify() == [name(1)] and tier.verify() == []
    assert stored(tier, range(3)) == [True, False, True]
    assert check(tier.read([name(2)])[0] or b"").name == name(2)


def test_a_segment_that_vanished_is_a_miss(tmp_path: Path) -> None:
    tier = opened(tmp_path)
    tier.write([payload(1)])
    (path,) = tmp_path.glob("*/payloads.bin")
    path.unlink()
    assert tier.read([name(1)]) == [None] and stored(tier, range(1, 2)) == [False]


def test_a_disk_that_is_really_full_and_then_read_only(tmp_path: Path) -> None:
    small = tmp_path / "small"
    with small_disk(small, "200k"):
        tier = opened(small)
        written: list[int] = []
        with pytest.raises(StoreError, match="cannot be written"):
            for number in range(100):
                tier.write([payload(number, 20_000)])
                written.append(number)
        assert 0 < len(written) < 10
        tier.purge(None)
        tier.write([payload(50), payload(51)])
        make_read_only(small)
        with pytest.raises(StoreError, match="cannot be written"):
            tier.write([payload(52)])
        tier.forget([name(50)])
        for again in (tier, opened(small)):
            data = again.read([name(51)])[0]
            assert data is not None and bytes(data) == payload(51)
            assert stored(again, range(52, 53)) == [False]
            again.close()
