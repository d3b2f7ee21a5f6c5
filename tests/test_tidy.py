"""Goal: the repository keeps the rules of the house, and each rule catches what it is for.
Method: the checker of `scripts/tidy.py` runs over this repository and must find nothing; then over
small planted trees, each of which breaks one rule in one place beside a twin that keeps it.
"""

import subprocess
import sys
from pathlib import Path

import pytest

from scripts import tidy
from scripts.tidy_imports import IMPURE, PURE
from scripts.tidy_source import Project

ROOT = Path(__file__).parents[1]


def test_this_repository_is_tidy() -> None:
    findings = tidy.find_all(ROOT)
    assert not findings, "\n" + "\n".join(str(finding) for finding in findings)


def test_pure_modules_load_no_device_at_run_time() -> None:
    modules = Project.read(ROOT).modules
    pure = [name for name in modules if name.startswith(tuple(f"{part}." for part in PURE))]
    pure += [name for name in PURE if name in modules]
    assert "serving.core.request" in pure
    # The standard library may load os, time and socket for its own ends; a device it may not.
    heavy = sorted(IMPURE - set(sys.stdlib_module_names))
    code = f"import {', '.join(sorted(pure))}, sys; print([m for m in {heavy} if m in sys.modules])"
    command = [sys.executable, "-c", code]
    result = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
    )
    assert result.stdout.strip() == "[]", result.stdout + result.stderr


def plant(root: Path, files: dict[str, str]) -> list[str]:
    """Writes a tree that is tidy but for `files`, and gives the findings in it as text."""
    tree = {
        "pyproject.toml": '[project]\ndependencies = ["jax>=1", "numpy", "orbax-checkpoint"]\n',
        "README.md": "# Planted\n",
        **{f"{package}/__init__.py": '"""A package."""\n' for package in tidy.PACKAGES},
        **files,
    }
    for path in list(tree):
        for folder in list(Path(path).parents)[:-1]:
            if path.startswith(tidy.PACKAGES):
                tree.setdefault(f"{folder.as_posix()}/__init__.py", '"""A package."""\n')
    for path, text in tree.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(text, encoding="utf-8")
    return [str(finding) for finding in tidy.find_all(root)]


def module(body: str, doc: str = '"""What it is."""\n') -> str:
    return doc + body


def with_test(path: str, body: str) -> dict[str, str]:
    """A module with the given body, its test, and a second user."""
    dotted = path.removesuffix(".py").replace("/", ".")
    folder, _, name = path.rpartition("/")
    return {
        path: module(body),
        f"tests/{folder}/test_{name}": module(f"import {dotted}\n"),
        "tests/e2e/test_all.py": module(f"import {dotted}\n"),
    }


def test_a_tidy_tree_has_no_findings(tmp_path: Path) -> None:
    assert plant(tmp_path, with_test("serving/core/thing.py", "import random\nimport enum\n")) == []


def function(length: int, name: str = "f") -> str:
    body = "".join("    x = 1\n" for _ in range(length - 2))
    return f'def {name}() -> None:\n    """Does."""\n{body}'


KEEPING = {
    "a function of 70 lines": ("serving/core/a.py", function(70)),
    "a seeded generator": ("serving/core/a.py", "import random\nR = random.Random(3)\n"),
    "a numpy generator": ("sharding/a.py", "import numpy as np\nR = np.random.default_rng(3)\n"),
    "a name like a module's": ("serving/core/a.py", "T = [time.x for time in ()]\n"),
    "a lower layer": ("serving/frontend/a.py", "import serving.core\n"),
    "a domain word": ("serving/frontend/a.py", 'D = {"data": 1}\n'),
    "jax in the model": ("deepinfer_jax/a.py", "import jax.numpy as jnp\nimport numpy\n"),
    "settings in the program": ("serving/__main__.py", "import os\nE = os.environ\nprint(E)\n"),
    "the system clock": ("serving/transport/driver.py", "import time\nT = time.monotonic()\n"),
    "the executor's model": ("serving/engine/jax_executor.py", "import deepinfer_jax\n"),
    "the planner's model": ("serving/planner.py", "import deepinfer_jax\n"),
    "a private function without docstring": ("serving/core/a.py", "def _f() -> None:\n    ...\n"),
}


@pytest.mark.parametrize("what", KEEPING)
def test_what_keeps_the_rules_is_not_found(what: str, tmp_path: Path) -> None:
    path, body = KEEPING[what]
    files = with_test(path, body)
    if path.endswith("__main__.py"):
        files = {path: module(body), "tests/serving/test_main.py": module("")}
    assert plant(tmp_path, files) == []


BREAKING = [
    # sizes
    ("serving/core/a.py", "\n" * 500, ":1: 501 lines; at most 500"),
    ("serving/core/a.py", function(71), ":2: f has 71 lines; at most 70"),
    ("serving/core/a.py", f"X = '{'x' * 100}'\n", ":2: 106 columns; at most 100"),
    # docstrings and names
    ("serving/core/a.py", "def f() -> None:\n    ...\n", ":2: f has no docstring"),
    ("serving/core/a.py", "class A:\n    '''A.'''\n    def g(self): ...\n", ":4: g has no doc"),
    ("serving/core/utils.py", "", ":1: utils is no subject"),
    ("serving/core/a.py", 'class BlockManager:\n    """B."""\n', ":2: the name BlockManager says"),
    ("serving/core/a.py", 'def new_f() -> None:\n    """F."""\n', ":2: the name new_f says too"),
    ("serving/core/a.py", 'def f_v2() -> None:\n    """F."""\n', ":2: the name f_v2 says too"),
    # bans
    ("serving/core/a.py", "print(1)\n", ":2: print is not used here; return the text"),
    ("sharding/a.py", "import os\nX = os.environ['A']\n", ":3: os.environ is not used here"),
    ("sharding/a.py", "from os import getenv as g\nX = g('A')\n", ":3: os.getenv is not used"),
    ("sharding/a.py", "import os.path\nX = os.environ\n", ":3: os.environ is not used here"),
    ("deepinfer_jax/a.py", "import time\nX = time.time()\n", ":3: time.time is not used here; ta"),
    ("deepinfer_jax/a.py", "import datetime as d\nX = d.datetime.now()\n", ":3: datetime.datetim"),
    ("serving/core/a.py", "import random\nX = random.random()\n", ":3: random.random is not"),
    ("sharding/a.py", "import numpy as np\nX = np.random.rand(3)\n", ":3: numpy.random.rand is"),
    ("serving/core/a.py", "import pickle\n", ":2: pickle is not used here; send bytes"),
    ("tests/e2e/a.py", "import pickle\n", ":2: pickle is not used here; send bytes"),
    ("serving/core/a.py", "raise NotImplementedError('x')\n", ":2: NotImplementedError is for"),
    # walls
    ("sharding/a.py", "import serving.core\n", ":2: sharding imports serving; it may import no"),
    ("deepinfer_jax/a.py", "import serving\n", ":2: deepinfer_jax imports serving; it may import"),
    ("sharding/a.py", "import orbax\n", ":2: sharding imports orbax; it may import jax and numpy"),
    ("serving/core/a.py", "import scripts.x\n", ":2: imports scripts; nobody imports scripts"),
    ("deepinfer_jax/a.py", "import flax\n", ":2: flax is not in the dependencies of pyproject"),
    ("tests/e2e/a.py", "import flax\n", ":2: flax is not in the dependencies or the dev extra"),
    ("serving/core/a.py", "import serving.engine.b\n", ":2: serving.core imports serving.engine"),
    ("serving/config.py", "import serving.clock\n", ":2: serving.config imports serving.clock, w"),
    ("serving/extra/a.py", "", ":1: serving.extra has no place in the order"),
    ("serving/nodes/router.py", "import serving.nodes.decode_worker\n", ":2: serving.nodes.route"),
    ("serving/core/a.py", "import time\n", ":2: pure module reaches time (serving.core.a > time)"),
    ("serving/core/a.py", "def _f():\n    import asyncio\n", ":3: pure module reaches asyncio"),
    ("serving/engine/engine.py", "from serving.kv import disk\n", "serving.kv.disk > os); take"),
    ("serving/engine/a.py", "import deepinfer_jax\n", ":2: imports deepinfer_jax; only serving.e"),
    ("serving/kv/a.py", "from orbax import checkpoint\n", ":2: imports orbax; only serving.kv.orb"),
    (
        "serving/kv/a.py",
        "import pallas_kernels.ops\n",
        ":2: serving imports pallas_kernels; it may",
    ),
    # the mesh
    ("deepinfer_jax/a.py", "from jax.sharding import Mesh\n", ":2: jax.sharding.Mesh; use logical"),
    ("deepinfer_jax/a.py", "import jax\nX = jax.make_mesh((1,), ())\n", ":3: jax.make_mesh; use"),
    ("deepinfer_jax/a.py", "import jax\njax.lax.psum(1, 'expert')\n", ":3: names mesh axis 'expe"),
    ("deepinfer_jax/a.py", "all_to_all(1, axis_name=('data',))\n", ":2: names mesh axis 'data'"),
    # texts
    ("sharding/a.py", "X = 1  # see /wor" + "k/notes\n", ":2: '/work/n': path of one machine"),
    ("sharding/a.py", "X = 1  # from pypi" + ".org\n", "': name of a package registry; name"),
    ("sharding/a.py", "X = 1  # see issue" + " 7\n", "': number of a ticket; say what"),
    ("sharding/a.py", "X = 1  # TO" + "DO more\n", "': unfinished work; finish it"),
]


@pytest.mark.parametrize(("path", "body", "expected"), BREAKING)
def test_what_breaks_a_rule_is_found(path: str, body: str, expected: str, tmp_path: Path) -> None:
    others = {
        "serving/kv/disk.py": module("import os\n"),
        "tests/serving/kv/test_disk.py": module(""),
        "tests/e2e/test_disk.py": module("import serving.kv.disk\n"),
    }
    in_tests = path.startswith("tests/")
    files = {path: module(body)} if in_tests else with_test(path, body)
    findings = plant(tmp_path, {**others, **files})
    # Nothing else is found than this: at most once where it is imported and once where it is used.
    folder = path.rpartition("/")[0]
    assert 1 <= len(findings) <= 2 and all(one.startswith(folder) for one in findings), findings
    assert any(expected in finding for finding in findings), findings


def test_files_and_folders_out_of_place_are_found(tmp_path: Path) -> None:
    (tmp_path / "docs").mkdir()
    (tmp_path / ".hidden").mkdir()
    (tmp_path / "build").mkdir()
    findings = plant(tmp_path, {"setup.cfg": "", "serving/core/lonely.py": module("")})
    assert [finding.split(";")[0] for finding in findings] == [
        "docs:1: not part of the top level",
        "serving/core/lonely.py:1: imported by nothing but its own test",
        "serving/core/lonely.py:1: no test module",
        "setup.cfg:1: not part of the top level",
    ]


def test_a_module_used_only_by_its_own_test_is_found(tmp_path: Path) -> None:
    files = with_test("serving/core/lonely.py", "")
    del files["tests/e2e/test_all.py"]
    findings = plant(tmp_path, files)
    assert findings == [
        "serving/core/lonely.py:1: imported by nothing but its own test; use it or remove it"
    ]


def test_a_missing_docstring_and_a_missing_or_full_init_are_found(tmp_path: Path) -> None:
    files = with_test("serving/core/a.py", "")
    files["serving/core/a.py"] = "X = 1\n"
    files["tests/serving/core/test_a.py"] = "import serving.core.a\n"
    files["serving/core/__init__.py"] = '"""Core."""\nimport enum\n'
    findings = plant(tmp_path, files)
    (tmp_path / "serving" / "core" / "__init__.py").unlink()
    findings += [str(finding) for finding in tidy.find_all(tmp_path)]
    assert [finding.split(";")[0] for finding in findings] == [
        "serving/core/__init__.py:2: code in __init__.py",
        "serving/core/a.py:1: no module docstring",
        "tests/serving/core/test_a.py:1: no module docstring",
        "serving/core/__init__.py:1: missing",
        "serving/core/a.py:1: no module docstring",
        "tests/serving/core/test_a.py:1: no module docstring",
    ]


def op_files(door: str) -> dict[str, str]:
    return {
        "pallas_kernels/ops.py": module(door),
        "pallas_kernels/reference/mix.py": module(
            "import jax\n", '"""Mixes.\n\nNo kernel: it is rare.\n"""\n'
        ),
        "tests/pallas_kernels/test_ops.py": module(""),
        "tests/pallas_kernels/test_mix.py": module(""),
        "tests/e2e/test_all.py": module("import pallas_kernels.ops\n"),
    }


DOOR = (
    "from pallas_kernels.reference import mix as _mix\n"
    'def mix() -> None:\n    """M."""\n    _mix.f()\n'
)


def test_an_op_has_all_its_places(tmp_path: Path) -> None:
    assert plant(tmp_path / "whole", op_files(DOOR)) == []
    half = DOOR + 'def mix_half() -> None:\n    """Half."""\n    _mix.g()\n'
    assert plant(tmp_path / "half", op_files(half)) == []
    stray = DOOR + 'def other() -> None:\n    """O."""\n'
    assert plant(tmp_path / "stray", op_files(stray)) == [
        "pallas_kernels/ops.py:6: other calls nothing in pallas_kernels/reference; an op has its "
        "meaning there"
    ]
    renamed = DOOR.replace("def mix", "def blend")
    assert plant(tmp_path / "renamed", op_files(renamed)) == [
        "pallas_kernels/reference/mix.py:1: no function mix in pallas_kernels/ops.py"
    ]
    silent = op_files(DOOR) | {"pallas_kernels/reference/mix.py": module("import jax\n")}
    assert plant(tmp_path / "silent", silent) == [
        "pallas_kernels/reference/mix.py:1: mix has no kernel; say why in its docstring: No kernel:"
    ]


def test_an_op_that_has_a_kernel_has_cases_and_a_test(tmp_path: Path) -> None:
    files = op_files(DOOR)
    files["pallas_kernels/mosaic/mix_sm100.py"] = module(function(150))
    files["pallas_kernels/mosaic/widen.py"] = module("")
    files["pallas_kernels/cases.py"] = module('CASES = {"mix": 1}\n')
    for name in ("mix_sm100", "widen", "cases"):
        files[f"tests/pallas_kernels/test_{name}.py"] = module("")
    files["tests/e2e/test_all.py"] = module(
        "import pallas_kernels.ops\nimport pallas_kernels.cases\n"
        "import pallas_kernels.mosaic.mix_sm100\nimport pallas_kernels.mosaic.widen\n"
    )
    files["tests/pallas_kernels/test_mix.py"] = module('KINDS = quick("mix")\n')
    assert plant(tmp_path / "whole", files) == []
    files["pallas_kernels/cases.py"] = module("CASES = {}\n")
    files["tests/pallas_kernels/test_mix.py"] = module("")
    assert plant(tmp_path / "lacking", files) == [
        "pallas_kernels/mosaic/mix.py:1: no mix in pallas_kernels/cases.py",
        'pallas_kernels/mosaic/mix.py:1: no test with quick("mix") in '
        "tests/pallas_kernels/test_mix.py",
    ]


def test_the_program_prints_findings_and_fails(tmp_path: Path) -> None:
    plant(tmp_path, with_test("serving/core/a.py", "print(1)\n"))
    command = [sys.executable, str(ROOT / "scripts" / "tidy.py"), str(tmp_path)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert result.returncode == 1
    assert result.stdout.startswith("serving/core/a.py:2: print is not used here; return the text")
    (tmp_path / "serving" / "core" / "a.py").write_text(module(""), encoding="utf-8")
    result = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (result.returncode, result.stdout) == (0, "tidy\n")
