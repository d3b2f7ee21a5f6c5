"""Which implementation of an operation runs, and one line that says so.

`auto` takes the kernel of the GPU that is compiled for and falls back to the reference where
there is none or where the kernel does not cover the call (`NotImplementedError`). Asking for an
implementation by name means this one or an exception.
"""

import functools
import logging
from collections.abc import Callable, Mapping
from typing import Any, Literal

import jax
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.targets import H200, Architecture, Target, current_target
from pallas_kernels.tiles import is_batch_invariant, settings

Implementation = Literal["auto", "mosaic", "interpret", "reference"]
"""`mosaic` is the kernel on a GPU; `interpret` the same kernel, simulated on a CPU with race
detection, for tests; `reference` plain `jax.numpy`."""

INTERPRET = plgpu.InterpretGPUParams(detect_races=True)

_logger = logging.getLogger(__name__)
_announced: set[tuple[str, str]] = set()


def run(
    op: str,
    implementation: Implementation,
    kernels: Mapping[Architecture, Callable[..., Any]],
    reference: Callable[..., Any],
    *args: Any,
    **sizes: Any,
) -> Any:
    """The result of `op` for `args` and `sizes`.

    Args:
        op: name of the operation, for messages.
        implementation: which one.
        kernels: kernel of each architecture; called with `target` and `interpret` besides.
        reference: what the operation means.

    Raises:
        ValueError: `implementation` is none of the four.
        RuntimeError: `mosaic` was asked for, or `auto` in the batch-invariant mode, and no GPU with
            a kernel is compiled for.
        NotImplementedError: a kernel was asked for so and does not cover the call.
    """
    if implementation == "reference":
        return reference(*args, **sizes)
    if implementation == "interpret":
        return kernels["sm90"](*args, target=H200, interpret=INTERPRET, **sizes)
    if implementation not in ("auto", "mosaic"):
        raise ValueError(
            f"implementation is {implementation!r}; expected auto, mosaic, interpret or reference"
        )
    must = implementation == "mosaic" or is_batch_invariant()
    target = current_target()
    kernel = None if target is None else kernels.get(target.architecture)
    if kernel is None:
        reason = (
            "no GPU that has kernels is compiled for"
            if target is None
            else f"there is no kernel for {target.architecture} ({target.device_kind})"
        )
        if must:
            asked = "implementation 'mosaic'" if implementation == "mosaic" else "batch invariance"
            raise RuntimeError(
                f"{op}: {asked} was asked for and {reason}; use 'auto' or 'reference' outside the "
                "batch-invariant mode, or 'interpret' to simulate the kernel"
            )
        _announce(op, f"the reference runs, since {reason}")
        return reference(*args, **sizes)
    try:
        result = _program(op, kernel, target, tuple(sizes.items()), settings())(*args)
    except NotImplementedError as reason:
        if must:
            raise
        _announce(op, f"the reference runs, since the kernel does not cover this call: {reason}")
        return reference(*args, **sizes)
    assert target is not None
    _announce(op, f"the {target.architecture} kernel runs")
    return result


@functools.cache
def _program(
    op: str,
    kernel: Callable[..., Any],
    target: Target | None,
    sizes: tuple[tuple[str, Any], ...],
    tile_settings: tuple[Any, ...],
) -> Callable[..., Any]:
    """A kernel as a function of arrays, made once: a model calls it in every layer, and lowering
    takes far longer than all else that is done to a step before XLA sees it. One for each of these
    settings, since tiles are chosen while it is traced.
    """
    del tile_settings

    def program(*args: Any) -> Any:
        # The name stands beside the kernel in compiled programs and in traces.
        with jax.named_scope(op):
            return kernel(*args, target=target, interpret=None, **dict(sizes))

    program.__name__ = op
    return jax.jit(program)


def _announce(op: str, what: str) -> None:
    if (op, what) not in _announced:
        _announced.add((op, what))
        _logger.info("%s: %s", op, what)
