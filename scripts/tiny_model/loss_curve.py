"""The picture of a training run: loss by step, as SVG, so that it can be read in a browser and
compared in a text tool."""

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

_WIDTH, _HEIGHT, _MARGIN = 720, 320, 48
_COLOURS = ("#1f6feb", "#2da44e", "#bf3989", "#9a6700")
_LOSS_MIN, _LOSS_MAX = 0.02, 8.0


def read_log(path: Path) -> list[dict[str, Any]]:
    """The lines of a `loss.jsonl`; of a step that was done twice after a resume, the later one."""
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    found = {(line["stage"] == "draft", line["step"]): line for line in lines}
    return [found[key] for key in sorted(found)]


def draw(log: Sequence[dict[str, Any]], path: Path) -> None:
    """Loss on a logarithmic axis; the draft module's steps follow those of the main model.

    Raises:
        ValueError: the log is empty.
    """
    if not log:
        raise ValueError("the log has no lines; expected at least one step")
    main_steps = max((line["step"] for line in log if line["stage"] != "draft"), default=0)
    stages = list(dict.fromkeys(line["stage"] for line in log))
    points: dict[str, list[str]] = {stage: [] for stage in stages}
    last = max(_step(line, main_steps) for line in log)
    for line in log:
        x = _MARGIN + (_WIDTH - 2 * _MARGIN) * _step(line, main_steps) / last
        points[line["stage"]].append(f"{x:.1f},{_height(line['loss']):.1f}")
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" '
        'font-family="sans-serif" font-size="12">',
        f'<rect width="{_WIDTH}" height="{_HEIGHT}" fill="white"/>',
    ]
    for value in (0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5):
        y = _height(value)
        line = f'x1="{_MARGIN}" x2="{_WIDTH - _MARGIN}" y1="{y:.1f}" y2="{y:.1f}"'
        parts.append(f'<line {line} stroke="#ddd"/><text x="8" y="{y + 4:.1f}">{value}</text>')
    for number, stage in enumerate(stages):
        colour = _COLOURS[number % len(_COLOURS)]
        path_points = " ".join(points[stage])
        parts.append(f'<polyline points="{path_points}" fill="none" stroke="{colour}"/>')
        x = _MARGIN + number * 150
        parts.append(f'<text x="{x}" y="20" fill="{colour}">{stage}</text>')
    parts.append(f'<text x="{_WIDTH - _MARGIN}" y="{_HEIGHT - 16}">{last} steps</text>')
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join([*parts, "</svg>"]) + "\n", encoding="utf-8")


def _step(line: dict[str, Any], main_steps: int) -> int:
    return line["step"] + (main_steps if line["stage"] == "draft" else 0)


def _height(loss: float) -> float:
    low, high = math.log(_LOSS_MIN), math.log(_LOSS_MAX)
    share = (math.log(min(max(loss, _LOSS_MIN), _LOSS_MAX)) - low) / (high - low)
    return _HEIGHT - _MARGIN - (_HEIGHT - 2 * _MARGIN) * share
