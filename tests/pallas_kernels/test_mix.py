"""Goal: a mix travels through compiled code as its three parts, each in its place.
Method: parts that cannot be confused are sent through jit and through an index per token.
"""

import jax
import jax.numpy as jnp

from pallas_kernels.mix import Mix


def test_parts_keep_their_names_through_transformations() -> None:
    mix = Mix(jnp.full((3, 4), 1.0), jnp.full((3, 4), 2.0), jnp.full((3, 4, 4), 3.0))
    one = jax.jit(lambda m: jax.tree.map(lambda part: part[1], m))(mix)
    assert isinstance(one, Mix)
    assert (one.pre.shape, one.post.shape, one.comb.shape) == ((4,), (4,), (4, 4))
    assert (float(one.pre[0]), float(one.post[0]), float(one.comb[0, 0])) == (1.0, 2.0, 3.0)
