"""Goal: a config that loads is one the model supports, and a refusal says what to change.

Method: read the released and the golden config, compare some facts with their published values,
then change one key at a time and look for key, value and remedy in the message.
"""

import copy
import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from deepinfer_jax.config import ModelConfig, ModelConfigError

Changed = dict[str, Any]


@pytest.fixture
def source(golden: Path) -> dict[str, Any]:
    """The golden config.json, parsed; every test may change its copy."""
    return json.loads((golden / "tiny-v41" / "config.json").read_text())


def test_released_config_has_the_published_numbers() -> None:
    config = ModelConfig.released()
    assert (config.vocab_size, config.hidden_size, config.num_hidden_layers) == (129280, 5120, 40)
    assert (config.num_attention_heads, config.head_dim, config.qk_rope_head_dim) == (64, 512, 64)
    assert (config.q_lora_rank, config.o_groups, config.o_lora_rank) == (1280, 8, 1024)
    assert config.rms_norm_eps == 1e-20
    assert config.compress_ratios == (0,) * 2 + (2,) * 18 + (1,) * 20 + (0,) * 3
    assert config.kv_source_layer_ids == (2, 8, 14, 20)
    assert config.index_source_layer_ids == (2, 8, 14, 20, 24, 28, 32, 36)
    assert (config.n_routed_experts, config.num_experts_per_tok) == (384, 6)
    assert config.engram_num_embeddings == (384006168, 384016682)
    assert config.rope_scaling.factor == 16.0
    assert config.rope_scaling.original_max_position_embeddings == 65536
    assert config.vision is not None
    assert (config.vision.num_hidden_layers, config.vision.head_dim) == (32, 64)
    assert config.vision.max_wh_ratio is None


def test_tiny_is_the_golden_config(golden: Path, source: dict[str, Any]) -> None:
    assert ModelConfig.tiny() == ModelConfig.from_hf(golden / "tiny-v41" / "config.json")
    assert ModelConfig.tiny() == ModelConfig.from_hf(source)


def test_configs_are_hashable_values() -> None:
    """A config is a static argument of compiled functions, so equal ones must be one key."""
    assert hash(ModelConfig.tiny()) == hash(ModelConfig.tiny())
    wider = dataclasses.replace(ModelConfig.tiny(), index_topk=4)
    assert wider != ModelConfig.tiny()
    assert len({wider, ModelConfig.tiny(), ModelConfig.released()}) == 3


def test_reading_leaves_the_source_alone(source: dict[str, Any]) -> None:
    before = copy.deepcopy(source)
    ModelConfig.from_hf(source)
    assert source == before


def _set(source: dict[str, Any], key: str, value: object) -> None:
    *sections, last = key.split(".")
    for section in sections:
        source = source[section]
    source[last] = value


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("transformers_version", "5.24.0"),
        ("text_config.use_cache", False),
        ("text_config.bos_token_id", 0),
        ("text_config.hc_shifted", True),
        ("text_config.use_fp4_sparse_kv", True),
        ("text_config.index_k_source_layer_ids", [2, 4, 6]),
        ("tokenizer_compatibility", "release"),
        ("text_config.swiglu_limit", 2),
        ("vision_config.max_wh_ratio", None),
    ],
)
def test_keys_that_change_nothing_are_accepted(
    source: dict[str, Any], key: str, value: object
) -> None:
    _set(source, key, value)
    assert ModelConfig.from_hf(source) == ModelConfig.tiny()


@pytest.mark.parametrize(
    "key",
    ["tokenizer_compatibility", "text_config.norm_topk_prob", "vision_config.max_wh_ratio"],
)
def test_keys_with_one_value_or_a_default_may_be_absent(source: dict[str, Any], key: str) -> None:
    *sections, last = key.split(".")
    del (source[sections[0]] if sections else source)[last]
    assert ModelConfig.from_hf(source) == ModelConfig.tiny()


def test_parts_of_the_model_may_be_absent(source: dict[str, Any]) -> None:
    del source["vision_config"]
    text = source["text_config"]
    text["num_nextn_predict_layers"] = 0
    text["compress_ratios"] = text["compress_ratios"][:12]
    config = ModelConfig.from_hf(source)
    assert config.vision is None
    assert config.num_nextn_predict_layers == 0


@pytest.mark.parametrize(
    ("key", "value", "parts"),
    [
        # One supported value.
        ("model_type", "deepseek_v3", ("model_type", "deepseek_v3", "deepseek_v41")),
        ("text_config.attention_bias", True, ("attention_bias is True", "expected False")),
        ("text_config.tie_word_embeddings", True, ("tie_word_embeddings", "expected False")),
        ("text_config.hidden_act", "gelu", ("hidden_act", "'gelu'", "'silu'")),
        ("text_config.scoring_func", "sigmoid", ("scoring_func", "'sqrtsoftplus'")),
        ("text_config.topk_method", "greedy", ("topk_method", "'noaux_tc'")),
        ("text_config.norm_topk_prob", False, ("norm_topk_prob", "expected True")),
        ("text_config.norm_topk_prob", 1, ("norm_topk_prob is 1", "expected True")),
        ("text_config.num_key_value_heads", 8, ("num_key_value_heads is 8", "expected 1")),
        ("text_config.n_shared_experts", 2, ("n_shared_experts is 2", "expected 1")),
        ("text_config.hc_shifted", False, ("hc_shifted", "expected True")),
        ("text_config.use_fp4_sparse_kv", False, ("use_fp4_sparse_kv", "expected True")),
        ("text_config.index_k_source_layer_ids", [2], ("index_k_source_layer_ids", "[2, 4, 6]")),
        ("text_config.rope_scaling.rope_type", "linear", ("rope_type", "'linear'", "'yarn'")),
        ("quantization_config.expert_dtype", "int4", ("expert_dtype", "'int4'", "'fp4'")),
        ("quantization_config.weight_block_size", [128, 128], ("[128, 128]", "[32, 32]")),
        ("tokenizer_compatibility", "other", ("tokenizer_compatibility", "'release'", "'native'")),
        ("dtype", "float16", ("dtype", "'float16'", "'bfloat16'")),
        ("text_config.eos_token_id", 7, ("text_config.eos_token_id is 7", "expected 1")),
        # Unknown keys.
        ("text_config.first_k_dense_replace", 3, ("text_config.first_k_dense_replace is 3",)),
        ("text_config.rope_scaling.mscale", 1.0, ("text_config.rope_scaling.mscale is 1.0",)),
        ("quantization_config.group_size", 64, ("quantization_config.group_size is 64",)),
        ("vision_config.window_size", 7, ("vision_config.window_size is 7", "does not know")),
        ("audio_config", {}, ("audio_config is {}", "does not know")),
        # Types.
        ("text_config.hidden_size", "64", ("text_config.hidden_size is '64'", "an integer")),
        ("text_config.hidden_size", 64.0, ("hidden_size is 64.0", "an integer")),
        ("text_config.hidden_size", True, ("hidden_size is True", "an integer")),
        ("text_config.rms_norm_eps", None, ("rms_norm_eps is None", "a number")),
        ("text_config.rms_norm_eps", float("nan"), ("rms_norm_eps is nan", "a number")),
        ("text_config.rope_theta", float("inf"), ("rope_theta is inf", "a number")),
        ("text_config.rope_theta", 10**400, ("rope_theta is 1000", "a number")),
        ("text_config.engram_layer_ids", [1, 4.5], ("engram_layer_ids is [1, 4.5]", "integers")),
        ("text_config.rope_scaling", [], ("rope_scaling is []", "an object")),
        ("vision_config.max_wh_ratio", "2", ("max_wh_ratio is '2'", "a number or null")),
        ("vision_config", 3, ("vision_config is 3", "an object")),
        # Ranges.
        ("text_config.vocab_size", 0, ("vocab_size is 0", "more than 0")),
        ("text_config.hc_eps", -1e-6, ("hc_eps is -1e-06", "more than 0")),
        ("text_config.max_position_embeddings", 2**31, ("max_position_embeddings", "at most")),
        ("image_token_id", 320, ("image_token_id is 320", "0 to 319")),
        ("eos_token_id", -1, ("eos_token_id is -1", "0 to 319")),
        ("text_config.dspark_noise_token_id", 320, ("dspark_noise_token_id is 320", "0 to 319")),
        ("text_config.num_experts_per_tok", 17, ("num_experts_per_tok is 17", "at most 16")),
        ("text_config.dspark_num_experts_per_tok", 9, ("is 9", "at most 8")),
        ("text_config.engram_max_ngram_size", 1, ("engram_max_ngram_size is 1", "at least 2")),
        ("text_config.engram_compressed_vocab_size", 321, ("is 321", "at most 320")),
        ("text_config.rope_scaling.factor", 0.5, ("rope_scaling.factor is 0.5", "at least 1")),
        ("text_config.rope_scaling.beta_slow", 40, ("rope_scaling.beta_fast is 32", "40")),
        ("vision_config.max_image_tokens", 3, ("vision_config.max_image_tokens", "at least 4")),
        ("vision_config.max_wh_ratio", 0.5, ("vision_config.max_wh_ratio is 0.5", "at least 1")),
        ("vision_config.num_attention_heads", 3, ("vision_config.hidden_size is 64", "4 x")),
        # Widths.
        ("text_config.hidden_size", 72, ("hidden_size is 72", "a multiple of 32")),
        ("text_config.o_lora_rank", 48, ("o_lora_rank is 48", "a multiple of 32")),
        ("text_config.qk_rope_head_dim", 15, ("qk_rope_head_dim is 15", "even")),
        ("text_config.qk_rope_head_dim", 64, ("qk_rope_head_dim is 64", "at most", "(32)")),
        ("text_config.o_groups", 3, ("o_groups is 3", "divisor of num_attention_heads (4)")),
        # Layer lists.
        ("text_config.compress_ratios", [0, 0], ("compress_ratios is [0, 0]", "(12)", "(3)")),
        ("text_config.compress_ratios", [0, 0, 4] + [0] * 12, ("compress_ratios", "0, 1 and 2")),
        ("text_config.compress_ratios", [0] * 14 + [1], ("compress_ratios", "draft layers")),
        ("text_config.kv_source_layer_ids", [2, 6, 4], ("kv_source_layer_ids", "ascending")),
        ("text_config.index_source_layer_ids", [2, 2], ("index_source_layer_ids", "ascending")),
        ("text_config.engram_layer_ids", [1, 12], ("engram_layer_ids is [1, 12]", "0 and 11")),
        ("text_config.dspark_target_layer_ids", [], ("dspark_target_layer_ids", "at least one")),
        ("text_config.engram_num_embeddings", [864], ("engram_num_embeddings is [864]", "(2)")),
        ("text_config.engram_num_embeddings", [864, 1], ("engram_num_embeddings", "786")),
        ("text_config.engram_num_embeddings", [864, 2**31], ("engram_num_embeddings", "786")),
    ],
)
def test_a_bad_value_is_refused_by_name(
    source: dict[str, Any], key: str, value: object, parts: tuple[str, ...]
) -> None:
    _set(source, key, value)
    with pytest.raises(ModelConfigError) as refusal:
        ModelConfig.from_hf(source)
    message = str(refusal.value)
    assert "\n" not in message
    for part in parts:
        assert part in message


@pytest.mark.parametrize(
    "key",
    [
        "model_type",
        "bos_token_id",
        "text_config",
        "quantization_config",
        "text_config.hidden_size",
        "text_config.rope_scaling",
        "text_config.rope_scaling.factor",
        "vision_config.patch_size",
    ],
)
def test_a_missing_key_is_named(source: dict[str, Any], key: str) -> None:
    *sections, last = key.split(".")
    section = source
    for name in sections:
        section = section[name]
    del section[last]
    with pytest.raises(ModelConfigError, match=f"^{key} is missing; expected"):
        ModelConfig.from_hf(source)


def test_direct_construction_is_checked_too() -> None:
    with pytest.raises(ModelConfigError, match="index_topk is 0; expected more than 0"):
        dataclasses.replace(ModelConfig.tiny(), index_topk=0)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (None, "cannot be read"),
        (b"{", "not valid JSON"),
        (b"\xff\xfe\xff", "not valid JSON"),
        (b"[" * 100_000, "not valid JSON"),
        (b"[]", "the file is \\[\\]; expected an object"),
        (b"null", "the file is missing; expected an object"),
        (b"{}", "text_config is missing"),
    ],
)
def test_a_broken_file_is_named(tmp_path: Path, content: bytes | None, reason: str) -> None:
    path = tmp_path / "config.json"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ModelConfigError, match=f"config.json: .*{reason}"):
        ModelConfig.from_hf(path)
