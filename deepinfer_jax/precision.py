"""In which types one run of the model computes and keeps its cache.

These are properties of a run, not of a checkpoint: the same weights are served in bfloat16 with
a quantised cache on a GPU, and checked in float32 without any rounding on a CPU.
"""

import enum
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.scaled_array import FP8_32, MXFP4_32, NVFP4_16, Format


class CacheFormat(enum.Enum):
    """Storage of what is cached: `kvq` quantised as published, `noq` in the compute type."""

    KVQ = "kvq"
    NOQ = "noq"

    @property
    def window(self) -> Format | None:
        """Window entries; None is unquantised."""
        return FP8_32 if self is CacheFormat.KVQ else None

    @property
    def entries(self) -> Format | None:
        """Compressed entries."""
        return NVFP4_16 if self is CacheFormat.KVQ else None

    @property
    def index(self) -> Format | None:
        """Index keys, and the index queries that meet them."""
        return MXFP4_32 if self is CacheFormat.KVQ else None


@dataclass(frozen=True)
class Precision:
    """Types of one run.

    Attributes:
        compute_dtype: type of streams and of block inputs and outputs; norms, softmax, router,
            mixing coefficients and logits are float32 whatever it is.
        cache_format: storage of the cache.
        quantise_activations: round inputs of FP8 and FP4 products to FP8 per 32 channels, as
            tensor cores need them; otherwise they stay in the compute type.
    """

    compute_dtype: Any = jnp.float32
    cache_format: CacheFormat = CacheFormat.KVQ
    quantise_activations: bool = False

    @property
    def activation_format(self) -> Format | None:
        """Format of the inputs of FP8 and FP4 products; None leaves them alone."""
        return FP8_32 if self.quantise_activations else None


def usual_compute_dtype() -> Any:
    """The type to compute in on the devices of this process."""
    # A CPU computes in float32 anyway, and bfloat16 there only costs conversions and accuracy.
    return jnp.float32 if jax.default_backend() == "cpu" else jnp.bfloat16
