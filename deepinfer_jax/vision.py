"""Image patches -> embeddings of the text model, in a step of its own.

The story of one image:

1. `normalise`: the bytes of its patches become numbers in the compute type.
2. `encode`: a transformer in which every patch sees every other; no mask but that of padding.
3. `align`: each square of 3 x 3 patches becomes one embedding of the text model.
4. `arrange`: the embeddings in the order of the prompt, with the learned vectors for the start,
   the end of each row and the end of the image among them.

`encode_image` is all four. It knows nothing of prompts, batches or caches, so it can run beside
the text model or on other devices; `insert` then puts the rows where a prefill step looks for
them. One image is one call, padded to a number of patches that was compiled (`patch_buckets`).
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from deepinfer_jax.config import ModelConfig, VisionConfig
from deepinfer_jax.layers.primitives import Arithmetic, rms_norm
from deepinfer_jax.parameters import (
    AlignerParameters,
    LinearParameters,
    VisionBlockParameters,
    VisionParameters,
)
from deepinfer_jax.precision import Precision
from sharding.mesh import DeviceMesh

NORM_EPS = 1e-6
"""Epsilon of the encoder's norms; the text model has a much smaller one."""

QUERY_CHUNK = 512
"""Patches whose attention scores exist at one time. Scores over all pairs of the largest image
would take gigabytes."""

_NUM_BUCKETS_MAX = 3

CompiledEncoder = Callable[[VisionParameters, jax.Array, jax.Array], jax.Array]
CompiledInsert = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]


def patch_buckets(config: VisionConfig) -> tuple[int, ...]:
    """Numbers of patches to compile, ascending; the last holds any image that the limits allow.

    Each is half of the next, down to the smallest image that resizing leaves.
    """
    # A span of r rows of c cells has r (c + 1) + 2 tokens, so at most max_image_tokens - 3 cells.
    size = (config.max_image_tokens - 3) * config.downsample_ratio**2
    smallest = config.min_pixels // config.patch_size**2
    sizes = {_round_up(size)}
    while len(sizes) < _NUM_BUCKETS_MAX and size // 2 >= smallest:
        size = -(-size // 2)
        sizes.add(_round_up(size))
    return tuple(sorted(sizes))


def normalise(pixels: jax.Array, precision: Precision) -> jax.Array:
    """Bytes 0 to 255 -> -1 to 1, rounded to bfloat16 as the encoder was trained."""
    # A table, because a compiler may turn the division into a product, which rounds otherwise.
    values = (np.arange(256, dtype=np.float32) / 255 - 0.5) / 0.5
    table = jnp.asarray(values).astype(jnp.bfloat16).astype(precision.compute_dtype)
    return table[pixels.astype(jnp.int32)]


def encode(
    config: ModelConfig,
    precision: Precision,
    parameters: VisionParameters,
    patches: jax.Array,
    grid: jax.Array,
) -> jax.Array:
    """Encoder output [P, vision hidden] in the compute type; rows of padding are arbitrary.

    Args:
        patches: [P, 3 * patch_size ** 2], row-major over the image, each flattened as channel,
            row, column. P is at most `QUERY_CHUNK` or a multiple of it.
        grid: [2] int32, rows and columns of patches; the first rows * columns patches are real.

    Raises:
        ValueError: the number of patches cannot be cut into chunks.
    """
    num_patches = patches.shape[0]
    if _round_up(num_patches) != num_patches:
        raise ValueError(
            f"patches has {num_patches} rows; expected at most {QUERY_CHUNK} or a multiple of it"
        )
    vision = _vision(config)
    run = _Encoder(config, precision)
    with jax.named_scope("vision_encoder"):
        index = jnp.arange(num_patches, dtype=jnp.int32)
        is_real = index < grid[0] * grid[1]
        angles = _angles(vision, index // grid[1], index % grid[1])
        z = run.affine(patches, parameters.patch_embed)
        for block in parameters.blocks:
            z = run.block(z, block, angles, is_real)
        return run.normed(z, parameters.norm)


def align(
    config: ModelConfig,
    precision: Precision,
    parameters: AlignerParameters,
    encoded: jax.Array,
    grid: jax.Array,
) -> jax.Array:
    """Embeddings [C, hidden] of the cells, row-major, in the compute type; C is the most that
    `encoded` [P, vision hidden] can have.

    A cell that reaches over the right or lower border of the grid is filled up with zeros.
    """
    vision = _vision(config)
    ratio = vision.downsample_ratio
    run = _Encoder(config, precision)
    with jax.named_scope("vision_aligner"):
        _, cell_cols = _cells(grid, ratio)
        cell = jnp.arange(_num_cells_max(vision, encoded.shape[0]), dtype=jnp.int32)[:, None]
        inside = jnp.arange(ratio**2, dtype=jnp.int32)
        row = cell // cell_cols * ratio + inside // ratio
        col = cell % cell_cols * ratio + inside % ratio
        exists = (row < grid[0]) & (col < grid[1])
        patch = jnp.where(exists, row * grid[1] + col, 0)
        gathered = jnp.where(exists[:, :, None], encoded[patch], 0)
        # Channel slowest, then row and column inside the cell.
        x = gathered.swapaxes(1, 2).reshape(cell.shape[0], -1)
        hidden = jax.nn.gelu(run.product_plus_bias(x, parameters.w1), approximate=False)
        return run.affine(hidden.astype(precision.compute_dtype), parameters.w2)


def arrange(
    config: ModelConfig, parameters: VisionParameters, cells: jax.Array, grid: jax.Array
) -> jax.Array:
    """Rows [max_image_tokens, hidden] of the image's span of tokens; zero after its end.

    Start, then for each row of cells its embeddings `cells` [C, hidden] and a newline, then end.
    """
    vision = _vision(config)
    cell_rows, cell_cols = _cells(grid, vision.downsample_ratio)
    token = jnp.arange(vision.max_image_tokens, dtype=jnp.int32)
    last = cell_rows * (cell_cols + 1) + 1
    row, col = (token - 1) // (cell_cols + 1), (token - 1) % (cell_cols + 1)
    cell = jnp.clip(row * cell_cols + col, 0, cells.shape[0] - 1)
    kinds: list[tuple[jax.Array, jax.Array | float]] = [
        (token > last, 0.0),
        (token == last, parameters.image_end),
        (token == 0, parameters.image_start),
        (col == cell_cols, parameters.image_newline),
    ]
    rows = cells[cell]
    for is_kind, vector in reversed(kinds):
        rows = jnp.where(is_kind[:, None], jnp.asarray(vector, rows.dtype), rows)
    return rows


def encode_image(
    config: ModelConfig,
    precision: Precision,
    parameters: VisionParameters,
    pixels: jax.Array,
    grid: jax.Array,
) -> jax.Array:
    """The whole vision step, not yet compiled.

    Args:
        pixels: [P, 3 * patch_size ** 2] uint8, patches as `encode` takes them.
        grid: [2] int32, rows and columns of patches.

    Returns:
        [max_image_tokens, hidden] in the compute type, the rows of the image's tokens.
    """
    patches = normalise(pixels, precision)
    encoded = encode(config, precision, parameters, patches, grid)
    cells = align(config, precision, parameters.aligner, encoded, grid)
    return arrange(config, parameters, cells, grid)


def insert(features: jax.Array, rows: jax.Array, place: jax.Array) -> jax.Array:
    """`features` [F, hidden] after the first rows of `rows` were written into it.

    Args:
        place: [2] int32, where the first row goes and how many there are. Rows that would fall
            outside are left out.
    """
    index = jnp.arange(rows.shape[0], dtype=jnp.int32)
    # An index past the end is dropped; a negative one would count from there.
    target = jnp.where(index < place[1], place[0] + index, features.shape[0])
    target = jnp.where(target < 0, features.shape[0], target)
    return features.at[target].set(rows.astype(features.dtype), mode="drop")


def compile_encoder(
    config: ModelConfig, precision: Precision, num_patches: int, parameters: Any
) -> CompiledEncoder:
    """Compile `encode_image` for one bucket and for arrays like `parameters`."""
    vision = _vision(config)
    pixels = jax.ShapeDtypeStruct((num_patches, 3 * vision.patch_size**2), jnp.uint8)
    grid = jax.ShapeDtypeStruct((2,), jnp.int32)
    step = jax.jit(functools.partial(encode_image, config, precision))
    return step.lower(parameters, pixels, grid).compile()


def compile_insert(config: ModelConfig, features: Any) -> CompiledInsert:
    """Compile `insert` for an array like `features`, which is donated."""
    shape = (_vision(config).max_image_tokens, features.shape[1])
    rows = jax.ShapeDtypeStruct(shape, features.dtype)
    place = jax.ShapeDtypeStruct((2,), jnp.int32)
    return jax.jit(insert, donate_argnums=0).lower(features, rows, place).compile()


class ImageEncoder:
    """Encodes images, and puts them where a prefill step looks for them.

    With a `num_features` of 0 there is no such place: images are encoded for steps elsewhere.

    Attributes:
        features: [`num_features`, hidden]: row i stands for token i of the step, if an image was
            added there.
        row_bytes: bytes of a row outside the device.
        description: everything that the bytes of a row depend on beside the weights.
        compiled: its programs, which the owner compiles among others (`programs`) and puts here.

    Raises:
        ValueError: the model has no image encoder.
    """

    def __init__(
        self,
        config: ModelConfig,
        precision: Precision,
        parameters: VisionParameters,
        mesh: DeviceMesh,
        num_features: int,
    ) -> None:
        self._config, self._precision, self._parameters = config, precision, parameters
        self._sharding = mesh.sharding((None,), (1,))
        self._pixels_sharding = mesh.sharding((None, None), (1, 1))
        zeros = np.zeros((num_features, config.hidden_size), precision.compute_dtype)
        self.features: jax.Array = mesh.place(zeros, (None, None))
        self.row_bytes = zeros.itemsize * config.hidden_size
        self.description = f"features of images: {config.hidden_size} of {zeros.dtype.name}"
        self._sizes = patch_buckets(_vision(config))
        self.compiled: Mapping[str, Any] = {}

    def programs(self) -> dict[str, Callable[[], Any]]:
        """What compiles each program of `compiled`, by name."""
        arguments = self._config, self._precision
        programs: dict[str, Callable[[], Any]] = {
            f"image_p{size}": functools.partial(compile_encoder, *arguments, size, self._parameters)
            for size in self._sizes
        }
        if len(self.features):
            insert = functools.partial(compile_insert, self._config, self.features)
            programs["image_insert"] = insert
        return programs

    def add(self, pixels: np.ndarray, grid: tuple[int, int], where: tuple[int, int]) -> None:
        """Dispatch the computation of an image into `features`.

        Args:
            pixels: [P, 3 * patch_size ** 2] uint8, as in `encode_image`, not padded.
            grid: its rows and columns of patches.
            where: the first row that it takes, and how many.
        """
        self._insert(self._encode(pixels, grid), where)

    def add_encoded(self, rows: np.ndarray, where: tuple[int, int]) -> None:
        """Bring an image that was encoded elsewhere into `features`.

        Args:
            rows: [num_tokens, `row_bytes`] uint8, as `encoded` gives them.
            where: as in `add`.

        Raises:
            ValueError: `rows` has another width, or is longer than an image can be.
        """
        num_rows_max = _vision(self._config).max_image_tokens
        if rows.shape[1:] != (self.row_bytes,) or len(rows) > num_rows_max:
            raise ValueError(
                f"features of an image have the shape {list(rows.shape)}; expected at most "
                f"{num_rows_max} rows of {self.row_bytes} bytes"
            )
        padded = np.zeros((num_rows_max, self.row_bytes), np.uint8)
        padded[: len(rows)] = rows
        placed = jax.device_put(padded.view(self.features.dtype), self._pixels_sharding)
        self._insert(placed, where)

    def encoded(self, pixels: np.ndarray, grid: tuple[int, int], num_tokens: int) -> np.ndarray:
        """[num_tokens, `row_bytes`] uint8: the rows of an image, on the host; waits for them."""
        rows = np.asarray(self._encode(pixels, grid))[:num_tokens]
        return np.ascontiguousarray(rows).view(np.uint8)

    def _encode(self, pixels: np.ndarray, grid: tuple[int, int]) -> jax.Array:
        size = min(size for size in self._sizes if size >= len(pixels))
        padded = np.zeros((size, pixels.shape[1]), np.uint8)
        padded[: len(pixels)] = pixels
        placed = jax.device_put(padded, self._pixels_sharding)
        return self.compiled[f"image_p{size}"](self._parameters, placed, self._numbers(grid))

    def _insert(self, rows: jax.Array, where: tuple[int, int]) -> None:
        insert = self.compiled["image_insert"]
        self.features = insert(self.features, rows, self._numbers(where))

    def _numbers(self, values: tuple[int, int]) -> jax.Array:
        return jax.device_put(np.array(values, np.int32), self._sharding)


class _Encoder(Arithmetic):
    """The parts of a block, in the types of one run."""

    def product_plus_bias(self, x: jax.Array, linear: LinearParameters) -> jax.Array:
        return self.product(x, linear.weight) + linear.bias.astype(jnp.float32)

    def affine(self, x: jax.Array, linear: LinearParameters) -> jax.Array:
        return self.product_plus_bias(x, linear).astype(self.precision.compute_dtype)

    def normed(self, x: jax.Array, weight: jax.Array) -> jax.Array:
        return rms_norm(x, weight, NORM_EPS).astype(self.precision.compute_dtype)

    def block(
        self,
        z: jax.Array,
        parameters: VisionBlockParameters,
        angles: jax.Array,
        is_real: jax.Array,
    ) -> jax.Array:
        x = self.normed(z, parameters.norm1)
        z = z + self.affine(self._attention(x, parameters, angles, is_real), parameters.wo)
        x = self.normed(z, parameters.norm2)
        gate, up = jnp.split(self.product(x, parameters.w1), 2, axis=1)
        inner = (jax.nn.silu(gate) * up).astype(z.dtype)
        return z + self.linear(inner, parameters.w2)

    def _attention(
        self,
        x: jax.Array,
        parameters: VisionBlockParameters,
        angles: jax.Array,
        is_real: jax.Array,
    ) -> jax.Array:
        """[P, hidden]: every patch over all real ones, some queries at a time."""
        vision = _vision(self.config)
        num_patches, heads, width = x.shape[0], vision.num_attention_heads, vision.head_dim
        both = self.affine(x, parameters.wqkv).reshape(num_patches, 3, heads, width)
        q, k, v = both[:, 0], both[:, 1], both[:, 2]
        q, k = _rotate(q, angles).astype(x.dtype), _rotate(k, angles).astype(x.dtype)

        def attend(queries: jax.Array) -> jax.Array:
            scores = _einsum("phd,nhd->hpn", queries, k) / np.sqrt(width)
            scores = jnp.where(is_real, scores, -jnp.inf)
            weights = jax.nn.softmax(scores, axis=-1).astype(x.dtype)
            return _einsum("hpn,nhd->phd", weights, v)

        chunks = q.reshape(-1, min(num_patches, QUERY_CHUNK), heads, width)
        return jax.lax.map(attend, chunks).reshape(num_patches, -1).astype(x.dtype)


def _einsum(form: str, a: jax.Array, b: jax.Array) -> jax.Array:
    return jnp.einsum(
        form, a, b, precision=jax.lax.Precision.HIGHEST, preferred_element_type=jnp.float32
    )


def _angles(vision: VisionConfig, row: jax.Array, col: jax.Array) -> jax.Array:
    """[P, head_dim / 2] float32: the row times each frequency, then the column times each."""
    half = vision.head_dim // 2
    frequencies = vision.rope_theta ** (-np.arange(0, half, 2, dtype=np.float64) / half)
    position = jnp.stack([row, col], axis=1).astype(jnp.float32)
    angles = position[:, :, None] * frequencies.astype(np.float32)
    return angles.reshape(row.shape[0], half)


def _rotate(x: jax.Array, angles: jax.Array) -> jax.Array:
    """Rotates the first half of the channels of `x` [P, H, D] against the second; float32."""
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    cos, sin = jnp.cos(angles)[:, None], jnp.sin(angles)[:, None]
    return jnp.concatenate([first * cos - second * sin, first * sin + second * cos], axis=-1)


def _cells(grid: jax.Array, ratio: int) -> tuple[jax.Array, jax.Array]:
    """Rows and columns of cells of a grid of patches."""
    return (grid[0] + ratio - 1) // ratio, (grid[1] + ratio - 1) // ratio


def _num_cells_max(vision: VisionConfig, num_patches: int) -> int:
    """Most cells that so many patches make: a strip one patch wide has a third as many."""
    return min(vision.max_image_tokens - 3, -(-num_patches // vision.downsample_ratio))


def _round_up(num_patches: int) -> int:
    """The next size that `encode` can cut into chunks."""
    if num_patches <= QUERY_CHUNK:
        return num_patches
    return -(-num_patches // QUERY_CHUNK) * QUERY_CHUNK


def _vision(config: ModelConfig) -> VisionConfig:
    if config.vision is None:
        raise ValueError("the model has no image encoder; expected a config with vision_config")
    return config.vision
