"""The images of a conversation: from what the client sent to patches and spans of tokens.

deepseek-recipe finds the images of a request and puts a placeholder for each into the prompt.
Here the bytes are checked against the limits, decoded by Pillow, scaled and cut into patches, and
the placeholders are widened to spans. Every refusal names the image by its number and message.

*Why not deepseek-recipe's own preprocessor*: it compresses the scaled picture again with losses,
and it knows the sizes of one model only.
"""

import base64
import binascii
import hashlib
import io
import re
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import deepseek_recipe as recipe
import numpy as np
from PIL import Image, ImageOps

from serving.config import ImageOptions
from serving.core.image_layout import ImageGeometry, ImageGrid, insert_spans, plan_grid
from serving.core.request import RequestImage
from serving.frontend.errors import bad_request
from serving.frontend.image_fetching import FetchError, fetch_images
from serving.frontend.text import TextCodec

_FORMATS = ("PNG", "JPEG", "WEBP", "GIF")
_GREY = (127, 127, 127)
_PARAM = "messages"
_DATA_HEAD = re.compile(r"\s*data:image/[^,]+;base64", re.IGNORECASE)
_WEB_HEAD = re.compile(r"\s*https?://", re.IGNORECASE)

# Pillow's own limit warns or raises depending on the size; ours is checked before decoding.
Image.MAX_IMAGE_PIXELS = None

_DECODING_ERRORS = (OSError, SyntaxError, ValueError, EOFError, IndexError, struct.error)
"""What Pillow raises for files that are damaged in one way or another."""


@dataclass(frozen=True, slots=True)
class EncodedPrompt:
    """A prompt in tokens, spans of images included, and the images of those spans."""

    token_ids: tuple[int, ...]
    images: tuple[RequestImage, ...] = ()


@dataclass(frozen=True, slots=True)
class PreparedImage:
    """An image scaled to its grid. `pixels` are patches as `RequestImage` has them."""

    grid: ImageGrid
    pixels: np.ndarray


class _ImageError(Exception):
    """Why one image is refused; the message goes on from the name of the image."""


@dataclass(frozen=True, slots=True)
class ImageReader:
    """Encodes conversations that may hold images. Safe to use from several threads.

    Attributes:
        geometry: how the model cuts images up; None for a model that takes none.
        limits: what is accepted.
    """

    geometry: ImageGeometry | None = None
    limits: ImageOptions = ImageOptions()

    def encode(self, conversation: recipe.Conversation, codec: TextCodec) -> EncodedPrompt:
        """The prompt of a conversation. Decoding images takes time; call it in a thread then.

        Raises:
            ApiError: 400, an image is refused; the message says which one and why.
            RuntimeError: the chat format needs a special token that the tokenizer lacks.
        """
        sources = [source for m in conversation.messages for source in m.image_sources]
        if not sources:
            return EncodedPrompt(codec.encode_chat(conversation))
        geometry = self.geometry
        if geometry is None:
            raise bad_request(
                f"{_name(0, sources[0])}: this model has no image encoder; send text only", _PARAM
            )
        if len(sources) > self.limits.per_request_max:
            raise bad_request(
                f"{_name(self.limits.per_request_max, sources[self.limits.per_request_max])} is "
                f"one too many: the request has {len(sources)} images; expected at most "
                f"{self.limits.per_request_max}",
                _PARAM,
            )
        fetched = self._fetched(sources)
        prepared = [
            self._prepare_named(index, source, geometry, fetched.get(index))
            for index, source in enumerate(sources)
        ]
        lengths = [image.grid.num_tokens for image in prepared]
        try:
            ids, starts = insert_spans(codec.encode_chat(conversation), geometry, lengths)
        except ValueError as error:
            # Text of the client that is spelled like a placeholder could bring this about.
            raise bad_request(f"The messages do not fit their images: {error}", _PARAM) from None
        images = [_at(start, image) for start, image in zip(starts, prepared, strict=True)]
        return EncodedPrompt(ids, tuple(images))

    def _fetched(self, sources: Sequence[recipe.ImageSource]) -> dict[int, bytes]:
        """The files of images that are named by web addresses, where those are fetched."""
        if not self.limits.fetches_urls:
            return {}
        urls = {index: source.url for index, source in enumerate(sources) if source.kind == "url"}
        if not urls:
            return {}
        try:
            files = fetch_images([url or "" for url in urls.values()], self.limits)
        except FetchError as error:
            index = list(urls)[error.index]
            raise bad_request(f"{_name(index, sources[index])} {error}", _PARAM) from None
        return dict(zip(urls, files, strict=True))

    def _prepare_named(
        self,
        index: int,
        source: recipe.ImageSource,
        geometry: ImageGeometry,
        fetched: bytes | None,
    ) -> PreparedImage:
        try:
            data = _data_of(source) if fetched is None else fetched
            return prepare(data, geometry, self.limits, is_low_detail=source.detail == "low")
        except _ImageError as error:
            raise bad_request(f"{_name(index, source)} {error}", _PARAM) from None


def refuse_placeholders(
    token_ids: Sequence[int], geometry: ImageGeometry | None, param: str
) -> None:
    """Raise ApiError 400 for a raw prompt with the token that stands for an image.

    Such a token takes what it means from an image, and a raw prompt has none.
    """
    if geometry is not None and geometry.token_id in token_ids:
        raise bad_request(
            f"token {token_ids.index(geometry.token_id)} of the {param} is {geometry.token_id}, "
            "which stands for an image; expected no images in raw prompts, send them in a chat",
            param,
        )


def check_image_parts(body: Mapping[str, Any]) -> None:
    """Refuses image parts of a chat request that deepseek-recipe would refuse without a name.

    Raises:
        ApiError: 400, naming the image.
    """
    for index, (where, role, part) in enumerate(_image_parts(body)):
        if role == "assistant":
            raise bad_request(
                f"Image {index + 1} ({where}) is in an assistant message; expected images in "
                "messages of users and tools only",
                _PARAM,
            )
        source = part.get("image_url")
        url = source.get("url") if isinstance(source, Mapping) else None
        if isinstance(url, str) and _WEB_HEAD.match(url):
            continue
        try:
            _decoded(url if isinstance(url, str) else "")
        except _ImageError as error:
            raise bad_request(f"Image {index + 1} ({where}) {error}", _PARAM) from None


def _image_parts(body: Mapping[str, Any]) -> Iterator[tuple[str, Any, Mapping[str, Any]]]:
    """Place, role of the message, and the part itself."""
    messages = body.get("messages")
    for i, message in enumerate(messages if isinstance(messages, list) else ()):
        content = message.get("content") if isinstance(message, Mapping) else None
        for j, part in enumerate(content if isinstance(content, list) else ()):
            if isinstance(part, Mapping) and part.get("type") == "image_url":
                yield f"messages[{i}].content[{j}]", message.get("role"), part


def prepare(
    data: bytes, geometry: ImageGeometry, limits: ImageOptions, *, is_low_detail: bool = False
) -> PreparedImage:
    """Decodes a PNG, JPEG, WebP or GIF file (its first frame), scales it and cuts it into patches.

    The picture is turned as its orientation mark says; where it is transparent, it is white.
    """
    if len(data) > limits.bytes_max:
        raise _ImageError(f"has {len(data)} bytes; expected at most {limits.bytes_max}")
    try:
        with Image.open(io.BytesIO(data), formats=_FORMATS) as image:
            num_pixels = image.width * image.height
            if num_pixels > limits.pixels_max:
                raise _ImageError(
                    f"has {image.width} x {image.height} pixels; expected at most "
                    f"{limits.pixels_max} in all"
                )
            picture = _as_rgb(ImageOps.exif_transpose(image))
    except _DECODING_ERRORS as error:
        detail = " ".join(str(error).split()) or type(error).__name__
        if isinstance(error, Image.UnidentifiedImageError):
            detail = "its format is not recognised"
        raise _ImageError(
            f"cannot be decoded ({detail}); expected a whole PNG, JPEG, WebP or GIF file"
        ) from None
    grid = plan_grid(geometry, picture.width, picture.height, is_low_detail=is_low_detail)
    return PreparedImage(grid, _patches(_scaled(picture, grid), geometry.patch_size))


def _data_of(source: recipe.ImageSource) -> bytes:
    """The file that a source holds."""
    if source.kind == "bytes":
        assert source.data is not None
        return source.data
    if source.kind == "url":
        raise _ImageError(
            "is a URL, and this server does not fetch images; expected a data URL "
            "(data:image/png;base64,...)"
        )
    return _decoded(source.data_url or "")


def _decoded(data_url: str) -> bytes:
    head, _, body = data_url.partition(",")
    if not _DATA_HEAD.fullmatch(head):
        raise _ImageError("has no usable url; expected a data URL (data:image/png;base64,...)")
    try:
        return base64.b64decode(body, validate=True)
    except (binascii.Error, ValueError) as error:
        raise _ImageError(f"is not valid base64 ({error})") from None


def _as_rgb(image: Image.Image) -> Image.Image:
    if image.mode.startswith("I;16"):
        # Pillow would cut off what is brighter than 255 instead of scaling.
        return Image.fromarray((np.asarray(image) >> 8).astype(np.uint8)).convert("RGB")
    if not image.has_transparency_data:
        return image.convert("RGB")
    layer = image.convert("RGBA")
    white = Image.new("RGBA", layer.size, "white")
    return Image.alpha_composite(white, layer).convert("RGB")


def _scaled(picture: Image.Image, grid: ImageGrid) -> Image.Image:
    """The picture in the size of its grid: as large as fits, centred between grey borders."""
    size = (grid.width, grid.height)
    if not grid.is_stretched:
        if picture.width * grid.height > picture.height * grid.width:
            size = (grid.width, max(round(picture.height / picture.width * grid.width), 1))
        else:
            size = (max(round(picture.width / picture.height * grid.height), 1), grid.height)
    scaled = picture.resize(size, Image.Resampling.BICUBIC)
    if size == (grid.width, grid.height):
        return scaled
    canvas = Image.new("RGB", (grid.width, grid.height), _GREY)
    left, top = (round((whole - part) * 0.5) for whole, part in zip(canvas.size, size, strict=True))
    canvas.paste(scaled, (left, top))
    return canvas


def _patches(picture: Image.Image, patch_size: int) -> np.ndarray:
    """[patches, 3 * patch_size ** 2] uint8, row by row; channel, row and column inside each."""
    values = np.asarray(picture)
    rows, cols = values.shape[0] // patch_size, values.shape[1] // patch_size
    tiles = values.reshape(rows, patch_size, cols, patch_size, 3).transpose(0, 2, 4, 1, 3)
    patches = np.ascontiguousarray(tiles).reshape(rows * cols, -1)
    patches.flags.writeable = False
    return patches


def _at(start: int, image: PreparedImage) -> RequestImage:
    grid = image.grid
    digest = hashlib.sha256(f"{grid.patch_rows} x {grid.patch_cols} patches:".encode())
    digest.update(image.pixels)
    return RequestImage(
        start=start,
        num_tokens=grid.num_tokens,
        patch_rows=grid.patch_rows,
        patch_cols=grid.patch_cols,
        digest=digest.digest(),
        pixels=image.pixels,
    )


def _name(index: int, source: recipe.ImageSource) -> str:
    where = source.path.lstrip(".")
    return f"Image {index + 1} ({where})" if where else f"Image {index + 1}"
