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


def accept_equal(
    tokens: jax.Array, batch: StepBatch, draft: DraftCache
) -> tuple[jax.Array, jax.Array]:
    """`accept` of drafts that are what `sample` chose anyway, [R] int32 each.

    The text is the one without drafts, token for token, whatever is drafted and however much of it
    is verified. Where tokens are drawn at random, drafts that were drawn with the same random
    numbers are accepted often (Daliri et al., 2024, drafter-invariant speculative decoding).

    Args:
        tokens: [T] int32, sampled after every token of the step.
    """
    num_tokens, drafts_max = tokens.shape[0], draft.tokens.shape[1]
    first = jnp.cumsum(batch.num_tokens) - batch.num_tokens
    number = jnp.arange(drafts_max, dtype=jnp.int32)[None, :]
    is_draft = number < batch.num_tokens[:, None] - 1
    judge = jnp.minimum(first[:, None] + number, num_tokens - 1)
    is_equal = is_draft & (tokens[judge] == draft.tokens[batch.slots])
    num_accepted = jnp.sum(jnp.cumprod(is_equal.astype(jnp.int32), axis=1), axis=1)
    return num_accepted, tokens[jnp.minimum(first + num_accepted, num_tokens - 1)]
