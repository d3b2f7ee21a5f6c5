"""What a request may ask of its tokens beyond temperature, top_k and top_p: the mask of a grammar,
biases, penalties for repeating, a floor of probability; and whether it wants log probabilities.

Few requests ask for any of it, so all of it travels apart from the batch (`Controls`) and is
computed under one condition each: a step in which nobody asks sends nothing and skips the work.

Logits are changed in this order: bias, repetition, presence and frequency penalty, mask, floor.
Temperature, top_k and top_p come after.

*Why the counts of tokens live in a state slot*: penalties need to know how often each token has
occurred. At 129,280 tokens a slot's counts take 253 KiB, a twelfth of the slot's other state. If
they came with each step, a prompt of 100,000 different tokens would cost 400 KiB per row and step,
and a fixed shape would need room for that in every step. The host only sends what has changed.
"""

from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np

from deepinfer_jax.batch import StepBatch, StepShape, TokenView

BIASES_MAX = 300
"""Tokens of one request that may have a bias."""

IN_PROMPT = 1 << 15
"""Bit of a token's count that says that the prompt holds it; the rest counts the output."""

COUNT_MAX = IN_PROMPT - 1


class Controls(NamedTuple):
    """The controls of a step of R rows and M sampled tokens.

    Attributes:
        settings: [N] int32, the `fields` of the step one after another.
        masks: [M, ceil(V / 32)] int32; bit b of word w is set if token 32 w + b may be sampled.
        counts: [num_slots, V] uint16, how often the sequence of a slot holds each token.
    """

    settings: jax.Array
    masks: jax.Array
    counts: jax.Array

    @classmethod
    def abstract(cls, shape: StepShape, counts: Any, lead: tuple[int, ...] = ()) -> "Controls":
        """Shapes and types of the controls of a step, with `counts` (array or shape) as it is.

        `lead` is the number of devices that have rows of their own, if a step is divided.
        """
        num_words = mask_words(counts.shape[1])
        return cls(
            cast(jax.Array, jax.ShapeDtypeStruct((*lead, settings_size(shape)), jnp.int32)),
            cast(jax.Array, jax.ShapeDtypeStruct((*lead, shape.num_samples, num_words), jnp.int32)),
            counts,
        )


class Settings(NamedTuple):
    """What `Controls.settings` holds.

    Attributes:
        adjusts: [1] int32, 1 if any row changes its logits; otherwise all but `reports` and
            `next_tokens` is without effect.
        reports: [1] int32, 1 if any row wants log probabilities.
        min_ps: [R] float32, least probability of a token as a share of the most likely one's.
        repetition_penalties: [R] float32, 1 for none; divides positive logits of tokens in prompt
            or output and multiplies negative ones.
        presence_penalties, frequency_penalties: [R] float32, taken from the logits of tokens in
            the output, once and for each time.
        next_tokens: [R] int32, of rows that want log probabilities of their prompt: the token
            after this step's chunk. -1 for other rows.
        bias_tokens: [R, BIASES_MAX] int32, ids past the vocabulary where there is none.
        bias_values: [R, BIASES_MAX] float32, added to the logits of those tokens.
    """

    adjusts: jax.Array
    reports: jax.Array
    min_ps: jax.Array
    repetition_penalties: jax.Array
    presence_penalties: jax.Array
    frequency_penalties: jax.Array
    next_tokens: jax.Array
    bias_tokens: jax.Array
    bias_values: jax.Array

    @classmethod
    def unpack(cls, words: jax.Array, shape: StepShape) -> "Settings":
        """The settings in `words` [N] int32."""
        parts, offset = {}, 0
        for name, (dims, dtype) in fields(shape).items():
            size = int(np.prod(dims))
            some = words[offset : offset + size].reshape(dims)
            parts[name] = jax.lax.bitcast_convert_type(some, dtype)
            offset += size
        return cls(**parts)


def fields(shape: StepShape) -> dict[str, tuple[tuple[int, ...], type]]:
    """Shape and 4-byte type of each field of `Settings`, in the order they lie in its words."""
    rows = (shape.num_rows,)
    biases = (shape.num_rows, BIASES_MAX)
    return {
        "adjusts": ((1,), np.int32),
        "reports": ((1,), np.int32),
        "min_ps": (rows, np.float32),
        "repetition_penalties": (rows, np.float32),
        "presence_penalties": (rows, np.float32),
        "frequency_penalties": (rows, np.float32),
        "next_tokens": (rows, np.int32),
        "bias_tokens": (biases, np.int32),
        "bias_values": (biases, np.float32),
    }


def settings_size(shape: StepShape) -> int:
    """Words of the settings of a step."""
    return sum(int(np.prod(dims)) for dims, _ in fields(shape).values())


def mask_words(vocab_size: int) -> int:
    """32-bit words of one mask."""
    return -(-vocab_size // 32)


def adjusted(
    logits: jax.Array,
    batch: StepBatch,
    token_index: jax.Array,
    shape: StepShape,
    controls: Controls,
) -> jax.Array:
    """Float32 [M, V] logits after `token_index` [M], as the controls change them.

    What must not be sampled is -inf. In a decode step the tokens of a row after its first one are
    drafts; what follows them is counted as if they were accepted.
    """
    settings = Settings.unpack(controls.settings, shape)
    view = TokenView.of(batch)
    row = view.row[token_index]

    def change() -> jax.Array:
        x = _biased(logits.astype(jnp.float32), settings, row)
        words = controls.counts[batch.slots][row].astype(jnp.int32)
        in_output = words & COUNT_MAX
        if shape.samples_every_token and shape.num_tokens > shape.num_rows:
            in_output = _with_drafts(in_output, batch.token_ids, view, row)
        x = _penalised(x, in_output, words >= IN_PROMPT, settings, row)
        x = jnp.where(_unpacked(controls.masks, x.shape[1]), x, -jnp.inf)
        return _floored(x, settings.min_ps[row], batch.temperatures[row])

    return jax.lax.cond(settings.adjusts[0] > 0, change, lambda: logits.astype(jnp.float32))


def _biased(x: jax.Array, settings: Settings, row: jax.Array) -> jax.Array:
    sample = jnp.arange(x.shape[0])[:, None]
    return x.at[sample, settings.bias_tokens[row]].add(settings.bias_values[row], mode="drop")


def _with_drafts(
    in_output: jax.Array, token_ids: jax.Array, view: TokenView, row: jax.Array
) -> jax.Array:
    """The counts [T, V] with each token's drafts, from the first to itself, counted too."""
    number = view.history.position - view.history.row_start
    sample = jnp.arange(row.shape[0])

    # Rows of a step may be of any length up to all its tokens, but drafts are few.
    def add(back: jax.Array, counts: jax.Array) -> jax.Array:
        token = token_ids[jnp.maximum(sample - back, 0)]
        return counts.at[sample, token].add((number - back >= 1).astype(counts.dtype))

    return jax.lax.fori_loop(0, jnp.max(number), add, in_output)


def _penalised(
    x: jax.Array, in_output: jax.Array, is_in_prompt: jax.Array, settings: Settings, row: jax.Array
) -> jax.Array:
    occurs = in_output > 0
    repetition = settings.repetition_penalties[row][:, None]
    repeated = jnp.where(x > 0, x / repetition, x * repetition)
    x = jnp.where(occurs | is_in_prompt, repeated, x)
    frequency = settings.frequency_penalties[row][:, None]
    return x - frequency * in_output - settings.presence_penalties[row][:, None] * occurs


def _unpacked(masks: jax.Array, vocab_size: int) -> jax.Array:
    """[M, V] bool of the bits of `masks`."""
    bits = (masks[:, :, None] >> jnp.arange(32)) & 1
    return bits.reshape(masks.shape[0], -1)[:, :vocab_size] > 0


def _floored(x: jax.Array, min_p: jax.Array, temperature: jax.Array) -> jax.Array:
    """`x` without the tokens less likely than `min_p` times the most likely one."""
    has_floor = (min_p > 0) & (temperature > 0)
    below = temperature * jnp.log(jnp.where(has_floor, min_p, 1.0))
    floor = jnp.where(has_floor, jnp.max(x, axis=1) + below, -jnp.inf)
    return jnp.where(x >= floor[:, None], x, -jnp.inf)


def set_counts(
    counts: jax.Array, cleared: jax.Array, slots: jax.Array, tokens: jax.Array, values: jax.Array
) -> jax.Array:
    """`counts` [S, V] with the rows `cleared` [C] set to 0 and then single counts [E] written.

    Slots past the end stand for nothing.
    """
    counts = counts.at[cleared].set(0, mode="drop")
    return counts.at[slots, tokens].set(values.astype(counts.dtype), mode="drop")
