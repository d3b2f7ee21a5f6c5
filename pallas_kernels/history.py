"""How a token of a step finds what earlier tokens of its sequence left behind.

Several things are kept for the last few tokens of a sequence only: window entries, raw inputs of
an unfinished compression group, token classes. All of them live in *rings* in the sequence's state
slot, position `p` at `p mod length`, and the tokens of the running step have not been written yet
when they are needed. So the value at a distance comes from this step's own rows when the
distance stays inside them, from the ring when it does not, and from nowhere before position 0.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np


class TokenHistory(NamedTuple):
    """For each token `T` of a step, int32.

    Attributes:
        position: absolute position of the token in its sequence.
        row_start: position of the first token that its sequence has in this step.
        slot: state slot of its sequence; 0 for padding tokens, which belong to nobody.
        first_visible: position before which nothing exists; 0 unless part of a sequence's
            recent past was left out on purpose.
    """

    position: jax.Array
    row_start: jax.Array
    slot: jax.Array
    first_visible: jax.Array

    def gather(
        self, ring: Any, recent: Any, distances: jax.Array | np.ndarray
    ) -> tuple[Any, jax.Array]:
        """Values `distances` [N] tokens back, for every token.

        Args:
            ring: array or `ScaledArray` [num_slots, ring_length, ...], as before this step.
            recent: the same for the tokens of this step, [T, ...].
            distances: [N] int32, 0 is the token itself; at most `ring_length`, counted from
                the first token of the row in this step.

        Returns:
            values [T, N, ...] and a mask [T, N], true where such a token exists. Values without
            one are arbitrary.
        """
        num_tokens = self.position.shape[0]
        at = self.position[:, None] - distances[None, :]
        in_step = at >= self.row_start[:, None]
        index = jnp.maximum(jnp.arange(num_tokens)[:, None] - distances[None, :], 0)

        def pick(ring_leaf: jax.Array, recent_leaf: jax.Array) -> jax.Array:
            old = ring_leaf[self.slot[:, None], jnp.mod(at, ring_leaf.shape[1])]
            new = recent_leaf[index]
            shape = in_step.shape + (1,) * (new.ndim - 2)
            return jnp.where(in_step.reshape(shape), new, old)

        return jax.tree.map(pick, ring, recent), at >= self.first_visible[:, None]
