"""Goal: what a client sends as an image becomes the patches of the published preprocessing, or a
400 that names the image. Method: golden patches, Pillow's own padding, files that are damaged or
too large in every way, and conversations encoded to their last token.
"""

import base64
import io
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import deepseek_recipe as recipe
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image, ImageOps

from serving.config import ImageOptions
from serving.core.image_layout import ImageGeometry, plan_grid
from serving.frontend.errors import ApiError
from serving.frontend.images import (
    EncodedPrompt,
    ImageReader,
    PreparedImage,
    check_image_parts,
    prepare,
)
from serving.frontend.text import TextCodec
from tests.serving.running_service import MODEL_DIR

IMAGE_ID = 318
GEOMETRY = ImageGeometry(IMAGE_ID, 14, 3, 64, 1764)
CODEC = TextCodec.load(MODEL_DIR).with_image_token(IMAGE_ID)
READER = ImageReader(GEOMETRY)


def _file(values: np.ndarray, form: str = "PNG", **options: Any) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(values).save(buffer, form, **options)
    return buffer.getvalue()


def _noise(height: int, width: int, channels: int = 3) -> np.ndarray:
    return np.random.default_rng(1).integers(0, 256, (height, width, channels), np.uint8)


def _url(data: bytes) -> str:
    return "data:image/png;base64," + base64.b64encode(data).decode()


def _prepared(data: bytes, geometry: ImageGeometry = GEOMETRY) -> PreparedImage:
    return prepare(data, geometry, ImageOptions())


def _picture(image: PreparedImage) -> np.ndarray:
    """The pixels [H, W, 3] behind the patches."""
    rows, cols = image.grid.patch_rows, image.grid.patch_cols
    tiles = image.pixels.reshape(rows, cols, 3, 14, 14).transpose(0, 3, 1, 4, 2)
    return tiles.reshape(rows * 14, cols * 14, 3)


def _encode(*contents: list[dict[str, Any]], reader: ImageReader = READER) -> EncodedPrompt:
    body = {"model": "m", "messages": [{"role": "user", "content": c} for c in contents]}
    options = (
        recipe.ConversionOptions()
        .with_model_versions_by_name({"m": recipe.ModelVersion.DeepseekV41Flash})
        .with_special_tokens(CODEC.special_tokens)
    )
    converted = recipe.ChatCompletionRequest(body).convert(options)
    return reader.encode(converted.conversation, CODEC)


def _image_part(url: str, **fields: str) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url, **fields}}


def _refused(*contents: list[dict[str, Any]], reader: ImageReader = READER) -> str:
    with pytest.raises(ApiError) as caught:
        _encode(*contents, reader=reader)
    assert caught.value.status == 400 and caught.value.param == "messages"
    return caught.value.detail


def test_patches_equal_the_golden_ones(golden: Path) -> None:
    data = np.load(golden / "image_patches.npz")
    names = [name.removeprefix("rgb_") for name in data.files if name.startswith("rgb_")]
    for name in names:
        image = _prepared(_file(data[f"rgb_{name}"]))
        expected = data[f"patches_{name}"]
        bytes_of_golden = np.rint((expected.astype(np.float64) * 0.5 + 0.5) * 255)
        np.testing.assert_array_equal(image.pixels, bytes_of_golden.reshape(len(expected), -1))


@given(st.integers(1, 90), st.integers(1, 90))
def test_scaling_equals_that_of_pillow(width: int, height: int) -> None:
    values = _noise(height, width)
    grid = plan_grid(GEOMETRY, width, height)
    size = (grid.width, grid.height)
    expected = ImageOps.pad(
        Image.fromarray(values), size, Image.Resampling.BICUBIC, color=(127, 127, 127)
    )
    np.testing.assert_array_equal(_picture(_prepared(_file(values))), np.asarray(expected))


def test_a_line_of_pixels_does_not_vanish() -> None:
    image = _prepared(_file(np.zeros((9000, 1, 3), np.uint8)))
    assert (_picture(image) == 0).any()


def test_wide_images_are_stretched_where_the_model_says_so() -> None:
    geometry = ImageGeometry(IMAGE_ID, 14, 3, 64, 1764, 2.0)
    image = _prepared(_file(np.zeros((20, 200, 3), np.uint8)), geometry)
    assert image.grid.is_stretched and (_picture(image) == 0).all()


@pytest.mark.parametrize("form", ["PNG", "JPEG", "WEBP", "GIF"])
def test_every_format_is_read(form: str) -> None:
    values = np.zeros((56, 56, 3), np.uint8)
    values[:, 28:] = 255
    options = {"lossless": True} if form == "WEBP" else {}
    picture = _picture(_prepared(_file(values, form, **options))).astype(int)
    assert np.abs(picture - values).max() <= 2


def test_colour_models_become_rgb() -> None:
    grey = np.full((56, 56), 77, np.uint8)
    assert (_picture(_prepared(_file(grey))) == 77).all()
    deep = np.full((56, 56), 77 << 8, np.uint16)
    assert (_picture(_prepared(_file(deep))) == 77).all()
    clear = np.zeros((56, 56, 4), np.uint8)
    clear[:28, :, 3] = 255
    picture = _picture(_prepared(_file(clear)))
    assert (picture[:28] == 0).all() and (picture[28:] == 255).all()


def test_pictures_are_turned_upright() -> None:
    values = np.zeros((28, 56, 3), np.uint8)
    values[:, 28:] = 255
    orientation = Image.Exif()
    orientation[0x0112] = 6  # The camera lay on its side: turn right to see it upright.
    image = _prepared(_file(values, "JPEG", exif=orientation, quality=100))
    assert (image.grid.width, image.grid.height) == (42, 70)
    picture = _picture(image)
    assert picture[10, 20, 0] < 5 and picture[60, 20, 0] > 250


def test_conversation_with_images_becomes_spans() -> None:
    first, second = _file(_noise(42, 42)), _file(_noise(42, 84))
    prompt = _encode(
        [{"type": "text", "text": "a"}, _image_part(_url(first)), _image_part(_url(second))],
        [{"type": "text", "text": "b"}, _image_part(_url(first))],
    )
    assert [(image.patch_rows, image.patch_cols) for image in prompt.images] == [
        (3, 3),
        (3, 6),
        (3, 3),
    ]
    assert [image.num_tokens for image in prompt.images] == [4, 5, 4]
    is_image = np.array(prompt.token_ids) == IMAGE_ID
    covered = np.zeros_like(is_image)
    for image in prompt.images:
        covered[image.start : image.stop] = True
        assert not image.pixels.flags.writeable
    np.testing.assert_array_equal(is_image, covered)
    one, two, three = prompt.images
    assert one.digest == three.digest != two.digest
    plain = _encode([{"type": "text", "text": "a"}], [{"type": "text", "text": "b"}])
    assert plain.images == () and IMAGE_ID not in plain.token_ids


def test_low_detail_is_honoured() -> None:
    reader = ImageReader(ImageGeometry(IMAGE_ID, 14, 3, 1024, 1))
    url = _url(_file(np.zeros((300, 1024, 3), np.uint8)))
    for detail, cols in (("low", 37), ("high", 74), ("original", 74), ("auto", 74)):
        prompt = _encode([_image_part(url, detail=detail)], reader=reader)
        assert prompt.images[0].patch_cols == cols


def test_text_cannot_add_an_image() -> None:
    spelled = CODEC.decode([IMAGE_ID])
    prompt = _encode([{"type": "text", "text": f"{spelled} {spelled}"}])
    assert IMAGE_ID not in prompt.token_ids


def test_an_image_of_an_assistant_is_named() -> None:
    image = _image_part(_url(_PNG))
    messages = [
        {"role": "user", "content": [image]},
        {"role": "assistant", "content": ["", image]},
    ]
    with pytest.raises(ApiError, match=r"Image 2 \(messages\[1\].content\[1\]\) is in an assist"):
        check_image_parts({"messages": messages})


def test_urls_that_cannot_be_read_are_refused() -> None:
    good = _image_part(_url(_PNG))
    with pytest.raises(ApiError) as caught:
        check_image_parts({"messages": [{"content": [good, _image_part(_url(_PNG)[:-1])]}]})
    assert "Image 2 (messages[0].content[1]) is not valid base64" in caught.value.detail
    bad: list[Any] = [
        {"url": "data:image/png,abc"},
        {"url": "data:text/plain;base64,abc"},
        {"url": "/etc/passwd"},
        {"url": ""},
        {"url": 5},
        {},
        "data:image/png;base64,AAAA",
        None,
    ]
    for source in bad:
        parts = [good, {"type": "text", "text": "x"}, {"type": "image_url", "image_url": source}]
        with pytest.raises(ApiError) as caught:
            check_image_parts({"messages": ["", {"content": "x"}, {"content": parts}]})
        assert caught.value.status == 400
        assert caught.value.detail == (
            "Image 2 (messages[2].content[2]) has no usable url; expected a data URL "
            "(data:image/png;base64,...)"
        )
    check_image_parts({"messages": [{"content": [good, _image_part("HTTPS://a/b")]}]})
    check_image_parts({"messages": 5})


def test_a_source_that_never_passed_the_conversion_is_checked_too() -> None:
    for url, expected in (
        ("data:image/png,abc", "Image 1 has no usable url"),
        ("data:image/png;base64,@@@@", "Image 1 is not valid base64"),
    ):
        bad = recipe.DataUrlImageSource(url)
        conversation = recipe.Conversation([recipe.UserMessage("<｜image｜>", [bad])])
        with pytest.raises(ApiError, match=expected):
            READER.encode(conversation, CODEC)
    spelled = CODEC.decode([IMAGE_ID])
    source = recipe.BytesImageSource(_PNG)
    message = recipe.UserMessage(f"see {spelled}", [source], image_token=spelled)
    assert len(READER.encode(recipe.Conversation([message]), CODEC).images) == 1
    without = recipe.UserMessage("see", [source], image_token=spelled)
    with pytest.raises(ApiError, match="0 placeholders for 1 images"):
        READER.encode(recipe.Conversation([without]), CODEC)


_PNG = _file(_noise(40, 40))
_LIMITS = ImageOptions(per_request_max=2, bytes_max=4000, pixels_max=2000)


@pytest.mark.parametrize(
    ("damage", "expected"),
    [
        (lambda: b"", "its format is not recognised"),
        (lambda: b"hello", "its format is not recognised"),
        (lambda: _file(_noise(9, 9), "BMP"), "its format is not recognised"),
        (lambda: _PNG[: len(_PNG) // 2], "cannot be decoded"),
        (lambda: _file(_noise(40, 40), "JPEG")[:-400], "cannot be decoded"),
        (lambda: _file(_noise(40, 40), "WEBP")[:-400], "cannot be decoded"),
        (lambda: _PNG[:60] + bytes(60) + _PNG[120:], "cannot be decoded"),
    ],
)
def test_damaged_files_are_refused(damage: Callable[[], bytes], expected: str) -> None:
    good = _image_part(_url(_PNG))
    detail = _refused([good], [{"type": "text", "text": "x"}, _image_part(_url(damage()))])
    assert detail.startswith("Image 2 (messages[1]) cannot be decoded (")
    assert expected in detail and "expected a whole PNG, JPEG, WebP or GIF file" in detail


@pytest.mark.parametrize("form", ["PNG", "JPEG", "WEBP", "GIF"])
def test_any_damage_is_refused_or_survived(form: str) -> None:
    whole = _file(_noise(20, 20), form)
    chance = random.Random(form)
    for _ in range(150):
        data = bytearray(whole)
        for _ in range(chance.randint(1, 8)):
            data[chance.randrange(len(data))] = chance.randrange(256)
        cut = bytes(data[: chance.randint(1, len(data))]) if chance.random() < 0.3 else bytes(data)
        try:
            prompt = _encode([_image_part(_url(cut))])
        except ApiError as error:
            assert error.status == 400 and error.detail.startswith("Image 1 (messages[0])")
        else:
            assert len(prompt.images) == 1


def test_limits_are_enforced() -> None:
    reader = ImageReader(GEOMETRY, _LIMITS)
    small = _image_part(_url(_file(np.zeros((40, 50, 3), np.uint8))))
    assert len(_encode([small, small], reader=reader).images) == 2
    assert "Image 3 (messages[1]) is one too many: the request has 4" in _refused(
        [small, small], [small, small], reader=reader
    )
    wide = _image_part(_url(_file(np.zeros((40, 51, 3), np.uint8))))
    assert _refused([small, wide], reader=reader) == (
        "Image 2 (messages[0]) has 51 x 40 pixels; expected at most 2000 in all"
    )
    heavy = _file(_noise(40, 50))
    assert len(heavy) > 4000
    assert "bytes; expected at most 4000" in _refused([_image_part(_url(heavy))], reader=reader)
    source = recipe.BytesImageSource(heavy, path="here")
    conversation = recipe.Conversation([recipe.UserMessage("", [source])])
    with pytest.raises(ApiError, match=rf"Image 1 \(here\) has {len(heavy)} bytes; expected"):
        reader.encode(conversation, CODEC)


def test_a_small_file_of_many_pixels_is_not_decoded() -> None:
    bomb = _file(np.zeros((6000, 6000), np.uint8))
    assert len(bomb) < 100_000
    assert "6000 x 6000 pixels" in _refused([_image_part(_url(bomb))])


def test_urls_are_refused() -> None:
    good = _image_part(_url(_PNG))
    assert _refused([good, _image_part("https://example.org/cat.png")]) == (
        "Image 2 (messages[0]) is a URL, and this server does not fetch images; expected a data "
        "URL (data:image/png;base64,...)"
    )


def test_a_model_without_an_encoder_takes_text_only() -> None:
    good = _image_part(_url(_PNG))
    assert _refused([good], reader=ImageReader()) == (
        "Image 1 (messages[0]): this model has no image encoder; send text only"
    )
    assert _encode([{"type": "text", "text": "a"}], reader=ImageReader()).images == ()
