"""The architecture of one model as numbers: `ModelConfig`, read from a Hugging Face `config.json`.

The one idea: a config that exists is a config the code supports. `from_hf` refuses a key it does
not know, a value it does not implement and a number of the wrong type; construction refuses
numbers that do not fit together. Nothing downstream checks again.

Keys keep their published names. Keys that may hold only one value (`hidden_act`, `scoring_func`,
...) are checked and then dropped, so that no field exists that changes nothing.

*Why unknown keys are refused*: a key nobody reads may still mean a different model, and such a
checkpoint would load and answer nonsense. Bookkeeping keys of the Hugging Face libraries
(`transformers_version`, `use_cache`, ...) are known and ignored.
"""

import dataclasses
import itertools
import json
import sys
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

QUANTISATION_BLOCK = 32
"""Values that share a scale in every stored format; widths of quantised weights divide by it."""

_INT32_MAX = 2**31 - 1
"""Positions and table rows travel as 32-bit integers."""

_DATA_FOLDER = Path(__file__).parent / "configs"


class ModelConfigError(ValueError):
    """A configuration that is malformed, inconsistent or describes an unsupported model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeScaling:
    """YaRN interpolation of the rotary frequencies of compressed layers.

    Raises:
        ModelConfigError: a value lies outside its range.
    """

    factor: float
    beta_fast: float
    beta_slow: float
    original_max_position_embeddings: int

    def __post_init__(self) -> None:
        _require_positive(self, "original_max_position_embeddings beta_slow")
        _require(self, "factor", self.factor >= 1, "at least 1")
        fits = self.beta_fast > self.beta_slow
        _require(self, "beta_fast", fits, f"more than beta_slow ({self.beta_slow})")


@dataclass(frozen=True, slots=True, kw_only=True)
class VisionConfig:
    """The image encoder and the limits of image resizing.

    `max_wh_ratio` None leaves the shape of wide images alone.

    Raises:
        ModelConfigError: a value lies outside its range.
    """

    num_hidden_layers: int
    hidden_size: int
    num_attention_heads: int
    intermediate_size: int
    patch_size: int
    rope_theta: float
    downsample_ratio: int
    max_image_tokens: int
    min_pixels: int
    max_wh_ratio: float | None = None

    def __post_init__(self) -> None:
        _require_positive(
            self,
            "num_hidden_layers hidden_size num_attention_heads intermediate_size patch_size "
            "rope_theta downsample_ratio min_pixels",
        )
        # Start, one cell, a newline and the end are the smallest image.
        _require(self, "max_image_tokens", self.max_image_tokens >= 4, "at least 4")
        fits = self.hidden_size % (4 * self.num_attention_heads) == 0
        allowed = f"a multiple of 4 x num_attention_heads ({self.num_attention_heads})"
        _require(self, "hidden_size", fits, allowed)
        fits = self.max_wh_ratio is None or self.max_wh_ratio >= 1
        _require(self, "max_wh_ratio", fits, "null or at least 1")

    @property
    def head_dim(self) -> int:
        """Channels of one attention head."""
        return self.hidden_size // self.num_attention_heads


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """Every architectural number of one model. Hashable, so it may be a static argument.

    `compress_ratios` has one entry per text layer and then one per draft layer. `vision` is None
    for a checkpoint without an image encoder. Which layer reads whose entries is worked out, and
    checked, by `topology.Topology`.

    Raises:
        ModelConfigError: values that do not fit together.
    """

    bos_token_id: int
    eos_token_id: int
    pad_token_id: int
    image_token_id: int
    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    max_position_embeddings: int
    rms_norm_eps: float
    # Attention.
    num_attention_heads: int
    head_dim: int
    qk_rope_head_dim: int
    q_lora_rank: int
    o_groups: int
    o_lora_rank: int
    sliding_window: int
    rope_theta: float
    compress_rope_theta: float
    rope_scaling: RopeScaling
    # Compressed entries and their selection.
    compress_ratios: tuple[int, ...]
    kv_source_layer_ids: tuple[int, ...]
    index_source_layer_ids: tuple[int, ...]
    index_n_heads: int
    index_head_dim: int
    index_topk: int
    candidate_source_layer_id: int
    candidate_topk_blocks: int
    candidate_block_size: int
    # Experts.
    n_routed_experts: int
    num_experts_per_tok: int
    moe_intermediate_size: int
    routed_scaling_factor: float
    swiglu_limit: float
    # Hyper-connections.
    hc_mult: int
    hc_sinkhorn_iters: int
    hc_eps: float
    # Engram.
    engram_layer_ids: tuple[int, ...]
    engram_num_embeddings: tuple[int, ...]
    engram_vocab_size: int
    engram_max_ngram_size: int
    engram_n_heads: int
    engram_head_dim: int
    engram_pad_token_id: int
    engram_compressed_vocab_size: int
    # Draft module.
    num_nextn_predict_layers: int
    dspark_block_size: int
    dspark_noise_token_id: int
    dspark_target_layer_ids: tuple[int, ...]
    dspark_markov_rank: int
    dspark_n_routed_experts: int
    dspark_num_experts_per_tok: int
    vision: VisionConfig | None = None

    def __post_init__(self) -> None:
        _check_ranges(self)
        _check_widths(self)
        _check_layer_lists(self)

    @classmethod
    def from_hf(cls, source: Mapping[str, Any] | str | Path) -> "ModelConfig":
        """Reads a parsed `config.json`, or the file at a path.

        Raises:
            ModelConfigError: the file is missing or not JSON; a key is unknown, missing, of the
                wrong type or holds an unsupported value; values do not fit together. The message
                names the file (for a path), the key, the value and what is supported.
        """
        if isinstance(source, Mapping):
            return _parse(source)
        try:
            parsed = json.loads(Path(source).read_text(encoding="utf-8"))
        except OSError as error:
            raise ModelConfigError(
                f"{source}: cannot be read ({error.strerror}); expected the model's config.json"
            ) from error
        except (ValueError, RecursionError) as error:
            raise ModelConfigError(f"{source}: not valid JSON ({error})") from error
        try:
            return _parse(parsed)
        except ModelConfigError as error:
            raise ModelConfigError(f"{source}: {error}") from error

    @classmethod
    def released(cls) -> "ModelConfig":
        """The published DeepSeek-V4.1-Flash (552 B parameters)."""
        return cls.from_hf(_DATA_FOLDER / "deepseek_v41_flash.json")

    @classmethod
    def tiny(cls) -> "ModelConfig":
        """Every kind of layer at toy widths, for tests."""
        return cls.from_hf(_DATA_FOLDER / "tiny.json")


# Keys that have one supported value: (key, value). Absent means that value.
_TOP_FIXED = {
    "model_type": "deepseek_v41",
    "architectures": ["DeepseekV41ForCausalLM"],
    "tie_word_embeddings": False,
    "dtype": "bfloat16",
    "torch_dtype": "bfloat16",
}
_TEXT_FIXED = {
    "model_type": "deepseek_v41_text",
    "num_key_value_heads": 1,
    "n_shared_experts": 1,
    "hidden_act": "silu",
    "attention_bias": False,
    "tie_word_embeddings": False,
    "scoring_func": "sqrtsoftplus",
    "topk_method": "noaux_tc",
    "norm_topk_prob": True,
    "dtype": "bfloat16",
    "torch_dtype": "bfloat16",
    "hc_shifted": True,
    "use_fp4_sparse_kv": True,
    "dspark_target_attn_input": True,
}
_QUANTISATION_FIXED = {
    "quant_method": "fp8",
    "fmt": "e4m3",
    "expert_dtype": "fp4",
    "activation_scheme": "dynamic",
    "weight_block_size": [QUANTISATION_BLOCK, QUANTISATION_BLOCK],
    "scale_fmt": "ue8m0",
}
_VISION_FIXED = {"model_type": "deepseek_v41_vision", "dtype": "bfloat16"}
_ROPE_FIXED = {"rope_type": "yarn", "type": "yarn"}
# Keys that say nothing about the mathematics of inference.
_BOOKKEEPING = frozenset(
    {
        "_attn_implementation",
        "_commit_hash",
        "_name_or_path",
        "attention_dropout",
        "auto_map",
        "chunk_size_feed_forward",
        "id2label",
        "initializer_range",
        "is_encoder_decoder",
        "label2id",
        "output_attentions",
        "output_hidden_states",
        "problem_type",
        "return_dict",
        "torchscript",
        "transformers_version",
        "use_cache",
    }
)
_KIND_NAMES: dict[object, str] = {
    int: "an integer",
    float: "a number",
    float | None: "a number or null",
    tuple[int, ...]: "a list of integers",
}
_TOKENIZER_COMPATIBILITY = ("release", "native")
_TOP_IDS = ("bos_token_id", "eos_token_id", "pad_token_id", "image_token_id")


def _parse(source: object) -> ModelConfig:
    """Checks every key of a parsed config.json and builds the config."""
    top = _section(source, "")
    text = _section(top.pop("text_config", None), "text_config")
    quantisation = _section(top.pop("quantization_config", None), "quantization_config")
    vision = top.pop("vision_config", None)
    if "model_type" not in top:
        raise _missing("model_type", repr(_TOP_FIXED["model_type"]))
    _take_fixed(top, _TOP_FIXED, "")
    _take_fixed(quantisation, _QUANTISATION_FIXED, "quantization_config.")
    _refuse_rest(quantisation, "quantization_config.")
    compatibility = top.pop("tokenizer_compatibility", "release")
    if compatibility not in _TOKENIZER_COMPATIBILITY:
        raise _unsupported("tokenizer_compatibility", compatibility, _TOKENIZER_COMPATIBILITY)
    values: dict[str, Any] = {}
    for key in _TOP_IDS:
        values[key] = _take(top, key, int, "")
        # Some exporters repeat the ids inside text_config; a disagreement is a mistake.
        repeated = text.pop(key, values[key])
        if repeated != values[key]:
            raise _unsupported(f"text_config.{key}", repeated, (values[key],))
    _refuse_rest(top, "")
    _take_fixed(text, _TEXT_FIXED, "text_config.")
    sources = text.get("kv_source_layer_ids")
    index_key_sources = text.pop("index_k_source_layer_ids", sources)
    if index_key_sources != sources:
        raise _unsupported("text_config.index_k_source_layer_ids", index_key_sources, (sources,))
    scaling = _section(text.pop("rope_scaling", None), "text_config.rope_scaling")
    _take_fixed(scaling, _ROPE_FIXED, "text_config.rope_scaling.")
    values["rope_scaling"] = _build(RopeScaling, scaling, "text_config.rope_scaling.", {})
    if vision is not None:
        section = _section(vision, "vision_config")
        _take_fixed(section, _VISION_FIXED, "vision_config.")
        values["vision"] = _build(VisionConfig, section, "vision_config.", {})
    else:
        values["vision"] = None
    return _build(ModelConfig, text, "text_config.", values)


def _build[T: (RopeScaling, VisionConfig, ModelConfig)](
    cls: type[T], section: dict[str, Any], prefix: str, known: dict[str, Any]
) -> T:
    """Builds `cls` from the keys of `section` plus fields that are already `known`."""
    kinds = typing.get_type_hints(cls)
    values = dict(known)
    for field in dataclasses.fields(cls):
        if field.name in values:
            continue
        if field.name in section or field.default is dataclasses.MISSING:
            values[field.name] = _take(section, field.name, kinds[field.name], prefix)
    _refuse_rest(section, prefix)
    try:
        return cls(**values)
    except ModelConfigError as error:
        # The keys of ModelConfig come from two sections, and their names say which.
        where = "" if cls is ModelConfig else prefix
        raise ModelConfigError(f"{where}{error}") from error


def _section(value: object, name: str) -> dict[str, Any]:
    where = name or "the file"
    if value is None:
        raise _missing(where, "an object")
    if not isinstance(value, Mapping):
        raise ModelConfigError(f"{where} is {_show(value)}; expected an object")
    return dict(value)


def _take(section: dict[str, Any], key: str, kind: object, prefix: str) -> object:
    """Removes `key` from `section` and returns it as a value of `kind`."""
    expected = _KIND_NAMES[kind]
    if key not in section:
        raise _missing(prefix + key, expected)
    value = section.pop(key)
    if kind is int and type(value) is int:
        return value
    if kind == tuple[int, ...]:
        if isinstance(value, list | tuple) and all(type(item) is int for item in value):
            return tuple(value)
    elif kind is not int:
        if value is None and kind is not float:
            return None
        # The comparison refuses infinities, NaN, and integers that no float can hold.
        is_number = type(value) in (int, float)
        if value is not None and is_number and abs(value) <= sys.float_info.max:
            return float(value)
    raise ModelConfigError(f"{prefix}{key} is {_show(value)}; expected {expected}")


def _take_fixed(section: dict[str, Any], fixed: dict[str, Any], prefix: str) -> None:
    """Removes the keys that may hold only one value, after checking that they hold it."""
    for key, supported in fixed.items():
        value = section.pop(key, supported)
        if type(value) is not type(supported) or value != supported:
            raise _unsupported(prefix + key, value, (supported,))


def _refuse_rest(section: dict[str, Any], prefix: str) -> None:
    unknown = [key for key in section if key not in _BOOKKEEPING]
    if unknown:
        raise ModelConfigError(
            f"{prefix}{unknown[0]} is {_show(section[unknown[0]])}, a key this implementation "
            "does not know; expected a DeepSeek-V4.1 config (remove the key if it does not "
            "change the model)"
        )


def _check_ranges(config: ModelConfig) -> None:
    _require_positive(
        config,
        "vocab_size hidden_size num_hidden_layers max_position_embeddings num_attention_heads "
        "head_dim qk_rope_head_dim q_lora_rank o_groups o_lora_rank sliding_window index_n_heads "
        "index_head_dim index_topk candidate_topk_blocks candidate_block_size n_routed_experts "
        "num_experts_per_tok moe_intermediate_size hc_mult hc_sinkhorn_iters engram_vocab_size "
        "engram_n_heads engram_head_dim engram_compressed_vocab_size rms_norm_eps rope_theta "
        "compress_rope_theta routed_scaling_factor swiglu_limit hc_eps",
    )
    _require_at_most(config, "max_position_embeddings", _INT32_MAX, "32-bit positions")
    for key in (*_TOP_IDS, "engram_pad_token_id", "dspark_noise_token_id"):
        fits = 0 <= getattr(config, key) < config.vocab_size
        _require(config, key, fits, f"0 to {config.vocab_size - 1} (vocab_size)")
    _require(config, "engram_max_ngram_size", config.engram_max_ngram_size >= 2, "at least 2")
    _require_at_most(config, "engram_compressed_vocab_size", config.vocab_size, "vocab_size")
    _require_at_most(config, "num_experts_per_tok", config.n_routed_experts, "n_routed_experts")
    num_draft = config.num_nextn_predict_layers
    _require(config, "num_nextn_predict_layers", num_draft >= 0, "0 (no draft module) or more")
    if num_draft:
        _require_positive(
            config,
            "dspark_block_size dspark_markov_rank dspark_n_routed_experts "
            "dspark_num_experts_per_tok",
        )
        limit = config.dspark_n_routed_experts
        _require_at_most(config, "dspark_num_experts_per_tok", limit, "dspark_n_routed_experts")


def _check_widths(config: ModelConfig) -> None:
    widest = min(config.head_dim, config.index_head_dim)
    fits = config.qk_rope_head_dim % 2 == 0 and config.qk_rope_head_dim <= widest
    allowed = f"even and at most head_dim and index_head_dim ({widest})"
    _require(config, "qk_rope_head_dim", fits, allowed)
    heads = config.num_attention_heads
    allowed = f"a divisor of num_attention_heads ({heads})"
    _require(config, "o_groups", heads % config.o_groups == 0, allowed)
    allowed = f"a multiple of {QUANTISATION_BLOCK}, the width of a quantisation block"
    for key in (
        "hidden_size",
        "head_dim",
        "q_lora_rank",
        "o_lora_rank",
        "index_head_dim",
        "moe_intermediate_size",
        "engram_head_dim",
    ):
        _require(config, key, getattr(config, key) % QUANTISATION_BLOCK == 0, allowed)


def _check_layer_lists(config: ModelConfig) -> None:
    num_text, num_draft = config.num_hidden_layers, config.num_nextn_predict_layers
    fits = len(config.compress_ratios) == num_text + num_draft
    allowed = f"one ratio per text layer ({num_text}) and draft layer ({num_draft})"
    _require(config, "compress_ratios", fits, allowed)
    fits = all(ratio in (0, 1, 2) for ratio in config.compress_ratios)
    _require(config, "compress_ratios", fits, "only ratios 0, 1 and 2")
    fits = not any(config.compress_ratios[num_text:])
    _require(config, "compress_ratios", fits, f"0 for the draft layers ({num_text} and above)")
    allowed = f"ascending layers between 0 and {num_text - 1}"
    for key in (
        "kv_source_layer_ids",
        "index_source_layer_ids",
        "engram_layer_ids",
        "dspark_target_layer_ids",
    ):
        ids = getattr(config, key)
        ascending = all(a < b for a, b in itertools.pairwise(ids))
        _require(config, key, ascending and all(0 <= i < num_text for i in ids), allowed)
    if num_draft:
        fits = len(config.dspark_target_layer_ids) > 0
        _require(config, "dspark_target_layer_ids", fits, "at least one layer to draft from")
    heights = config.engram_num_embeddings
    fits = len(heights) == len(config.engram_layer_ids)
    allowed = f"one table height per engram layer ({len(config.engram_layer_ids)})"
    _require(config, "engram_num_embeddings", fits, allowed)
    # Each (n, head) has a region of at least engram_vocab_size rows; the primes that size the
    # regions exactly are checked with the tokenizer, by `engram_tables`.
    least = (config.engram_max_ngram_size - 1) * config.engram_n_heads * config.engram_vocab_size
    fits = all(least <= rows <= _INT32_MAX for rows in heights)
    allowed = f"{least} (engram_vocab_size per n-gram and head) to {_INT32_MAX} (32-bit rows)"
    _require(config, "engram_num_embeddings", fits, allowed)


def _require_positive(config: object, keys: str) -> None:
    for key in keys.split():
        value = getattr(config, key)
        _require(config, key, value > 0, "more than 0")


def _require_at_most(config: object, key: str, limit: int, name: str) -> None:
    _require(config, key, getattr(config, key) <= limit, f"at most {limit} ({name})")


def _require(config: object, key: str, condition: bool, expected: str) -> None:
    if not condition:
        raise ModelConfigError(f"{key} is {_show(getattr(config, key))}; expected {expected}")


def _missing(key: str, expected: str) -> ModelConfigError:
    return ModelConfigError(f"{key} is missing; expected {expected}")


def _unsupported(key: str, value: object, supported: tuple[object, ...]) -> ModelConfigError:
    allowed = " or ".join(_show(item) for item in supported)
    return ModelConfigError(f"{key} is {_show(value)}, which is not supported; expected {allowed}")


def _show(value: object) -> str:
    text = repr(list(value) if isinstance(value, tuple) else value)
    return text if len(text) <= 120 else text[:117] + "..."
