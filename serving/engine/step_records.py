"""Steps that have run, a line of JSON for each: what they computed, and how long they took.

`scripts/fit_cost.py` fits the cost of steps to them, so predictions follow the traffic that there
is rather than full steps measured at a start.
"""

from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import msgspec

from serving.core.buckets import StepKind
from serving.core.cost import DecodeSample, PrefillSample, num_pairs
from serving.core.step_plan import StepPlan, StepResult
from serving.engine.engine import Executor
from serving.engine.kv_moves import TransferPassage


class StepRecord(msgspec.Struct, frozen=True):
    """One step: its rows, the tokens that were computed, padding included, and what they look back
    on: pairs of a token and one before it for prefill, tokens of context for decode.
    """

    kind: Literal["prefill", "decode"]
    num_rows: int
    num_tokens: int
    looked_back: float
    time_ms: float


class RecordsError(ValueError):
    """A file of records that cannot be used."""


def record_of(plan: StepPlan, time_ms: float) -> StepRecord:
    """The record of a step."""
    chunks = list(zip(plan.num_tokens.tolist(), plan.starts.tolist(), strict=True))
    if plan.kind is StepKind.PREFILL:
        pairs = sum(num_pairs(count, before) for count, before in chunks)
        return StepRecord("prefill", len(chunks), plan.bucket.num_tokens, pairs, time_ms)
    context = float(sum(count + before for count, before in chunks))
    return StepRecord("decode", len(chunks), plan.bucket.num_tokens, context, time_ms)


def read_records(path: Path) -> tuple[list[PrefillSample], list[DecodeSample]]:
    """The steps in a file.

    Raises:
        RecordsError: it cannot be read, or a line is no record; which one.
    """
    decoder = msgspec.json.Decoder(StepRecord)
    prefill: list[PrefillSample] = []
    decode: list[DecodeSample] = []
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise RecordsError(f"{path}: cannot be read: {error.strerror}") from None
    for number, line in enumerate(lines, 1):
        try:
            record = decoder.decode(line)
        except msgspec.DecodeError as error:
            raise RecordsError(f"{path}:{number}: no record of a step: {error}") from None
        if not record.time_ms > 0:
            raise RecordsError(f"{path}:{number}: time_ms is {record.time_ms}; expected above 0")
        if record.kind == "prefill":
            prefill.append(PrefillSample(record.num_tokens, record.looked_back, record.time_ms))
        else:
            decode.append(DecodeSample(record.num_rows, record.looked_back, record.time_ms))
    return prefill, decode


class RecordingExecutor(TransferPassage):
    """An executor around one whose results have times (`TimedExecutor`); `write` takes lines."""

    def __init__(self, executor: Executor, write: Callable[[bytes], object]) -> None:
        self._executor = executor
        self._write = write
        self._plans: deque[StepPlan] = deque()
        self._encoder = msgspec.json.Encoder()

    def submit(self, plan: StepPlan) -> None:
        """Dispatch a step."""
        self._executor.submit(plan)
        self._plans.append(plan)

    def collect(self) -> StepResult:
        """Wait for the oldest submitted step."""
        result = self._executor.collect()
        plan = self._plans.popleft()
        if result.elapsed_ms:
            self._write(self._encoder.encode(record_of(plan, result.elapsed_ms)) + b"\n")
        return result
