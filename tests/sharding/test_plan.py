"""Goal: a plan is either sound or refused with both sides of the contradiction in the message.
Method: plans built by hand and from files; each wrong one differs from a right one in one place.
"""

import re
from pathlib import Path

import pytest

import sharding
from deepinfer_jax.config import ModelConfig
from deepinfer_jax.parameter_table import parameter_table
from sharding.config_file import ConfigError
from sharding.plan import MeshPlan, ShardingError, load_plan

PLAN = MeshPlan(
    mesh={"data": 2, "expert": 4},
    rules={"batch": ("data", "expert"), "experts": ("expert",), "vocab": ("expert",)},
)


def test_axes_of_follows_the_rules() -> None:
    assert PLAN.num_devices == 8
    assert PLAN.axes_of(("batch", "embed")) == (("data", "expert"), ())
    assert PLAN.axes_of(("experts", None, "ffn")) == (("expert",), (), ())
    assert PLAN.axes_of(()) == ()


def test_one_mesh_axis_cannot_cut_two_dimensions_of_an_array() -> None:
    with pytest.raises(ShardingError, match="experts and vocab would both .* axis expert"):
        PLAN.axes_of(("experts", "vocab"))


def test_an_unknown_logical_name_is_refused_rather_than_replicated() -> None:
    with pytest.raises(ShardingError, match="logical name expert is unknown; expected .*experts"):
        PLAN.axes_of(("expert", "ffn"))
    with pytest.raises(ValueError, match="logical name rows is unknown"):
        MeshPlan(mesh={"data": 2}, rules={"rows": ("data",)})


@pytest.mark.parametrize(
    ("mesh", "rules", "message"),
    [
        ({}, {}, "mesh has no axis; expected at least one of data, expert, context, tensor"),
        ({"model": 2}, {}, "mesh axis model is unknown"),
        ({"data": 0}, {}, "mesh axis data has size 0; expected at least 1"),
        ({"data": 2}, {"batch": ("expert",)}, "rule batch uses axis expert; .*: data"),
        ({"data": 2}, {"batch": ("data", "data")}, "rule batch names an axis twice: data, data"),
    ],
)
def test_contradictory_plans_are_refused(
    mesh: dict[str, int], rules: dict[str, tuple[str, ...]], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        MeshPlan(mesh, rules)


def test_shapes_must_have_a_name_per_dimension_and_divide() -> None:
    PLAN.check_shape(("batch", "embed"), (16, 3))
    with pytest.raises(ShardingError, match="has 1 names; expected 2"):
        PLAN.check_shape(("batch",), (16, 3))
    with pytest.raises(ShardingError, match="dimension batch of size 12 does not divide into 8"):
        PLAN.check_shape(("batch", "embed"), (12, 3))


def test_every_shipped_plan_loads_by_name() -> None:
    folder = Path(sharding.__path__[0]) / "configs"
    names = [path.stem for path in folder.glob("*.toml")]
    assert "single" in names
    for name in names:
        assert load_plan(name).num_devices >= 1
    assert load_plan("single") == MeshPlan(mesh={"data": 1})


def test_plans_are_read_from_files_and_wrong_files_named(tmp_path: Path) -> None:
    path = tmp_path / "two.toml"
    path.write_text('[mesh]\ndata = 2\n[rules]\nbatch = ["data"]\n', encoding="utf-8")
    assert load_plan(path) == MeshPlan({"data": 2}, {"batch": ("data",)})
    path.write_text("[mesh]\nmodel = 2\n", encoding="utf-8")
    with pytest.raises(ConfigError, match=r"two\.toml: mesh axis model is unknown"):
        load_plan(str(path))
    path.write_text("[mesh]\ndata = 2\n[rule]\n", encoding="utf-8")
    with pytest.raises(ConfigError, match=r"rule: unknown key \(did you mean rules\?\)"):
        load_plan(path)
    with pytest.raises(ConfigError, match="sharding sngle: expected the path .* single"):
        load_plan("sngle")


def test_every_dimension_of_the_parameter_table_has_a_known_name() -> None:
    table = parameter_table(ModelConfig.tiny())
    assert len(table) > 100
    for spec in table:
        assert len(PLAN.axes_of(spec.axes)) == len(spec.axes), spec.name


def test_shipped_plans_have_the_devices_of_their_names() -> None:
    sizes = {"cpu8": 8, "serve_h200x8": 8, "prefill_h200x8": 8, "decode_b200x4": 4}
    sizes |= {"decode_ep64": 64, "decode_ep128": 128}
    assert {name: load_plan(name).num_devices for name in sizes} == sizes


def test_settings_of_the_whole_mesh_are_checked(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    for line, expected in (
        ("redundant_experts = -1", "redundant_experts is -1; expected 0 or more"),
        ("micro_batches = 3", "micro_batches: received 3; expected one of 1, 2"),
        ('engram = "disk"', 'engram: received "disk"; expected one of "device", "host"'),
    ):
        file.write_text(f"{line}\n[mesh]\nexpert = 2\n")
        with pytest.raises(ConfigError, match=f"mine.toml: .*{re.escape(expected)}"):
            load_plan(file)


def test_parts_of_a_dimension_are_the_product_of_its_axes() -> None:
    plan = load_plan("decode_ep64")
    assert (plan.num_parts("experts"), plan.num_parts("embed")) == (64, 1)
