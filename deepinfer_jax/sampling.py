"""Per-row sampling settings of a step, and the draw.

The random number of a token depends on the request's seed and on the position that the token will
take, and on nothing else: not on the step, the row, the batch or the bucket. So a request gives
the same text in any company, and after it was interrupted and recomputed.
"""

import jax
import jax.numpy as jnp

from deepinfer_jax.batch import StepBatch, TokenView
from pallas_kernels import ops


def sample(logits: jax.Array, batch: StepBatch, token_index: jax.Array) -> jax.Array:
    """[M] int32: the token that follows each token `token_index` [M], from `logits` [M, V]."""
    view = TokenView.of(batch)
    row = view.row[token_index]
    with jax.named_scope("sampling"):
        return ops.sample_tokens(
            logits,
            batch.temperatures[row],
            batch.top_ks[row],
            batch.top_ps[row],
            jnp.stack([batch.seed_high[row], batch.seed_low[row]], axis=1),
            view.history.position[token_index] + 1,
        )
