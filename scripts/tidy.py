"""The rules of the house that no general tool checks, found by reading the source text alone.

`python scripts/tidy.py [FOLDER]` prints one line per finding, `file:line: what; what to do
instead`, and exits 1 if there is any. Walls between packages are in `tidy_imports.py`; here are
sizes, docstrings, names, banned calls, places of tests, and the layout of the folders.

*Why besides ruff and import-linter*: these rules know this project, and the import rules must
hold even where those tools are not installed.
"""

import ast
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from scripts import tidy_imports
from scripts.tidy_source import PACKAGES, Finding, Project, SourceFile, Text

TOP_LEVEL = {"pyproject.toml", "README.md", "scripts", "tests", *PACKAGES}
FILE_LINES_MAX = 500
FUNCTION_LINES_MAX = 70
KERNEL_LINES_MAX = 150
COLUMNS_MAX = 100
NO_KERNEL = "No kernel: "

NO_HOME_NAMES = {"util", "utils", "common", "helper", "helpers", "misc", "shared"}
VAGUE_WORDS = {"manager", "handler", "util", "utils", "helper", "helpers"}
VAGUE_PREFIXES = ("new_", "process_", "do_")

# What is banned in the packages, the substitute, and the only files that may use it.
BANS: tuple[tuple[re.Pattern[str], str, set[str]], ...] = (
    (
        re.compile(r"os\.(environ|environb|getenv|putenv)\b"),
        "settings enter through flags and configuration files, read in serving/__main__.py",
        {"serving/__main__.py"},
    ),
    (
        re.compile(r"time\.|datetime\.(datetime|date)\.(now|utcnow|today)\b"),
        "take a Clock (serving/clock.py); only the driver reads system time",
        {"serving/transport/driver.py"},
    ),
    (
        re.compile(r"random\.(?!Random\b)|numpy\.random\.(?!default_rng\b|Generator\b)"),
        "take a seeded random.Random or numpy Generator from the caller",
        set(),
    ),
    (
        re.compile(r"(pickle|cloudpickle|dill|marshal|shelve)\b"),
        "send bytes with a checked layout (msgspec, numpy.frombuffer); pickle runs what it reads",
        set(),
    ),
    (
        re.compile(r"print$"),
        "return the text, or log one structured line with logging",
        {"serving/__main__.py"},
    ),
)

MACHINE_PATH = re.compile(r"(?<![\w.\"'}])/(?:root|home|Users|work|mnt)/\w")
BANNED_TEXT: tuple[tuple[re.Pattern[str], str], ...] = (
    (MACHINE_PATH, "path of one machine; use a path relative to the project or a parameter"),
    (
        re.compile(r"\b(pypi[.]org|pythonhosted[.]org|npmjs[.]org|debian[.]org|crates[.]io)\b"),
        "name of a package registry; name the package and let its tool find it",
    ),
    (re.compile(r"\bissue #?[0-9]"), "number of a ticket; say what it was about"),
    (
        re.compile(r"\b(TOD[O]|FIXM[E]|XX[X])\b"),
        "unfinished work; finish it or say what is missing",
    ),
)


def check_sizes(project: Project) -> Iterator[Finding]:
    """Lines per file and function, columns per line."""
    for file in project.files:
        if len(file.lines) > FILE_LINES_MAX:
            yield file.finding(
                1, f"{len(file.lines)} lines; at most {FILE_LINES_MAX}: split it by concept"
            )
        in_kernel = file.path.startswith("pallas_kernels/mosaic/")
        limit = KERNEL_LINES_MAX if in_kernel else FUNCTION_LINES_MAX
        for node in ast.walk(file.tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                length = (node.end_lineno or node.lineno) - node.lineno + 1
                if length > limit:
                    yield file.finding(
                        node.lineno, f"{node.name} has {length} lines; at most {limit}: split it"
                    )
    for text in project.texts:
        if text.path.endswith((".py", ".toml", ".sh")) or "." not in Path(text.path).name:
            for number, line in enumerate(text.lines, 1):
                if len(line) > COLUMNS_MAX:
                    yield text.finding(number, f"{len(line)} columns; at most {COLUMNS_MAX}")


def check_docstrings(project: Project) -> Iterator[Finding]:
    """Every module says what it is; so does everything public in the packages."""
    for file in project.files:
        if not ast.get_docstring(file.tree) and (file.tree.body or file.is_init):
            what = "goal and method of its tests" if file.in_tests else "what the module is"
            yield file.finding(1, f"no module docstring; say the {what}")
        if file.in_package:
            yield from _missing_docstrings(file, file.tree.body)


def _missing_docstrings(file: SourceFile, body: list[ast.stmt]) -> Iterator[Finding]:
    for node in body:
        if not isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        if node.name.startswith("_") or _continues_another(node):
            continue
        if not ast.get_docstring(node):
            yield file.finding(
                node.lineno, f"{node.name} has no docstring; say what, shapes, units and errors"
            )
        if isinstance(node, ast.ClassDef):
            yield from _missing_docstrings(file, node.body)


def _continues_another(node: ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """True for what another definition already documents: overloads, overrides, setters."""
    names = {
        decorator.attr if isinstance(decorator, ast.Attribute) else getattr(decorator, "id", "")
        for decorator in node.decorator_list
    }
    return bool(names & {"overload", "override", "setter", "deleter"})


def check_names(project: Project) -> Iterator[Finding]:
    """No file without a subject, no definition with a word that says nothing."""
    for file in project.files:
        if not file.in_package:
            continue
        for part in Path(file.path).with_suffix("").parts:
            if part in NO_HOME_NAMES:
                yield file.finding(
                    1, f"{part} is no subject; put it beside its user or name what it is"
                )
        for node in ast.walk(file.tree):
            if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                bare = node.name.lstrip("_")
                words = {word.lower() for word in re.findall(r"[A-Z]?[a-z0-9]+|[A-Z]+", bare)}
                vague = words & VAGUE_WORDS or bare.startswith(VAGUE_PREFIXES)
                if vague or re.search(r"_v\d+$|V\d+$", bare):
                    yield file.finding(
                        node.lineno, f"the name {node.name} says too little; name what it does"
                    )


def check_bans(project: Project) -> Iterator[Finding]:
    """Calls that a package must not make, each with its substitute."""
    for file in project.files:
        for line, name in file.references():
            for pattern, substitute, allowed in BANS:
                is_everywhere = "pickle" in pattern.pattern
                applies = file.in_package or is_everywhere
                if applies and pattern.match(name) and file.path not in allowed:
                    yield file.finding(line, f"{name} is not used here; {substitute}")
        for node in ast.walk(file.tree):
            if isinstance(node, ast.Raise) and file.in_package:
                raised = node.exc.func if isinstance(node.exc, ast.Call) else node.exc
                is_stub = isinstance(raised, ast.Name) and raised.id == "NotImplementedError"
                if is_stub and not file.path.startswith("pallas_kernels/"):
                    yield file.finding(
                        node.lineno, "NotImplementedError is for kernels; finish it or refuse input"
                    )


def check_tests(project: Project) -> Iterator[Finding]:
    """`a/b/c.py` is tested by `tests/a/b/test_c.py`; all bodies of an op share one test."""
    tests = {file.path for file in project.files if file.in_tests}
    for file in project.files:
        if file.in_package and not file.is_init and file.test_path not in tests:
            yield file.finding(1, f"no test module; expected {file.test_path}")


def check_packages(project: Project) -> Iterator[Finding]:
    """Package folders have an `__init__.py` with a docstring and nothing else."""
    paths = {file.path for file in project.files}
    folders = {Path(file.path).parent for file in project.files if file.in_package}
    for folder in sorted(folders):
        if f"{folder.as_posix()}/__init__.py" not in paths:
            yield Finding(f"{folder.as_posix()}/__init__.py", 1, "missing; add its docstring")
    for file in project.files:
        # The one exception: `from serving import LLM` is a promise to users, kept lazily.
        if file.in_package and file.is_init and file.path != "serving/__init__.py":
            for node in file.tree.body[1:]:
                yield file.finding(
                    node.lineno, "code in __init__.py; importing one module must not import others"
                )


def check_ops(project: Project) -> Iterator[Finding]:
    """An op has the same name in all its places; a kernel has cases and a test that runs them, and
    an op without a kernel says why. (`test_kernel_report.py` checks the rows of the report.)
    """
    paths = {file.path: file for file in project.files}
    names = _module_names(project, "pallas_kernels/reference/")
    kernels = _module_names(project, "pallas_kernels/mosaic/")
    door = paths.get("pallas_kernels/ops.py", SourceFile("pallas_kernels/ops.py", ""))
    functions = {
        node.name: node
        for node in door.tree.body
        if isinstance(node, ast.FunctionDef) and not node.name.startswith("_")
    }
    for name in sorted(names - set(functions)):
        yield Finding(
            f"pallas_kernels/reference/{name}.py", 1, f"no function {name} in pallas_kernels/ops.py"
        )
    for name, function in functions.items():
        # A part of an op, such as the first half of hyper_mix, lives in that op's file.
        if name not in names and not _calls_reference(door, function):
            yield Finding(
                "pallas_kernels/ops.py",
                function.lineno,
                f"{name} calls nothing in pallas_kernels/reference; an op has its meaning there",
            )
    # A sibling for one architecture, such as grouped_matmul_sm100, is not another op.
    kernels = {re.sub(r"_sm\d+a?$", "", kernel) for kernel in kernels} & names
    for name in sorted(names - kernels):
        reference = paths[f"pallas_kernels/reference/{name}.py"]
        if NO_KERNEL not in (ast.get_docstring(reference.tree) or ""):
            yield reference.finding(
                1, f"{name} has no kernel; say why in its docstring: No kernel:"
            )
    cases = paths.get("pallas_kernels/cases.py")
    words = set(re.findall(r"\w+", cases.text)) if cases else set[str]()
    for name in sorted(kernels):
        place = f"pallas_kernels/mosaic/{name}.py"
        if name not in words:
            yield Finding(place, 1, f"no {name} in pallas_kernels/cases.py")
        test = f"tests/pallas_kernels/test_{name}.py"
        if test not in paths or f'quick("{name}")' not in paths[test].text:
            yield Finding(place, 1, f'no test with quick("{name}") in {test}')


def _calls_reference(door: SourceFile, function: ast.FunctionDef) -> bool:
    home = "pallas_kernels.reference."
    bound = {item.binds for item in door.imports if f"{item.origin}.".startswith(home)}
    used = {node.id for node in ast.walk(function) if isinstance(node, ast.Name)}
    return bool(bound & used)


def _module_names(project: Project, folder: str) -> set[str]:
    inside = (file for file in project.files if file.path.startswith(folder))
    return {Path(file.path).stem for file in inside if not file.is_init}


def check_layout(project: Project) -> Iterator[Finding]:
    """The top level holds what it is meant to and nothing else."""
    for name in project.top_level:
        if name not in TOP_LEVEL and not name.startswith("."):
            yield Finding(
                name, 1, f"not part of the top level; expected only {', '.join(sorted(TOP_LEVEL))}"
            )


def check_texts(project: Project) -> Iterator[Finding]:
    """No text that is true on one machine or at one time only."""
    for text in project.texts:
        yield from _banned_in(text)


def _banned_in(text: Text) -> Iterator[Finding]:
    for number, line in enumerate(text.lines, 1):
        for pattern, why in BANNED_TEXT:
            if found := pattern.search(line):
                yield text.finding(number, f"{found.group().strip()!r}: {why}")


RULES: tuple[Callable[[Project], Iterator[Finding]], ...] = (
    check_layout,
    check_sizes,
    check_docstrings,
    check_names,
    check_bans,
    check_tests,
    check_packages,
    check_ops,
    check_texts,
    *tidy_imports.RULES,
)


def find_all(root: Path) -> list[Finding]:
    """Every finding in the project at `root`, ordered by file and line.

    Raises:
        SyntaxError: a Python file cannot be parsed.
    """
    project = Project.read(root)
    return sorted({finding for rule in RULES for finding in rule(project)})


if __name__ == "__main__":
    findings = find_all(Path(sys.argv[1] if len(sys.argv) > 1 else ".").resolve())
    print("\n".join(str(finding) for finding in findings) or "tidy")
    sys.exit(bool(findings))
