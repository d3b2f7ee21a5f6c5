"""The loss curve shows every stage once.

Goal: a picture that follows the log. Method: a small log with a repeated step is drawn and read.
"""

import json
from pathlib import Path

import pytest

from scripts.tiny_model.loss_curve import draw, read_log


def test_draws_all_stages_and_keeps_the_later_of_two(tmp_path: Path) -> None:
    lines = [
        {"step": 10, "stage": "128 tokens", "loss": 5.0},
        {"step": 10, "stage": "128 tokens", "loss": 4.0},
        {"step": 20, "stage": "576 tokens", "loss": 1.0},
        {"step": 10, "stage": "draft", "loss": 2.0},
    ]
    log = tmp_path / "loss.jsonl"
    log.write_text("".join(json.dumps(line) + "\n" for line in lines))
    read = read_log(log)
    assert [line["loss"] for line in read] == [4.0, 1.0, 2.0]
    draw(read, tmp_path / "curve.svg")
    picture = (tmp_path / "curve.svg").read_text()
    assert picture.count("<polyline") == 3
    assert "30 steps" in picture
    # Lower loss lies lower in the picture, where y is larger.
    heights = [float(part.split('"')[0].split(",")[1]) for part in picture.split('points="')[1:]]
    assert heights[1] > heights[2] > heights[0]


def test_empty_log_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no lines"):
        draw([], tmp_path / "curve.svg")
