"""Blocks and states that an executor moves between its device and host memory.

The compiled reads and writes belong to the model (`deepinfer_jax/cache_bytes.py`); here is which of
them a `KVTransfer` takes, and the reads that are on their way.
"""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np

from serving.core.kv_transfer import KVRead, KVTransfer
from serving.engine.engine import Executor

BLOCKS_PER_CALL = 16
"""Blocks that one compiled transfer moves; longer prefixes take several."""


@dataclass(frozen=True, slots=True)
class KVForm:
    """What blocks and states are outside the device.

    Attributes:
        description: everything that their bytes depend on beside the weights.
        group_bytes: bytes of one block in each layer group.
        state_bytes: bytes of one state.
    """

    description: str
    group_bytes: tuple[int, ...]
    state_bytes: int

    @property
    def block_bytes(self) -> int:
        """Bytes of one block in all layer groups."""
        return sum(self.group_bytes)


class PendingRead(Protocol):
    """Blocks and states on their way to the host."""

    def wait(self) -> tuple[tuple[np.ndarray, ...], np.ndarray]:
        """Per layer group [N, bytes] uint8, and states [M, bytes] uint8."""
        ...


class CompiledMoves(Protocol):
    """Reads and writes of one cache; all of them only dispatch."""

    def read(self, cache: Any, blocks: np.ndarray, slots: np.ndarray) -> PendingRead:
        """Begin to copy blocks [N] int32 and the states of slots [M] int32 to the host."""
        ...

    def write(
        self,
        cache: Any,
        blocks: np.ndarray,
        groups: tuple[np.ndarray, ...],
        slots: np.ndarray,
        states: np.ndarray,
    ) -> Any:
        """The cache with other content in blocks [K] and slots [L] int32."""
        ...

    def classes(self, states: np.ndarray) -> np.ndarray:
        """[L, ring length] int32, the token classes in states [L, bytes] uint8."""
        ...


class TokenClasses(Protocol):
    """A copy on the host of the token classes in every slot."""

    def set_classes(self, slots: np.ndarray, classes: np.ndarray) -> None:
        """Give slots [N] int32 other classes [N, ring length] int32."""
        ...


@runtime_checkable
class TransferExecutor(Protocol):
    """An executor that also moves blocks and states, in line with its steps."""

    def move(self, transfer: KVTransfer) -> None:
        """Dispatch a transfer; does not wait for it."""
        ...

    def collect_read(self) -> KVRead:
        """Wait for the oldest transfer that reads and was not collected yet."""
        ...


class CacheOwner:
    """An executor's part in transfers.

    Attributes:
        cache: what later steps are to use.
        kv_moves: None for an executor that was made without transfers.
    """

    cache: Any
    kv_moves: "KVMoves | None" = None

    def move(self, transfer: KVTransfer) -> None:
        """Dispatch a transfer of blocks and states; does not wait for it."""
        assert self.kv_moves is not None, "made without transfers"
        self.cache = self.kv_moves.move(self.cache, transfer)

    def collect_read(self) -> KVRead:
        """Wait for the oldest transfer that reads."""
        assert self.kv_moves is not None, "made without transfers"
        return self.kv_moves.collect()


class TransferPassage:
    """For an executor around another one: transfers go through to that."""

    _executor: Executor

    def move(self, transfer: KVTransfer) -> None:
        """Dispatch a transfer; does not wait for it."""
        self._mover().move(transfer)

    def collect_read(self) -> KVRead:
        """Wait for the oldest transfer that reads."""
        return self._mover().collect_read()

    def _mover(self) -> TransferExecutor:
        assert isinstance(self._executor, TransferExecutor), "this executor moves no blocks"
        return self._executor


class KVMoves:
    """Runs transfers in their order.

    Args:
        compiled: reads and writes of the cache.
        form: what moves.
        classes: the host's copy of the token classes, where there is one.
    """

    def __init__(
        self, compiled: CompiledMoves, form: KVForm, classes: TokenClasses | None = None
    ) -> None:
        self.form = form
        self._compiled = compiled
        self._classes = classes
        self._reading: deque[tuple[int, PendingRead]] = deque()

    @classmethod
    def of(
        cls,
        compiled: CompiledMoves,
        sizes: Any,
        lines: Iterable[str],
        classes: TokenClasses | None,
    ) -> "KVMoves":
        """Moves of blocks and states of `sizes`, which depend on what `lines` say."""
        return cls(compiled, KVForm("\n".join(lines), sizes.groups, sizes.state), classes)

    def move(self, cache: Any, transfer: KVTransfer) -> Any:
        """Dispatch a transfer; the cache that later steps are to use.

        Raises:
            ValueError: an array does not have the size of what it is to fill.
        """
        self._check(transfer)
        if transfer.is_reading:
            read = self._compiled.read(cache, transfer.read_blocks, transfer.read_slots)
            self._reading.append((transfer.transfer_id, read))
        cache = self._compiled.write(
            cache,
            transfer.write_blocks,
            transfer.write_groups,
            transfer.write_slots,
            transfer.write_states,
        )
        if self._classes is not None and len(transfer.write_slots):
            classes = self._compiled.classes(transfer.write_states)
            self._classes.set_classes(transfer.write_slots, classes)
        return cache

    def collect(self) -> KVRead:
        """Wait for the oldest transfer that reads.

        Raises:
            IndexError: there is none.
        """
        transfer_id, read = self._reading.popleft()
        return KVRead(transfer_id, *read.wait())

    def _check(self, transfer: KVTransfer) -> None:
        num_blocks, num_states = len(transfer.write_blocks), len(transfer.write_slots)
        wanted = [(num_blocks, size) for size in self.form.group_bytes] if num_blocks else []
        received = [group.shape for group in transfer.write_groups]
        if num_states:
            wanted.append((num_states, self.form.state_bytes))
            received.append(transfer.write_states.shape)
        if received != wanted:
            raise ValueError(
                f"transfer {transfer.transfer_id} brings arrays of shapes {received}; expected "
                f"{wanted} for {num_blocks} blocks and {num_states} states"
            )
