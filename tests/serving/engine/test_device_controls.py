"""Goal: every rank of a mesh gets the controls of its own rows. Method: parts of a step by hand, on
eight CPU devices, and what lies on each of them afterwards.
"""

from dataclasses import replace

import numpy as np
import pytest

from serving.core.buckets import Bucket, BucketTable, StepKind
from serving.core.controls import NO_BIAS, CountEdits, StepControls
from serving.core.request import LOGIT_BIASES_MAX
from serving.core.step_plan import StepPlan
from serving.engine import control_packing
from serving.engine.device_controls import DeviceControls, MeshControls
from sharding.collectives import StepGroups
from sharding.mesh import DeviceMesh
from sharding.plan import load_plan

pytestmark = pytest.mark.multi_device

BUCKET = Bucket(2, 2, 1)
BUCKETS = BucketTable({StepKind.PREFILL: [Bucket(1, 4, 1)], StepKind.DECODE: [BUCKET]})
NUM_SLOTS, VOCAB = 3, 40


def _plan(penalty: float, edits: CountEdits | None, masks: np.ndarray | None = None) -> StepPlan:
    """A decode step of one row with one penalty."""
    one = np.ones(1, np.int32)
    controls = StepControls(
        adjusts=True,
        reports=False,
        min_ps=np.zeros(1, np.float32),
        repetition_penalties=np.ones(1, np.float32),
        presence_penalties=np.array([penalty], np.float32),
        frequency_penalties=np.zeros(1, np.float32),
        next_tokens=-one,
        bias_tokens=np.full((1, LOGIT_BIASES_MAX), NO_BIAS, np.int32),
        bias_values=np.zeros((1, LOGIT_BIASES_MAX), np.float32),
        masks=masks,
        count_edits=edits,
    )
    return StepPlan(
        0, StepKind.DECODE, BUCKET, one, one, one, one, one, one[None], one, one, one, one,
        controls=controls,
    )  # fmt: skip


def test_each_rank_has_its_own_settings_masks_and_counts() -> None:
    plan = load_plan("cpu8")
    mesh, groups = DeviceMesh.of(plan), StepGroups.of(plan)
    controls = MeshControls(mesh, groups, BUCKETS, NUM_SLOTS, VOCAB)
    controls.set_counts = controls.compile_changes()
    slots, tokens, values = np.array([[1, 2], [5, 6], [3, 4]], np.int32)
    edits = CountEdits(np.array([1], np.int32), slots, tokens, values)
    masks = np.array([[5, 0]], np.int32)
    parts = [
        None,
        _plan(0.5, edits),
        None,
        None,
        replace(_plan(0, None), controls=None),
        None,
        None,
    ]
    parts.append(_plan(2.0, None, masks))
    made = controls.of_parts(tuple(parts), StepKind.DECODE, BUCKET)
    settings = np.asarray(made.settings)
    assert settings.shape == (8, control_packing.settings_size(BUCKET))
    offset = control_packing.layout(BUCKET)["presence_penalties"].offset
    penalties = settings[:, offset].view(np.float32)
    np.testing.assert_array_equal(penalties, [0, 0.5, 0, 0, 0, 0, 0, 2.0])
    counts = np.asarray(made.counts).reshape(8, NUM_SLOTS, VOCAB)
    expected = np.zeros_like(counts)
    expected[1, 1, 5], expected[1, 2, 6] = 3, 4
    np.testing.assert_array_equal(counts, expected)
    received = np.asarray(made.masks)
    np.testing.assert_array_equal(received[7, 0], [5, 0])
    assert (received[:7] == -1).all() and (received[7, 1] == -1).all()
    # What nobody asks for lies there already.
    nothing = controls.of_parts((None,) * 8, StepKind.DECODE, BUCKET)
    assert nothing.settings is controls.neutral(StepKind.DECODE, BUCKET).settings
    assert not np.asarray(nothing.settings)[1, offset]


def test_one_device_packs_the_same_settings() -> None:
    plan = _plan(0.5, None)
    mesh = DeviceMesh.of(load_plan("single"))
    controls = DeviceControls(mesh, BUCKETS, NUM_SLOTS, VOCAB)
    packed = control_packing.pack_settings(plan.controls, BUCKET)
    np.testing.assert_array_equal(controls.of_step(plan).settings, packed)
    neutral = controls.of_step(replace(plan, controls=None))
    assert neutral.settings is controls.neutral(StepKind.DECODE, BUCKET).settings
