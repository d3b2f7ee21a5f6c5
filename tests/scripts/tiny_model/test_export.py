"""An exported checkpoint is one that the loader takes, with the weights that training saw.

Goal: nothing is lost between training and serving.
Method: random weights are exported and loaded; decoded they have to equal the rounded ones.
"""

import json
from pathlib import Path

import jax
import numpy as np
import pytest

from deepinfer_jax import checkpoint
from scripts.tiny_model.export import write_weights
from scripts.tiny_model.weights import as_stored, storage_of, unpacked
from tests.scripts.tiny_model import small_case


def test_loaded_equals_rounded(tmp_path: Path) -> None:
    config = small_case.config()
    size = write_weights(config, small_case.parameters(), tmp_path)
    assert size == (tmp_path / checkpoint.WEIGHTS_FILE).stat().st_size
    loaded = unpacked(checkpoint.load(tmp_path, config, parts={"text", "draft"}))
    expected = as_stored(small_case.parameters(), storage_of(config))
    for one, other in zip(jax.tree.leaves(loaded), jax.tree.leaves(expected), strict=True):
        np.testing.assert_array_equal(one, other)
    index = json.loads((tmp_path / checkpoint.INDEX_FILE).read_text())
    assert "mtp.2.confidence_head.proj.weight" in index["weight_map"]


def test_weights_of_another_shape_are_refused(tmp_path: Path) -> None:
    wrong = small_case.parameters().replace(norm=np.ones(64, np.float32))
    with pytest.raises(AssertionError, match=r"norm\.weight"):
        write_weights(small_case.config(), wrong, tmp_path)
