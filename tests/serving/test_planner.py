"""Goal: `plan` names every figure, for a machine and for a person, from a config.json alone.

Method: figures of the released model against published numbers; the text read back; a directory
that holds nothing but a config, and directories that hold none or a bad one.
"""

import json
import shutil
from pathlib import Path

import pytest

from serving.config import ClusterOptions, ModelOptions, NodeOptions, ServingConfig
from serving.planner import ModelPlan, check_roles
from sharding.config_file import ConfigError


@pytest.fixture(scope="module")
def released() -> ModelPlan:
    """The published model."""
    return ModelPlan.of(None, "kvq")


@pytest.fixture
def bare(golden: Path, tmp_path: Path) -> Path:
    """A directory with the golden checkpoint's config and nothing else."""
    shutil.copy(golden / "tiny-v41" / "config.json", tmp_path)
    return tmp_path


def test_figures_of_the_released_model(released: ModelPlan) -> None:
    figures = json.loads(json.dumps(released.figures()))
    assert figures["total_bytes"] == 510_286_023_000
    assert figures["num_tensors"] == 96_085
    assert round(figures["params_backbone"] / 1e9, 1) == 551.9
    assert round(figures["params_active_decode"] / 1e9, 1) == 16.1
    assert round(figures["params_active_prefill"] / 1e9, 1) == 7.9
    assert figures["kv_bytes_per_token"] == 890 and isinstance(figures["kv_bytes_per_token"], int)
    assert figures["state_bytes_per_sequence"] == 2_916_136
    flops = {
        context: round(value / 1e9, 1) for context, value in figures["flops_per_token"].items()
    }
    assert flops == {"4096": 35.7, "65536": 37.4, "1048576": 57.5}
    reads = figures["read_bytes_per_token"]
    assert reads.keys() == flops.keys()
    assert round(reads["1048576"] / 1e9, 1) == 13.2
    assert figures["replay_keep_min"] == 134
    prompts = figures["flops_per_prompt_products"]
    assert prompts.keys() == flops.keys()
    assert [round(prompts["65536"][name] / 1e15, 2) for name in ("exact", "replay")] == [2.03, 1.04]


def test_parts_add_up(released: ModelPlan) -> None:
    figures = released.figures()
    for whole in ("flops_per_token", "read_bytes_per_token"):
        for context, total in figures[whole].items():
            assert sum(figures[f"{whole}_parts"][context].values()) == total
    assert sum(group["size_bytes"] for group in figures["groups"]) == figures["total_bytes"]
    assert sum(group["num_tensors"] for group in figures["groups"]) == figures["num_tensors"]
    assert sum(figures["state_bytes"].values()) == figures["state_bytes_with_drafts"]


def test_text_of_the_released_model(released: ModelPlan) -> None:
    rows = [line.split("  ") for line in released.text().splitlines()]
    cells = [[cell.strip() for cell in row if cell.strip()] for row in rows]
    assert ["backbone", "551.9 B"] in cells
    assert ["active per decoded token", "16.1 B"] in cells
    assert ["text routed experts", "92,160", "543.6 B", "288.8 GB", "56.6 %"] in cells
    assert ["growing, per token", "890"] in cells
    assert ["at 1,048,576", "32.3 GFLOP", "3.2 GFLOP", "22.0 GFLOP", "57.5 GFLOP"] in cells
    assert ["products of a prompt", "exact", "replay of 134"] in cells
    assert ["of 4,096", "126.7 TFLOP", "66.7 TFLOP"] in cells
    assert "510,286,023,000 bytes" in released.text()
    # Columns line up: the numbers of a table end where its header does.
    lines = released.text().splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith("weights"))
    table = lines[start : lines.index("", start) - 1]
    assert len({len(line) for line in table}) == 1


def test_a_config_is_enough(bare: Path) -> None:
    quantised, plain = ModelPlan.of(bare, "kvq"), ModelPlan.of(bare, "noq")
    assert quantised.figures()["num_tensors"] == 1823
    assert quantised.figures()["kv_bytes_per_token"] == 106
    assert plain.figures()["kv_bytes_per_token"] == 384
    assert str(bare) in quantised.text() and "(noq)" in plain.text()


def test_contexts_end_with_the_model(bare: Path) -> None:
    path = bare / "config.json"
    config = json.loads(path.read_text())
    for longest, expected in ((65536, ("4096", "65536")), (300, ("300",))):
        config["text_config"]["max_position_embeddings"] = longest
        path.write_text(json.dumps(config))
        plan = ModelPlan.of(bare, "kvq")
        assert tuple(plan.figures()["flops_per_token"]) == expected
        assert f"at {longest:,}" in plan.text()


def test_a_fraction_of_a_byte_stays_a_fraction(bare: Path) -> None:
    path = bare / "config.json"
    config = json.loads(path.read_text())
    config["text_config"]["index_head_dim"] = 32
    config["text_config"]["qk_rope_head_dim"] = 16
    path.write_text(json.dumps(config))
    figure = ModelPlan.of(bare, "kvq").figures()["kv_bytes_per_token"]
    # 36 + 17 bytes an entry; two layers have one per two tokens, one has one per token.
    assert figure == 53 / 2 * _sources_of_ratio(config, 2) + 53 * _sources_of_ratio(config, 1)


def _sources_of_ratio(config: dict, ratio: int) -> int:
    text = config["text_config"]
    return sum(text["compress_ratios"][layer] == ratio for layer in text["kv_source_layer_ids"])


def test_bad_directories_are_named(bare: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="/no/where: no such directory"):
        ModelPlan.of(Path("/no/where"), "kvq")
    path = bare / "config.json"
    config = json.loads(path.read_text())
    config["text_config"]["hidden_size"] = 100
    path.write_text(json.dumps(config))
    with pytest.raises(ConfigError, match="config.json: hidden_size is 100; expected a multiple"):
        ModelPlan.of(bare, "kvq")
    path.unlink()
    with pytest.raises(ConfigError, match="config.json: no such file"):
        ModelPlan.of(tmp_path, "kvq")


def test_roles_that_a_model_cannot_play_are_refused_before_anything_starts(bare: Path) -> None:
    nodes = {name: NodeOptions(name) for name in ("prefill", "decode", "vision")}
    config = ServingConfig(model=ModelOptions(str(bare)), cluster=ClusterOptions(nodes))
    check_roles(config)
    values = json.loads((bare / "config.json").read_text())
    del values["vision_config"]
    (bare / "config.json").write_text(json.dumps(values))
    with pytest.raises(ConfigError, match=r"nodes\.vision has the role 'vision'.* no image enc"):
        check_roles(config)
    del nodes["vision"]
    check_roles(ServingConfig(model=ModelOptions(str(bare)), cluster=ClusterOptions(nodes)))
