"""Goal: `auto` falls back and says so once, and a name means this implementation or an exception.
Method: kernels that only record how they are called, with a described GPU and without any.
"""

import logging
from collections.abc import Iterator
from typing import Any

import jax
import pytest
from jax.sharding import AbstractDevice, AbstractMesh, AxisType

from pallas_kernels import selection
from pallas_kernels.targets import B200, H200, Target


def kernel(x: int, *, target: Target, interpret: Any, scale: int) -> tuple[Any, ...]:
    if x < 0:
        raise NotImplementedError(f"x is {x}")
    return "kernel", x * scale, target, interpret is not None


def reference(x: int, *, scale: int) -> tuple[str, int]:
    return "reference", x * scale


def choose(implementation: Any, x: int = 3) -> Any:
    return selection.run("twice", implementation, {"sm90": kernel}, reference, x, scale=2)


@pytest.fixture
def lines(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.setattr(selection, "_announced", set())
    with caplog.at_level(logging.INFO, logger="pallas_kernels.selection"):
        yield lambda: [record.message for record in caplog.records]


def on(target: Target) -> Any:
    device = AbstractDevice(target.device_kind, num_cores=target.num_cores, platform="gpu")
    mesh = AbstractMesh((1,), ("x",), (AxisType.Auto,), abstract_device=device)
    return jax.sharding.use_abstract_mesh(mesh)


def test_auto_takes_the_kernel_of_the_gpu(lines: Any) -> None:
    with on(H200):
        assert choose("auto") == ("kernel", 6, H200, False)
        assert choose("mosaic") == ("kernel", 6, H200, False)
    assert lines() == ["twice: the sm90 kernel runs"]


def test_auto_falls_back_and_says_so_once(lines: Any) -> None:
    assert choose("auto") == choose("auto") == ("reference", 6)
    with on(B200):
        assert choose("auto") == ("reference", 6)
    with on(H200):
        assert choose("auto", -1) == ("reference", -2)
    assert lines() == [
        "twice: the reference runs, since no GPU that has kernels is compiled for",
        "twice: the reference runs, since there is no kernel for sm100 (NVIDIA B200)",
        "twice: the reference runs, since the kernel does not cover this call: x is -1",
    ]


def test_a_name_means_this_or_an_exception() -> None:
    assert choose("reference") == ("reference", 6)
    assert choose("interpret") == ("kernel", 6, H200, True)
    with pytest.raises(RuntimeError, match="'mosaic' was asked for and no GPU"):
        choose("mosaic")
    with on(B200), pytest.raises(RuntimeError, match="no kernel for sm100"):
        choose("mosaic")
    with on(H200), pytest.raises(NotImplementedError, match="x is -1"):
        choose("mosaic", -1)
    with pytest.raises(ValueError, match="implementation is 'triton'; expected auto, mosaic"):
        choose("triton")
