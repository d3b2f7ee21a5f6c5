"""Goal: prefill and decode steps fit the released configuration, shape by shape.

Method: `jax.eval_shape` of the whole step with the weights, cache and batch of the 552 B model as
shapes alone. Nothing is allocated or compiled.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from deepinfer_jax.batch import StepShape, buffer_size
from deepinfer_jax.cache import CacheLayout
from deepinfer_jax.config import ModelConfig
from deepinfer_jax.engram_tables import EngramTables
from deepinfer_jax.model import Model, Weights
from deepinfer_jax.parameter_table import abstract_parameters
from deepinfer_jax.precision import CacheFormat, Precision
from deepinfer_jax.steps import run_step
from deepinfer_jax.topology import Topology

LONGEST = 8192
"""Blocks of the longest context, a million tokens."""


@functools.cache
def released() -> tuple[Model, Weights, CacheLayout]:
    """The model, its weights as shapes, and a cache for a thousand sequences."""
    config = ModelConfig.released()
    # The tokenizer is not at hand; of its classes the constants use the number alone.
    last_class = config.engram_compressed_vocab_size - 1
    classes = np.minimum(np.arange(config.vocab_size), last_class).astype(np.int32)
    precision = Precision(jnp.bfloat16, CacheFormat.KVQ, quantise_activations=True)
    model = Model(config, Topology.of(config), EngramTables.of(config, classes), precision)
    abstract_classes: Any = jax.ShapeDtypeStruct(classes.shape, jnp.int32)
    weights = Weights(abstract_parameters(config, {"text"}), abstract_classes)
    return model, weights, CacheLayout(config, precision, num_blocks=20_000, num_slots=1025)


@pytest.mark.parametrize(
    "shape",
    [
        StepShape(num_rows=4, num_tokens=8192, num_blocks=LONGEST, samples_every_token=False),
        StepShape(num_rows=256, num_tokens=1536, num_blocks=LONGEST, samples_every_token=True),
    ],
    ids=["prefill", "decode"],
)
def test_a_step_of_the_released_model(shape: StepShape) -> None:
    model, weights, layout = released()
    given = layout.abstract()
    buffer = jax.ShapeDtypeStruct((buffer_size(shape),), jnp.int32)
    step = functools.partial(run_step, model, shape)
    tokens, cache = jax.eval_shape(step, weights, buffer, given)
    assert (tokens.shape, tokens.dtype) == ((shape.num_samples,), jnp.int32)
    # The cache can be updated in place only if it comes back as it went in.
    assert jax.tree.structure(cache) == jax.tree.structure(given)
    for after, before in zip(jax.tree.leaves(cache), jax.tree.leaves(given), strict=True):
        assert (after.shape, after.dtype) == (before.shape, before.dtype)
