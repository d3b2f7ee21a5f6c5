"""Goal: every published format is read, and a broken row is refused with its line.
Method: a few rows written in each format; each way to break one; hit ratios against a count by
hand and against a walk that remembers every block.
"""

import json

import pytest

from serving.sim.traces import TraceError, TraceRow, read_trace
from tests.serving.sim.small_fleet import mooncake_lines

MOONCAKE = [
    '{"timestamp": 0, "input_length": 1000, "output_length": 5, "hash_ids": [7, 8]}',
    '{"timestamp": 2500, "input_length": 1025, "output_length": 1, "hash_ids": [7, 9, 10]}',
]
BAILIAN = [
    json.dumps(
        {
            "chat_id": 159,
            "parent_chat_id": -1,
            "timestamp": 61.25,
            "input_length": 33,
            "output_length": 2,
            "type": "text",
            "turn": 1,
            "hash_ids": [10**12, 2, 3],
        }
    )
]
AZURE = [
    "TIMESTAMP,ContextTokens,GeneratedTokens",
    "2023-11-16 18:17:03.9799600,4808,10",
    "2023-11-16 18:17:04.2299600,3180,8",
]
AZURE_IMAGES = [
    "TIMESTAMP,NumImages,ContextTokens,GeneratedTokens",
    "2025-01-01 00:00:00.5,3,4808,10",
    "2025-01-01 00:00:00,0,64,1",
]
BURST = [
    "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type",
    "5,ChatGPT,472,18,490,Conversation log",
    "45.5,GPT-4,1087,0,1087,API log",
    "118,GPT-4,1,276,277,Conversation log",
]


def test_mooncake() -> None:
    trace = read_trace(MOONCAKE, "a")
    assert trace.rows == (
        TraceRow(0.0, 1000, 5, (0, 1)),
        TraceRow(2.5, 1025, 1, (0, 2, 3)),
    )
    assert (trace.block_tokens, trace.num_blocks, trace.duration_s) == (512, 4, 5.0)


def test_bailian_counts_in_seconds_and_small_blocks() -> None:
    trace = read_trace([*BAILIAN, "", *BAILIAN], "a")
    assert trace.rows == (TraceRow(0.0, 33, 2, (0, 1, 2)),) * 2
    assert (trace.block_tokens, trace.num_blocks) == (16, 3)


def test_azure_with_and_without_images() -> None:
    trace = read_trace(AZURE, "a")
    assert [row.arrival_s for row in trace.rows] == pytest.approx([0, 0.25])
    assert [(row.num_prompt, row.num_output) for row in trace.rows] == [(4808, 10), (3180, 8)]
    assert trace.block_tokens == trace.num_blocks == 0
    # Rows are sorted by time.
    images = read_trace(AZURE_IMAGES, "a")
    assert [(row.arrival_s, row.num_images) for row in images.rows] == [(0.0, 0), (0.5, 3)]


def test_burst_leaves_out_failed_requests() -> None:
    trace = read_trace(BURST, "a")
    assert trace.rows == (TraceRow(0.0, 472, 18), TraceRow(113.0, 1, 276))


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        ([], "a: no rows"),
        (["x,y"], "a:1: 'x,y' begins no known trace; expected the Mooncake"),
        (AZURE[:1], "a: no requests; expected at least one row"),
        ([MOONCAKE[0], "{"], "a:2: not JSON"),
        ([MOONCAKE[0], "", "[1]"], "a:3: .* expected one JSON object"),
        ([MOONCAKE[0].replace("1000", "0")], "a:1: input_length is 0; expected .* at least 1"),
        ([MOONCAKE[0].replace("1000", "9.5")], "a:1: input_length is 9.5"),
        ([MOONCAKE[0].replace("1000", "true")], "a:1: input_length is True"),
        ([MOONCAKE[0].replace("output_length", "out")], "a:1: output_length is nothing"),
        ([MOONCAKE[0].replace("stamp", "")], "a:1: timestamp is nothing; expected a number"),
        ([MOONCAKE[0].replace('": 0', '": NaN')], "a:1: timestamp is nan"),
        ([MOONCAKE[0].replace("[7, 8]", "[7]")], "hash_ids holds 1 different ids of 1; expected 2"),
        ([MOONCAKE[0].replace("[7, 8]", "[7, 7]")], "hash_ids holds 1 different ids of 2"),
        ([MOONCAKE[0].replace("[7, 8]", '["7", 8]')], "expected a list of whole numbers"),
        ([*AZURE, "2023-11-16 18:17:04,3180"], "a:4: 2 fields; expected 3"),
        ([*AZURE, "2023-11-16 18:17:04,3180,-8"], "a:4: GeneratedTokens is -8"),
        ([*AZURE, "yesterday,3180,8"], "a:4: TIMESTAMP is 'yesterday'; expected a date"),
        ([*AZURE_IMAGES, "2025-01-01,-1,64,1"], "a:4: NumImages is -1; expected .* at least 0"),
        ([*BURST, "soon,M,1,1,2,L"], "a:5: Timestamp is 'soon'"),
        ([*BURST, "inf,M,1,1,2,L"], "a:5: Timestamp is 'inf'"),
        ([*BURST, "9,M,,1,2,L"], "a:5: Request tokens is ''"),
    ],
)
def test_a_broken_row_is_refused_with_its_line(lines: list[str], expected: str) -> None:
    with pytest.raises(TraceError, match=expected):
        read_trace(lines, "a")


def test_best_hit_ratio_by_hand() -> None:
    assert read_trace(MOONCAKE, "a").best_depths.tolist() == [0, 1]
    assert read_trace(MOONCAKE, "a").best_hit_ratio() == 1 / 5
    assert read_trace(AZURE, "a").best_hit_ratio() == 0


def test_best_depths_equal_a_walk_that_remembers_everything() -> None:
    trace = read_trace(mooncake_lines(), "a")
    known: set[int] = set()
    for row, depth in zip(trace.rows, trace.best_depths.tolist(), strict=True):
        expected = next((n for n, b in enumerate(row.blocks) if b not in known), len(row.blocks))
        assert depth == expected
        known.update(row.blocks)
    assert 0.1 < trace.best_hit_ratio() < 0.9
