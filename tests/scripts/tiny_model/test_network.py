"""The network that is trained is the model that is served.

Goal: dense, batched, packed training computes the mathematics of `deepinfer_jax.model`.
Method: the same random weights run through both, two conversations packed in one row here, as two
sequences there. Logits have to agree in float32, with plain and with quantised caches, where the
selection leaves entries out. Gradients that are written by hand are compared with derived ones.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from deepinfer_jax.model import forward, logits
from deepinfer_jax.precision import CacheFormat
from scripts.tiny_model import products
from scripts.tiny_model.network import Network, Rows, Settings
from scripts.tiny_model.products import rounded
from tests.scripts.tiny_model import small_case


def served_logits(cache_format: CacheFormat) -> tuple[np.ndarray, np.ndarray]:
    """Logits of all tokens, and the entries that the last index source selected."""
    model, weights, cache = small_case.served_model(cache_format)
    batch = small_case.prefill_batch(small_case.token_ids())

    @jax.jit
    def run(weights: Any, cache: Any, batch: Any) -> tuple[jax.Array, jax.Array]:
        seen: dict[str, Any] = {}
        residual, _ = forward(model, weights, cache, batch, probe=seen.__setitem__)
        everything = jnp.arange(sum(small_case.LENGTHS))
        return logits(model, weights, residual, everything), seen["topk_4"]

    found, selected = run(weights, cache, batch)
    return np.asarray(found), np.asarray(selected)


@pytest.mark.parametrize("cache_format", list(CacheFormat))
def test_equals_the_served_model(cache_format: CacheFormat) -> None:
    expected, selected = served_logits(cache_format)
    network = Network(small_case.config(), Settings(jnp.float32, cache_format, selects=True))
    rows = small_case.packed_rows(small_case.token_ids())

    @jax.jit
    def run(parameters: Any, rows: Rows) -> tuple[jax.Array, jax.Array]:
        hidden, trace = network.hidden(parameters, rows)
        return network.logits(parameters, hidden), trace.recall

    found, recall = run(small_case.parameters(), rows)
    places = zip(small_case.STARTS, small_case.LENGTHS, strict=True)
    found = np.concatenate([np.asarray(found)[0, start : start + n] for start, n in places])
    # Selection takes place and leaves something out.
    assert np.max((selected >= 0).sum(-1)) == small_case.config().index_topk
    assert 0.1 < float(recall) < 0.95
    difference = np.max(np.abs(found - expected), axis=-1)
    if cache_format is CacheFormat.NOQ:
        assert difference.max() < 1e-4, difference
    else:
        # A value that lies on the edge between two codes may fall either way.
        assert np.median(difference) < 1e-3, difference


def assert_same_gradients(by_hand: Any, derived: Any, *arguments: jax.Array) -> None:
    weight = jax.random.normal(jax.random.key(9), by_hand(*arguments).shape)
    both = [
        jax.grad(lambda *a, f=f: jnp.sum(f(*a) * weight), argnums=(0, 1))(*arguments)
        for f in (by_hand, derived)
    ]
    for found, expected in zip(*both, strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)


def test_products_have_the_derived_gradients() -> None:
    x, w, keys = (
        jax.random.normal(jax.random.key(i), shape)
        for i, shape in enumerate([(4, 8, 16), (5, 16), (4, 6, 16)])
    )
    shares = jax.random.normal(jax.random.key(3), (4, 8, 6))
    assert_same_gradients(
        lambda x, w: products.linear(x, w, jnp.float32), lambda x, w: x @ w.T, x, w
    )
    assert_same_gradients(
        lambda q, k: products.compare(q, k, jnp.float32),
        lambda q, k: jnp.einsum("nqd,ned->nqe", q, k),
        x,
        keys,
    )
    assert_same_gradients(
        lambda s, v: products.weigh(s, v, jnp.float32),
        lambda s, v: jnp.einsum("nqe,ned->nqd", s, v),
        shares,
        keys,
    )


def test_rounding_passes_gradients_through() -> None:
    values = jnp.linspace(-1.0, 1.0, 64).reshape(2, 32)
    form = CacheFormat.KVQ.window
    assert not np.array_equal(rounded(values, form), values)
    gradient = jax.grad(lambda v: jnp.sum(rounded(v, form) ** 2))(values)
    np.testing.assert_allclose(gradient, 2 * rounded(values, form))
    np.testing.assert_array_equal(rounded(values, "F32"), values)
