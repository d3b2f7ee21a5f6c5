"""MeshPlan: how many devices along which axis, and which array dimension is cut along which.

A mesh has axes with four possible names and no others. Arrays are described by *logical* names,
one per dimension (`("vocab", "embed")`), and the plan's rules map logical names to mesh axes; a
name without a rule is replicated. The file format is

    redundant_experts = 64         # and other settings of the whole mesh; see `MeshPlan`
    [mesh]                         # axis = size, outermost first
    data = 2
    expert = 4
    [rules]                        # logical name = mesh axes, outermost first
    batch = ["data", "expert"]
    experts = ["expert"]

*Why logical names*: layers and the table of parameters say what a dimension is, once; where it
lies is decided per deployment by a file.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from sharding import config_file
from sharding.config_file import ConfigError

MESH_AXES = ("data", "expert", "context", "tensor")
"""The mesh axes that exist: rows of a step, routed experts, positions of a prompt, channels."""

LOGICAL_AXES: Mapping[str, str] = {
    # Steps and caches.
    "batch": "rows of a step",
    "tokens": "tokens of a step",
    "blocks": "blocks of the KV pool",
    "slots": "state slots, one per running sequence",
    # Text model.
    "vocab": "vocabulary",
    "embed": "channels of a residual stream",
    "streams": "residual streams",
    "stream_embed": "channels of all residual streams together",
    "mixes": "mixing weights of the residual streams",
    "mix_kinds": "kinds of mixing weights",
    "heads": "attention heads, or their channels",
    "group_heads": "head channels of one output group",
    "q_lora": "channels of the low-rank query",
    "kv": "channels of a key-value latent",
    "o_lora": "low-rank channels of all output groups",
    "index_heads": "indexer heads, or their channels",
    "index_dim": "channels of an indexer head",
    "router": "experts, where every device chooses among all of them",
    "experts": "routed experts",
    "ffn": "inner channels of a routed expert",
    "shared_ffn": "inner channels of the shared expert",
    "engram_rows": "rows of an Engram table",
    "engram_dim": "channels of an Engram row",
    "engram_in": "channels of the rows read for one token",
    "engram_out": "channels of the Engram keys and value",
    # Draft module.
    "features": "channels of the target layers that a draft starts from",
    "markov": "rank of the Markov head",
    "confidence": "outputs of the confidence head",
    "confidence_in": "inputs of the confidence head",
    # Image encoder.
    "vision_embed": "channels of the image encoder",
    "vision_ffn": "inner channels of the image encoder",
    "vision_in": "input channels of a linear map",
    "vision_out": "output channels of a linear map",
}
"""Every name an array dimension may carry, and what it means. A name not here is refused, since
a misspelt one would silently be replicated."""

_CONFIGS = Path(__file__).parent / "configs"


class ShardingError(ValueError):
    """An array or a set of devices that does not fit the plan."""


@dataclass(frozen=True)
class MeshPlan:
    """Axes, their sizes, and the rules from logical names to axes.

    Attributes:
        mesh: axis name -> number of devices along it, outermost first.
        rules: logical name -> axes that cut it, outermost first.
        redundant_experts: expert slots of a layer beyond one for each expert.
        engram: where Engram tables lie, on the devices (as the rules say) or in host memory.
        micro_batches: parts of a step that run by turns, so that one computes while the other
            exchanges tokens.
        devices: what the mesh is made of: accelerators (or what jax finds in their place), or as
            many devices as it needs on the CPUs of this host, for tests and trials.

    Raises:
        ValueError: no axis, an unknown axis or logical name, a size below 1, a rule that names
            an axis twice or one that the mesh lacks, or a negative number of redundant experts.
    """

    mesh: Mapping[str, int]
    rules: Mapping[str, tuple[str, ...]] = field(default_factory=dict[str, tuple[str, ...]])
    redundant_experts: int = 0
    engram: Literal["device", "host"] = "device"
    micro_batches: Literal[1, 2] = 1
    devices: Literal["accelerators", "host"] = "accelerators"

    def __post_init__(self) -> None:
        if not self.mesh:
            raise ValueError(f"mesh has no axis; expected at least one of {', '.join(MESH_AXES)}")
        for axis, size in self.mesh.items():
            if axis not in MESH_AXES:
                raise ValueError(f"mesh axis {axis} is unknown; expected {', '.join(MESH_AXES)}")
            if size < 1:
                raise ValueError(f"mesh axis {axis} has size {size}; expected at least 1")
        for name, axes in self.rules.items():
            check_logical_name(name)
            for axis in axes:
                if axis not in self.mesh:
                    raise ValueError(
                        f"rule {name} uses axis {axis}; expected axes of this mesh: "
                        f"{', '.join(self.mesh)}"
                    )
            if len(set(axes)) < len(axes):
                raise ValueError(f"rule {name} names an axis twice: {', '.join(axes)}")
        if self.redundant_experts < 0:
            raise ValueError(
                f"redundant_experts is {self.redundant_experts}; expected 0 or more slots"
            )

    @property
    def num_devices(self) -> int:
        """Devices that the mesh needs: the product of its sizes."""
        return math.prod(self.mesh.values())

    def num_parts(self, name: str) -> int:
        """Into how many parts a dimension of this logical name is cut."""
        return math.prod(self.mesh[axis] for axis in self.rules.get(name, ()))

    def axes_of(self, names: tuple[str | None, ...]) -> tuple[tuple[str, ...], ...]:
        """Mesh axes that cut each dimension of an array; empty where it is replicated.

        `names` holds one logical name per dimension, None for a dimension that is never cut.

        Raises:
            ShardingError: an unknown name, or two dimensions that would use the same mesh axis.
        """
        owner: dict[str, str] = {}
        result: list[tuple[str, ...]] = []
        for name in names:
            if name is None:
                result.append(())
                continue
            try:
                check_logical_name(name)
            except ValueError as error:
                raise ShardingError(str(error)) from None
            axes = self.rules.get(name, ())
            for axis in axes:
                if axis in owner:
                    raise ShardingError(
                        f"array {names}: dimensions {owner[axis]} and {name} would both be cut "
                        f"along mesh axis {axis}; change the rule of one of them"
                    )
                owner[axis] = name
            result.append(axes)
        return tuple(result)

    def check_shape(self, names: tuple[str | None, ...], shape: tuple[int, ...]) -> None:
        """Checks that an array of `shape` can be cut evenly.

        Raises:
            ShardingError: as many names as dimensions are expected, and sizes that divide.
        """
        if len(names) != len(shape):
            raise ShardingError(
                f"array {names} has {len(names)} names; expected {len(shape)}, one for each "
                f"dimension of {shape}"
            )
        for name, size, axes in zip(names, shape, self.axes_of(names), strict=True):
            parts = 1 if name is None else self.num_parts(name)
            if size % parts:
                raise ShardingError(
                    f"array {names} of shape {shape}: dimension {name} of size {size} does not "
                    f"divide into {parts} parts (mesh axes {', '.join(axes)})"
                )


def check_logical_name(name: str) -> None:
    """Raises ValueError if `name` is not one of `LOGICAL_AXES`."""
    if name not in LOGICAL_AXES:
        raise ValueError(f"logical name {name} is unknown; expected {', '.join(LOGICAL_AXES)}")


def load_plan(name_or_path: str | Path) -> MeshPlan:
    """Reads a plan by the name of a shipped file (`single`) or by the path of a `.toml` file.

    Raises:
        ConfigError: no such plan, or a file that is not one.
    """
    path = Path(name_or_path)
    if path.suffix == ".toml":
        return config_file.load(path, MeshPlan)
    shipped = sorted(file.stem for file in _CONFIGS.glob("*.toml"))
    if str(name_or_path) not in shipped:
        raise ConfigError(
            f"sharding {name_or_path!s}: expected the path of a .toml file or one of "
            f"{', '.join(shipped)}"
        )
    return config_file.load(_CONFIGS / f"{name_or_path}.toml", MeshPlan)
