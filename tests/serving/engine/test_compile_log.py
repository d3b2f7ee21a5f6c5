"""Goal: every program is listed with its own time, and hits of the cache are told apart.

Method: small programs compiled on two threads, with a cache in a temporary folder and a clock that
moves as it is told.
"""

import itertools
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jax
import pytest
from jax.experimental.compilation_cache import compilation_cache

from serving.core.buckets import CompiledProgram
from serving.engine.compile_log import CompileLog

SETTINGS = (
    "jax_compilation_cache_dir",
    "jax_persistent_cache_min_compile_time_secs",
    "jax_persistent_cache_min_entry_size_bytes",
)


@pytest.fixture
def cache(tmp_path: Path) -> Iterator[None]:
    before = {name: getattr(jax.config, name) for name in SETTINGS}
    for name, value in zip(SETTINGS, (str(tmp_path), 0, -1), strict=True):
        jax.config.update(name, value)
    compilation_cache.reset_cache()
    yield
    for name, value in before.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()


def compile_with(log: CompileLog, factor: int) -> None:
    # A function of its own each time, as in a new process.
    def scaled(x: float) -> float:
        return x * factor + 0.125

    with log.watch(f"times {factor}"):
        jax.jit(scaled).lower(1.0).compile()


def test_hits_are_told_apart_on_every_thread(cache: None) -> None:
    log = CompileLog(itertools.count(0, 10**9).__next__)
    with log.listening():
        compile_with(log, 3)
        with ThreadPoolExecutor(2) as pool:
            list(pool.map(lambda factor: compile_with(log, factor), (3, 5, 3, 7)))
    found = {(program.name, program.is_from_cache) for program in log.programs[1:]}
    assert log.programs[0] == CompiledProgram("times 3", 1.0, False)
    assert found == {("times 3", True), ("times 5", False), ("times 7", False)}
    compile_with(log, 3)
    assert not log.programs[-1].is_from_cache, "nobody listens any more"
