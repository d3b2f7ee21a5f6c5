"""How large an image becomes, and which tokens of a prompt stand for it: pure arithmetic.

An image is scaled so that whole patches fill it and its span of tokens stays within the model's
limit. A span is a start token, then for each row of cells one token per cell and a newline, then
an end token; all of them carry the same id.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from serving.core.request import RequestImage

LOW_DETAIL_SIDE_MAX = 512
"""Pixels of the longer side beyond which an image of low detail is shrunk first."""


@dataclass(frozen=True, slots=True)
class ImageGeometry:
    """How the model's image encoder cuts images up, under the names of its configuration.

    `token_id` is the id of every token of a span. `max_wh_ratio` None keeps every shape.
    """

    token_id: int
    patch_size: int
    downsample_ratio: int
    max_image_tokens: int
    min_pixels: int
    max_wh_ratio: float | None = None


@dataclass(frozen=True, slots=True)
class ImageGrid:
    """An image after scaling: rows and columns of patches, and of the cells made of them.

    `width` and `height` are pixels. `is_stretched` tells that the picture fills them without
    keeping its shape; otherwise it is centred between grey borders.
    """

    width: int
    height: int
    patch_rows: int
    patch_cols: int
    cell_rows: int
    cell_cols: int
    is_stretched: bool = False

    @property
    def num_tokens(self) -> int:
        """Tokens of the image's span."""
        return self.cell_rows * (self.cell_cols + 1) + 2


def plan_grid(
    geometry: ImageGeometry, width: int, height: int, *, is_low_detail: bool = False
) -> ImageGrid:
    """The size at which an image of `width` x `height` pixels (at least 1 x 1) is encoded.

    Small images are enlarged to `min_pixels`, sides are rounded up to whole patches, and what has
    more than `max_image_tokens` tokens then is shrunk. Rounding is exactly the published one.
    """
    assert width >= 1 and height >= 1, f"an image of {width} x {height} pixels"
    wide: float = width
    tall: float = height
    ratio = geometry.max_wh_ratio
    if is_low_detail and max(width, height) > LOW_DETAIL_SIDE_MAX:
        shrink = LOW_DETAIL_SIDE_MAX / max(width, height)
        wide, tall = max(int(width * shrink), 1), max(int(height * shrink), 1)
    if ratio is not None and wide > tall * ratio:
        wide = tall * ratio
    if wide * tall < geometry.min_pixels:
        enlarge = math.sqrt(geometry.min_pixels / (wide * tall))
        wide, tall = int(wide * enlarge), int(tall * enlarge)
    patch = geometry.patch_size
    is_stretched = ratio is not None and width >= height * ratio
    cols, rows = math.ceil(wide / patch), math.ceil(tall / patch)
    grid = _grid(geometry, cols, rows, is_stretched)
    if grid.num_tokens > geometry.max_image_tokens:
        cols, rows = _largest_patches(geometry, wide, tall)
        grid = _grid(geometry, cols, rows, is_stretched)
    assert grid.num_tokens <= geometry.max_image_tokens, (width, height, grid)
    return grid


def insert_spans(
    token_ids: Sequence[int], geometry: ImageGeometry, span_lengths: Sequence[int]
) -> tuple[tuple[int, ...], list[int]]:
    """Widens each image placeholder of a prompt to the length of its image's span.

    Returns:
        the new prompt, and the position of each span's first token.

    Raises:
        ValueError: the prompt has not as many placeholders as there are spans.
    """
    places = [at for at, token in enumerate(token_ids) if token == geometry.token_id]
    if len(places) != len(span_lengths):
        raise ValueError(f"{len(places)} placeholders for {len(span_lengths)} images")
    widened: list[int] = []
    starts: list[int] = []
    done = 0
    for place, length in zip(places, span_lengths, strict=True):
        widened += token_ids[done:place]
        starts.append(len(widened))
        widened += [geometry.token_id] * length
        done = place + 1
    widened += token_ids[done:]
    return tuple(widened), starts


def whole_images_end(images: Sequence[RequestImage], stop: int) -> int:
    """The largest position up to `stop` such that no image lies on both sides of it."""
    for image in images:
        if image.start < stop < image.stop:
            return image.start
    return stop


def next_stop(images: Sequence[RequestImage], start: int) -> int:
    """The end of the shortest run of tokens from `start` that cuts no image."""
    for image in images:
        if image.start <= start < image.stop:
            return image.stop
    return start + 1


def _grid(geometry: ImageGeometry, cols: int, rows: int, is_stretched: bool) -> ImageGrid:
    patch, down = geometry.patch_size, geometry.downsample_ratio
    return ImageGrid(
        width=cols * patch,
        height=rows * patch,
        patch_rows=rows,
        patch_cols=cols,
        cell_rows=-(-rows // down),
        cell_cols=-(-cols // down),
        is_stretched=is_stretched,
    )


def _largest_patches(geometry: ImageGeometry, wide: float, tall: float) -> tuple[int, int]:
    """Columns and rows of patches of the largest shape like `wide` x `tall` within the limit."""
    patch, down = geometry.patch_size, geometry.downsample_ratio
    cell = patch * down
    # All tokens of the rows, newlines included.
    room = geometry.max_image_tokens - 2
    shape = tall / wide
    # The real solution of rows (cols + 1) = room with rows / cols = shape.
    cell_cols = math.sqrt(room / shape + 0.25) - 0.5
    cell_rows = cell_cols * shape
    if cell_cols < 1:
        return down, down * (room // 2)
    if cell_rows < 1:
        return down * (room - 1), down
    scale = min(cell * math.floor(cell_cols) / wide, cell * math.floor(cell_rows) / tall)
    return math.floor(wide * scale / patch), math.floor(tall * scale / patch)
