"""Compiles for NVIDIA GPUs that are not there, and reads what the compiler says of each kernel.

Needs the extra `gpu-aot`; JAX itself runs on the CPU. XLA:GPU and ptxas do all they would do on a
machine with the GPU, except for what has to be measured (the choice of tiles in matrix products).
"""

import os
import re
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from pallas_kernels.targets import Target

_TENSOR_CORE = re.compile(r"wgmma\.mma_async|tcgen05\.mma")

# XLA's numbers of element types: bf16, f16, f32, and e4m3fn, whose rates the tensor core has.
_TENSOR_CORE_RATES = {16: 1.0, 10: 1.0, 11: 0.5, 20: 2.0}


@dataclass(frozen=True)
class KernelFacts:
    """What ptxas says of the kernels in one program, worst first.

    Attributes:
        num_kernels: Mosaic kernels that were compiled.
        registers: most of one thread.
        spills: bytes stored and loaded because registers ran out, all kernels together.
        shared_bytes: most shared memory of one block.
        tensor_core: instruction that multiplies matrices; None if no kernel has one.
        num_without: kernels that have none.
        compile_s: seconds for lowering and compiling the program.
    """

    num_kernels: int
    registers: int
    spills: int
    shared_bytes: int
    tensor_core: str | None
    num_without: int
    compile_s: float


def compile_for(
    target: Target, function: Callable[..., Any], arguments: Any, **jit_options: Any
) -> tuple[Any, KernelFacts]:
    """The compiled `function` for abstract `arguments` on one GPU, and facts of its kernels.

    Raises:
        RuntimeError: the extra `gpu-aot` is not installed.
    """
    with _dumped() as folder:
        started = time.perf_counter()
        compiled = compile_only(target, function, arguments, **jit_options)
        return compiled, _facts(folder, time.perf_counter() - started)


def compile_only(
    target: Target, function: Callable[..., Any], arguments: Any, **jit_options: Any
) -> Any:
    """The compiled `function` alone, which takes less time for a program of many kernels.

    Raises:
        RuntimeError: the extra `gpu-aot` is not installed.
    """
    mesh = _mesh(target)
    sharding = NamedSharding(mesh, PartitionSpec())
    placed = jax.tree.map(
        lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=sharding), arguments
    )
    with jax.set_mesh(mesh):
        return jax.jit(function, **jit_options).lower(*placed).compile()


def _mesh(target: Target) -> Mesh:
    try:
        topology = topologies.get_topology_desc(
            "deviceless", platform="cuda", target_config=_description(target), topology="1x1x1"
        )
    except (RuntimeError, NotImplementedError, ValueError) as error:
        raise RuntimeError(
            f"no compiler for {target.device_kind}: {error}; install the extra gpu-aot and set "
            "JAX_PLATFORMS=cpu"
        ) from error
    return Mesh(np.array(topology.devices), ("x",))


@contextmanager
def _dumped() -> Iterator[Path]:
    """A folder into which Mosaic writes, for each kernel, its PTX and what ptxas says of it."""
    with tempfile.TemporaryDirectory() as folder:
        wanted = {f"MOSAIC_GPU_DUMP_{what}": "1" for what in ("PTX", "PTXAS", "RESOURCES")}
        wanted["MOSAIC_GPU_DUMP_TO"] = folder
        before = {name: os.environ.get(name) for name in wanted}
        os.environ.update(wanted)
        try:
            yield Path(folder)
        finally:
            for name, value in before.items():
                if value is None:
                    del os.environ[name]
                else:
                    os.environ[name] = value


def _facts(folder: Path, seconds: float) -> KernelFacts:
    reports = [path.read_text() for path in sorted(folder.glob("*.ptxas"))]
    programs = [path.read_text() for path in sorted(folder.glob("*.ptx"))]
    resources = [path.read_text() for path in folder.glob("*.resources.txt")]
    found = [_TENSOR_CORE.search(program) for program in programs]
    names = sorted({match.group() for match in found if match})
    return KernelFacts(
        num_kernels=len(programs),
        registers=max(_numbers(r"Used (\d+) registers", reports), default=0),
        spills=sum(_numbers(r"(\d+) bytes spill", reports)),
        shared_bytes=max(_numbers(r"smem_scratch_bytes=(\d+)", resources), default=0),
        tensor_core=" ".join(names) or None,
        num_without=found.count(None),
        compile_s=seconds,
    )


def _numbers(pattern: str, texts: list[str]) -> list[int]:
    return [int(number) for text in texts for number in re.findall(pattern, text)]


def _description(target: Target) -> str:
    """The facts of a GPU in the text form that XLA takes."""
    major = {"sm90": 9, "sm100": 10}[target.architecture]
    multiply_adds = {9: 512, 10: 1024}[major]
    rates = " ".join(
        f"rate_infos {{ key: {key} value {{ clock_rate_ghz: 1.83 units_per_core: 4 "
        f"ops_per_clock: {round(multiply_adds * share)} }} }}"
        for key, share in _TENSOR_CORE_RATES.items()
    )
    return f"""gpu_device_info {{
      threads_per_block_limit: 1024 threads_per_warp: 32
      shared_memory_per_block: 49152 shared_memory_per_core: 233472
      shared_memory_per_block_optin: {target.shared_bytes}
      threads_per_core_limit: 2048 core_count: {target.num_cores} fpus_per_core: 128
      block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
      memory_bandwidth: {round(target.bytes_per_s)} l2_cache_size: 52428800 clock_rate_ghz: 1.9
      device_memory_size: 84942979072
      cuda_compute_capability {{ major: {major} minor: 0 feature_extension: ACCELERATED_FEATURES }}
      registers_per_core_limit: 65536 registers_per_block_limit: 65536
      matrix_unit_description {{ {rates} }}
      thread_dim_limit_x: 1024 thread_dim_limit_y: 1024 thread_dim_limit_z: 64
      device_vendor: "NVIDIA Corporation" device_address_bits: 64 ecc_enabled: true
      pcie_bandwidth: 34359738368
      name: "{target.device_kind}" driver_version: "13.0.0" runtime_version: "13.0.0"
      compile_time_toolkit_version: "13.0.0" dnn_version: "9.10.0"
      device_interconnect_info {{ active_links: 18 }}
      collective_memory_granularity: 2097152
    }}
    platform_name: "CUDA"
    dnn_version_info {{ major: 9 minor: 10 patch: 0 }}
    device_description_str: "{target.device_kind}"
    """
