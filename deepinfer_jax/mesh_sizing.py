"""How many bytes of weights each device of a mesh holds, from the one table of logical axes.

Nothing is allocated. The same names that place a parameter (`ParameterSpec.axes`) and the same
rules (`MeshPlan`) say here into how many parts it is cut, so a plan that passes here can be loaded.
"""

import math
from typing import NamedTuple

from deepinfer_jax.config import ModelConfig
from deepinfer_jax.parameter_table import ParameterSpec, parameter_table
from sharding.plan import MeshPlan, ShardingError


class DeviceGroup(NamedTuple):
    """Bytes of one group of weights on one device; `part` and `group` as in `ParameterSpec`."""

    part: str
    group: str
    size_bytes: int


def device_weights(config: ModelConfig, plan: MeshPlan) -> tuple[DeviceGroup, ...]:
    """Weights of one device by group, in the order of the forward pass.

    Redundant experts are further replicas of routed experts of the text model, in every layer.
    Engram tables that lie in host memory count nothing.

    Raises:
        ShardingError: a dimension does not divide, or two would lie on one mesh axis; the message
            names the tensor, the sizes and the axes.
    """
    sizes: dict[tuple[str, str], int] = {}
    for spec in parameter_table(config):
        key = (spec.part, spec.group)
        sizes[key] = sizes.get(key, 0) + _device_bytes(spec, plan)
    return tuple(DeviceGroup(*key, size) for key, size in sizes.items())


def _device_bytes(spec: ParameterSpec, plan: MeshPlan) -> int:
    if spec.group == "engram_table" and plan.engram == "host":
        return 0
    num_stacked = spec.num_stacked
    if spec.part == "text" and num_stacked:
        num_stacked += plan.redundant_experts
    # Values, then scales if the storage has them: of one matrix, all stacked ones being alike.
    tensors = spec.tensors()[: 1 if isinstance(spec.storage, str) else 2]
    size = 0
    for tensor in tensors:
        shape = (num_stacked, *tensor.shape) if num_stacked else tensor.shape
        try:
            plan.check_shape(spec.axes, shape)
        except ShardingError as error:
            raise ShardingError(f"{tensor.name}: {error}") from None
        size += tensor.size_bytes * max(num_stacked, 1)
    return size // math.prod(plan.num_parts(name) for name in spec.axes)
