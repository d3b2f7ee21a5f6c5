"""Goal: the parameter tree is a pytree that jax can map, flatten and pass to compiled functions.

Method: build the tree of the tiny config with numbers in place of arrays and take it apart.
"""

import dataclasses
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from deepinfer_jax.config import ModelConfig
from deepinfer_jax.parameter_table import build_parameters, parameter_table
from deepinfer_jax.parameters import CompressorParameters, HyperParameters


def _numbered(parts: tuple[str, ...]) -> Any:
    numbers = itertools.count()
    return build_parameters(ModelConfig.tiny(), lambda spec: next(numbers), parts)


def test_every_leaf_is_visited_once() -> None:
    leaves = jax.tree.leaves(_numbered(("text", "draft", "vision")))
    assert sorted(leaves) == list(range(len(parameter_table(ModelConfig.tiny()))))


def test_absent_parts_have_no_leaves() -> None:
    text = _numbered(("text",))
    assert text.draft is None
    assert text.vision is None
    num_text = sum(spec.part == "text" for spec in parameter_table(ModelConfig.tiny()))
    assert len(jax.tree.leaves(text)) == num_text


def test_mapping_keeps_the_structure() -> None:
    tree = _numbered(("text", "draft", "vision"))
    doubled = jax.tree.map(lambda number: 2 * number, tree)
    assert jax.tree.structure(doubled) == jax.tree.structure(tree)
    assert doubled.layers[4].attn.compressor.wgate == 2 * tree.layers[4].attn.compressor.wgate
    assert doubled.vision.aligner.w2.bias == 2 * tree.vision.aligner.w2.bias


def test_modules_enter_compiled_functions_with_absent_fields() -> None:
    gated = CompressorParameters(wkv=jnp.ones(2), norm=jnp.ones(2), wgate=jnp.ones(2))
    plain = CompressorParameters(wkv=jnp.ones(2), norm=jnp.ones(2))
    count = jax.jit(lambda tree: sum(leaf.sum() for leaf in jax.tree.leaves(tree)))
    assert (count(gated), count(plain)) == (6, 4)


def test_parameters_are_frozen() -> None:
    hyper: Any = HyperParameters(fn=jnp.ones(1), base=jnp.ones(1), scale=jnp.ones(1))
    with pytest.raises(dataclasses.FrozenInstanceError):
        hyper.fn = jnp.zeros(1)
