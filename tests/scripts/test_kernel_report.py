"""Goal: a row holds the promised figures, and what must not be in it is named.
Method: planted facts of a compiled kernel.
"""

import dataclasses

from pallas_kernels.cases import find
from pallas_kernels.targets import H100
from scripts.deviceless import KernelFacts
from scripts.kernel_report import report_row, row_faults

GOOD = KernelFacts(2, 100, 0, 65536, "wgmma.mma_async", 0, 1.0)
KEYS = [
    *("op", "target", "shape", "registers", "spills", "shared_bytes", "tensor_core"),
    *("without_tensor_core", "bytes", "flops", "bound_us", "compile_s"),
]


def test_a_row_has_the_promised_keys() -> None:
    case = find("grouped_matmul", "model")[0]
    row = report_row(case, H100, GOOD)
    assert list(row) == KEYS
    assert (row["op"], row["target"], row["shape"]) == ("grouped_matmul", "h100", case.name)
    assert row["bound_us"] > 1e6 * row["bytes"] / 3.4e12
    assert row_faults(row) == []


def test_faults_are_named() -> None:
    case = find("scaled_matmul", "model")[0]

    def faults(**changes: object) -> list[str]:
        facts = dataclasses.replace(GOOD, **changes)  # pyright: ignore[reportArgumentType]
        return row_faults(report_row(case, H100, facts))

    place = f"scaled_matmul {case.name} on h100"
    assert faults(spills=8) == [f"{place}: spills 8 bytes; expected 0"]
    assert faults(num_without=1) == [f"{place}: a kernel without a tensor-core instruction"]
    assert faults(registers=0) == [f"{place}: no kernel was compiled"]


def test_a_kernel_that_multiplies_nothing_needs_no_tensor_core() -> None:
    case = find("hyper_mix", "model")[0]
    assert row_faults(report_row(case, H100, dataclasses.replace(GOOD, num_without=1))) == []
    assert row_faults(report_row(case, H100, dataclasses.replace(GOOD, num_without=2)))
