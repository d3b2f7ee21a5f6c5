"""Blocks and states that move between device and host memory, between two steps.

A transfer stands in line with the steps of an engine: it sees what all steps submitted before it
have written, and those submitted after it see what it has written. Reading comes before writing.
"""

from dataclasses import dataclass, field

import numpy as np


def no_numbers() -> np.ndarray:
    """[0] int32, the blocks or slots of a transfer that moves none."""
    return np.zeros(0, np.int32)


@dataclass(frozen=True, slots=True, eq=False)
class KVTransfer:
    """What moves. `G` layer groups travel each as one array.

    Attributes:
        transfer_id: its number; what was read comes back under it.
        read_blocks: [N] int32, blocks that are copied to the host.
        read_slots: [M] int32, slots whose states are copied to the host.
        write_blocks: [K] int32, blocks that are written.
        write_groups: per layer group [K, bytes] uint8, their content; empty if K is 0.
        write_slots: [L] int32, slots whose states are written.
        write_states: [L, bytes] uint8, their content.
    """

    transfer_id: int
    read_blocks: np.ndarray = field(default_factory=no_numbers)
    read_slots: np.ndarray = field(default_factory=no_numbers)
    write_blocks: np.ndarray = field(default_factory=no_numbers)
    write_groups: tuple[np.ndarray, ...] = ()
    write_slots: np.ndarray = field(default_factory=no_numbers)
    write_states: np.ndarray = field(default_factory=lambda: np.zeros((0, 0), np.uint8))

    @property
    def is_reading(self) -> bool:
        """Whether anything comes back."""
        return bool(len(self.read_blocks) or len(self.read_slots))


@dataclass(frozen=True, slots=True, eq=False)
class KVRead:
    """What a transfer has read.

    Attributes:
        transfer_id: that of the transfer.
        groups: per layer group [N, bytes] uint8.
        states: [M, bytes] uint8.
    """

    transfer_id: int
    groups: tuple[np.ndarray, ...]
    states: np.ndarray


@dataclass(frozen=True, slots=True)
class SwapInTimes:
    """For how long blocks were copied to the device for a step, in nanoseconds.

    `hidden_ns` of the `copy_ns` the step computed meanwhile.
    """

    copy_ns: int
    hidden_ns: int
