"""The project as text and syntax trees: what the rules of `tidy.py` read.

Files are found by walking the folder, so the rules see what is there whether or not it is
committed, and a planted tree in a test needs no version control.
"""

import ast
import functools
import os
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

PACKAGES = ("deepinfer_jax", "pallas_kernels", "serving", "sharding")
_LEFT_OUT_FOLDERS = {"__pycache__", "build", "dist", "golden"}
_TEXT_SUFFIXES = {".py", ".md", ".toml", ".sh", ".txt", ".html", ".js", ".css", ""}


@dataclass(frozen=True, order=True)
class Finding:
    """One place that breaks a rule. `path` is relative to the project."""

    path: str
    line: int
    message: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.message}"


@dataclass(frozen=True)
class Text:
    """A text file."""

    path: str
    text: str

    @functools.cached_property
    def lines(self) -> list[str]:
        """The lines without their ends."""
        return self.text.splitlines()

    def finding(self, line: int, message: str) -> Finding:
        """A finding in this file."""
        return Finding(self.path, line, message)


@dataclass(frozen=True)
class Import:
    """`module` is what the statement names, and `name` what it takes from it if it says `from`.
    The file then calls `origin` by the name `binds`."""

    line: int
    module: str
    name: str | None
    binds: str
    origin: str


@dataclass(frozen=True)
class SourceFile(Text):
    """A Python file."""

    @functools.cached_property
    def tree(self) -> ast.Module:
        """The syntax tree."""
        return ast.parse(self.text, filename=self.path)

    @property
    def module(self) -> str:
        """Dotted name; a package's is that of its folder."""
        return self.path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")

    @property
    def in_package(self) -> bool:
        """True for what is installed, false for tests and scripts."""
        return self.path.split("/")[0] in PACKAGES

    @property
    def in_tests(self) -> bool:
        """True below `tests`."""
        return self.path.startswith("tests/")

    @property
    def is_init(self) -> bool:
        """True for `__init__.py`."""
        return self.path.endswith("/__init__.py")

    @property
    def test_path(self) -> str:
        """Where the tests of this module belong; all bodies of an op share one test."""
        path = Path(self.path)
        folder = path.parent.as_posix()
        if folder in ("pallas_kernels/reference", "pallas_kernels/mosaic"):
            folder = "pallas_kernels"
        return f"tests/{folder}/test_{path.stem.strip('_')}.py"

    @functools.cached_property
    def imports(self) -> tuple[Import, ...]:
        """Every import, wherever it stands in the file."""
        return tuple(_imports(self.tree))

    def references(self) -> Iterator[tuple[int, str]]:
        """(line, dotted name) of what the file uses, with import aliases replaced by their origin:
        `from os import environ as e; e["A"]` gives `os.environ`. Imports count as uses."""
        for item in self.imports:
            yield item.line, f"{item.module}.{item.name}" if item.name else item.module
        origin = {item.binds: item.origin for item in self.imports}
        inner: set[ast.AST] = set()
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Attribute):
                inner.add(node.value)
            if isinstance(node, ast.Attribute | ast.Name) and node not in inner:
                dotted = _dotted(node)
                if dotted:
                    first, _, rest = dotted.partition(".")
                    known = origin.get(first)
                    if known:
                        yield node.lineno, f"{known}.{rest}" if rest else known
                    elif not rest:
                        yield node.lineno, first


@dataclass(frozen=True)
class Project:
    """All text of a project."""

    top_level: tuple[str, ...]
    texts: tuple[Text, ...]
    dependencies: frozenset[str]
    dev_dependencies: frozenset[str]

    @classmethod
    def read(cls, root: Path) -> "Project":
        """Reads the project in the folder `root`."""
        texts = tuple(sorted(_texts(root), key=lambda text: text.path))
        top_level = tuple(sorted(path.name for path in root.iterdir() if _is_ours(path.name)))
        described = root / "pyproject.toml"
        table = (
            tomllib.loads(described.read_text()).get("project", {}) if described.exists() else {}
        )
        extras = table.get("optional-dependencies", {})
        kinds = ("plot", "tracing", "mooncake")
        optional = [requirement for kind in kinds for requirement in extras.get(kind, [])]
        needed = _import_names([*table.get("dependencies", []), *optional])
        dev = _import_names(extras.get("dev", []))
        return cls(top_level, texts, needed, needed | dev)

    @functools.cached_property
    def files(self) -> tuple[SourceFile, ...]:
        """The Python files."""
        return tuple(text for text in self.texts if isinstance(text, SourceFile))

    @functools.cached_property
    def modules(self) -> dict[str, SourceFile]:
        """The modules of the packages by dotted name."""
        return {file.module: file for file in self.files if file.in_package}

    def resolve(self, item: Import) -> str:
        """The module that an import reaches: `from a import b` may name module a.b or a thing
        in module a. For modules of others, what the statement names."""
        full = f"{item.module}.{item.name}"
        return full if full in self.modules else item.module


def _texts(root: Path) -> Iterator[Text]:
    for folder, folders, names in os.walk(root):
        here = Path(folder)
        folders[:] = [
            name for name in folders if _is_ours(name) or (here == root and name == ".ci")
        ]
        for name in names:
            path = here / name
            if path.suffix in _TEXT_SUFFIXES and (_is_ours(name) or name == ".gitignore"):
                kind = SourceFile if path.suffix == ".py" else Text
                yield kind(path.relative_to(root).as_posix(), path.read_text(encoding="utf-8"))


def _is_ours(name: str) -> bool:
    is_made = name in _LEFT_OUT_FOLDERS or name.endswith(".egg-info")
    return not is_made and not name.startswith(".")


def _imports(tree: ast.Module) -> Iterator[Import]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                # `import a.b` binds `a`; `import a.b as c` binds c to a.b.
                first = alias.name.partition(".")[0]
                origin = alias.name if alias.asname else first
                yield Import(node.lineno, alias.name, None, alias.asname or first, origin)
        elif isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                origin = f"{node.module}.{alias.name}"
                yield Import(
                    node.lineno, node.module, alias.name, alias.asname or alias.name, origin
                )


def _dotted(node: ast.AST) -> str | None:
    """`a.b.c` for an expression made of names and attributes only."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        below = _dotted(node.value)
        return f"{below}.{node.attr}" if below else None
    return None


def _import_names(requirements: list[str]) -> frozenset[str]:
    """Names under which the distributions of a requirements list are imported."""
    special = {
        "opentelemetry_sdk": "opentelemetry",
        "mooncake_transfer_engine_non_cuda": "mooncake",
        "orbax_checkpoint": "orbax",
        "pillow": "PIL",
        "pyyaml": "yaml",
        "pyzmq": "zmq",
    }
    names: set[str] = set()
    for requirement in requirements:
        word = ""
        for character in requirement:
            if not (character.isalnum() or character in "-_."):
                break
            word += character
        name = word.lower().replace("-", "_")
        names.add(special.get(name, name))
    return frozenset(names)
