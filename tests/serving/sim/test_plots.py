"""Goal: a run can be looked at.
Method: a picture of a small run, and an ending that names no format.
"""

from pathlib import Path

import pytest
from PIL import Image

from serving.sim.fleet import Fleet
from serving.sim.plots import draw
from serving.sim.report import make_report
from tests.serving.sim.small_fleet import FLEET, small_workload


def test_a_picture_of_a_run(tmp_path: Path) -> None:
    workload = small_workload(duration_s=5.0)
    report = make_report(FLEET, workload, Fleet(FLEET, workload).run())
    draw(report, "small", tmp_path / "run.png")
    with Image.open(tmp_path / "run.png") as picture:
        # Something is drawn: most of it is white, not all.
        shades = picture.convert("L").histogram()
        assert picture.width > 500
        assert 0.001 < sum(shades[:128]) / sum(shades) < 0.3
    with pytest.raises(ValueError, match="not supported"):
        draw(report, "small", tmp_path / "run.nothing")
