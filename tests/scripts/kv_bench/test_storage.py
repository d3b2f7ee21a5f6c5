"""Goal: the figures of the storage tiers are ratios of what they say. Method: clocks and work that
are known, and the parts that need no other process with few payloads.
"""

from pathlib import Path

import pytest

from scripts import bench_kv
from scripts.kv_bench import storage
from serving.kv.store import check


def test_the_fastest_of_each_side_counts() -> None:
    now = 0.0
    seconds = {"ours": iter([4.0, 2.0, 3.0]), "other": iter([5.0, 1.0, 9.0])}
    called: list[str] = []

    def work(side: str) -> None:
        nonlocal now
        called.append(side)
        now += next(seconds[side])

    def before() -> None:
        nonlocal now
        now += 100.0

    ratio, rates = storage.compare(
        4_000_000_000, lambda _: work("ours"), lambda _: work("other"), lambda: now, before, 3
    )
    assert ratio == 0.5 and rates == {"ours": 2.0, "other": 4.0}
    assert called == ["ours", "other"] * 3


def test_payloads_are_good_and_different() -> None:
    made = storage.payloads(3, 5)
    assert [check(payload).name for payload in made] == [storage.name(n) for n in (5, 6, 7)]
    assert len({bytes(payload) for payload in made}) == 3


def test_all_figures_of_the_part_are_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storage, "NUM_PAYLOADS", 3)
    monkeypatch.setattr(storage, "ROUNDS", 2)
    found = storage.disk(tmp_path) | storage.coding() | storage.host(tmp_path)
    ratios = [name for name in bench_kv.FIGURES["storage"] if name != "degraded_over_healthy"]
    assert all(found[name] > 0 for name in ratios)
