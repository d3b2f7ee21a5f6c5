"""Goal: a line for each step says what it computed and how long it took, and comes back so.
Method: an engine around a scripted executor, whose plans are looked at beside the lines.
"""

import random
from pathlib import Path

import pytest

from serving.core.buckets import StepKind
from serving.core.request import Request, SamplingParams
from serving.engine.engine import Engine, run_step
from serving.engine.step_records import RecordingExecutor, RecordsError, read_records
from serving.engine.step_times import TimedExecutor
from tests.serving.engine.checked_engine import BUCKETS, make_limits
from tests.serving.scripted import ScriptedExecutor


def test_records_are_those_of_the_steps(tmp_path: Path) -> None:
    path = tmp_path / "steps.jsonl"
    inner = ScriptedExecutor(lambda position: 3 + position % 5)
    now_ns = iter(range(0, 10**9, 1_000_000))
    with path.open("ab") as file:
        executor = RecordingExecutor(TimedExecutor(inner, lambda: next(now_ns)), file.write)
        engine = Engine(make_limits(), BUCKETS, random.Random(0))
        for name, length in (("a", 5), ("b", 13)):
            sampling = SamplingParams(4, temperature=0, ignore_eos=True)
            engine.admit(Request(name, tuple([3] * length), sampling))
        while engine.has_work:
            run_step(engine, executor)
    prefill, decode = read_records(path)
    plans = {kind: [plan for plan in inner.plans if plan.kind is kind] for kind in StepKind}
    assert len(prefill) == len(plans[StepKind.PREFILL]) > 0
    for sample, plan in zip(prefill, plans[StepKind.PREFILL], strict=True):
        assert sample.num_tokens == plan.bucket.num_tokens and sample.time_ms > 0
        chunks = zip(plan.num_tokens.tolist(), plan.starts.tolist(), strict=True)
        assert sample.num_pairs == sum(q * h + q * q / 2 for q, h in chunks)
    assert len(decode) == len(plans[StepKind.DECODE]) > 0
    for sample, plan in zip(decode, plans[StepKind.DECODE], strict=True):
        assert sample.num_rows == plan.num_rows
        assert sample.num_context == plan.starts.sum() + plan.num_tokens.sum()


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("nonsense", "steps.jsonl:2: no record of a step"),
        ('{"kind": "prefill", "num_rows": 1}', "steps.jsonl:2: no record of a step"),
        (
            '{"kind":"decode","num_rows":1,"num_tokens":1,"looked_back":1,"time_ms":0}',
            "steps.jsonl:2: time_ms is 0.0",
        ),
    ],
)
def test_broken_lines_are_named(tmp_path: Path, line: str, expected: str) -> None:
    path = tmp_path / "steps.jsonl"
    good = '{"kind":"decode","num_rows":1,"num_tokens":1,"looked_back":1,"time_ms":2}'
    path.write_text(f"{good}\n{line}\n")
    with pytest.raises(RecordsError, match=expected):
        read_records(path)
    with pytest.raises(RecordsError, match="nowhere: cannot be read"):
        read_records(tmp_path / "nowhere")
