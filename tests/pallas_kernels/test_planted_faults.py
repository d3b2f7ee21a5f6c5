"""Goal: the tests of kernels would see a race and a write past the end of an array.
Method: both are planted in a real kernel, which the same call runs without complaint untouched.
"""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import jax
import pytest
from jax._src.pallas.mosaic_gpu.interpret.interpret_pallas_call import (
    reset_gpu_interpret_mode_state,
)
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import cases, ops
from pallas_kernels.mosaic import hyper_mix
from tests.pallas_kernels.interpreted import TIME_LIMIT


@pytest.fixture(autouse=True)
def clean_interpreter() -> Iterator[None]:
    """An exception leaves the interpreter as it was in the middle of the kernel."""
    yield
    reset_gpu_interpret_mode_state()


def changed(**functions: Any) -> SimpleNamespace:
    """The module that kernels are written with, some of its functions replaced."""
    return SimpleNamespace(**vars(plgpu) | functions)


def run() -> None:
    case = next(c for c in cases.find("hyper_mix", "quick") if c.name == "first")
    args, sizes = case.arguments(jax.random.key(0))
    jax.block_until_ready(ops.hyper_mix(*args, implementation="interpret", **sizes))


@TIME_LIMIT
def test_the_kernel_untouched_shows_neither() -> None:
    run()


@TIME_LIMIT
def test_reading_before_the_copy_has_arrived_is_a_race(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hyper_mix, "plgpu", changed(barrier_wait=lambda barrier: None))
    with pytest.raises(Exception, match="RACE DETECTED"):
        run()


@TIME_LIMIT
def test_a_write_past_the_end_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def kernel(body: Any, *, out_type: Any, **more: Any) -> Any:
        if not isinstance(out_type, list):
            rows, columns = out_type.shape
            out_type = jax.ShapeDtypeStruct((rows - 1, columns), out_type.dtype)
        return plgpu.kernel(body, out_type=out_type, **more)

    monkeypatch.setattr(hyper_mix, "plgpu", changed(kernel=kernel))
    with pytest.raises(Exception, match="[Oo]ut.of.bounds"):
        run()
