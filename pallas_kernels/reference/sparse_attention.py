"""Latent attention over a window and selected entries: what it means, in plain jax.numpy."""

from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.history import TokenHistory
from pallas_kernels.scaled_array import ScaledArray, decode

_HIGHEST = jax.lax.Precision.HIGHEST


def sparse_attention(
    q: jax.Array,
    ring: ScaledArray | jax.Array,
    recent: ScaledArray | jax.Array,
    history: TokenHistory,
    entries: ScaledArray | jax.Array | None,
    entry_index: jax.Array | None,
    sink: jax.Array,
    *,
    window: int,
    scale: float,
) -> jax.Array:
    """See `pallas_kernels.ops.sparse_attention`."""
    keys, present = history.gather(ring, recent, jnp.arange(window))
    parts, masks = [decode(keys)], [present]
    if entries is not None and entry_index is not None:
        flat = jax.tree.map(lambda a: a.reshape(-1, a.shape[-1]), entries)
        selected: Any = jax.tree.map(lambda a: a[jnp.maximum(entry_index, 0)], flat)
        parts.append(decode(selected))
        masks.append(entry_index >= 0)
    mask = jnp.concatenate(masks, axis=1)
    # Absent entries are zeroed and not only masked: whatever bytes a reused block or slot still
    # holds must not reach another sequence, not even as 0 times NaN.
    keys = jnp.where(mask[:, :, None], jnp.concatenate(parts, axis=1), 0.0)
    logits = jnp.einsum("thd,tkd->thk", q.astype(jnp.float32), keys, precision=_HIGHEST) * scale
    logits = jnp.where(mask[:, None, :], logits, -jnp.inf)
    # The sink takes part in the maximum, so a row without any entry is well defined: zero.
    peak = jnp.maximum(jnp.max(logits, axis=-1), sink[None, :])
    weights = jnp.exp(logits - peak[:, :, None])
    total = jnp.sum(weights, axis=-1) + jnp.exp(sink[None, :] - peak)
    out = jnp.einsum("thk,tkd->thd", weights, keys, precision=_HIGHEST)
    return out / total[:, :, None]
