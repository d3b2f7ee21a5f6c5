"""Which replica of an expert serves how many tokens: chosen per step from that step's own loads.

Every device has one weight, and an expert's tokens are shared among its replicas in proportion to
the weights of their devices. The weights are then moved a few times: a device above the mean
lowers its own by about what would bring it to the mean. Tokens of replicated experts so fill up
what the other experts of a step leave free.

*Why not fixed shares*: loads of single steps scatter around any forecast, and the most loaded of
64 devices is then 9 % above the mean even under a perfect plan for 4,096 tokens.

The iteration is Newton's method on the diagonal of device load against logarithm of weight, with
momentum, keeping the best iterate; `proportional allocation` is the name of the family. It needs
nothing but sums per expert and per device, so the same lines run in numpy and inside a jax step.
"""

# numpy and jax.numpy stand for each other here, which no type describes.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportUnknownParameterType=false

from typing import Any, NamedTuple

import numpy as np

_ITERATIONS = 10
_DAMPING = 0.35
_MOMENTUM = 0.5
_CHANGE_MAX = 2.0
_LOG_WEIGHT_MAX = 20.0
_TINY = 1e-3


class ReplicaLoads(NamedTuple):
    """How a step's tokens are shared out, arrays of numpy or jax as the input.

    Attributes:
        of_slot: [B, P], tokens of each physical expert slot; fractions of tokens.
        of_device: [B, D], their sums per device.
    """

    of_slot: Any
    of_device: Any


def share_tokens(
    loads: Any, slots: Any, num_devices: int, xp: Any = np, iterations: int = _ITERATIONS
) -> ReplicaLoads:
    """Shares out the tokens of a step so that the most loaded device has few.

    Args:
        loads: [B, E], tokens of each logical expert in each of B layers.
        slots: [B, P] int, the logical expert in each physical slot; slot p lies on device
            p // (P / num_devices). Every expert with tokens must have a slot.
        num_devices: D.
        xp: the array module, numpy or jax.numpy.
    """
    num_layers, num_slots = slots.shape
    num_experts = loads.shape[1]
    dtype = np.float64 if xp is np else np.float32
    loads = loads.astype(dtype)
    flat = (slots + num_experts * xp.arange(num_layers)[:, None]).reshape(-1)
    tokens = loads.reshape(-1)[flat].reshape(num_layers, num_slots)
    mean = loads.sum(1, keepdims=True) / num_devices
    log_weights = xp.zeros((num_layers, num_devices), dtype)
    change = log_weights
    best = None
    for iteration in range(iterations + 1):
        weights = xp.repeat(xp.exp(log_weights), num_slots // num_devices, axis=1).reshape(-1)
        totals = _sum_by(weights, flat, num_layers * num_experts, xp)
        shares = (weights / totals[flat]).reshape(num_layers, num_slots)
        of_slot = tokens * shares
        of_device = _per_device(of_slot, num_devices)
        best = _better(best, ReplicaLoads(of_slot, of_device), xp)
        if iteration < iterations:
            slope = _per_device(of_slot * (1 - shares), num_devices)
            wanted = _DAMPING * (mean - of_device) / xp.maximum(slope, _TINY)
            change = _MOMENTUM * change + xp.clip(wanted, -_CHANGE_MAX, _CHANGE_MAX)
            log_weights = xp.clip(log_weights + change, -_LOG_WEIGHT_MAX, _LOG_WEIGHT_MAX)
    assert best is not None
    return best


def whole_tokens(of_slot: np.ndarray, slots: np.ndarray) -> np.ndarray:
    """[B, P] int64: `of_slot` in whole tokens, each within one of its fraction.

    The sum over the slots of an expert stays what it was, which must be a whole number.
    """
    order = np.argsort(slots, axis=1, kind="stable")
    running = np.rint(np.cumsum(np.take_along_axis(of_slot, order, axis=1), axis=1))
    counts = np.diff(running, axis=1, prepend=0.0).astype(np.int64)
    result = np.empty_like(counts)
    np.put_along_axis(result, order, counts, axis=1)
    return result


def moe_lb(of_device: np.ndarray) -> float:
    """Sum of the largest device loads over sum of the mean ones, [..., D]; 1 is perfect balance."""
    mean = of_device.mean(-1).sum(dtype=np.float64)
    return float(of_device.max(-1).sum(dtype=np.float64) / mean) if mean else 1.0


def _per_device(of_slot: Any, num_devices: int) -> Any:
    return of_slot.reshape(of_slot.shape[0], num_devices, -1).sum(2)


def _sum_by(values: Any, index: Any, length: int, xp: Any) -> Any:
    if xp is np:
        return np.bincount(index, values, minlength=length)
    return xp.zeros(length, values.dtype).at[index].add(values)


def _better(best: ReplicaLoads | None, now: ReplicaLoads, xp: Any) -> ReplicaLoads:
    """Layer by layer the one whose most loaded device has less."""
    if best is None:
        return now
    is_less = (now.of_device.max(1) < best.of_device.max(1))[:, None]
    return ReplicaLoads(*(xp.where(is_less, a, b) for a, b in zip(now, best, strict=True)))
