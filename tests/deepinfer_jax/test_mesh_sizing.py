"""Bytes of weights per device, for shipped plans and the released model against its published
totals, and plans that do not fit the model."""

import pytest

from deepinfer_jax.config import ModelConfig
from deepinfer_jax.mesh_sizing import device_weights
from sharding.plan import MeshPlan, ShardingError, load_plan


def _sizes(plan: MeshPlan) -> dict[tuple[str, str], int]:
    return {group[:2]: group.size_bytes for group in device_weights(ModelConfig.released(), plan)}


def test_one_device_holds_the_whole_checkpoint() -> None:
    assert sum(_sizes(load_plan("single")).values()) == 510_286_023_000


def test_experts_and_tables_are_divided_and_the_rest_is_not() -> None:
    whole, eighth = _sizes(load_plan("single")), _sizes(load_plan("serve_h200x8"))
    divided = {("text", "routed_experts"), ("draft", "routed_experts"), ("text", "engram_table")}
    for key, size in eighth.items():
        assert size == whole[key] // (8 if key in divided else 1)


def test_redundant_experts_are_further_replicas_of_the_text_model() -> None:
    whole, wide = _sizes(load_plan("single")), _sizes(load_plan("decode_ep64"))
    text, draft = ("text", "routed_experts"), ("draft", "routed_experts")
    assert wide[text] == whole[text] * 7 // 384
    assert wide[draft] == whole[draft] // 64


def test_tables_on_the_host_take_nothing_of_a_device() -> None:
    plan = MeshPlan({"expert": 8}, {"experts": ("expert",)}, engram="host")
    assert _sizes(plan)["text", "engram_table"] == 0


def test_scales_must_divide_as_well_as_values() -> None:
    # Rows of 256 channels have eight scales.
    plan = MeshPlan({"expert": 16}, {"engram_dim": ("expert",)})
    with pytest.raises(ShardingError, match=r"engram.embed.scale: .* size 8 .* into 16 parts"):
        device_weights(ModelConfig.released(), plan)


def test_experts_that_do_not_divide_are_refused() -> None:
    plan = MeshPlan({"expert": 5}, {"experts": ("expert",)})
    with pytest.raises(
        ShardingError, match=r"layers.0.ffn.experts.0.w1.weight.* size 384 .* into 5 parts"
    ):
        device_weights(ModelConfig.released(), plan)
