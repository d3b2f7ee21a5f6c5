"""Blocks and states that an executor moves between its device and host memory.

The compiled reads and writes belong to the model (`deepinfer_jax/cache_bytes.py`); here is which of
them a `KVTransfer` takes, and the reads that are on their way.
"""

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np

from serving.core.kv_transfer import KVRead, KVTransfer, SwapInTimes
from serving.core.step_plan import StepPlan
from serving.engine.engine import Executor
from serving.kv.swap_in import GroupCopies, SwapIns, Timeline

BLOCKS_PER_CALL = 16
"""Blocks that one compiled read moves, and that the smallest compiled write has room for."""


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


@runtime_checkable
class PartedStep(Protocol):
    """A compiled step that can be given blocks while it runs."""

    @property
    def programs(self) -> tuple[Any, ...]:
        """Its parts."""
        ...


class ByteSizes(Protocol):
    """Bytes of one block in each layer group, and of one state."""

    @property
    def groups(self) -> tuple[int, ...]:
        """Of one block, in each layer group."""
        ...

    @property
    def state(self) -> int:
        """Of one state."""
        ...


class CompiledMoves(GroupCopies, Protocol):
    """Reads and writes of one cache; all of them only dispatch."""

    @property
    def sizes(self) -> ByteSizes:
        """How much moves."""
        ...

    def read(self, cache: Any, blocks: np.ndarray, slots: np.ndarray) -> PendingRead:
        """Begin to copy blocks [N] int32 and the states of slots [M] int32 to the host."""
        ...

    def write_states(self, cache: Any, slots: np.ndarray, states: np.ndarray) -> Any:
        """The cache with other states [L, bytes] uint8 in slots [L] int32."""
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

    def run_step(self, plan: StepPlan, step: Any, *arrays: Any, **named: Any) -> Any:
        """Dispatch a compiled step with the blocks that it needs; what it gives beside the cache.

        Args:
            step: takes `arrays`, the cache and what is named.
        """
        if self.kv_moves is None:
            result, self.cache = step(*arrays, self.cache, **named)
        else:
            result, self.cache = self.kv_moves.run_step(plan, step, (*arrays, self.cache), named)
        return result

    def swap_in_times(self, plan: StepPlan) -> SwapInTimes | None:
        """How stored blocks came to the device for a step that is over; None if none did."""
        return None if self.kv_moves is None else self.kv_moves.swap_in_times(plan)


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
        swap_ins: blocks on their way to the cache.
        classes: the host's copy of the token classes, where there is one.
    """

    def __init__(
        self,
        compiled: CompiledMoves,
        form: KVForm,
        swap_ins: SwapIns,
        classes: TokenClasses | None = None,
    ) -> None:
        self.form = form
        self._compiled = compiled
        self._swap_ins = swap_ins
        self._classes = classes
        self._reading: deque[tuple[int, PendingRead]] = deque()
        self._timelines: dict[int, Timeline] = {}

    @classmethod
    def of(
        cls,
        compiled: CompiledMoves,
        lines: Iterable[str],
        part_of_group: Sequence[int],
        now_ns: Callable[[], int],
        classes: TokenClasses | None,
    ) -> "KVMoves":
        """Moves of blocks and states whose bytes depend on what `lines` say.

        Args:
            part_of_group: of each layer group, the part of a step that reads it.
            now_ns: the clock, by which moves are timed.
        """
        form = KVForm("\n".join(lines), compiled.sizes.groups, compiled.sizes.state)
        return cls(compiled, form, SwapIns(compiled, part_of_group, now_ns), classes)

    def move(self, cache: Any, transfer: KVTransfer) -> Any:
        """Dispatch a transfer; the cache that later steps are to use.

        Blocks may be written as late as for the first step that uses one of them.

        Raises:
            ValueError: an array does not have the size of what it is to fill.
        """
        self._check(transfer)
        if transfer.is_reading:
            cache = self._swap_ins.settle(cache, transfer.read_blocks)
            read = self._compiled.read(cache, transfer.read_blocks, transfer.read_slots)
            self._reading.append((transfer.transfer_id, read))
        slots, states = transfer.write_slots, transfer.write_states
        cache = self._swap_ins.add(cache, transfer)
        cache = self._compiled.write_states(cache, slots, states)
        if self._classes is not None and len(slots):
            self._classes.set_classes(slots, self._compiled.classes(states))
        return cache

    def run_step(
        self, plan: StepPlan, step: Any, arguments: tuple[Any, ...], named: dict[str, Any]
    ) -> tuple[Any, Any]:
        """Dispatch a compiled step with the blocks that it needs; what it returns."""
        blocks = plan.block_tables
        is_parted = isinstance(step, PartedStep)
        result, cache, timeline = self._swap_ins.run(step, is_parted, blocks, arguments, named)
        if timeline is not None:
            self._timelines[plan.step_index] = timeline
        return result, cache

    def swap_in_times(self, plan: StepPlan) -> SwapInTimes | None:
        """How blocks came to the device for a step that is over; None if none did."""
        timeline = self._timelines.pop(plan.step_index, None)
        return None if timeline is None else timeline.times()

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
