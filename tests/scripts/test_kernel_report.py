"""Goal: a row holds the promised figures, and what must not be in it is named.
Method: planted facts of a compiled kernel. A report is taken over as far as nothing that its rows
are made from has changed, which a planted tree of sources shows.
"""

import dataclasses
import json
from pathlib import Path

import pytest

from pallas_kernels import tiles
from pallas_kernels.cases import find
from pallas_kernels.targets import B200, H100, H200
from scripts import kernel_report
from scripts.deviceless import KernelFacts
from scripts.kernel_report import (
    code_of,
    fingerprint,
    has,
    kernel_file,
    place,
    report_row,
    row_faults,
    still_true,
)

GOOD = KernelFacts(2, 100, 0, 65536, "wgmma.mma_async", 0, 1.0)
KEYS = [
    *("op", "target", "shape", "registers", "spills", "shared_bytes", "tensor_core"),
    *("without_tensor_core", "bytes", "flops", "bound_us", "compile_s", "fingerprint"),
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


RECORDED = Path(kernel_report.ROOT) / "scripts" / "results" / "kernel_report.json"


def test_a_row_holds_until_something_that_it_is_made_from_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = find("cache_append", "model")[0]
    files = {
        "mosaic/cache_append.py": "from pallas_kernels.mosaic.widen import Layout\n",
        "mosaic/widen.py": "from pallas_kernels import targets\n",
        "targets.py": "x = 1\n",
        "ops.py": "y = 1\n",
        "tuned.toml": "",
    }

    def made(**changes: str) -> str:
        root = tmp_path / str(len(list(tmp_path.iterdir())))
        for name, text in (files | changes).items():
            path = root / "pallas_kernels" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        monkeypatch.setattr(kernel_report, "ROOT", root)
        return fingerprint(H200, case)

    first = made()
    assert made() == made(**{"ops.py": "y = 2\n"}) == first
    for name in ("mosaic/cache_append.py", "mosaic/widen.py", "targets.py", "tuned.toml"):
        assert made(**{name: files[name] + "# more\n"}) != first, name
    case = dataclasses.replace(case, sizes=case.sizes | {"num_rows": 1})
    assert made() != first
    monkeypatch.setattr(kernel_report.jax, "__version__", "0.0")
    assert made() != first


def test_only_rows_of_the_same_fingerprint_are_taken_over() -> None:
    pairs = [(target, case) for target in (H100, H200) for case in find("hyper_mix", "model")]
    rows = [report_row(case, target, GOOD) for target, case in pairs]
    rows[1]["fingerprint"] = "another"
    del rows[2]["fingerprint"]
    assert list(still_true(rows, pairs)) == [place(*pairs[0]), place(*pairs[3])]


def test_kernels_of_another_architecture_lie_in_files_of_their_own() -> None:
    case = find("hyper_mix", "model")[0]
    assert has(case, H200) and not has(case, B200)
    assert kernel_file("hyper_mix", B200).name == "hyper_mix_sm100.py"


def test_gpus_of_one_architecture_share_code_unless_one_has_tiles_of_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert code_of(H100) == code_of(H200) != code_of(B200)
    monkeypatch.setattr(tiles, "_table", lambda: ({"device": "h200"},))
    assert code_of(H200) not in (code_of(H100), code_of(B200))


def test_the_recorded_report_has_sound_rows_of_every_kernel() -> None:
    """Which of its rows still hold is checked where changed kernels are compiled."""
    rows = json.loads(RECORDED.read_text())
    pairs = [(t, case) for t in (H100, H200, B200) for case in find(tag="model") if has(case, t)]
    assert {place(*pair)[:2] for pair in pairs} == {(row["target"], row["op"]) for row in rows}
    assert {(row["target"], row["op"], row["shape"]) for row in rows} <= {
        place(*pair) for pair in pairs
    }
    assert not [fault for row in rows for fault in row_faults(row)]
