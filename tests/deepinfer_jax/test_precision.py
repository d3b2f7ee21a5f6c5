"""Goal: a cache format names the published storage of each cached thing. Method: the table."""

import jax.numpy as jnp

from deepinfer_jax.precision import CacheFormat, Precision
from pallas_kernels.scaled_array import FP8_32, MXFP4_32, NVFP4_16


def test_quantised_formats() -> None:
    kvq = CacheFormat("kvq")
    assert (kvq.window, kvq.entries, kvq.index) == (FP8_32, NVFP4_16, MXFP4_32)


def test_unquantised_formats() -> None:
    noq = CacheFormat("noq")
    assert (noq.window, noq.entries, noq.index) == (None, None, None)


def test_activations() -> None:
    assert Precision().activation_format is None
    assert Precision(jnp.bfloat16, quantise_activations=True).activation_format == FP8_32
