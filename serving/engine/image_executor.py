"""Encodes images on one device: what a vision worker runs in place of a whole model.

It reads the weights of the image encoder alone, and compiles nothing but that. The features it
gives are the bytes that a step of `jax_executor.py` would compute for the same picture.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from deepinfer_jax import checkpoint
from deepinfer_jax.precision import CacheFormat, Precision, usual_compute_dtype
from deepinfer_jax.steps import Watch, compile_programs, no_watch
from deepinfer_jax.vision import ImageEncoder
from serving.core.image_layout import ImageGeometry
from serving.core.request import RequestImage
from serving.engine.jax_executor import geometry_of
from sharding.mesh import DeviceMesh
from sharding.plan import MeshPlan

_NUM_MEASURED = 3


class NoEncoderError(ValueError):
    """The model has no image encoder."""


class ImageExecutor:
    """The image encoder of one model.

    `report` takes lines of progress; `watch` is opened around each compilation.

    Attributes:
        model_config: of the whole model.
        image_geometry: how images are cut into patches.
        feature_bytes: bytes of the features of one token.
        feature_form: what these depend on beside the weights.

    Raises:
        CheckpointError: the checkpoint is not usable.
        NoEncoderError: the model has no image encoder.
    """

    def __init__(
        self,
        directory: Path,
        mesh_plan: MeshPlan,
        report: Callable[[str], None] = lambda line: None,
        watch: Watch = no_watch,
    ) -> None:
        self.model_config = checkpoint.read_config(directory)
        geometry = geometry_of(self.model_config)
        if geometry is None:
            raise NoEncoderError(
                f"{directory}: the model has no image encoder (no vision_config in config.json), "
                "so there is nothing for a vision worker to do; remove its node, or serve a model "
                "that takes images"
            )
        self.image_geometry: ImageGeometry = geometry
        mesh = DeviceMesh.of(mesh_plan)

        def place(array: np.ndarray, names: tuple[str, ...]) -> Any:
            # Copied, since a CPU device would go on using the mapped file itself.
            return mesh.place(np.array(array), names)

        parameters = checkpoint.load_vision(directory, self.model_config, place=place)
        assert parameters is not None
        # How the cache is kept is no affair of images.
        precision = Precision(usual_compute_dtype(), CacheFormat.NOQ)
        self._encoder = ImageEncoder(self.model_config, precision, parameters, mesh, 0)
        self.feature_bytes = self._encoder.row_bytes
        self.feature_form = self._encoder.description

        def progress(done: int, total: int) -> None:
            report(f"compiling: {done} of {total} programs")

        self._encoder.compiled = compile_programs(self._encoder.programs(), progress, watch)

    def encode(self, image: RequestImage) -> np.ndarray:
        """[num_tokens, `feature_bytes`] uint8: the features of an image; waits for them."""
        grid = (image.patch_rows, image.patch_cols)
        return self._encoder.encoded(image.pixels, grid, image.num_tokens)

    def tokens_per_s(self, now_ns: Callable[[], int]) -> float:
        """Image tokens that it encodes in a second, of large images, by the best of a few."""
        geometry = self.image_geometry
        # A row of cells has a newline, and the image a start and an end.
        num_cells = geometry.max_image_tokens - 3
        ratio = geometry.downsample_ratio
        pixels = np.zeros((num_cells * ratio**2, 3 * geometry.patch_size**2), np.uint8)
        num_tokens = geometry.max_image_tokens
        image = RequestImage(0, num_tokens, ratio, num_cells * ratio, b"", pixels)
        times: list[int] = []
        for _ in range(_NUM_MEASURED):
            begin_ns = now_ns()
            self.encode(image)
            times.append(now_ns() - begin_ns)
        return 1e9 * num_tokens / max(min(times), 1)
