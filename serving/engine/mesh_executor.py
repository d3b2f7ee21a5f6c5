"""Runs plans on a mesh of several devices: `JaxExecutor` for steps that are divided between them.

Each rank of the mesh, a device with rows of its own, has its own part of every plan, and pools of
the sizes that are given. Its slots and blocks are numbered from 0; in arrays of the whole mesh the
ranks stand one after another. A step sends one buffer for each rank, stacked, of which a device
receives its own; results come back to all, so that any process can read them.
"""

from dataclasses import replace
from typing import Any

import jax
import numpy as np

from deepinfer_jax.reports import Logprobs, ReportedResult
from deepinfer_jax.steps import SpeculativeResult
from serving.core.buckets import Bucket, BucketTable, StepKind
from serving.core.controls import LogprobColumns, StepReport
from serving.core.step_plan import StepImage, StepPlan, StepResult, join_results
from serving.engine import packing
from serving.engine.device_controls import MeshControls
from serving.engine.jax_executor import COPIES_PER_CALL, JaxExecutor, add_images, wanted


class MeshExecutor(JaxExecutor):
    """The `Executor` of one model on a mesh of several devices.

    Takes what `JaxExecutor` takes; the sizes of buckets and pools are those of one rank. A plan
    without parts, as for measuring, is run by every rank. Engram tables in host memory, replay and
    moves of blocks are there for one device only.
    """

    def submit(self, plan: StepPlan) -> None:
        """Dispatch a step; does not wait for it.

        Raises:
            KeyError: the plan's bucket was not compiled.
            ValueError: the plan has images, but the model has no image encoder.
        """
        parts = plan.parts or (plan,) * self.num_ranks
        step = self.compiled(plan.kind, plan.bucket, None)
        nothing = packing.empty_buffer(plan.bucket)
        buffers = [nothing if part is None else packing.pack(part).buffer for part in parts]
        more: dict[str, Any] = {"controls": self._controls.of_parts(parts, plan.kind, plan.bucket)}
        if self._images is not None and plan.kind is StepKind.PREFILL:
            images = _images_of(parts, plan.bucket)
            more["image_features"] = add_images(self._images, images)
        elif any(part is not None and part.images for part in parts):
            raise ValueError(f"step {plan.step_index} has images; the model has no image encoder")
        buffer = self._put(np.stack(buffers))
        self._copy_parts([_copies(part, "restores") for part in parts])
        result, self.cache = step(self.weights, buffer, self.cache, **more)
        self._copy_parts([_copies(part, "snapshots") for part in parts])
        result = _wanted_of(parts, result)
        jax.tree.map(lambda array: array.copy_to_host_async(), result)
        self._in_flight.append((plan, result))

    def collect(self) -> StepResult:
        """Wait for the oldest submitted step.

        Raises:
            IndexError: nothing was submitted.
        """
        plan, whole = self._in_flight.popleft()
        result = jax.tree.map(np.asarray, whole)
        if not plan.parts:
            return self._result_of(plan, result, 0)
        parts = [
            None if part is None else self._result_of(part, result, rank)
            for rank, part in enumerate(plan.parts)
        ]
        return join_results(plan.step_index, parts)

    def _result_of(self, part: StepPlan, results: ReportedResult, rank: int) -> StepResult:
        result = jax.tree.map(lambda array: array[rank], results)
        tokens, confidences = result.values[: part.num_rows], None
        if self.layout.has_draft:
            tokens, _, confidences = SpeculativeResult.unpack(np.ascontiguousarray(tokens))
        report = None
        if result.sampled is not None and part.controls is not None:
            prompt = result.prompt and LogprobColumns(*result.prompt)
            report = StepReport(LogprobColumns(*result.sampled), prompt)
        return StepResult(part.step_index, tokens, report, confidences)

    def _put(self, array: np.ndarray) -> jax.Array:
        """An array [ranks, ...], of which each rank receives its own part."""
        return self.mesh.place_parts(array, self.model.groups.rows)

    def _copy_parts(self, pairs: list[np.ndarray]) -> None:
        """Copy state slots within each rank: for each [N, 2] of source and destination."""
        for first in range(0, max(map(len, pairs)), COPIES_PER_CALL):
            columns = np.zeros((self.num_ranks, 2, COPIES_PER_CALL), np.int32)
            for rank, some in enumerate(pairs):
                part = some[first : first + COPIES_PER_CALL]
                columns[rank, :, : len(part)] = part.T
            self.cache = self._copy_slots(self.cache, self._put(columns))

    def _make_controls(self, buckets: BucketTable, num_slots: int) -> MeshControls:
        return MeshControls(
            self.mesh, self.model.groups, buckets, num_slots, self.model_config.vocab_size
        )


def _copies(part: StepPlan | None, name: str) -> np.ndarray:
    return np.zeros((0, 2), np.int32) if part is None else getattr(part, name)


def _images_of(parts: tuple[StepPlan | None, ...], bucket: Bucket) -> tuple[StepImage, ...]:
    """The images of all parts, at their places among the tokens of all ranks."""
    return tuple(
        replace(place, token_index=rank * bucket.num_tokens + place.token_index)
        for rank, part in enumerate(parts)
        if part is not None
        for place in part.images
    )


def _wanted_of(parts: tuple[StepPlan | None, ...], result: ReportedResult) -> ReportedResult:
    """The result without what no part asks for, which need not be copied to the host."""
    sampled: Logprobs | None = None
    prompt: Logprobs | None = None
    for part in parts:
        if part is not None:
            some = wanted(part, result)
            sampled = sampled if some.sampled is None else some.sampled
            prompt = prompt if some.prompt is None else some.prompt
    return result._replace(sampled=sampled, prompt=prompt)
