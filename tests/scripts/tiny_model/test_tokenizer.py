"""The tokenizer carries DeepSeek's special tokens and keeps digits apart.

Goal: prompts that the library renders are encoded as the model was trained on.
Method: a tokenizer is trained on a small sample and asked for single tokens and round trips.
"""

import json

import pytest
from tokenizers import Tokenizer

from scripts.tiny_model import tokenizer as tokens
from tests.scripts.tiny_model import tokenised


def loaded() -> Tokenizer:
    return Tokenizer.from_file(str(tokenised.directory() / "tokenizer.json"))


def test_special_tokens_have_their_spelling_and_first_ids() -> None:
    tokenizer = loaded()
    assert [tokenizer.token_to_id(t) for t in (tokens.BOS, tokens.EOS, tokens.PAD)] == [0, 1, 2]
    for special in (
        "<｜User｜>",
        "<｜Assistant｜>",
        "<think>",
        "</think>",
        "｜DSML｜",
        tokens.IMAGE,
    ):
        assert len(tokenizer.encode(special).ids) == 1, special
    described = json.loads((tokenised.directory() / "tokenizer_config.json").read_text())
    assert described["eos_token"] == tokens.EOS


def test_digits_are_single_tokens_and_text_survives() -> None:
    tokenizer = loaded()
    for text in ("river = 47, lamp = 12.", 'a "quote" {x}\n', "Grüße, 世界! \u00e9"):
        encoded = tokenizer.encode(text)
        assert tokenizer.decode(encoded.ids) == text
    assert tokenizer.encode("4711").tokens == ["4", "7", "1", "1"]


def test_same_sample_gives_same_tokenizer() -> None:
    texts = list(tokens.sample_texts(3, 50))
    assert texts == list(tokens.sample_texts(3, 50))
    assert not any(special in text for text in texts for special in tokens.special_tokens())


def test_too_little_text_is_refused() -> None:
    with pytest.raises(ValueError, match="expected 4096"):
        tokens.train_tokenizer(["only this"], 4096)
