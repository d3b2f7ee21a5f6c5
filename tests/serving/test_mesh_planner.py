"""Goal: `plan --sharding` says what a device holds, whom a mesh serves and how fast, and refuses.

Method: the released model on shipped plans against sums worked out from its published sizes; a mesh
that is too small; bad numbers and files; traffic from a description and from a trace.
"""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from serving.core.pool_sizing import Traffic
from serving.mesh_planner import MeshFit, load_traffic
from serving.planner import ModelPlan
from sharding.config_file import ConfigError
from sharding.hardware import hardware

_H200 = hardware("h200")


@pytest.fixture(scope="module")
def released() -> ModelPlan:
    """The published model."""
    return ModelPlan.of(None, "kvq")


@pytest.fixture(scope="module")
def eight(released: ModelPlan) -> MeshFit:
    """It on one machine of eight H200."""
    return MeshFit.of(released, "serve_h200x8", _H200, 8192)


def test_bytes_of_a_device_add_up(eight: MeshFit) -> None:
    figures = json.loads(json.dumps(eight.figures()))
    # An eighth of 202.8 GB of tables, 288.8 GB of experts and 7.2 GB of draft experts; 11.5 GB.
    assert figures["weight_bytes"] / 1e9 == pytest.approx(
        (202.76 + 288.78 + 7.22) / 8 + 11.53, abs=0.1
    )
    assert sum(figures["weight_bytes_by_group"].values()) == figures["weight_bytes"]
    parts = figures["weight_bytes"] + sum(figures["temporary_bytes"].values())
    assert parts + figures["cache_bytes"] == pytest.approx(141e9 * 0.95)


def test_sequences_that_fit(eight: MeshFit) -> None:
    assert eight.fits and eight.users == 512
    assert eight.bytes_per_user == 8192 * 890 + sum(eight.model.size.state)
    per_device = int(eight.cache_bytes // eight.bytes_per_user)
    assert eight.users_max == 8 * per_device
    assert eight.kv_tokens_per_device == 8192 * per_device
    assert not replace(eight, users=eight.users_max + 1).fits


def test_step_times_are_those_of_the_roofline(eight: MeshFit) -> None:
    figures = eight.figures()
    assert figures["decode_step_ms"] == pytest.approx(
        eight.roofline().decode(64, 8192).total_s * 1e3
    )
    parts = figures["decode_parts_ms"]
    assert parts[figures["bound_by"]] == max(parts.values())
    # Sixteen billion active parameters, of which half are passed in prefill: 15.8 GFLOP a token.
    costs = eight.roofline().costs
    flops = costs.prefill.fp8_flops + costs.prefill.bf16_flops + costs.prefill.expert_flops
    assert flops / 1e9 == pytest.approx(15.8, abs=0.1)
    assert (costs.decode.num_moe_layers, costs.prefill.num_moe_layers) == (40, 20)
    attention = costs.decode.at(65536)
    exact = eight.model.size.decode_flops(65536)
    assert attention.flops == pytest.approx(exact.attention + exact.index_scores, rel=1e-3)


def test_a_longer_context_and_more_users_take_longer(released: ModelPlan) -> None:
    times = [
        MeshFit.of(released, "serve_h200x8", _H200, context, users).decode.total_s
        for context, users in ((8192, 64), (131072, 64), (131072, 256))
    ]
    assert times[0] < times[1] < times[2]


@pytest.mark.parametrize(
    ("sharding", "kind", "num_devices"),
    [
        ("serve_h200x8", "h200", 8),
        ("prefill_h200x8", "h200", 8),
        ("decode_ep64", "h200", 64),
        ("decode_ep128", "h200", 128),
        ("decode_b200x4", "b200", 4),
    ],
)
def test_shipped_plans_fit_their_hardware(
    released: ModelPlan, sharding: str, kind: str, num_devices: int
) -> None:
    fit = MeshFit.of(released, sharding, hardware(kind), 8192)
    assert fit.fits and fit.plan.num_devices == num_devices
    assert "Fits: " in fit.text() and "bound by" in fit.text()


def test_what_does_not_fit_says_by_how_much_and_why(released: ModelPlan) -> None:
    fit = MeshFit.of(released, "single", _H200, 8192)
    assert not fit.fits
    missing = fit.bytes_per_user - fit.cache_bytes
    text = fit.text()
    assert (
        f"Does not fit, by {missing / 1e9:.1f} GB on each device, because weights (510.3 GB" in text
    )
    assert "most of them text routed experts" in text and "compute" not in text
    many = MeshFit.of(released, "serve_h200x8", _H200, 1_000_000, users=8000)
    assert "caches of 1,000 sequences (89" in many.text()


@pytest.mark.parametrize(
    ("sharding", "context", "users", "expected"),
    [
        ("serve_h200x8", 0, None, "--context 0: expected 1 to 1048576"),
        ("serve_h200x8", 100, 0, "--users 0: expected at least 1"),
        ("nowhere", 100, None, "sharding nowhere: expected"),
    ],
)
def test_bad_numbers_and_files_are_refused(
    released: ModelPlan, sharding: str, context: int, users: int | None, expected: str
) -> None:
    with pytest.raises(ConfigError, match=expected):
        MeshFit.of(released, sharding, _H200, context, users)


def test_experts_that_do_not_divide_are_refused(released: ModelPlan, tmp_path: Path) -> None:
    file = tmp_path / "seven.toml"
    file.write_text('[mesh]\nexpert = 7\n[rules]\nexperts = ["expert"]\n')
    with pytest.raises(ConfigError, match=r"seven.toml: .*size 384 .* into 7 parts"):
        MeshFit.of(released, str(file), _H200, 8192)


def test_traffic_sizes_pools(eight: MeshFit) -> None:
    figures = eight.figures(Traffic(2000, 8000, 500, hit_ratio=0.5))
    new_tokens_per_s = 2000 * 8000 * 0.5
    assert figures["pools"]["prefill_workers"] == pytest.approx(
        new_tokens_per_s / figures["prefill_tokens_per_s"] / 0.8, abs=1
    )
    assert figures["pools"]["storage_read_bytes_per_s"] == pytest.approx(890 * 8e6)


def test_traffic_from_a_trace_counts_blocks_seen_before(tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    rows = [
        {"timestamp": 0, "input_length": 1000, "output_length": 10, "hash_ids": [1, 2]},
        {"timestamp": 4000, "input_length": 3000, "output_length": 30, "hash_ids": [1, 3]},
    ]
    trace.write_text("\n".join(map(json.dumps, rows)))
    assert load_traffic(trace) == Traffic(0.5, 2000, 20, hit_ratio=0.25)
    trace.write_text('{"timestamp": 1}')
    with pytest.raises(ConfigError, match="trace.jsonl: line 1: KeyError"):
        load_traffic(trace)
    trace.write_text("")
    with pytest.raises(ConfigError, match="0 requests; expected some at different times"):
        load_traffic(trace)


def test_traffic_from_a_description_is_strict(tmp_path: Path) -> None:
    file = tmp_path / "traffic.toml"
    file.write_text("requests_per_s = 1\nprompt_tokens = 10\noutput_tokens = 5\nhit_ratio = 0.5\n")
    assert load_traffic(file).hit_ratio == 0.5
    file.write_text("requests_per_s = 1\nprompt_token = 10\noutput_tokens = 5\n")
    with pytest.raises(ConfigError, match="prompt_token: unknown key .did you mean prompt_tokens"):
        load_traffic(file)
