"""Goal: a slice of a trace keeps who shares what with whom, and figures reach the table.

Method: rows by hand; an export as aiperf writes it.
"""

from scripts.replay_mooncake import ROWS, TOTALS, figures_of, slice_of, table_of

TRACE = [
    {"timestamp": 0, "input_length": 1100, "output_length": 40, "hash_ids": [7, 8, 9]},
    {"timestamp": 3000, "input_length": 600, "output_length": 5, "hash_ids": [7, 10]},
    {"timestamp": 4000, "input_length": 3, "output_length": 900, "hash_ids": [11]},
    {"timestamp": 5000, "input_length": 1, "output_length": 1, "hash_ids": [12]},
]


def test_lengths_shrink_with_their_blocks() -> None:
    first, second, third = slice_of(TRACE, 3, 16, 2.0)
    assert first == {"timestamp": 0, "input_length": 68, "output_length": 2, "hash_ids": [7, 8, 9]}
    assert (second["timestamp"], second["input_length"]) == (6000, 37)
    assert second["hash_ids"] == [7, 10], "37 tokens are two blocks of 32"
    assert (third["input_length"], third["output_length"]) == (1, 56)


def test_table() -> None:
    export = {name: {"avg": 1.25, "p50": 2.5, "p99": 3.75} for name in ROWS}
    export |= {name: {"avg": 4.5} for name in TOTALS if name != "error_request_count"}
    figures = figures_of(export)
    assert figures["time_to_first_token_p99"] == 3.75 and figures["error_request_count"] == 0
    table = table_of(figures, "What it was.")
    assert "| time to first token (ms) | 1.2 | 2.5 | 3.8 |" in table
    assert "| requests a second | 4.50 |" in table and "What it was." in table
