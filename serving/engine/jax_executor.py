"""Runs plans on the mesh: the only place where serving meets the model.

Loading, in order: read and check the checkpoint, place its parameters, allocate the cache, compile
every bucket. Then each step is one packed host buffer down, one call, one array of tokens back;
`submit` only dispatches and `collect` waits, so several steps may be in flight. The cache lives
here and passes from step to step by donation.

A model with an image encoder has one more array on the device: the features of the images in the
prefill step at hand, each row standing for the token of the same index. Images are encoded into it
by steps of their own, dispatched right before the prefill step that reads them.

What only few requests ask for, controls, is further arguments of every step. For a step in which
nobody does, these lie on the device already.

Engram tables lie on the devices like all weights, or stay in the mapped checkpoint. Then the rows
of a step are read on the host while earlier steps run, and are sent along with its buffer; only a
step that feeds tokens of a step in flight waits for those.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np

from deepinfer_jax import batch, checkpoint, controls
from deepinfer_jax.batch import Replay, StepShape
from deepinfer_jax.cache import CacheLayout, KVCache
from deepinfer_jax.cache_bytes import CacheTransfers, description
from deepinfer_jax.config import ModelConfig
from deepinfer_jax.controls import Controls
from deepinfer_jax.draft import DraftSettings
from deepinfer_jax.engram_host import HostEngram, detach_tables
from deepinfer_jax.mesh_steps import whole_layout
from deepinfer_jax.model import Model, Weights
from deepinfer_jax.parameters import Parameters
from deepinfer_jax.precision import CacheFormat, Precision, usual_compute_dtype
from deepinfer_jax.replay import ReplayError, check_replay
from deepinfer_jax.reports import ReportedResult
from deepinfer_jax.step_parts import compile_in_parts, texts_of
from deepinfer_jax.steps import (
    CompiledStep,
    SpeculativeResult,
    Watch,
    compile_programs,
    compile_slot_copies,
    compile_step,
    no_watch,
)
from deepinfer_jax.topology import Topology
from deepinfer_jax.vision import ImageEncoder
from serving.core.buckets import Bucket, BucketTable, StepKind
from serving.core.controls import LogprobColumns, StepReport
from serving.core.image_layout import ImageGeometry
from serving.core.replay import ReplayMode, ReplayRule
from serving.core.step_plan import LAST_SAMPLED, StepImage, StepPlan, StepResult
from serving.engine import control_packing, packing
from serving.engine.device_controls import DeviceControls
from serving.engine.kv_moves import BLOCKS_PER_CALL, CacheOwner, KVMoves
from serving.engine.packing import PackedStep
from sharding.collectives import StepGroups
from sharding.mesh import DeviceMesh
from sharding.plan import MeshPlan

Report = Callable[[str], None]

_UNREAD_MAX = 8
"""Results that are kept for later steps to look up; more steps are never in flight at one time."""

COPIES_PER_CALL = 8
"""State slots that one compiled copy copies; a step seldom starts or ends more prefixes."""


class CacheTooLargeError(ValueError):
    """The device has no room for the cache that was asked for."""


class JaxExecutor(CacheOwner):
    """The `Executor` of one model on one mesh.

    `num_slots` counts the slots for snapshots too. `engram` is where its tables lie: "device" or
    "host"; drafts, which the host does not know, need them on the device. With `has_drafts` every
    step also drafts tokens, and decode steps verify them. With `replay` there are prefill steps
    whose upper layers compute the tails of prompts alone. With `tile_tokens` other than 0, steps
    run in tiles of that many tokens, and nothing that they give depends on company. `watch` is
    opened around each compilation. A `kv_clock` compiles moves of blocks, and steps in parts.

    Raises:
        ReplayError: the model cannot run that.
        CheckpointError: the checkpoint is not usable, or drafts are asked for and it has none.
        ValueError: a pool size is too small.
        ShardingError: the mesh needs more devices than there are.
    """

    def __init__(
        self,
        directory: Path,
        cache_format: str,
        buckets: BucketTable,
        num_blocks: int,
        num_slots: int,
        mesh_plan: MeshPlan,
        report: Report = lambda line: None,
        engram: str = "device",
        has_drafts: bool = False,
        replay: ReplayRule | None = None,
        tile_tokens: int = 0,
        watch: Watch = no_watch,
        kv_clock: Callable[[], int] | None = None,
    ) -> None:
        self.mesh = DeviceMesh.of(mesh_plan)
        self._engram_is_on_host = engram == "host"
        self.model_config = checkpoint.read_config(directory)
        if has_drafts and not self.model_config.num_nextn_predict_layers:
            raise checkpoint.CheckpointError(
                f"{directory}: num_nextn_predict_layers is 0, so the model has no draft module; "
                "serve it without drafts"
            )
        topology = Topology.of(self.model_config)
        if replay is not None:
            _check_replay(self.model_config, topology, replay)
        precision = Precision(usual_compute_dtype(), CacheFormat(cache_format))
        tables = checkpoint.read_engram_tables(directory, self.model_config)
        self.model = Model(
            self.model_config,
            topology,
            tables,
            precision,
            DraftSettings(is_coupled=tile_tokens > 0),
            tile_tokens,
            StepGroups.of(mesh_plan),
        )
        self.layout = CacheLayout(
            self.model_config, precision, num_blocks, num_slots, has_draft=has_drafts
        )
        parameters = self._load_parameters(directory, report)
        self.cache = self._allocate(report)
        self._engram: HostEngram | None = None
        if self._engram_is_on_host:
            parameters, mapped = detach_tables(parameters)
            self._engram = HostEngram(self.model_config, tables, mapped, self.cache.classes.shape)
        self.weights = Weights(parameters, self._place(tables.token_classes, ("vocab",)))
        self._buffer_sharding = self.mesh.sharding((None,), (1,))
        self._slots_sharding = self.mesh.sharding((None, None), (1, 1))
        self._rows_sharding = self.mesh.sharding((None,) * 4, (1,) * 4)
        self._images = None
        if self.weights.parameters.vision is not None:
            num_features = buckets.largest(StepKind.PREFILL).num_tokens
            num_features *= self.model.groups.rows.size
            self._images = ImageEncoder(
                self.model_config,
                precision,
                self.weights.parameters.vision,
                self.mesh,
                num_features,
            )
        self._controls: Any = self._make_controls(buckets, num_slots)
        self._steps = self._compile(buckets, replay, report, watch, kv_clock is not None)
        if kv_clock is not None:
            self.kv_moves = self._make_moves(buckets, kv_clock)
        self._in_flight: deque[tuple[StepPlan, ReportedResult]] = deque()
        self._unread: deque[tuple[StepPlan, jax.Array]] = deque()
        self._sampled = np.zeros(num_slots, np.int32)

    def submit(self, plan: StepPlan) -> None:
        """Dispatch a step; does not wait for it.

        Raises:
            KeyError: the plan's bucket was not compiled.
            ValueError: the plan has images, but the model has no image encoder.
        """
        if plan.images and self._images is None:
            raise ValueError(f"step {plan.step_index} has images; the model has no image encoder")
        packed = packing.pack(plan)
        step = self.compiled(plan.kind, plan.bucket, packed.num_tail_tokens)
        more: dict[str, Any] = {"controls": self._controls.of_step(plan)}
        if self._images is not None and plan.kind is StepKind.PREFILL:
            more["image_features"] = add_images(self._images, plan.images)
        buffer = jax.device_put(packed.buffer, self._buffer_sharding)
        self._copy(plan.restores)
        if self._engram is not None:
            token_ids = self._known_tokens(packed)
            rows = self._engram.fetch(token_ids, packed.starts, packed.num_tokens, packed.slots)
            more["engram_rows"] = jax.device_put(rows, self._rows_sharding)
        result = self.run_step(plan, step, self.weights, buffer, **more)
        self._copy(plan.snapshots)
        result = wanted(plan, result)
        jax.tree.map(lambda array: array.copy_to_host_async(), result)
        self._in_flight.append((plan, result))
        if self._engram is not None:
            self._unread.append((plan, result.values))

    def no_controls(self, kind: StepKind, bucket: Bucket) -> Controls:
        """The argument `controls` of a compiled step in which no row has any."""
        return self._controls.neutral(kind, bucket)

    @property
    def num_ranks(self) -> int:
        """Parts that plans consist of; devices with rows of their own."""
        return self.model.groups.rows.size

    @property
    def num_drafts(self) -> int:
        """Tokens that every step drafts for each row; 0 if it does not."""
        return self.model_config.dspark_block_size if self.layout.has_draft else 0

    @property
    def image_geometry(self) -> ImageGeometry | None:
        """How images are to be cut into patches; None for a model without an image encoder."""
        return geometry_of(self.model_config)

    @property
    def feature_form(self) -> str:
        """What features of images depend on beside the weights; empty without an encoder."""
        return "" if self._images is None else self._images.description

    def compiled(
        self, kind: StepKind, bucket: Bucket, num_tail_tokens: int | None = None
    ) -> CompiledStep:
        """The compiled step of a bucket: the exact one, or that of a tail (`StepTail`).

        Raises:
            KeyError: it is not among those that were compiled at the start.
        """
        return self._steps[kind, bucket, num_tail_tokens]

    def program_texts(self) -> Iterator[str]:
        """The compiled steps in the notation of XLA; for traces."""
        return (text for step in self._steps.values() for text in texts_of(step))

    def collect(self) -> StepResult:
        """Wait for the oldest submitted step.

        Raises:
            IndexError: nothing was submitted.
        """
        plan, result = self._in_flight.popleft()
        # Without drafts a decode row has one token.
        tokens, drafts, confidences = np.asarray(result.values)[: plan.num_rows], None, None
        if self.layout.has_draft:
            tokens, drafts, confidences = SpeculativeResult.unpack(tokens)
        report = None
        if result.sampled is not None:
            sampled = LogprobColumns(*map(np.asarray, result.sampled))
            prompt = result.prompt and LogprobColumns(*map(np.asarray, result.prompt))
            report = StepReport(sampled, prompt)
        swap_in = self.swap_in_times(plan)
        return StepResult(plan.step_index, tokens, report, confidences, drafts, None, swap_in)

    def _known_tokens(self, packed: PackedStep) -> np.ndarray:
        """[T] token ids of a step whose references are looked up, for which it may have to wait."""
        is_reference = packed.token_ids == LAST_SAMPLED
        is_wanted = bool(is_reference.any())
        while self._unread and (is_wanted or len(self._unread) > _UNREAD_MAX):
            plan, tokens = self._unread.popleft()
            self._sampled[plan.slots] = np.asarray(tokens)[: plan.num_rows]
        row = np.minimum(packed.row_index, len(packed.slots) - 1)
        return np.where(is_reference, self._sampled[packed.slots[row]], packed.token_ids)

    @property
    def identity(self) -> dict[str, str]:
        """What the time of its steps depends on, beside their shapes."""
        device = self.mesh.mesh.devices.flat[0]
        return {
            "config": str(self.model_config),
            "cache_format": self.layout.precision.cache_format.value,
            "mesh": str(self.mesh.plan),
            "device": f"{device.platform} {device.device_kind}",
            "has_drafts": str(self.layout.has_draft),
            "tile_tokens": str(self.model.tile_tokens),
        }

    @property
    def cache_directory(self) -> Path | None:
        """Where jax keeps compiled programs between starts; None if it does not."""
        directory = jax.config.jax_compilation_cache_dir
        return Path(directory) if directory else None

    def _copy(self, pairs: np.ndarray) -> None:
        """Copy state slots: `pairs` [N, 2] of source and destination."""
        if self._engram is not None:
            self._engram.copy_slots(pairs)
        for first in range(0, len(pairs), COPIES_PER_CALL):
            padded = np.zeros((COPIES_PER_CALL, 2), np.int32)
            some = pairs[first : first + COPIES_PER_CALL]
            padded[: len(some)] = some
            columns = jax.device_put(np.ascontiguousarray(padded.T), self._slots_sharding)
            self.cache = self._copy_slots(self.cache, columns)

    def _load_parameters(self, directory: Path, report: Report) -> Parameters:
        shown = -1

        def progress(done: int, total: int) -> None:
            nonlocal shown
            quarter = 4 * done // total
            if quarter > shown:
                shown = quarter
                report(f"loading {directory.name}: {25 * quarter}% of {total / 2**20:.1f} MiB")

        parts = {"text"} if self.model_config.vision is None else {"text", "vision"}
        if self.layout.has_draft:
            parts.add("draft")
        return checkpoint.load(
            directory, self.model_config, place=self._place, parts=parts, report=progress
        )

    def _place(self, array: np.ndarray, names: tuple[str, ...]) -> Any:
        if self._engram_is_on_host and "engram_rows" in names:
            return array
        # Copied, since a CPU device would go on using the mapped file itself.
        return self.mesh.place(np.array(array), names)

    def _allocate(self, report: Report) -> KVCache:
        layout = self.layout
        size = layout.num_blocks * layout.bytes_per_block + layout.num_slots * layout.bytes_per_slot
        report(
            f"allocating {size / 2**20:.1f} MiB of KV cache: {layout.num_blocks} blocks of "
            f"{layout.bytes_per_block} bytes, {layout.num_slots} slots of {layout.bytes_per_slot}"
        )
        whole = whole_layout(layout, self.model.groups)
        shardings = self.mesh.tree_shardings(whole.abstract(), whole.logical_axes())
        try:
            return jax.jit(whole.zeros, out_shardings=shardings)()
        except jax.errors.JaxRuntimeError as error:
            raise CacheTooLargeError(
                f"the KV cache of {size / 2**30:.1f} GiB cannot be allocated "
                f"({str(error).splitlines()[0]}); expected fewer engine.num_blocks, "
                "engine.decode_rows or engine.prefix_snapshots"
            ) from None

    def _make_moves(self, buckets: BucketTable, now_ns: Callable[[], int]) -> KVMoves:
        lines = (*self.identity.values(), description(self.layout))
        num_blocks_max = buckets.largest(StepKind.PREFILL).num_blocks
        moves = CacheTransfers(self.cache, BLOCKS_PER_CALL, num_blocks_max)
        parts = self.model.topology.part_of_group
        return KVMoves.of(moves, lines, parts, now_ns, self._engram)

    def _make_controls(self, buckets: BucketTable, num_slots: int) -> Any:
        return DeviceControls(self.mesh, buckets, num_slots, self.model_config.vocab_size)

    def _compile(
        self,
        buckets: BucketTable,
        replay: ReplayRule | None,
        report: Report,
        watch: Watch,
        has_parts: bool,
    ) -> dict[tuple[StepKind, Bucket, int | None], CompiledStep]:
        steps: list[tuple[StepKind, Bucket, int | None]] = [(*each, None) for each in buckets]
        if replay is not None:
            for bucket in buckets.of(StepKind.PREFILL):
                steps += [(StepKind.PREFILL, bucket, size) for size in replay.sizes(bucket)]
        shapes = {step: shape_of(*step) for step in steps}
        for (_, bucket, _), shape in shapes.items():
            check_layout(bucket, shape)

        compile_shape = compile_in_parts if has_parts else compile_step
        arrays = (
            self.weights,
            self.cache,
            None if self._images is None else self._images.features,
            None if self._engram is None else self._engram.row_shape,
            self._controls.counts,
        )
        programs: dict[str, Callable[[], Any]] = {
            shape.name: partial(compile_shape, self.model, shape, *arrays)
            for shape in shapes.values()
        }
        programs |= {} if self._images is None else self._images.programs()
        programs |= {
            "set_counts": self._controls.compile_changes,
            "copy_slots": partial(
                compile_slot_copies, self.cache, COPIES_PER_CALL, self.model.groups
            ),
        }

        def progress(done: int, total: int) -> None:
            report(f"compiling: {done} of {total} programs")

        compiled = compile_programs(programs, progress, watch)
        if self._images is not None:
            self._images.compiled = compiled
        self._controls.set_counts, self._copy_slots = compiled["set_counts"], compiled["copy_slots"]
        return {key: compiled[shape.name] for key, shape in shapes.items()}


def geometry_of(config: ModelConfig) -> ImageGeometry | None:
    """How a model's images are cut into patches; None if it takes none."""
    vision = config.vision
    if vision is None:
        return None
    return ImageGeometry(
        token_id=config.image_token_id,
        patch_size=vision.patch_size,
        downsample_ratio=vision.downsample_ratio,
        max_image_tokens=vision.max_image_tokens,
        min_pixels=vision.min_pixels,
        max_wh_ratio=vision.max_wh_ratio,
    )


def add_images(encoder: ImageEncoder, images: Iterable[StepImage]) -> jax.Array:
    """The features of a step with these images, of which some may have been encoded elsewhere."""
    for place in images:
        image, where = place.image, (place.token_index, place.image.num_tokens)
        if place.features is None:
            encoder.add(image.pixels, (image.patch_rows, image.patch_cols), where)
        else:
            encoder.add_encoded(place.features, where)
    return encoder.features


def wanted(plan: StepPlan, result: ReportedResult) -> ReportedResult:
    """The result without what nobody asked for, which need not be copied to the host."""
    asked = plan.controls
    if asked is None or not (asked.reports or (asked.next_tokens >= 0).any()):
        return result._replace(sampled=None, prompt=None)
    return result if (asked.next_tokens >= 0).any() else result._replace(prompt=None)


def _check_replay(config: ModelConfig, topology: Topology, replay: ReplayRule) -> None:
    drops = replay.mode is ReplayMode.COMPACT
    try:
        check_replay(config, topology, replay.num_kept, drops_tokens=drops)
    except ReplayError as error:
        options = f"engine.replay is {replay.mode.value!r}, engine.replay_keep {replay.num_kept}"
        raise ReplayError(f"{options}: {error}") from None


def shape_of(kind: StepKind, bucket: Bucket, num_tail_tokens: int | None = None) -> StepShape:
    """What the model calls a bucket; `num_tail_tokens` as in `JaxExecutor.compiled`."""
    return StepShape(
        bucket.num_rows,
        bucket.num_tokens,
        bucket.num_blocks,
        kind is StepKind.DECODE,
        None if num_tail_tokens is None else Replay(num_tail_tokens),
    )


def check_layout(bucket: Bucket, shape: StepShape) -> None:
    """Packing and model must agree on every field of a buffer; a mismatch is a defect."""
    assert (packing.IMAGE_FEATURE, LAST_SAMPLED) == (batch.IMAGE_FEATURE, batch.LAST_SAMPLED)
    places = packing.layout(bucket, shape.replay is not None)
    packed = {name: (p.shape, p.dtype) for name, p in places.items()}
    expected = {name: (dims, np.dtype(t)) for name, (dims, t) in batch.fields(shape).items()}
    assert list(packed.items()) == list(expected.items()), (packed, expected)
    settings = {name: (p.shape, p.dtype) for name, p in control_packing.layout(bucket).items()}
    wanted = {name: (dims, np.dtype(t)) for name, (dims, t) in controls.fields(shape).items()}
    assert list(settings.items()) == list(wanted.items()), (settings, wanted)
