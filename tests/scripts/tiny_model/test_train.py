"""Training steps, stops and goes on.

Goal: a resumed run is the run that was never stopped, for the main model and for the drafts.
Method: two steps at once and one step twice, on a very small model, compared number by number.
"""

import dataclasses
from pathlib import Path

import jax
import numpy as np
import optax
import pytest

from scripts.tiny_model import train
from scripts.tiny_model.loss_curve import read_log
from scripts.tiny_model.tasks import DRILLS
from scripts.tiny_model.train_drafts import DraftTraining
from tests.scripts.tiny_model import small_case, tokenised

STAGE = train.Stage(2, 64, 2, 4, 12, 0.0, 0.5, DRILLS, 3.0, serves=True)


def training(folder: Path, num_steps: int) -> train.Training:
    folder.mkdir(exist_ok=True)
    stages = (dataclasses.replace(STAGE, num_steps=num_steps),)
    return train.Training(
        small_case.config(), small_case.tables(), tokenised.codec(), folder, stages, seed=1
    )


@pytest.mark.slow
def test_resumed_equals_uninterrupted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("scripts.tiny_model.loop.LOG_EVERY", 1)
    # The rate follows from the number of steps planned, so it is held still to compare.
    monkeypatch.setattr(train, "optimiser", lambda *_: optax.sgd(1e-2, momentum=0.9))
    whole = training(tmp_path / "whole", 2).run()
    training(tmp_path / "parts", 1).run()
    resumed = training(tmp_path / "parts", 2).run()
    for one, other in zip(jax.tree.leaves(whole), jax.tree.leaves(resumed), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)
    log = read_log(tmp_path / "parts" / "loss.jsonl")
    assert [line["step"] for line in log] == [1, 2]
    assert log[0]["loss"] > 0
    # Router biases move although they have no gradient.
    assert np.abs(np.asarray(whole.layers[0].ffn.bias)).max() > 0


@pytest.mark.slow
def test_drafts_learn_and_the_main_model_stays(tmp_path: Path) -> None:
    main = training(tmp_path / "main", 1)
    parameters = dataclasses.replace(small_case.parameters(), draft=None)
    drafting = DraftTraining(
        small_case.config(), parameters, main.rows(0), tmp_path, seed=1, num_steps=2
    )
    first = drafting.run()
    assert (tmp_path / "draft").is_dir()
    # Nothing is left to do: the same weights come back from the checkpoint.
    again = drafting.run()
    for one, other in zip(jax.tree.leaves(first), jax.tree.leaves(again), strict=True):
        np.testing.assert_array_equal(one, other)
