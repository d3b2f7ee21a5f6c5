"""Goal: what was written over nodes is read back as long as enough of them are there, and is a miss
within the deadline when they are not; nothing committed is lost by restarts.

Method: nodes in threads, a code of three and two, damage to the files of nodes, nodes that end and
come back, tiers that are closed and opened. Processes that are killed and stopped are in the
end-to-end tests.
"""

import os
import time
from dataclasses import replace
from pathlib import Path

import pytest

from serving.kv.cluster_key import ClusterKey
from serving.kv.erasure_tier import ErasureTier
from serving.kv.store import SparesStore, StoreError, tenant_id
from serving.kv.stripe_repair import RepairOptions
from serving.kv.stripes import Coding
from tests.serving.kv.storage_parts import (
    PATIENT,
    TIMES,
    check_payloads,
    names,
    opened,
    payload,
    running_nodes,
    wait_until,
)

OTHER = tenant_id("b")


def write(tier: ErasureTier, *numbers: int) -> None:
    tier.write([payload(number) for number in numbers])


def wait_until_missed(tier: ErasureTier, count: int) -> None:
    wait_until(lambda: tier.counts().num_nodes_away == count, f"{count} nodes are missed")


def test_what_is_written_is_read_and_survives_restarts_of_all(tmp_path: Path) -> None:
    key = ClusterKey(b"a secret of the cluster")
    with running_nodes(tmp_path, 6, key) as nodes:
        with opened(nodes) as tier:
            assert isinstance(tier, SparesStore)
            write(tier, 1, 2, 3)
            write(tier, 2, 4)
            assert tier.counts().num_written == 4
            check_payloads(tier.read(names(4, 1, 3, 2)), [4, 1, 3, 2])
            assert tier.read(names(9, 1))[0] is None
        # One fragment of each stripe on a node.
        assert sum(len(nodes.files(node)) for node in nodes.addresses) == 2 * 5
        for node in list(nodes.running):
            nodes.stop(node)
        for node in nodes.addresses:
            nodes.start(node)
        with opened(nodes) as tier:
            assert tier.contains(names(1, 2, 3, 4, 5)) == [True] * 4 + [False]
            check_payloads(tier.read(names(1, 2, 3, 4)), [1, 2, 3, 4])
            assert tier.sizes() == {tenant_id("a"): 4 * len(payload(1))}
            assert tier.counts().num_degraded == 0


def test_two_tiers_on_the_same_nodes_find_what_the_other_has_written(tmp_path: Path) -> None:
    with running_nodes(tmp_path, 5) as nodes, opened(nodes) as one, opened(nodes) as other:
        write(one, 1)
        wait_until(lambda: other.contains(names(1)) == [True], "the other hears of it")
        check_payloads(other.read(names(1)), [1])
        other.purge(None)
        wait_until(lambda: one.contains(names(1)) == [False], "its end is heard of")
        wait_until(
            lambda: not any(nodes.files(node) for node in nodes.addresses), "every node forgets it"
        )


@pytest.mark.parametrize("num_lost", [1, 2, 3])
def test_as_many_nodes_as_the_code_bears_may_be_away(tmp_path: Path, num_lost: int) -> None:
    with running_nodes(tmp_path, 5) as nodes, opened(nodes) as tier:
        write(tier, 1, 2)
        for node in list(nodes.running)[:num_lost]:
            nodes.stop(node)
        began = time.monotonic()
        found = tier.read(names(1, 2))
        if num_lost <= 2:
            check_payloads(found, [1, 2])
        else:
            assert found == [None, None]
        # Not known to be away at the time: their answers are waited for, but not for ever.
        assert time.monotonic() - began < TIMES.read_s + 2
        wait_until_missed(tier, num_lost)
        assert tier.contains(names(1)) == [num_lost <= 2]
        assert (tier.read(names(1)) == [None]) == (num_lost > 2)
        assert tier.counts().num_degraded == (num_lost <= 2)


def test_damage_on_as_many_nodes_as_the_code_bears_is_made_good(tmp_path: Path) -> None:
    """A flip in every region of the fragments of two nodes; then of a third."""
    with running_nodes(tmp_path, 5) as nodes, opened(nodes) as tier:
        write(tier, 1, 2)
        files = [nodes.files(node)[0] for node in nodes.addresses]
        whole = [file.read_bytes() for file in files]
        for at in range(0, len(whole[0]), len(whole[0]) // 11):
            for file, data in zip(files[:2], whole, strict=False):
                damaged = bytearray(data)
                damaged[at] ^= 1
                file.write_bytes(damaged)
            check_payloads(tier.read(names(1, 2)), [1, 2])
        assert tier.counts().num_corrupt > 0
        wait_until(lambda: tier.verify() == [] and tier.repair() == 0, "it is repaired")
        check_payloads(tier.read(names(1, 2)), [1, 2])
        for node in list(nodes.addresses)[:3]:
            (file,) = nodes.files(node)
            file.write_bytes(file.read_bytes()[:-1] + b"?")
        assert tier.read(names(2)) == [None]
        wait_until(lambda: tier.contains(names(1, 2)) == [False, False], "it is forgotten")
        # Computed again, it is stored again.
        write(tier, 1, 2)
        check_payloads(tier.read(names(1, 2)), [1, 2])


def test_fragments_that_were_cut_are_repaired(tmp_path: Path) -> None:
    with running_nodes(tmp_path, 5) as nodes, opened(nodes) as tier:
        write(tier, 1, 2)
        for node, size in zip(list(nodes.addresses)[:2], (0, 1000), strict=True):
            os.truncate(nodes.files(node)[0], size)
        check_payloads(tier.read(names(1, 2)), [1, 2])
        assert tier.verify() == []

        def are_made_anew() -> bool:
            # Each node tells by itself what it has removed.
            tier.repair()
            return {len(nodes.files(node)) for node in nodes.addresses} == {1}

        wait_until(are_made_anew, "the fragments are made anew")
        assert tier.verify() == [] and tier.counts().num_repaired == 2


def test_what_lost_nodes_held_is_made_anew_and_removed_when_they_come_back(
    tmp_path: Path,
) -> None:
    quick = replace(PATIENT, after_s=0.5, every_s=0.1)
    with running_nodes(tmp_path, 7) as nodes, opened(nodes, repair=quick) as tier:
        for number in range(4):
            write(tier, number)
        lost = [node for node in nodes.addresses if nodes.files(node)][:2]
        num_lost = sum(len(nodes.files(node)) for node in lost)
        for node in lost:
            nodes.stop(node)
        wait_until(lambda: tier.counts().num_repaired >= num_lost, "all is made anew")
        wait_until(lambda: tier.counts().num_missing == 0, "nothing is missing")
        # Two more may go now.
        for node in list(nodes.running)[:2]:
            nodes.stop(node)
        check_payloads(tier.read(names(0, 1, 2, 3)), [0, 1, 2, 3])
        for node in set(nodes.addresses) - set(nodes.running):
            nodes.start(node)
        wait_until(
            lambda: sum(len(nodes.files(node)) for node in nodes.addresses) == 4 * 5,
            "what is there twice is removed",
        )
        check_payloads(tier.read(names(0, 1, 2, 3)), [0, 1, 2, 3])


def test_a_node_gives_away_what_it_holds_and_another_joins(tmp_path: Path) -> None:
    quick = replace(PATIENT, every_s=0.1)
    with running_nodes(tmp_path, 5) as nodes, opened(nodes, repair=quick) as tier:
        write(tier, 1)
        write(tier, 2)
        assert tier.leave("n00") == 2
        # Nobody to give it to.
        wait_until(lambda: tier.counts().num_missing == 2, "it is to be made elsewhere")
        assert len(nodes.files("n00")) == 2
        made = nodes.start("n05")
        nodes.running["n01"][0].meet("n05", made.address)
        wait_until(lambda: not nodes.files("n00") and len(nodes.files("n05")) == 2, "it moves")
        nodes.stop("n00")
        check_payloads(tier.read(names(1, 2)), [1, 2])
        write(tier, 3)
        assert len(nodes.files("n05")) == 3
        with pytest.raises(StoreError, match=r"called 'n9'; expected one of n00, n01"):
            tier.leave("n9")
        with pytest.raises(StoreError, match="does not answer"):
            wait_until_missed(tier, 1)
            tier.leave("n00")


def test_too_few_nodes_take_nothing_and_leave_nothing(tmp_path: Path) -> None:
    with running_nodes(tmp_path, 5) as nodes, opened(nodes) as tier:
        nodes.stop("n00")
        # Not known yet that it is away: four of five fragments are enough.
        write(tier, 1)
        wait_until_missed(tier, 1)
        write(tier, 2)
        nodes.stop("n01")
        with pytest.raises(StoreError, match=r"n01: no answer"):
            tier.write([payload(3)])
        wait_until_missed(tier, 2)
        with pytest.raises(StoreError, match="0 storage nodes have taken.*at least 4 of 5"):
            tier.write([payload(4)])
        assert tier.contains(names(1, 2, 3, 4)) == [True, True, False, False]
        assert tier.counts().num_failed == 2
        wait_until(
            lambda: {len(nodes.files(node)) for node in nodes.running} == {2}, "its rest is removed"
        )
        nodes.start("n00")
        nodes.start("n01")
        wait_until_missed(tier, 0)
        write(tier, 3)
        wait_until(lambda: tier.repair() == 0 and tier.counts().num_missing == 0, "all is whole")
        assert {len(nodes.files(node)) for node in nodes.addresses} == {3}


def test_a_write_that_broke_off_is_a_miss_and_is_removed(tmp_path: Path) -> None:
    with running_nodes(tmp_path, 5) as nodes:
        with opened(nodes) as tier:
            write(tier, 1)
            write(tier, 2)
        stripe = nodes.files("n00")[0].name
        for node in ("n00", "n01", "n02"):
            nodes.stop(node)
            next(file for file in nodes.files(node) if file.name == stripe).unlink()
            nodes.start(node)
        with opened(nodes) as tier:
            assert sorted(tier.contains(names(1, 2))) == [False, True]
            tier.repair()
            wait_until(lambda: len(nodes.files("n04")) == 1, "what is left of it is removed")
            write(tier, 1, 2)
            check_payloads(tier.read(names(1, 2)), [1, 2])


def test_limits_of_bytes_and_tenants(tmp_path: Path) -> None:
    size = len(payload(1))
    with (
        running_nodes(tmp_path, 5) as nodes,
        opened(nodes, bytes_max=6 * size, tenant_bytes_max=3 * size) as tier,
    ):
        tier.write([payload(9, tenant=OTHER)])
        for number in range(5):
            write(tier, number)
        assert tier.evicted_age_s.count == tier.counts().num_evicted
        # Five of three fragments are stored of each: three payloads fit.
        assert tier.counts().num_bytes <= 6 * size and tier.counts().num_evicted >= 3
        assert tier.contains(names(4)) == [True]
        num_held = sum(tier.contains(names(*range(5), 9)))
        wait_until(
            lambda: len(list(tmp_path.glob("n*/fragments/*/*"))) == 5 * num_held, "the rest goes"
        )


def test_a_purge_leaves_no_byte_of_the_tenant(tmp_path: Path) -> None:
    with running_nodes(tmp_path, 5) as nodes:
        with opened(nodes) as tier:
            tier.write([payload(1), payload(2, tenant=OTHER), payload(3)])
            nodes.stop("n00")
            wait_until_missed(tier, 1)
            assert tier.purge(OTHER) == 1
            check_payloads(tier.read(names(1, 3)), [1, 3])
            nodes.start("n00")
            wait_until(lambda: len(nodes.files("n00")) == 0, "the one that was away removes it")
            assert tier.sizes().keys() == {tenant_id("a")}
        secret = payload(2, tenant=OTHER)[200:260]
        assert not any(secret in f.read_bytes() for f in tmp_path.glob("n*/fragments/*/*"))


def test_ten_and_two_over_thirteen(tmp_path: Path) -> None:
    with running_nodes(tmp_path, 13) as nodes, opened(nodes, Coding()) as tier:
        write(tier, *range(5))
        holders = [node for node in nodes.addresses if nodes.files(node)]
        assert len(holders) == 12
        for node in holders[:2]:
            nodes.stop(node)
        check_payloads(tier.read(names(*range(5))), range(5))


def test_a_tier_whose_nodes_are_not_there_finds_nothing(tmp_path: Path) -> None:
    with running_nodes(tmp_path, 5) as nodes:
        for node in list(nodes.running):
            nodes.stop(node)
        with opened(nodes, times=replace(TIMES, start_s=0.1), repair=RepairOptions()) as tier:
            assert tier.contains(names(1)) == [False] and tier.read(names(1)) == [None]
            with pytest.raises(StoreError, match="at least 4"):
                write(tier, 1)
