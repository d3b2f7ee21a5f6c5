"""What accelerators can do at most, as plain numbers, for predicting and for simulating.

All figures are the vendor's peaks for dense operations, per device and per second; links count
one direction. No kernel reaches a peak, so times made from them are lower bounds.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from sharding.config_file import ConfigError


@dataclass(frozen=True, slots=True)
class Hardware:
    """One kind of device in nodes of `devices_per_node`.

    Attributes:
        memory_bytes: device memory.
        memory_bytes_per_s: its bandwidth.
        fp8_flops_per_s, bf16_flops_per_s: tensor operations, a multiply and an add being two.
        node_bytes_per_s: to devices of the same node.
        network_bytes_per_s: to devices of other nodes.
        host_bytes_per_s: from the memory of the host.
    """

    name: str
    memory_bytes: float
    memory_bytes_per_s: float
    fp8_flops_per_s: float
    bf16_flops_per_s: float
    node_bytes_per_s: float
    network_bytes_per_s: float
    host_bytes_per_s: float
    devices_per_node: int = 8


HARDWARE: Mapping[str, Hardware] = {
    "h100": Hardware("h100", 80e9, 3.35e12, 1979e12, 989e12, 450e9, 50e9, 64e9),
    "h200": Hardware("h200", 141e9, 4.8e12, 1979e12, 989e12, 450e9, 50e9, 64e9),
    "b200": Hardware("b200", 180e9, 8.0e12, 4500e12, 2250e12, 900e9, 50e9, 64e9),
}
"""The kinds that are known, by name. A link of 400 Gbit/s per device leads out of a node."""


def hardware(name: str) -> Hardware:
    """The kind of that name.

    Raises:
        ConfigError: it is not known.
    """
    if name not in HARDWARE:
        raise ConfigError(f"hardware {name!r} is unknown; expected one of {', '.join(HARDWARE)}")
    return HARDWARE[name]
