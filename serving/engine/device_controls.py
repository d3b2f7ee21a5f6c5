"""The controls of steps on the device: the counts that penalties go by, and what a step is sent.

For a step in which nobody has controls, what is to be sent lies on the device already.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from deepinfer_jax import controls
from deepinfer_jax.controls import Controls
from deepinfer_jax.mesh_steps import divide_set_counts
from serving.core.buckets import Bucket, BucketTable, StepKind
from serving.core.step_plan import StepPlan
from serving.engine import control_packing
from sharding.collectives import StepGroups
from sharding.mesh import DeviceMesh

EDITS_PER_CALL = 4096
"""Counts of tokens that one compiled change sets; a prompt with more takes several."""


class DeviceControls:
    """The controls of steps. `counts` is [slots, vocabulary], what penalties go by."""

    def __init__(
        self, mesh: DeviceMesh, buckets: BucketTable, num_slots: int, vocab_size: int
    ) -> None:
        self._sharding = mesh.sharding((None,), (1,))
        self._masks_sharding = mesh.sharding((None, None), (1, 1))
        self._num_mask_words = controls.mask_words(vocab_size)
        self.counts = mesh.place(np.zeros((num_slots, vocab_size), np.uint16), (None, None))
        self._neutral = {
            (kind, bucket): (
                self._put_settings(control_packing.pack_settings(None, bucket)),
                self._put_masks(None, kind, bucket),
            )
            for kind, bucket in buckets
        }
        self.set_counts: Callable[..., jax.Array] = controls.set_counts

    def compile_changes(self) -> Callable[..., jax.Array]:
        """`controls.set_counts` for as many changes as one call makes."""
        num_slots = self.counts.shape[0]
        sizes = (num_slots, *3 * (EDITS_PER_CALL,))
        edits = [jax.ShapeDtypeStruct((size,), jnp.int32) for size in sizes]
        set_counts = jax.jit(controls.set_counts, donate_argnums=0)
        return set_counts.lower(self.counts, *edits).compile()

    def neutral(self, kind: StepKind, bucket: Bucket) -> Controls:
        """The controls of a step in which no row has any."""
        return Controls(*self._neutral[kind, bucket], self.counts)

    def of_step(self, plan: StepPlan) -> Controls:
        """The controls of a step; dispatches the changes of counts that it needs."""
        wanted = plan.controls
        if wanted is None:
            return self.neutral(plan.kind, plan.bucket)
        if wanted.count_edits is not None:
            num_slots = self.counts.shape[0]
            for call in control_packing.split_edits(wanted.count_edits, EDITS_PER_CALL, num_slots):
                self.counts = self.set_counts(self.counts, *call)
        settings = self._put_settings(control_packing.pack_settings(wanted, plan.bucket))
        _, masks = self._neutral[plan.kind, plan.bucket]
        if wanted.masks is not None:
            masks = self._put_masks(wanted.masks, plan.kind, plan.bucket)
        return Controls(settings, masks, self.counts)

    def _put_settings(self, words: np.ndarray) -> jax.Array:
        return jax.device_put(words, self._sharding)

    def _put_masks(self, masks: np.ndarray | None, kind: StepKind, bucket: Bucket) -> jax.Array:
        packed = control_packing.pack_masks(masks, kind, bucket, self._num_mask_words)
        return jax.device_put(packed, self._masks_sharding)


class MeshControls:
    """The controls of the parts of steps. `counts` is [ranks * slots, vocabulary]."""

    def __init__(
        self,
        mesh: DeviceMesh,
        groups: StepGroups,
        buckets: BucketTable,
        num_slots: int,
        vocab_size: int,
    ) -> None:
        self._mesh, self._rows, self._num_slots = mesh, groups.rows, num_slots
        self._num_mask_words = controls.mask_words(vocab_size)
        shape = (groups.rows.size * num_slots, vocab_size)
        self.counts = mesh.place_parts(np.zeros(shape, np.uint16), groups.rows)
        nobody = (None,) * groups.rows.size
        self._neutral = {
            (kind, bucket): (self._settings(nobody, bucket), self._masks(nobody, kind, bucket))
            for kind, bucket in buckets
        }
        self._groups = groups
        self.set_counts: Callable[..., jax.Array] = controls.set_counts

    def compile_changes(self) -> Callable[..., jax.Array]:
        """`controls.set_counts` of every rank, for as many changes as one call makes."""
        sizes = (self._num_slots, *3 * (EDITS_PER_CALL,))
        edits = [jax.ShapeDtypeStruct((self._rows.size, size), jnp.int32) for size in sizes]
        change = jax.jit(divide_set_counts(self.counts, self._groups), donate_argnums=0)
        return change.lower(self.counts, *edits).compile()

    def neutral(self, kind: StepKind, bucket: Bucket) -> Controls:
        """The controls of a step in which no row has any."""
        return Controls(*self._neutral[kind, bucket], self.counts)

    def of_parts(
        self, parts: tuple[StepPlan | None, ...], kind: StepKind, bucket: Bucket
    ) -> Controls:
        """The controls of a step; dispatches the changes of counts that it needs."""
        own = [None if part is None else part.controls for part in parts]
        if all(some is None for some in own):
            return self.neutral(kind, bucket)
        calls = [
            []
            if some is None or some.count_edits is None
            else list(
                control_packing.split_edits(some.count_edits, EDITS_PER_CALL, self._num_slots)
            )
            for some in own
        ]
        nothing = control_packing.no_edits(EDITS_PER_CALL, self._num_slots)
        for number in range(max(map(len, calls))):
            now = [some[number] if number < len(some) else nothing for some in calls]
            edits = (self._put(np.stack(column)) for column in zip(*now, strict=True))
            self.counts = self.set_counts(self.counts, *edits)
        settings = self._settings(own, bucket)
        _, masks = self._neutral[kind, bucket]
        if any(some is not None and some.masks is not None for some in own):
            masks = self._masks([some and some.masks for some in own], kind, bucket)
        return Controls(settings, masks, self.counts)

    def _put(self, array: np.ndarray) -> jax.Array:
        return self._mesh.place_parts(array, self._rows)

    def _settings(self, own: Any, bucket: Bucket) -> jax.Array:
        return self._put(np.stack([control_packing.pack_settings(some, bucket) for some in own]))

    def _masks(self, own: Any, kind: StepKind, bucket: Bucket) -> jax.Array:
        words = self._num_mask_words
        packed = [control_packing.pack_masks(some, kind, bucket, words) for some in own]
        return self._put(np.stack(packed))
