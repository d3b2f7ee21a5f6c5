"""The draft module: five tokens proposed in one pass, and how sure it is of each.

The story of one round, for a sequence whose main model has processed positions up to p:

1. While the main model runs, the means of the streams that enter the last layers (*features*) are
   projected once and written, as window entries, to the ring of every draft block
   (`append_context`). Rows that are rejected later are overwritten before anything reads them.
2. The token just sampled for p+1 is the *anchor*. The anchor and four noise tokens pass the draft
   blocks as positions p+1 .. p+5; each sees the ring up to p and all five, in both directions.
3. Going left to right, a low-rank Markov term of the token before is added to the logits of each
   position and a token is drawn for the position after it: the drafts of p+2 .. p+6.
4. A confidence head estimates for each draft the chance that it is accepted if the ones before
   it were.

The drafts wait in the cache with the distributions they were drawn from; the next step of the main
model runs the anchor and some of them, and `sampling.accept` decides.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from deepinfer_jax.batch import StepBatch, TokenView
from deepinfer_jax.cache import DraftCache
from deepinfer_jax.layers.attention import output, queries, query_latent, window_latent
from deepinfer_jax.layers.hyper_connections import Residual, begin
from deepinfer_jax.layers.moe import feed_forward
from deepinfer_jax.layers.primitives import (
    Arithmetic,
    Probe,
    StepContext,
    embedding,
    no_probe,
    rope_frequencies,
    store,
)
from deepinfer_jax.parameters import DraftParameters, LayerParameters, Parameters
from pallas_kernels import ops
from pallas_kernels.history import TokenHistory

_SCORE_MAX = 60.0
"""Confidence scores are clipped here, so that their sigmoid stays inside (0, 1) in float32 sums."""


@dataclass(frozen=True, slots=True)
class DraftSettings:
    """How drafts are drawn, and how the confidence head is read, which depends on its training.

    Attributes:
        calibration: temperatures that divide the confidence scores, one for all drafts or one
            for each.
        is_coupled: a draft is drawn with the random number of the token that it stands for, for
            steps that accept only what is sampled anyway.
        reads_normalised: the head reads the hidden state after the final norm, as some training
            code has it, and not before it, as published.

    Raises:
        ValueError: no temperature, or one that is not above 0.
    """

    calibration: tuple[float, ...] = (1.0,)
    reads_normalised: bool = False
    is_coupled: bool = False

    def __post_init__(self) -> None:
        if not self.calibration or not all(t > 0 for t in self.calibration):
            raise ValueError(f"calibration is {self.calibration}; expected temperatures above 0")

    def temperatures(self, num_drafts: int) -> jax.Array:
        """[N] float32 temperature of each draft.

        Raises:
            ValueError: the number of temperatures is neither 1 nor the number of drafts.
        """
        if len(self.calibration) not in (1, num_drafts):
            raise ValueError(
                f"calibration has {len(self.calibration)} temperatures; expected 1 or "
                f"{num_drafts}, one for each draft"
            )
        return jnp.broadcast_to(jnp.array(self.calibration, jnp.float32), num_drafts)


class DraftRows(NamedTuple):
    """The sequences to draft for, [R] each.

    Attributes:
        anchors: int32, the token just sampled.
        positions: int32, the last processed position; the anchor stands one after it.
        slots: int32.
        is_real: bool, false for padding rows.
        first_visible: int32, position before which the rings hold nothing of the sequence.
        temperatures: float32.  top_ks: int32.  top_ps: float32.
        seeds: [R, 2] uint32, high half first.
    """

    anchors: jax.Array
    positions: jax.Array
    slots: jax.Array
    is_real: jax.Array
    first_visible: jax.Array
    temperatures: jax.Array
    top_ks: jax.Array
    top_ps: jax.Array
    seeds: jax.Array

    @classmethod
    def of(cls, batch: StepBatch, anchors: jax.Array, num_kept: jax.Array) -> "DraftRows":
        """Rows of a step that kept `num_kept` [R] of their tokens and sampled `anchors` [R]."""
        first_visible = jnp.zeros_like(batch.starts)
        for starts in (batch.visible_starts, batch.tail_starts):
            if starts is not None:
                first_visible = jnp.maximum(first_visible, starts)
        return cls(
            anchors=anchors,
            positions=batch.starts + num_kept - 1,
            slots=batch.slots,
            is_real=batch.num_tokens > 0,
            first_visible=first_visible,
            temperatures=batch.temperatures,
            top_ks=batch.top_ks,
            top_ps=batch.top_ps,
            seeds=batch.seeds,
        )


def append_context(
    features: list[jax.Array], parameters: DraftParameters, cache: DraftCache, step: StepContext
) -> DraftCache:
    """The cache with the window entries of the step's tokens, from the `features` [T, hidden] of
    the target layers, in their order.
    """
    with jax.named_scope("draft"):
        joined = jnp.concatenate(features, axis=-1)
        step.probe("features", joined)
        x = step.norm(step.linear(joined, parameters.main_proj), parameters.main_norm)
        step.probe("main_x", x)
        frequencies = rope_frequencies(step.config, is_scaled=False)
        rings = [
            step.append_to_ring(ring, window_latent(x, block.attn, frequencies, step))
            for ring, block in zip(cache.rings, parameters.layers, strict=True)
        ]
        return cache._replace(rings=tuple(rings))


def fill_drafts(batch: StepBatch, cache: DraftCache) -> StepBatch:
    """The batch of a decode step, with the waiting drafts behind the first token of each row.

    What the batch held there does not matter: the drafts need never have been on the host.
    """
    view = TokenView.of(batch)
    number = view.history.position - view.history.row_start - 1
    number_max = cache.tokens.shape[1] - 1
    drafts = cache.tokens[view.history.slot, jnp.clip(number, 0, number_max)]
    is_draft = view.is_real & (number >= 0)
    return batch._replace(token_ids=jnp.where(is_draft, drafts, batch.token_ids))


def draft(
    arithmetic: Arithmetic,
    settings: DraftSettings,
    parameters: Parameters,
    cache: DraftCache,
    rows: DraftRows,
    probe: Probe = no_probe,
) -> tuple[jax.Array, DraftCache]:
    """Propose N tokens for every row.

    Args:
        cache: its rings hold the features of every row up to `rows.positions`.

    Returns:
        confidences [R, N] float32, and the cache with the drafts of the real rows; a slot's
        earlier drafts are gone.

    Raises:
        ValueError: the parameters have no draft module.
    """
    module = draft_module(parameters)
    step = _block_step(arithmetic, rows, probe)
    with jax.named_scope("draft"):
        hidden = _hidden(parameters, module, cache, rows, step)
        probe("raw_hidden", hidden)
        tokens, probability, logits, scores = _heads(
            hidden, settings, parameters, module, rows, step
        )
        probe("draft_logits", logits)
        probe("scores", scores)
        scores = scores / settings.temperatures(scores.shape[1])
        confidences = jax.nn.sigmoid(jnp.clip(scores, -_SCORE_MAX, _SCORE_MAX))
        # One past the end is dropped.
        place = jnp.where(rows.is_real, rows.slots, cache.tokens.shape[0])
        written = {"tokens": tokens, "probability": probability, "logits": logits}
        return confidences, cache._replace(
            **{
                name: getattr(cache, name).at[place].set(value, mode="drop")
                for name, value in written.items()
            }
        )


def draft_module(parameters: Parameters) -> DraftParameters:
    """The draft parameters.

    Raises:
        ValueError: they were not loaded.
    """
    if parameters.draft is None:
        raise ValueError(
            "the cache has room for drafts, but the parameters have no draft module; load the "
            "part 'draft' of the checkpoint too, or lay out the cache without has_draft"
        )
    return parameters.draft


def _block_step(arithmetic: Arithmetic, rows: DraftRows, probe: Probe) -> StepContext:
    """The draft pass as a step of its own: N tokens a row, from the anchor's position on."""
    length = arithmetic.config.dspark_block_size
    num_rows = rows.anchors.shape[0]
    row = jnp.repeat(jnp.arange(num_rows, dtype=jnp.int32), length)
    offset = jnp.tile(jnp.arange(length, dtype=jnp.int32), num_rows)
    start = (rows.positions + 1)[row]
    tokens = TokenView(
        row=row,
        is_real=rows.is_real[row],
        history=TokenHistory(
            position=start + offset,
            row_start=start,
            slot=jnp.where(rows.is_real, rows.slots, 0)[row],
            first_visible=rows.first_visible[row],
        ),
        row_end=start + length,
    )
    return StepContext(
        config=arithmetic.config,
        precision=arithmetic.precision,
        groups=arithmetic.groups,
        tokens=tokens,
        is_image=jnp.zeros(row.shape, bool),
        # Draft blocks have no compressed branch and so no blocks.
        block_tables=jnp.zeros((num_rows, 0), jnp.int32),
        probe=probe,
    )


def _hidden(
    parameters: Parameters,
    module: DraftParameters,
    cache: DraftCache,
    rows: DraftRows,
    step: StepContext,
) -> jax.Array:
    """[R, N, hidden]: what leaves the last draft block, before its norm."""
    c = step.config
    noise = jnp.full((rows.anchors.shape[0], c.dspark_block_size), c.dspark_noise_token_id)
    token_ids = noise.at[:, 0].set(rows.anchors).reshape(-1)
    h = embedding(parameters.embed, token_ids).astype(step.precision.compute_dtype)
    residual = Residual.start(h, c.hc_mult)
    for block, ring in zip(module.layers, cache.rings, strict=True):
        x, residual = begin(residual, block.hc_attn, step)
        out = _attend(step.norm(x, block.attn_norm), block, ring, step)
        residual = residual._replace(output=out)
        residual = feed_forward(residual, block, c.dspark_num_experts_per_tok, step)
    return residual.collapsed().reshape(*noise.shape, c.hidden_size)


def _attend(x: jax.Array, block: LayerParameters, ring: Any, step: StepContext) -> jax.Array:
    """Attention of the input [T, hidden] over the ring before the anchor and over all of `x`."""
    c, history = step.config, step.tokens.history
    frequencies = rope_frequencies(c, is_scaled=False)
    with jax.named_scope("attention"):
        latent = window_latent(x, block.attn, frequencies, step)
        entries = store(latent, step.precision.cache_format.window, step.precision.compute_dtype)
        # As compressed entries they are visible whatever their position; the window of all
        # tokens ends where the ring does, just before the anchor.
        blocks = jax.tree.map(lambda a: a.reshape(-1, c.dspark_block_size, a.shape[-1]), entries)
        first = step.tokens.row * c.dspark_block_size
        entry_index = first[:, None] + jnp.arange(c.dspark_block_size, dtype=jnp.int32)
        out = ops.sparse_attention(
            queries(query_latent(x, block.attn, step), block.attn, frequencies, step),
            ring,
            entries,
            history._replace(position=history.row_start - 1),
            blocks,
            entry_index,
            block.attn.attn_sink,
            window=c.sliding_window,
            scale=c.head_dim**-0.5,
        )
        return output(out, block.attn, frequencies, step)


def _heads(
    hidden: jax.Array,
    settings: DraftSettings,
    parameters: Parameters,
    module: DraftParameters,
    rows: DraftRows,
    step: StepContext,
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Tokens, their probabilities, logits and confidence scores, [R, N] and more, one by one."""
    normalised = step.norm(hidden, module.norm)
    base = step.product(normalised, parameters.head)
    step.probe("base_logits", base)
    confident = normalised if settings.reads_normalised else hidden

    def one(token: jax.Array, inputs: tuple[jax.Array, ...]) -> tuple[jax.Array, Any]:
        number, base_logits, h = inputs
        before = embedding(module.markov_embed, token)
        # Rounded as the cache keeps them, for the distribution must be the one drawn from.
        logits = base_logits + step.product(before, module.markov_head)
        logits = logits.astype(step.precision.compute_dtype)
        asked = (logits, rows.temperatures, rows.top_ks, rows.top_ps, rows.seeds)
        position = rows.positions + 2 + number
        if settings.is_coupled:
            following = ops.sample_tokens(*asked, position)
            probability = jnp.ones(following.shape, jnp.float32)
        else:
            following, probability = ops.propose_tokens(*asked, rows.positions + 1, position)
        both = jnp.concatenate([h.astype(jnp.float32), before], axis=-1)
        score = step.product(both, module.confidence_proj)[:, 0]
        return following, (following, probability, logits, score)

    numbers = jnp.arange(hidden.shape[1], dtype=jnp.int32)
    steps = (numbers, jnp.swapaxes(base, 0, 1), jnp.swapaxes(confident, 0, 1))
    _, results = jax.lax.scan(one, rows.anchors, steps)
    tokens, probability, logits, scores = (jnp.swapaxes(a, 0, 1) for a in results)
    return tokens, probability, logits, scores
