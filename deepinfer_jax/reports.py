"""Log probabilities of sampled tokens and of prompts, for the steps in which somebody wants them.

They are those of the model itself, before biases, penalties, masks and temperature, so they mean
the same with every setting.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from deepinfer_jax.batch import StepBatch, StepShape, TokenView
from deepinfer_jax.controls import Controls, Settings
from deepinfer_jax.layers.hyper_connections import Residual
from deepinfer_jax.model import Model, Weights, logits
from deepinfer_jax.tiles import map_tiles

TOP_LOGPROBS_MAX = 20
"""The most likely tokens that are reported for each token, besides itself."""

_PROMPT_CHUNK = 512
"""Tokens of a prompt whose logits are held at one time."""


class Logprobs(NamedTuple):
    """Natural logarithms of probabilities, for M tokens; K = `TOP_LOGPROBS_MAX` or V if less.

    Attributes:
        chosen: [M] float32, of the token itself.
        top_tokens: [M, K] int32, the most likely tokens, the likeliest first.
        top: [M, K] float32, of those.
    """

    chosen: Any
    top_tokens: Any
    top: Any


class ReportedResult(NamedTuple):
    """What a step with controls returns; log probabilities are zeros unless they are wanted, and
    None where they have been taken out.

    Attributes:
        values: what the step returns without controls.
        sampled: of every sampled token. In a step that verifies drafts there is one for each of
            its tokens: of the accepted draft after it, or of the token that follows the last one;
            after that they have no meaning.
        prompt: of the token after each token of a prefill step, for rows that want it and as far
            as the prompt goes. None for a decode step.
    """

    values: jax.Array
    sampled: Logprobs | None
    prompt: Logprobs | None


def logprobs(target: jax.Array, tokens: jax.Array) -> Logprobs:
    """Of `tokens` [M] by the logits `target` [M, V]."""
    every = jax.nn.log_softmax(target.astype(jnp.float32), axis=1)
    chosen = jnp.take_along_axis(every, tokens[:, None], axis=1)[:, 0]
    top, top_tokens = jax.lax.top_k(every, min(TOP_LOGPROBS_MAX, target.shape[1]))
    return Logprobs(chosen, top_tokens.astype(jnp.int32), top)


def report(
    values: jax.Array,
    tokens: jax.Array,
    target: jax.Array,
    model: Model,
    weights: Weights,
    residual: Residual,
    batch: StepBatch,
    shape: StepShape,
    controls: Controls,
) -> ReportedResult:
    """The result `values` of a step with the log probabilities that are wanted.

    Args:
        tokens: [M] int32, the tokens sampled by the logits `target` [M, V].
        residual: what the layers left of each token of the step.
    """
    settings = Settings.unpack(controls.settings, shape)
    with jax.named_scope("logprobs"):
        sampled = _where_wanted(
            settings.reports[0] > 0, lambda: _of_sampled(model, batch, shape, target, tokens)
        )
        if shape.samples_every_token:
            return ReportedResult(values, sampled, None)
        prompt = _where_wanted(
            jnp.any(settings.next_tokens >= 0),
            lambda: _of_prompt(model, weights, residual, batch, settings),
        )
        return ReportedResult(values, sampled, prompt)


def emitted_after(batch: StepBatch, num_accepted: jax.Array, following: jax.Array) -> jax.Array:
    """[T] int32, what came after each token of a step that verified the drafts in it."""
    view = TokenView.of(batch)
    number = view.history.position - view.history.row_start
    is_draft = number < num_accepted[view.row]
    return jnp.where(is_draft, jnp.roll(batch.token_ids, -1), following[view.row])


def _of_sampled(
    model: Model, batch: StepBatch, shape: StepShape, target: jax.Array, tokens: jax.Array
) -> Logprobs:
    if not model.tile_tokens:
        return logprobs(target, tokens)
    num_sampled = shape.num_sampled(batch)
    pairs = (target, tokens)
    return map_tiles(lambda pair: logprobs(*pair), pairs, model.tile_tokens, num_sampled)


def _of_prompt(
    model: Model, weights: Weights, residual: Residual, batch: StepBatch, settings: Settings
) -> Logprobs:
    """Of the token after each token of the step, in pieces."""
    num_tokens = batch.token_ids.shape[0]
    view = TokenView.of(batch)
    is_last = view.history.position + 1 == view.row_end
    following = jnp.where(is_last, settings.next_tokens[view.row], jnp.roll(batch.token_ids, -1))
    # Some are no tokens: images, and what follows rows that want nothing. Neither is looked at.
    following = jnp.maximum(following, 0)

    def of_piece(index: jax.Array) -> Logprobs:
        return logprobs(logits(model, weights, residual, index), following[index])

    if model.tile_tokens:
        every = jnp.arange(num_tokens)
        return map_tiles(of_piece, every, model.tile_tokens, jnp.sum(batch.num_tokens))
    size = min(_PROMPT_CHUNK, num_tokens)
    index = jnp.minimum(jnp.arange(-(-num_tokens // size) * size), num_tokens - 1)
    pieces = jax.lax.map(of_piece, index.reshape(-1, size))
    return jax.tree.map(lambda a: a.reshape(-1, *a.shape[2:])[:num_tokens], pieces)


def _where_wanted(is_wanted: jax.Array, measure: Callable[[], Logprobs]) -> Logprobs:
    zeros = jax.eval_shape(measure)
    return jax.lax.cond(
        is_wanted, measure, lambda: jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), zeros)
    )
