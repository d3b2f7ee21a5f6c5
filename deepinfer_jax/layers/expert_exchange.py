"""Routed experts on several devices: tokens travel to the experts, and their outputs back.

1. Each device knows which devices hold the experts of its tokens. A token is sent once to each of
   them, however many of its experts are there.
2. With a token travel the numbers of its experts on that device and their route weights. The
   token itself is sent in the format in which the experts' products read it, so the exchange
   rounds nothing that one device would not round; that is FP8 with a scale for 32 channels, or the
   compute type where activations are not quantised.
3. A device runs its experts on what it received and sends back one row for each: the weighted sum
   over its experts, in the compute type.
4. The sender adds up what came back of each token, in float32.

No token is ever dropped: buffers have room for all tokens of all devices at one of them. Rows
that nobody sent have no expert, so kernels skip them.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from deepinfer_jax.parameters import ExpertParameters
from deepinfer_jax.precision import Precision
from pallas_kernels import ops
from pallas_kernels.scaled_array import ScaledArray, decode, encode
from sharding.collectives import Group, StepGroups


def routed_experts(
    x: jax.Array,
    index: jax.Array,
    weight: jax.Array,
    experts: ExpertParameters,
    groups: StepGroups,
    precision: Precision,
    limit: float,
) -> jax.Array:
    """Weighted sum of the outputs of the chosen experts, float32 [T, D].

    Args:
        x: [T, D], this device's tokens.
        index: [T, K] int32 in all experts.
        weight: [T, K] float32; 0 for padding tokens, which are not sent.
        experts: those of this device, [E / devices, ...].
    """
    if groups.experts.size == 1:
        return _run_experts(x, index, weight, experts, precision, limit)
    num_tokens = x.shape[0]
    some = _own_part(groups.spread, x, index, weight)
    sending = _Sending.of(some.index, some.weight, experts.w1.shape[0], groups.experts)
    received = sending.dispatch(some, precision, groups.experts)
    out = _run_experts(received.x, received.index, received.weight, experts, precision, limit)
    mine = sending.combine(out.astype(precision.compute_dtype), groups.experts)
    return groups.spread.gather(mine)[:num_tokens]


def _run_experts(
    x: jax.Array,
    index: jax.Array,
    weight: jax.Array,
    experts: ExpertParameters,
    precision: Precision,
    limit: float,
) -> jax.Array:
    return ops.grouped_matmul(
        x,
        index,
        weight,
        experts.w1,
        experts.w3,
        experts.w2,
        limit=limit,
        activation_format=precision.activation_format,
    )


class _Routed(NamedTuple):
    """Tokens [T, D] with their experts [T, K] int32 and route weights [T, K] float32."""

    x: jax.Array
    index: jax.Array
    weight: jax.Array


def _own_part(spread: Group, x: jax.Array, index: jax.Array, weight: jax.Array) -> _Routed:
    """The part of the tokens that this device sends, of those that all of `spread` have."""
    if spread.size == 1:
        return _Routed(x, index, weight)
    size = -(-x.shape[0] // spread.size)

    def part(a: jax.Array) -> jax.Array:
        padded = jnp.pad(a, ((0, size * spread.size - a.shape[0]), (0, 0)))
        return jax.lax.dynamic_slice_in_dim(padded, spread.index * size, size)

    return _Routed(part(x), part(index), part(weight))


class _Sending(NamedTuple):
    """What one device sends: N = T min(K, D) rows at most to D devices.

    Attributes:
        device: [T, K] int32, where each chosen expert lies.
        local: [T, K] int32, its number there.
        is_first: [T, K] bool, the first choice of its token on that device, and not padding.
        row: [T, K] int32, the row that carries the token there.
        token: [N] int32, the token of each row, T for rows that are not sent.
        target: [N] int32, the device that it goes to.
        counts: [D, D] int32, rows between all devices.
    """

    device: jax.Array
    local: jax.Array
    is_first: jax.Array
    row: jax.Array
    token: jax.Array
    target: jax.Array
    counts: jax.Array

    @classmethod
    def of(cls, index: jax.Array, weight: jax.Array, num_local: int, group: Group) -> "_Sending":
        """Works out who gets what."""
        num_tokens, num_chosen = index.shape
        device, local = index // num_local, index % num_local
        is_on = weight > 0
        # [D, T]: a token goes to a device or it does not.
        is_sent = (
            jnp.zeros((group.size, num_tokens), bool)
            .at[device, jnp.arange(num_tokens)[:, None]]
            .max(is_on)
        )
        counts = group.gather(jnp.sum(is_sent, axis=1, dtype=jnp.int32)[None])
        flat = is_sent.reshape(-1)
        num_rows = num_tokens * min(num_chosen, group.size)
        (place,) = jnp.nonzero(flat, size=num_rows, fill_value=flat.shape[0])
        row = (jnp.cumsum(flat) - 1).reshape(is_sent.shape)
        earlier = jnp.tril(jnp.ones((num_chosen, num_chosen), bool), -1)
        is_again = (device[:, :, None] == device[:, None, :]) & is_on[:, None, :] & earlier
        return cls(
            device=device,
            local=local,
            is_first=is_on & ~is_again.any(axis=2),
            row=row[device, jnp.arange(num_tokens)[:, None]].astype(jnp.int32),
            token=jnp.where(place < flat.shape[0], place % num_tokens, num_tokens),
            target=place // num_tokens,
            counts=counts,
        )

    def dispatch(self, tokens: _Routed, precision: Precision, group: Group) -> _Routed:
        """What this device received: [D T, ...] tokens with its own experts' numbers."""
        num_tokens, width = tokens.x.shape

        def rows(a: jax.Array) -> jax.Array:
            return a.at[self.token].get(mode="fill", fill_value=0)

        is_there = rows(self.device) == self.target[:, None]
        weight = jnp.where(is_there, rows(tokens.weight), 0.0)
        local = jnp.where(is_there, rows(self.local), 0)
        packed = _pack(_Routed(rows(tokens.x), local, weight), precision)
        received = group.exchange(packed, self.counts, group.size * num_tokens, num_tokens)
        return _unpack(received, width, local.shape[1], precision)

    def combine(self, out: jax.Array, group: Group) -> jax.Array:
        """Float32 [T, D], the sums of what the devices made of each token; `out` [D T, D] here."""
        num_tokens = self.device.shape[0]
        num_rows = self.token.shape[0]
        back = group.exchange(out, self.counts.T, num_rows, num_tokens)
        total = jnp.zeros((num_tokens, out.shape[1]), jnp.float32)
        for choice in range(self.device.shape[1]):
            part = back[jnp.clip(self.row[:, choice], 0, num_rows - 1)].astype(jnp.float32)
            total += jnp.where(self.is_first[:, choice, None], part, 0.0)
        return total


def _pack(tokens: _Routed, precision: Precision) -> jax.Array:
    """[N, bytes] uint8, so that everything about a token travels in one exchange."""
    form = precision.activation_format
    if form is None:
        values = [tokens.x.astype(precision.compute_dtype)]
    else:
        encoded = encode(tokens.x, form)
        values = [encoded.codes, encoded.scale]
    parts = [*values, tokens.weight, tokens.index.astype(jnp.int16)]
    return jnp.concatenate([_as_bytes(part) for part in parts], axis=1)


def _unpack(rows: jax.Array, width: int, num_chosen: int, precision: Precision) -> _Routed:
    form, dtype = precision.activation_format, jnp.dtype(precision.compute_dtype)
    if form is None:
        sizes = [(width, dtype)]
    else:
        num_scales = form.scale_shape((1, width))[1]
        sizes = [(width, form.code_dtype), (num_scales, form.scale_dtype)]
    sizes += [(num_chosen, jnp.float32), (num_chosen, jnp.int16)]
    values, start = [], 0
    for length, kind in sizes:
        stop = start + length * jnp.dtype(kind).itemsize
        values.append(_from_bytes(rows[:, start:stop], kind))
        start = stop
    *tokens, weight, index = values
    x = tokens[0] if form is None else decode(ScaledArray(tokens[0], tokens[1], form), dtype)
    return _Routed(x, index.astype(jnp.int32), weight)


def _as_bytes(a: jax.Array) -> jax.Array:
    """[N, bytes] uint8 of [N, M]."""
    return jax.lax.bitcast_convert_type(a, jnp.uint8).reshape(a.shape[0], -1)


def _from_bytes(rows: jax.Array, dtype: jax.typing.DTypeLike) -> jax.Array:
    size = jnp.dtype(dtype).itemsize
    shape = (rows.shape[0], -1) if size == 1 else (rows.shape[0], -1, size)
    return jax.lax.bitcast_convert_type(rows.reshape(shape), dtype)
