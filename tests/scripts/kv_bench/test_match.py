"""Goal: the measurement finds what it has stored, and the index is as small as it is to be. Method:
the part of the benchmark with few blocks.
"""

import pytest

from scripts.bench_kv import FIGURES, run_part
from scripts.kv_bench import match


def test_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("NUM_BLOCKS", 2000), ("LONG_BLOCKS", 256), ("ROUNDS", 2)):
        monkeypatch.setattr(match, name, value)
    found = run_part("match")
    assert set(FIGURES["match"]) <= set(found)
    assert 0 < found["match_64_ms"] <= found["match_64_median_ms"]
    # Bytes of memory of each token; what is counted does not depend on the machine's speed.
    assert 1 < found["index_bytes_per_token"] < 5
