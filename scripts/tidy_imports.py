"""Who may import whom, read from the source text: the same walls as the import-linter contracts
in `pyproject.toml`, the rule on mesh axes, and modules that nobody imports.
"""

import ast
import sys
from collections.abc import Callable, Iterator

from scripts.tidy_source import PACKAGES, Finding, Import, Project, SourceFile

MAY_IMPORT: dict[str, set[str]] = {
    "serving": {"deepinfer_jax", "sharding"},
    "deepinfer_jax": {"pallas_kernels", "sharding"},
    "sharding": set(),
    "pallas_kernels": set(),
}
ARRAYS_ONLY = {"sharding", "pallas_kernels"}

# Highest first. A module sees only lines below its own; names on one line do not see each other.
SERVING_ORDER = (
    ("__main__",),
    ("kv_commands", "mesh_planner"),
    ("offline", "simulate"),
    ("offline_outputs", "offline_tiers"),
    ("kv_process", "metadata_process", "router_process", "supervisor"),
    ("http_service", "node_process", "planner"),
    ("loading", "kv_storage"),
    ("cost_file",),
    ("cluster",),
    ("frontend", "sim"),
    ("transport",),
    ("nodes",),
    ("engine",),
    ("kv",),
    ("core",),
    ("observe", "config", "clock", "code_version", "listening"),
    ("kv_config",),
)
NODES_ORDER = (
    ("member_worker",),
    ("mesh_worker",),
    (
        "router",
        "prefill_worker",
        "decode_worker",
        "vision_worker",
        "feature_pulls",
        "storage_node",
        "metadata_node",
    ),
    ("reception",),
    ("vision_pool",),
    ("calls",),
    ("block_service", "kv_offload", "membership", "pools"),
    ("registry", "request_spans"),
    ("node",),
    ("messages",),
    ("values",),
)

PURE = (
    "serving.core",
    "serving.nodes",
    "serving.sim",
    "serving.cluster",
    "serving.kv.directory",
    "serving.kv.offload",
    "serving.engine.engine",
    "serving.engine.packing",
)
IMPURE = {"jax", "deepinfer_jax", "orbax", "time", "asyncio", "threading", "socket", "os"}

# What only these modules of serving may import: the executors run the model, and the planners
# count one that does not run, which needs no executor.
SOLE_IMPORTERS = {
    "deepinfer_jax": (
        "serving.engine.jax_executor",
        "serving.engine.mesh_executor",
        "serving.engine.device_controls",
        "serving.engine.image_executor",
        "serving.planner",
        "serving.mesh_planner",
    ),
    "orbax": ("serving.kv.orbax_tier",),
}

MESH_BUILDERS = {"Mesh", "AbstractMesh", "NamedSharding", "PartitionSpec", "make_mesh", "P"}
MESH_AXES = {"data", "expert", "context", "tensor"}
COLLECTIVES = {
    "psum",
    "pmax",
    "pmin",
    "pmean",
    "psum_scatter",
    "all_gather",
    "all_to_all",
    "ragged_all_to_all",
    "ppermute",
    "axis_index",
    "axis_size",
    "shard_map",
}


def check_packages_order(project: Project) -> Iterator[Finding]:
    """A package imports only the packages below it and libraries the project declares."""
    for file in project.files:
        package = file.path.split("/")[0]
        for item in file.imports:
            root = item.module.split(".")[0]
            if root == package or root in sys.stdlib_module_names:
                continue
            if root in ("scripts", "tests"):
                if file.in_package:
                    yield file.finding(
                        item.line, f"imports {root}; nobody imports scripts or tests"
                    )
            elif root in PACKAGES:
                if file.in_package and root not in MAY_IMPORT[package]:
                    allowed = ", ".join(sorted(MAY_IMPORT[package])) or "no other package"
                    yield file.finding(
                        item.line, f"{package} imports {root}; it may import {allowed}"
                    )
            else:
                yield from _library(project, file, item, root)


def _library(project: Project, file: SourceFile, item: Import, root: str) -> Iterator[Finding]:
    package = file.path.split("/")[0]
    if package in ARRAYS_ONLY and root not in ("jax", "numpy"):
        yield file.finding(item.line, f"{package} imports {root}; it may import jax and numpy only")
    known = project.dependencies if file.in_package else project.dev_dependencies
    if known and root not in known:
        table = "dependencies" if file.in_package else "dependencies or the dev extra"
        yield file.finding(item.line, f"{root} is not in the {table} of pyproject.toml; add it")


def check_serving_order(project: Project) -> Iterator[Finding]:
    """The order of parts inside serving, and of services inside nodes."""
    yield from _check_order(project, "serving", SERVING_ORDER)
    yield from _check_order(project, "serving.nodes", NODES_ORDER)


def _check_order(
    project: Project, parent: str, order: tuple[tuple[str, ...], ...]
) -> Iterator[Finding]:
    depth = parent.count(".") + 1
    rank = {name: level for level, names in enumerate(order) for name in names}
    for file in project.modules.values():
        if not file.module.startswith(f"{parent}."):
            continue
        part = file.module.split(".")[depth]
        if part not in rank:
            yield file.finding(
                1,
                f"{parent}.{part} has no place in the order; add it here and in pyproject.toml: "
                + " > ".join(" | ".join(names) for names in order),
            )
            continue
        for item in file.imports:
            reached = project.resolve(item)
            if not reached.startswith(f"{parent}."):
                continue
            other = reached.split(".")[depth]
            if other != part and rank.get(other, len(order)) <= rank[part]:
                yield file.finding(
                    item.line,
                    f"{parent}.{part} imports {parent}.{other}, which is not below it; move what "
                    "both need below, or pass it in",
                )


def check_pure(project: Project) -> Iterator[Finding]:
    """Pure modules reach no device, clock, thread, socket or file, directly or through others."""
    for file in project.modules.values():
        if not any(file.module == pure or file.module.startswith(f"{pure}.") for pure in PURE):
            continue
        for line, chain in _chains(project, file):
            yield file.finding(
                line,
                f"pure module reaches {chain[-1]} ({' > '.join((file.module, *chain))}); take a "
                "Clock, Executor, BlockStore or seeded random.Random from the caller",
            )


def _chains(project: Project, start: SourceFile) -> Iterator[tuple[int, tuple[str, ...]]]:
    """(line in `start`, modules passed) of each way to an impure module, the shortest of each."""
    seen: set[str] = {start.module}
    queue: list[tuple[SourceFile, int, tuple[str, ...]]] = [(start, 0, ())]
    for file, first_line, passed in queue:
        for item in file.imports:
            line = first_line or item.line
            reached = project.resolve(item)
            root = reached.split(".")[0]
            if reached in seen:
                continue
            if root in IMPURE:
                seen.add(reached)
                yield line, (*passed, root)
            elif reached in project.modules:
                seen.add(reached)
                queue.append((project.modules[reached], line, (*passed, reached)))


def check_sole_importers(project: Project) -> Iterator[Finding]:
    """In serving, few modules import the model and one imports orbax."""
    for file in project.modules.values():
        if not file.path.startswith("serving/"):
            continue
        for item in file.imports:
            root = item.module.split(".")[0]
            if root in SOLE_IMPORTERS and file.module not in SOLE_IMPORTERS[root]:
                allowed = " and ".join(SOLE_IMPORTERS[root])
                yield file.finding(item.line, f"imports {root}; only {allowed} may")


def check_mesh(project: Project) -> Iterator[Finding]:
    """Only sharding builds meshes and shardings or names mesh axes."""
    for file in project.files:
        if not file.in_package or file.path.startswith("sharding/"):
            continue
        for line, name in file.references():
            builder = name.rpartition(".")[2]
            if name.startswith("jax.") and builder in MESH_BUILDERS:
                yield file.finding(
                    line, f"{name}; use logical names and sharding.mesh.DeviceMesh instead"
                )
        for node in ast.walk(file.tree):
            if isinstance(node, ast.Call) and _called_name(node) in COLLECTIVES:
                for axis in _axis_literals(node):
                    yield file.finding(
                        node.lineno, f"names mesh axis {axis!r}; take it from sharding instead"
                    )


def _called_name(node: ast.Call) -> str:
    if isinstance(node.func, ast.Attribute):
        return node.func.attr
    return node.func.id if isinstance(node.func, ast.Name) else ""


def _axis_literals(node: ast.Call) -> Iterator[str]:
    for argument in [*node.args, *(keyword.value for keyword in node.keywords)]:
        for inner in ast.walk(argument):
            if isinstance(inner, ast.Constant) and inner.value in MESH_AXES:
                yield str(inner.value)


def check_used(project: Project) -> Iterator[Finding]:
    """Every module is imported by something other than its own test."""
    importers: dict[str, set[str]] = {}
    for file in project.files:
        for item in file.imports:
            importers.setdefault(project.resolve(item), set()).add(file.path)
    for module, file in project.modules.items():
        others = importers.get(module, set()) - {file.path, file.test_path}
        if not others and not file.is_init and not module.endswith(".__main__"):
            yield file.finding(1, "imported by nothing but its own test; use it or remove it")


RULES: tuple[Callable[[Project], Iterator[Finding]], ...] = (
    check_packages_order,
    check_serving_order,
    check_pure,
    check_sole_importers,
    check_mesh,
    check_used,
)
