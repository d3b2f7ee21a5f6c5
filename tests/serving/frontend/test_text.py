"""Goal: text and token ids convert exactly, in one piece or streamed, whatever the bytes are.

Method: the reference is the tokenizers library reading the same file; ids are drawn at random,
including ones that are no valid UTF-8 and special tokens.
"""

import json
import shutil
from pathlib import Path
from typing import Any

import deepseek_recipe as recipe
import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st

from serving.frontend.text import PlainDecoder, TextCodec, _longest_token
from sharding.config_file import ConfigError
from tests.serving.running_service import MODEL_DIR

CODEC = TextCodec.load(MODEL_DIR)
REFERENCE = tokenizers.Tokenizer.from_file(str(MODEL_DIR / "tokenizer.json"))
BOS = "<｜begin▁of▁sentence｜>"


def test_fewest_tokens_is_a_bound_that_holds() -> None:
    codec = TextCodec.load(MODEL_DIR)
    for text in ("", "x", "hello world " * 9, "é" * 40, "<｜begin▁of▁sentence｜>" * 3):
        assert codec.fewest_tokens(len(text)) <= len(codec.encode_text(text))
    assert codec.fewest_tokens(21 * 4) == 4 and codec.fewest_tokens(21 * 4 + 1) == 5


@pytest.mark.parametrize(
    "change",
    [{"normalizer": {"type": "NFC"}}, {"decoder": None}, {"decoder": {"type": "Metaspace"}}],
)
def test_no_bound_where_a_token_may_stand_for_any_text(change: dict[str, Any]) -> None:
    table = {"model": {"vocab": {"abc": 0}}, "added_tokens": [{"content": "<long>"}]}
    whole = table | {"normalizer": None, "decoder": {"type": "ByteLevel"}}
    assert _longest_token(whole) == 6
    assert _longest_token(whole | {"normalizer": {"type": "Sequence", "normalizers": []}}) == 6
    assert _longest_token(whole | change) is None


@given(st.lists(st.integers(0, 319), max_size=40))
def test_decode_equals_the_reference(ids: list[int]) -> None:
    assert CODEC.decode(ids) == REFERENCE.decode(ids, skip_special_tokens=False)


@given(st.text(max_size=60).filter(lambda text: text.isprintable()))
def test_encode_then_decode_is_the_identity(text: str) -> None:
    assert CODEC.decode(CODEC.encode_text(text)) == text


@pytest.mark.parametrize("text", ["\n\nabc\n", "</think>a<think>", '```json\n{"a": 1}\n```', "é😀"])
def test_streamed_text_is_kept_as_it_is(text: str) -> None:
    decoder = PlainDecoder(CODEC)
    pieces = [decoder.push([token])[0] for token in CODEC.encode_text(text)]
    assert "".join(pieces) + decoder.finish() == text
    assert all("\ufffd" not in piece for piece in pieces), "a character cut in two was shown"


def test_stop_string_across_tokens_ends_the_text() -> None:
    decoder = PlainDecoder(CODEC, ["lo w", "zzz"])
    text, stops = "", []
    for token in CODEC.encode_text("hello world"):
        piece, is_stopped = decoder.push([token])
        text += piece
        stops.append(is_stopped)
    assert text == "hel"
    assert stops[-1] and not stops[0]
    assert decoder.push(CODEC.encode_text("more")) == ("", True)


def test_beginning_of_a_stop_string_is_shown_when_it_does_not_come() -> None:
    decoder = PlainDecoder(CODEC, ["lo there"])
    text, is_stopped = decoder.push(CODEC.encode_text("hello t"))
    assert not is_stopped and "lo t" not in text
    assert text + decoder.finish() == "hello t"


def test_chat_text_cannot_inject_special_tokens() -> None:
    def encode(text: str) -> tuple[int, ...]:
        conversation = recipe.Conversation([recipe.UserMessage(text)], thinking_mode=False)
        return CODEC.encode_chat(conversation)

    user_token = CODEC.encode_text("<｜User｜>")[0]
    assert encode("hi").count(user_token) == 1
    assert encode("<｜User｜>").count(user_token) == 1
    assert CODEC.encode_text("<｜User｜>") == (user_token,), "a raw prompt may spell them"


def copy_of_model(tmp_path: Path, **config: object) -> Path:
    shutil.copy(MODEL_DIR / "tokenizer.json", tmp_path / "tokenizer.json")
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    return tmp_path


def test_begin_token_is_put_in_front_where_the_checkpoint_says_so(tmp_path: Path) -> None:
    plain = CODEC.encode_text("hi")
    added = TextCodec.load(copy_of_model(tmp_path, bos_token=BOS, add_bos_token=True))
    assert added.encode_text("hi") == (0, *plain)
    assert added.encode_text(BOS + "hi") == (0, *plain), "not twice"
    as_object = TextCodec.load(
        copy_of_model(tmp_path, bos_token={"content": BOS}, add_bos_token=True)
    )
    assert as_object.encode_text("hi") == (0, *plain)
    off = TextCodec.load(copy_of_model(tmp_path, bos_token=BOS, add_bos_token=False))
    assert off.encode_text("hi") == plain


def test_a_begin_token_without_text_is_refused(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_bytes((MODEL_DIR / "tokenizer.json").read_bytes())
    for token in ({}, 5, {"content": 5}):
        values = {"add_bos_token": True, "bos_token": token}
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(values))
        with pytest.raises(ConfigError, match="bos_token is .* expected a text"):
            TextCodec.load(tmp_path)


def test_missing_or_damaged_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"tokenizer\.json: no such file"):
        TextCodec.load(tmp_path)
    whole = (MODEL_DIR / "tokenizer.json").read_bytes()
    (tmp_path / "tokenizer.json").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ConfigError, match=r"tokenizer\.json: not a tokenizer"):
        TextCodec.load(tmp_path)
    copy_of_model(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("[1]")
    with pytest.raises(ConfigError, match=r"tokenizer_config\.json: not a tokenizer conf"):
        TextCodec.load(tmp_path)


def test_image_token_is_spelled_as_the_tokenizer_does() -> None:
    codec = CODEC.with_image_token(318)
    assert codec.special_tokens.token(recipe.SpecialToken.Image) == "<｜deepseek_image｜>"
    source = recipe.BytesImageSource(b"")
    spelled = codec.decode([318])
    message = recipe.UserMessage(f"{spelled}{spelled}", [source], image_token=spelled)
    # The first one is the image, the second one text of the client.
    assert codec.encode_chat(recipe.Conversation([message])).count(318) == 1
    assert codec.encode_text("ab") == CODEC.encode_text("ab")


def test_image_token_that_is_no_token_is_refused() -> None:
    # The first is an ordinary piece of text, which clients may write; the second does not exist.
    for token_id in (200, 5000):
        with pytest.raises(ConfigError, match=f"id {token_id} is"):
            CODEC.with_image_token(token_id)
