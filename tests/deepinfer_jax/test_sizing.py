"""Goal: the counts of the released model are the published ones, and follow the config.

Method: totals and costs against published figures; single terms worked out by hand at contexts
where windows, selection or candidates are not full yet; a model changed in one number against the
difference that it must make; the state against the bytes of an allocated cache.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import pytest

from deepinfer_jax.cache import CacheLayout
from deepinfer_jax.config import ModelConfig
from deepinfer_jax.precision import CacheFormat, Precision
from deepinfer_jax.sizing import GroupSize, ModelSize


@functools.cache
def released(cache_format: CacheFormat = CacheFormat.KVQ) -> ModelSize:
    """The published model."""
    return ModelSize.of(ModelConfig.released(), cache_format)


@functools.cache
def tiny() -> ModelSize:
    """Every kind of layer at toy widths."""
    return ModelSize.of(ModelConfig.tiny())


def group(size: ModelSize, part: str, name: str) -> GroupSize:
    """The one group of that name."""
    (found,) = (g for g in size.groups if (g.part, g.group) == (part, name))
    return found


def test_released_totals_are_the_published_ones() -> None:
    size = released()
    assert size.total_bytes == 510_286_023_000
    assert size.num_tensors == 96_085
    counts = {
        "backbone": size.num_backbone,
        "engram": size.num_engram,
        "draft": size.num_in_part("draft"),
        "active decode": size.active_decode,
        "active prefill": size.active_prefill,
        "active draft": size.active_draft,
    }
    assert {name: round(count / 1e9, 1) for name, count in counts.items()} == {
        "backbone": 551.9,
        "engram": 196.6,
        "draft": 14.2,
        "active decode": 16.1,
        "active prefill": 7.9,
        "active draft": 0.8,
    }
    # No parameter is left out or counted twice.
    everything = size.num_backbone + size.num_engram
    everything += size.num_in_part("draft") + size.num_in_part("vision")
    assert everything == sum(g.num_parameters for g in size.groups)


def test_products_of_a_prompt() -> None:
    """16.1 B parameters a token, 7.9 B before the last ones; the head's 0.66 B once."""
    size = released()
    assert size.num_kept_min == 134
    exact, bounded = size.prompt_products(65536), size.prompt_products(65536, 140)
    assert round(exact / 65536 / 2e9, 1) == 15.5
    assert round(bounded / 65536 / 2e9, 1) == 7.9
    # What is left out passes no upper layer.
    upper = (exact - bounded) / 2 / (65536 - 140)
    assert round(upper / 1e9, 2) == 7.57
    assert size.prompt_products(140, 140) == size.prompt_products(140)
    head = 129280 * 5120
    assert size.prompt_products(1) == 2 * size.active_decode
    assert size.prompt_products(2) == 2 * (2 * size.active_decode - head)


def test_active_parameters_by_hand() -> None:
    expert = 3 * 2304 * 5120
    attention = (1280 + 512) * 5120 + 32768 * 1280 + 8192 * 4096 + 5120 * 8192
    # Norms, biases, sinks and scales of a block, beside its router and its mixing matrices.
    small = (2 * 5120 + 1280 + 512 + 64) + 2 * 384 + 2 * (24 + 3)
    block = attention + 7 * expert + 384 * 5120 + 2 * 24 * 20480 + small
    index_queries = 4096 * 1280 + 32 * 5120
    keys, projection = 128 * 512 + 128, 512 * 5120
    engram = 25600 * 6144 + 2 * 4 * 5120
    encoder = 20 * block + 3 * (index_queries + keys + 2 * projection + 512) + 2 * engram
    decoder = 20 * block + 5 * index_queries + keys + projection + 512
    head = 129280 * 5120 + 5120
    assert released().active_decode == encoder + decoder + head
    # Of the first decoder layer only what makes entries and keys.
    assert released().active_prefill == encoder + keys + projection + 512 + 5120


@pytest.mark.parametrize(
    ("context", "index", "total"),
    [(4096, 0.2, 35.7), (65536, 1.9, 37.4), (2**20, 22.0, 57.5)],
)
def test_operations_per_token_are_the_published_ones(
    context: int, index: float, total: float
) -> None:
    flops = released().decode_flops(context)
    assert round(flops.products / 1e9, 1) == 32.3
    assert round(flops.attention / 1e9, 1) == 3.2
    assert round(flops.index_scores / 1e9, 1) == index
    assert round(sum(flops) / 1e9, 1) == total


def test_short_contexts_by_hand() -> None:
    # 101 tokens: no window is full, and ratio 2 has 50 whole groups.
    flops, reads = released().decode_flops(101), released().decode_reads(101)
    selected = 18 * 50 + 20 * 101
    assert flops.attention == 4 * 64 * 512 * (40 * 101 + selected)
    assert flops.index_scores == 2 * 32 * 128 * (3 * 50 + 101 + 4 * 101)
    assert reads.windows == 40 * 101 * 528
    assert reads.entries == selected * 288
    assert reads.index_keys == (3 * 50 + 101) * 68
    assert reads.candidate_keys == 4 * 101 * 68


def test_reads_of_a_long_context() -> None:
    reads = released().decode_reads(2**20)
    assert reads.index_keys == 68 * 5 * 2**19
    assert reads.candidate_keys == 68 * 4 * 16384
    assert reads.entries == 38 * 512 * 288
    assert reads.windows == 40 * 128 * 528
    unquantised = released(CacheFormat.NOQ).decode_reads(2**20)
    assert unquantised.index_keys == 2 * 128 * 5 * 2**19
    assert unquantised.windows == 40 * 128 * 1024


def test_weights_that_a_token_reads() -> None:
    size = released()
    experts = group(size, "text", "routed_experts")
    assert experts.read_bytes_decode * 384 == experts.size_bytes * 6
    assert group(size, "text", "embedding").read_bytes_decode == 2 * 5120
    assert group(size, "text", "engram_table").read_bytes_decode == 2 * 24 * 264
    for name in ("attention", "shared_expert", "head", "router", "hyper_connections"):
        whole = group(size, "text", name)
        assert whole.read_bytes_decode == whole.size_bytes
    text = sum(g.read_bytes_decode for g in size.groups if g.part == "text")
    assert size.decode_reads(4096).weights == text


def test_cache_bytes_are_those_of_the_format() -> None:
    assert released().kv_bytes_per_token == 890
    assert released(CacheFormat.NOQ).kv_bytes_per_token == 3200
    state = released().state
    # Rings hold six positions more than the window, so that rejected rows can be taken back.
    assert state.window_rings == 40 * 134 * 528
    assert state.draft_rings == 3 * 134 * 528
    assert state.partial_groups == 3 * 7 * 4096
    assert state.without_drafts == 40 * 134 * 528 + 3 * 7 * 4096 + 9 * 4 + 4


def test_state_is_what_a_cache_takes() -> None:
    precision = Precision(jnp.bfloat16, CacheFormat.KVQ)
    sizes = []
    for num_slots in (3, 8):
        layout = CacheLayout(ModelConfig.tiny(), precision, 2, num_slots, has_draft=True)
        sizes.append(sum(leaf.nbytes for leaf in jax.tree.leaves(layout.zeros())))
    assert sum(tiny().state) * 5 == sizes[1] - sizes[0]


def test_one_layer_more_adds_that_layer() -> None:
    config = ModelConfig.tiny()
    layers = config.num_hidden_layers
    # A reuse layer at the end of the text model.
    ratios = config.compress_ratios
    longer = dataclasses.replace(
        config,
        num_hidden_layers=layers + 1,
        compress_ratios=(*ratios[:layers], ratios[layers - 1], *ratios[layers:]),
    )
    before, after = tiny(), ModelSize.of(longer)
    assert after.active_prefill == before.active_prefill
    assert after.kv_bytes_per_token == before.kv_bytes_per_token
    assert after.num_in_part("draft") == before.num_in_part("draft")
    share = config.num_experts_per_tok / config.n_routed_experts
    experts = group(before, "text", "routed_experts").num_parameters // layers
    added = after.num_backbone - before.num_backbone
    assert after.active_decode - before.active_decode == added - experts * (1 - share)
    assert after.decode_flops(50).index_scores == before.decode_flops(50).index_scores


def test_a_model_without_extras() -> None:
    config = dataclasses.replace(
        ModelConfig.tiny(),
        num_nextn_predict_layers=0,
        compress_ratios=ModelConfig.tiny().compress_ratios[: ModelConfig.tiny().num_hidden_layers],
        vision=None,
        engram_layer_ids=(),
        engram_num_embeddings=(),
    )
    size = ModelSize.of(config)
    assert (size.num_engram, size.num_in_part("draft"), size.num_in_part("vision")) == (0, 0, 0)
    assert (size.state.draft_rings, size.state.draft_proposals, size.active_draft) == (0, 0, 0)


def test_a_model_of_windows_only_prefills_all_layers() -> None:
    config = ModelConfig.tiny()
    config = dataclasses.replace(
        config,
        compress_ratios=(0,) * len(config.compress_ratios),
        kv_source_layer_ids=(),
        index_source_layer_ids=(),
    )
    size = ModelSize.of(config)
    head = config.vocab_size * config.hidden_size + config.hidden_size
    assert size.active_prefill == size.active_decode - head
    assert size.kv_bytes_per_token == 0
    assert size.decode_flops(1000).index_scores == size.decode_reads(1000).entries == 0
