"""Per-row sampling settings of a step, the draw, and the acceptance of drafts.

The random number of a token depends on the request's seed and on the position that the token will
take, and on nothing else: not on the step, the row, the batch or the bucket. So a request gives
the same text in any company, and after it was interrupted and recomputed.
"""

import jax
import jax.numpy as jnp

from deepinfer_jax.batch import StepBatch, TokenView
from deepinfer_jax.cache import DraftCache
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
            batch.seeds[row],
            view.history.position[token_index] + 1,
        )


def accept(logits: jax.Array, batch: StepBatch, draft: DraftCache) -> tuple[jax.Array, jax.Array]:
    """How many drafts of each row are accepted, and the token that follows them, [R] int32 each.

    Args:
        logits: [T, V] after every token of the step. A row's first token is its last known one,
            the others are the first of the drafts in its slot.
    """
    view = TokenView.of(batch)
    with jax.named_scope("sampling"):
        return ops.accept_tokens(
            logits,
            view.row,
            jnp.cumsum(batch.num_tokens) - batch.num_tokens,
            draft.tokens[batch.slots],
            draft.probability[batch.slots],
            jnp.maximum(batch.num_tokens - 1, 0),
            draft.logits,
            batch.slots,
            batch.temperatures,
            batch.top_ks,
            batch.top_ps,
            batch.seeds,
            batch.starts + 1,
        )
