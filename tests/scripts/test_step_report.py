"""Goal: a compiled step is searched for its kernels and for arrays that none would make.
Method: planted lines of a compiled program; the reduced model against the released one.
"""

from deepinfer_jax.config import ModelConfig
from deepinfer_jax.topology import Topology
from scripts import step_report
from scripts.step_report import BLOCKS, kernels_in, one_layer_of_each_kind, step_faults, too_large

CALL = (
    'custom-call(%a), custom_call_target="mosaic_gpu_v2", metadata={{op_name="jit(step)/{0}/x"}}\n'
)


def test_every_kind_of_layer_is_there_at_full_width() -> None:
    released = ModelConfig.released()
    config = one_layer_of_each_kind(released)
    kinds = {(layer.kind, layer.ratio) for layer in Topology.of(config).layers}
    assert kinds == {(layer.kind, layer.ratio) for layer in Topology.of(released).layers}
    assert config.hidden_size == released.hidden_size
    assert config.n_routed_experts == released.n_routed_experts


def test_kernels_are_counted_by_their_scope() -> None:
    text = CALL.format("attention/sparse_attention") * 3 + CALL.format("moe/grouped_matmul")
    text += CALL.format("elsewhere") + "fusion(%b)\n"
    counted = kernels_in(text)
    assert (counted["sparse_attention"], counted["grouped_matmul"]) == (3, 1)
    assert counted["index_topk"] == 0
    missing = ("scaled_matmul", "index_topk", "hyper_mix", "cache_append", "sample_tokens")
    row = {"step": "decode", "kernels": counted, "too_large": ["f32[2]"]}
    assert step_faults(row) == [
        *(f"decode step: no kernel of {op}" for op in missing),
        "decode step: holds f32[2]",
    ]


def test_scores_of_a_context_and_widened_experts_are_found() -> None:
    config = ModelConfig.released()
    scores = f"f32[64,{BLOCKS * 128}]"
    widened = "bf16[384,2304,5120]"
    harmless = "f32[64,129280]{1,0} s32[64,66560] f8e4m3fn[384,2304,5120] bf16[64,5120]"
    assert too_large(f"{scores} {widened} {harmless}", config) == [widened, scores]


def test_shapes_of_both_kinds_are_compiled() -> None:
    kinds = {shape.samples_every_token for shape in step_report.SHAPES.values()}
    assert kinds == {True, False}
