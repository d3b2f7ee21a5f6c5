"""Goal: figures come back as they were measured, and only for what they were measured on.

Method: files in a temporary directory, whole, missing, damaged and of other shapes.
"""

from pathlib import Path

import pytest

from serving.core.buckets import Bucket
from serving.core.cost import PrefillSample
from serving.engine.step_costs import (
    cost_file,
    read_costs,
    read_samples,
    write_costs,
    write_samples,
)

SAMPLES = [PrefillSample(64, 2048.0, 5.5), PrefillSample(512, 131072.5, 60.25)]
COUNTS = [(64, 2048.0), (512, 131072.5)]
COSTS = {Bucket(4, 4, 16): 1.25, Bucket(4, 24, 16): 3.5}


def test_figures_come_back(tmp_path: Path) -> None:
    path = cost_file(tmp_path / "made", {"model": "a"})
    assert read_costs(path, set(COSTS)) is None
    write_costs(path, COSTS)
    assert read_costs(path, set(COSTS)) == COSTS
    write_costs(path, {bucket: 2 * ms for bucket, ms in COSTS.items()})
    assert read_costs(path, set(COSTS)) == {bucket: 2 * ms for bucket, ms in COSTS.items()}
    assert [entry.name for entry in path.parent.iterdir()] == [path.name]


def test_each_identity_has_its_own_file(tmp_path: Path) -> None:
    identities = [{"model": "a", "device": "x"}, {"model": "a", "device": "y"}, {"model": "b"}, {}]
    paths = {cost_file(tmp_path, identity) for identity in identities}
    assert len(paths) == 4
    assert cost_file(tmp_path, {"device": "x", "model": "a"}) in paths


@pytest.mark.parametrize(
    "text", [b"", b"{}", b"[[4, 4, 16]]", b"[[4, 4, 16, 1.0]]", b"[[4,4,16,1.0],[4,24,16,-1.0]]"]
)
def test_what_is_not_usable_is_measured_again(tmp_path: Path, text: bytes) -> None:
    path = tmp_path / "costs.json"
    path.write_bytes(text)
    assert read_costs(path, set(COSTS)) is None


def test_samples_come_back_in_order_and_whole(tmp_path: Path) -> None:
    path = cost_file(tmp_path / "made", {"model": "a"}, "prefill-costs")
    assert path.name != cost_file(tmp_path / "made", {"model": "a"}).name
    assert read_samples(path, COUNTS) is None
    write_samples(path, SAMPLES)
    assert read_samples(path, COUNTS) == SAMPLES
    assert read_samples(path, COUNTS[:1]) is None
    assert read_samples(path, COUNTS[::-1]) is None


@pytest.mark.parametrize("text", [b"", b"[[64, 2048.0]]", b"[[64,2048.0,0.0],[512,131072.5,1.0]]"])
def test_unusable_samples_are_measured_again(tmp_path: Path, text: bytes) -> None:
    path = tmp_path / "costs.json"
    path.write_bytes(text)
    assert read_samples(path, COUNTS) is None
