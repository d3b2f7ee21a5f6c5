"""The coefficients with which a sub-layer reads and writes the residual streams."""

from typing import NamedTuple

import jax


class Mix(NamedTuple):
    """Per token `T`, for `S` streams, float32.

    Attributes:
        pre: [T, S] weights that form the input of the *next* sub-layer (delayed mix).
        post: [T, S] weights with which the output is added to each stream.
        comb: [T, S, S] weights from old streams (first index) to new ones (second).
    """

    pre: jax.Array
    post: jax.Array
    comb: jax.Array
