"""Training of the draft blocks on the features of the finished main model.

In each row some places inside answers are taken as anchors. From each the draft blocks propose five
tokens at once, as `deepinfer_jax.draft` does when serving; the Markov term sees the true token
before (what the text says is what the main model would say, by and large), and the confidence head
learns how often the best proposal is the true token.
"""

# Weights in training are plain arrays and never None here; the tree's type allows more.
# pyright: reportArgumentType=false

from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from deepinfer_jax.config import ModelConfig
from deepinfer_jax.parameters import DraftParameters, LayerParameters, Parameters
from scripts.tiny_model.network import (
    ABSENT,
    Network,
    Rows,
    Turn,
    turn_of,
)
from scripts.tiny_model.products import cross_entropy
from scripts.tiny_model.streams import collapse, expand

CONFIDENCE_LOSS_WEIGHT = 0.3


class Anchors(NamedTuple):
    """Where drafts start, [B, A] each.

    Attributes:
        place: int32, token that the main model processed last.
        weight: [B, A, N] float32, 1 for drafts whose true token belongs to the same answer.
    """

    place: jax.Array
    weight: jax.Array


def choose_anchors(rows: Rows, num_anchors: int, num_drafts: int, key: jax.Array) -> Anchors:
    """Random places whose next token is said by the model and not the last of its answer."""
    said = rows.said > 0
    length = said.shape[1]
    following = jnp.pad(said, ((0, 0), (0, num_drafts + 1)))
    runs = [following[:, 1 : length + 1]]
    for number in range(2, num_drafts + 2):
        runs.append(runs[-1] & following[:, number : length + number])
    score = jax.random.uniform(key, said.shape) + runs[1]
    _, place = jax.lax.top_k(score, num_anchors)
    weight = jnp.stack([jnp.take_along_axis(run, place, axis=1) for run in runs[1:]], axis=-1)
    return Anchors(place, weight.astype(jnp.float32))


@dataclass(frozen=True)
class DraftNetwork:
    """The draft module over a `Network` of the main model."""

    network: Network

    @property
    def config(self) -> ModelConfig:
        """Of the model."""
        return self.network.config

    def hidden(
        self, main: Parameters, draft: DraftParameters, features: jax.Array, rows: Rows, at: Anchors
    ) -> jax.Array:
        """[B, A, N, D] what leaves the last block, before its norm."""
        net, c = self.network, self.config
        batch, num_anchors = at.place.shape
        dtype, size = net.settings.compute_dtype, c.dspark_block_size
        context = net.norm(net.product(features, draft.main_proj).astype(dtype), draft.main_norm)
        anchor = jnp.take_along_axis(jnp.pad(rows.token_ids, ((0, 0), (0, 1))), at.place + 1, 1)
        noise = jnp.full((batch, num_anchors, size), c.dspark_noise_token_id)
        ids = noise.at[:, :, 0].set(anchor).reshape(batch, -1)
        streams = [main.embed[ids].astype(dtype)] * c.hc_mult
        pre = jnp.zeros((*ids.shape, c.hc_mult), jnp.float32).at[..., 0].set(1.0)
        turns = self._turns(rows, at)
        for block in draft.layers:
            x, mix = collapse(streams, pre), net.mix(streams, block.hc_attn)
            attended = self._attention(
                net.norm(x, block.attn_norm), context, block, rows, at, turns
            )
            streams = expand(streams, attended, mix)
            x, mix_f = collapse(streams, mix.pre), net.mix(streams, block.hc_ffn)
            real = jnp.ones(ids.shape, bool)
            x = net.norm(x, block.ffn_norm)
            out, _, _ = net.moe(x, block.ffn, c.dspark_num_experts_per_tok, real)
            streams, pre = expand(streams, out, mix_f), mix_f.pre
        return collapse(streams, pre).reshape(batch, num_anchors, size, -1)

    def heads(
        self, main: Parameters, draft: DraftParameters, hidden: jax.Array, rows: Rows, at: Anchors
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Logits [B, A, N, V], confidence scores [B, A, N] and the true tokens [B, A, N]."""
        net, size = self.network, self.config.dspark_block_size
        places = at.place[:, :, None] + jnp.arange(1, size + 2)
        padded = jnp.pad(rows.token_ids, ((0, 0), (0, size + 2)))
        tokens = jnp.take_along_axis(padded[:, None], places, axis=2)
        before = draft.markov_embed[tokens[:, :, :-1]]
        logits = net.product(net.norm(hidden, draft.norm), main.head)
        logits = logits + net.product(before, draft.markov_head)
        both = jnp.concatenate([hidden.astype(jnp.float32), before], axis=-1)
        return logits, net.product(both, draft.confidence_proj)[..., 0], tokens[:, :, 1:]

    def _turns(self, rows: Rows, at: Anchors) -> tuple[Turn, Turn]:
        """Rotations of the tokens of the rows, and of the drafts."""
        start = jnp.take_along_axis(rows.position, at.place, axis=1)
        steps = jnp.arange(1, self.config.dspark_block_size + 1)
        drafts = (start[:, :, None] + steps).reshape(len(start), -1)
        return (
            turn_of(rows.position, self.config, is_scaled=False),
            turn_of(drafts, self.config, is_scaled=False),
        )

    def _attention(
        self,
        x: jax.Array,
        context: jax.Array,
        block: LayerParameters,
        rows: Rows,
        at: Anchors,
        turns: tuple[Turn, Turn],
    ) -> jax.Array:
        """Output [B, A * N, D]: each draft sees the window before its anchor and all N drafts."""
        net, c, p = self.network, self.config, block.attn
        dtype, heads = net.settings.compute_dtype, self.config.num_attention_heads
        size, window = c.dspark_block_size, c.sliding_window
        query_latent = net.norm(net.product(x, p.wq_a).astype(dtype), p.q_norm)
        q = net.rotate(net.product(query_latent, p.wq_b).astype(dtype), turns[1], heads)
        own, ring = net.latent(x, p, turns[1]), net.latent(context, p, turns[0])
        place = at.place[:, :, None] - np.arange(window)
        near = jnp.take_along_axis(ring[:, None], jnp.maximum(place, 0)[..., None], axis=2)
        segment = jnp.take_along_axis(rows.segment[:, None], jnp.maximum(place, 0), axis=2)
        present = (place >= 0) & (segment == segment[:, :, :1])
        keys = jnp.concatenate([near, own.reshape(*near.shape[:2], size, -1)], axis=2)
        present = jnp.pad(present, ((0, 0), (0, 0), (0, size)), constant_values=True)
        q = q.reshape(*near.shape[:2], size, heads, -1).astype(dtype)
        logits = jnp.einsum("banhd,bakd->banhk", q, keys).astype(jnp.float32) * c.head_dim**-0.5
        logits = jnp.where(present[:, :, None, None], logits, ABSENT)
        sink = jnp.broadcast_to(p.attn_sink[:, None], (*logits.shape[:-1], 1))
        share = jax.nn.softmax(jnp.concatenate([logits, sink], axis=-1), axis=-1)[..., :-1]
        out = jnp.einsum("banhk,bakd->banhd", share.astype(dtype), keys)
        return net.attention_output(out.reshape(*x.shape[:2], -1), p, turns[1])


def draft_loss(
    network: DraftNetwork,
    main: Parameters,
    num_anchors: int,
    draft: DraftParameters,
    rows: Rows,
    key: jax.Array,
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Loss of a batch, and the measures that are logged."""
    main = jax.lax.stop_gradient(main)
    _, trace = network.network.hidden(main, rows)
    features = jax.lax.stop_gradient(trace.features)
    at = choose_anchors(rows, num_anchors, network.config.dspark_block_size, key)
    hidden = network.hidden(main, draft, features, rows, at)
    logits, scores, true = network.heads(main, draft, hidden, rows, at)
    total = jnp.sum(at.weight) + 1e-6
    text = jnp.sum(cross_entropy(logits, true) * at.weight) / total
    right = (jnp.argmax(logits, axis=-1) == true).astype(jnp.float32)
    surprise = jax.nn.softplus(scores) - right * scores
    confidence = jnp.sum(surprise * at.weight) / total
    run = jnp.cumprod(right * at.weight, axis=-1)
    anchors = jnp.sum(at.weight[..., 0]) + 1e-6
    named = {
        "loss": text,
        "right": jnp.sum(right * at.weight) / total,
        "confidence_loss": confidence,
        "accepted": jnp.sum(run) / anchors,
    }
    return text + CONFIDENCE_LOSS_WEIGHT * confidence, named
