"""Goal: `auto` falls back and says so once, and a name means this implementation or an exception.
Method: kernels that only record their calls, worked out for a described GPU and without any.
"""

import logging
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractDevice, AbstractMesh, AxisType

from pallas_kernels import selection
from pallas_kernels.targets import B200, H200, Target
from pallas_kernels.tiles import batch_invariant

CALLS: list[tuple[Target, bool]] = []
"""Of the kernel: for which GPU, and whether it was simulated."""


def kernel(x: jax.Array, *, target: Target, interpret: Any, scale: int) -> jax.Array:
    if x.ndim:
        raise NotImplementedError(f"x is {x.shape}")
    CALLS.append((target, interpret is not None))
    return jnp.full((scale,), x)


def reference(x: jax.Array, *, scale: int) -> jax.Array:
    return x * scale


def choose(implementation: Any, shape: tuple[int, ...] = ()) -> str:
    """Which one ran; the kernel's result has one dimension more than its argument."""

    def run(x: jax.Array) -> jax.Array:
        return selection.run("twice", implementation, {"sm90": kernel}, reference, x, scale=2)

    made = jax.eval_shape(run, jax.ShapeDtypeStruct(shape, jnp.float32))
    return "reference" if made.shape == shape else "kernel"


@pytest.fixture
def lines(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.setattr(selection, "_announced", set())
    with caplog.at_level(logging.INFO, logger="pallas_kernels.selection"):
        yield lambda: [record.message for record in caplog.records]


def on(target: Target) -> Any:
    device = AbstractDevice(target.device_kind, num_cores=target.num_cores, platform="gpu")
    mesh = AbstractMesh((1,), ("x",), (AxisType.Auto,), abstract_device=device)
    return jax.sharding.use_abstract_mesh(mesh)


@pytest.fixture(autouse=True)
def nothing_called() -> None:
    CALLS.clear()
    selection._program.cache_clear()


def test_auto_takes_the_kernel_of_the_gpu(lines: Any) -> None:
    with on(H200):
        assert choose("auto") == choose("mosaic") == "kernel"
    assert lines() == ["twice: the sm90 kernel runs"]
    assert CALLS == [(H200, False)], "a program is made once for all its calls"


def test_auto_falls_back_and_says_so_once(lines: Any) -> None:
    assert choose("auto") == choose("auto") == "reference"
    with on(B200):
        assert choose("auto") == "reference"
    with on(H200):
        assert choose("auto", (3,)) == "reference"
    assert lines() == [
        "twice: the reference runs, since no GPU that has kernels is compiled for",
        "twice: the reference runs, since there is no kernel for sm100 (NVIDIA B200)",
        "twice: the reference runs, since the kernel does not cover this call: x is (3,)",
    ]


def test_a_name_means_this_or_an_exception() -> None:
    assert choose("reference") == "reference"
    assert choose("interpret") == "kernel"
    assert CALLS == [(H200, True)]
    with pytest.raises(RuntimeError, match="'mosaic' was asked for and no GPU"):
        choose("mosaic")
    with on(B200), pytest.raises(RuntimeError, match="no kernel for sm100"):
        choose("mosaic")
    with on(H200), pytest.raises(NotImplementedError, match=r"x is \(3,\)"):
        choose("mosaic", (3,))
    with pytest.raises(ValueError, match="implementation is 'triton'; expected auto, mosaic"):
        choose("triton")


def test_the_batch_invariant_mode_falls_back_to_nothing() -> None:
    with batch_invariant():
        with pytest.raises(RuntimeError, match="twice: batch invariance was asked for and no GPU"):
            choose("auto")
        with on(H200):
            assert choose("auto") == "kernel"
            with pytest.raises(NotImplementedError, match=r"x is \(3,\)"):
                choose("auto", (3,))
        assert choose("reference") == "reference"
