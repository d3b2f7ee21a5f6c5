"""The configuration of the small model: every kind of layer, at widths that two cores can train."""

import itertools
import math
from typing import Any

VOCAB_SIZE = 1024
_ENGRAM_VOCAB_SIZE = 2003
_ENGRAM_ORDERS, _ENGRAM_HEADS, _ENGRAM_LAYERS = 3, 2, (1, 2)

_QUANTISATION = {
    "quant_method": "fp8",
    "expert_dtype": "fp4",
    "activation_scheme": "dynamic",
    "weight_block_size": [32, 32],
    "scale_fmt": "ue8m0",
}
_ROPE_SCALING = {
    "rope_type": "yarn",
    "factor": 16,
    "beta_fast": 32,
    "beta_slow": 1,
    "original_max_position_embeddings": 65536,
}


def small_config(token_ids: dict[str, int], num_classes: int) -> dict[str, Any]:
    """`config.json`. `token_ids` gives the ids of "image" and "noise", `num_classes` the number of
    token classes of the tokenizer."""
    return {
        "architectures": ["DeepseekV41ForCausalLM"],
        "model_type": "deepseek_v41",
        "dtype": "bfloat16",
        "bos_token_id": 0,
        "eos_token_id": 1,
        "pad_token_id": 2,
        "image_token_id": token_ids["image"],
        "tokenizer_compatibility": "native",
        "quantization_config": _QUANTISATION,
        "text_config": _text_config(token_ids["noise"], num_classes),
    }


def _text_config(noise_id: int, num_classes: int) -> dict[str, Any]:
    return {
        "model_type": "deepseek_v41_text",
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 128,
        "moe_intermediate_size": 32,
        "num_hidden_layers": 7,
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "head_dim": 64,
        "qk_rope_head_dim": 16,
        "q_lora_rank": 64,
        "o_lora_rank": 64,
        "o_groups": 2,
        "hidden_act": "silu",
        "swiglu_limit": 10.0,
        "rms_norm_eps": 1e-20,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "initializer_range": 0.02,
        "use_cache": True,
        "tie_word_embeddings": False,
        "max_position_embeddings": 1048576,
        "rope_theta": 10000.0,
        "compress_rope_theta": 160000.0,
        "rope_scaling": _ROPE_SCALING,
        "n_routed_experts": 8,
        "n_shared_experts": 1,
        "num_experts_per_tok": 3,
        "scoring_func": "sqrtsoftplus",
        "topk_method": "noaux_tc",
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.5,
        "sliding_window": 32,
        "compress_ratios": [0, 0, 2, 2, 1, 1, 1, 0, 0, 0],
        "kv_source_layer_ids": [2, 4],
        "index_source_layer_ids": [2, 4, 5],
        "index_n_heads": 2,
        "index_head_dim": 64,
        "index_topk": 128,
        "candidate_source_layer_id": 4,
        "candidate_topk_blocks": 24,
        "candidate_block_size": 8,
        "hc_mult": 2,
        "hc_sinkhorn_iters": 4,
        "hc_eps": 1e-6,
        "engram_layer_ids": list(_ENGRAM_LAYERS),
        "engram_num_embeddings": _table_heights(),
        "engram_vocab_size": _ENGRAM_VOCAB_SIZE,
        "engram_max_ngram_size": _ENGRAM_ORDERS + 1,
        "engram_n_heads": _ENGRAM_HEADS,
        "engram_head_dim": 32,
        "engram_pad_token_id": 2,
        "engram_compressed_vocab_size": num_classes,
        "num_nextn_predict_layers": 3,
        "dspark_block_size": 5,
        "dspark_noise_token_id": noise_id,
        "dspark_target_layer_ids": [4, 5, 6],
        "dspark_markov_rank": 64,
        "dspark_n_routed_experts": 8,
        "dspark_num_experts_per_tok": 2,
    }


def _table_heights() -> list[int]:
    """Sums of the consecutive primes from the Engram vocabulary size up, one table a layer."""
    per_layer = _ENGRAM_ORDERS * _ENGRAM_HEADS
    numbers = itertools.count(_ENGRAM_VOCAB_SIZE)
    primes = (n for n in numbers if all(n % d for d in range(2, math.isqrt(n) + 1)))
    return [sum(itertools.islice(primes, per_layer)) for _ in _ENGRAM_LAYERS]
