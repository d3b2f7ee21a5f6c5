"""Goal: the Engram hash constants and rows are the published ones, and a mismatch is refused.

Method: compare with golden constants of the tiny and the released model, golden rows of the
released constants and golden hashes of real prompts; check the text rule case by case with a
tokenizer made for it; change the config or the tokenizer and expect a refusal.
"""

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models

from deepinfer_jax.config import ModelConfig, ModelConfigError
from deepinfer_jax.engram_tables import EngramTables, read_token_classes


@pytest.fixture(scope="module")
def tiny_tables(golden: Path) -> EngramTables:
    """Tables of the golden checkpoint."""
    classes = read_token_classes(golden / "tiny-v41" / "tokenizer.json", 320)
    return EngramTables.of(ModelConfig.tiny(), classes)


def _classes_like_released() -> np.ndarray:
    # The released tokenizer is not at hand; its number of classes is all that the constants use.
    return np.minimum(np.arange(129280), 99091).astype(np.int32)


def test_token_classes_of_the_golden_tokenizer(golden: Path, tiny_tables: EngramTables) -> None:
    expected = json.loads((golden / "engram_token_map.json").read_text())
    assert tiny_tables.token_classes.tolist() == expected
    assert tiny_tables.token_classes.dtype == np.int32
    assert tiny_tables.pad_class == expected[2]


def test_constants_of_the_golden_checkpoint(golden: Path, tiny_tables: EngramTables) -> None:
    expected = json.loads((golden / "engram_tiny.json").read_text())
    assert tiny_tables.moduli.tolist() == expected["primes"]
    assert tiny_tables.offsets.tolist() == expected["offsets"]
    assert tiny_tables.multipliers.tolist() == expected["multipliers"]


def test_constants_and_rows_of_the_released_model(golden: Path) -> None:
    tables = EngramTables.of(ModelConfig.released(), _classes_like_released())
    expected = json.loads((golden / "engram_real_constants.json").read_text())
    assert tables.moduli.reshape(2, 3, 8).tolist() == expected["primes"]
    assert tables.offsets.tolist() == expected["offsets"]
    assert tables.multipliers.tolist() == expected["multipliers"]
    assert tables.moduli.sum(axis=1).tolist() == expected["rows"]
    with np.load(golden / "ops.npz") as ops:
        rows = tables.rows(ops["hash_ngram_ids"])
        np.testing.assert_array_equal(rows.swapaxes(0, 1), ops["hash_rows_real"])


@pytest.mark.parametrize("name", ["internals_24_noq.npz", "selection_77.npz"])
def test_rows_of_golden_prompts(golden: Path, tiny_tables: EngramTables, name: str) -> None:
    with np.load(golden / name) as data:
        ids = data["ids"]
        key = "engram_hashes" if "engram_hashes" in data else "engram_hashes_noq"
        expected = data[key]
    classes = tiny_tables.token_classes[ids]
    padded = np.concatenate([[tiny_tables.pad_class] * 3, classes])
    windows = np.stack([padded[3 - back : len(padded) - back] for back in range(4)], axis=1)
    np.testing.assert_array_equal(tiny_tables.rows(windows), expected)


def test_rows_stay_inside_their_regions(rng: np.random.Generator) -> None:
    """The largest classes make the largest products, which must not overflow 63 bits."""
    tables = EngramTables.of(ModelConfig.released(), _classes_like_released())
    classes = rng.integers(99000, 99092, (100, 4))
    rows = tables.rows(classes)
    assert (rows >= tables.offsets).all()
    assert (rows < tables.offsets + tables.moduli).all()
    exact = [int(c) * int(m) for c, m in zip(classes[0], tables.multipliers[1], strict=True)]
    hashed = (exact[0] ^ exact[1] ^ exact[2]) % int(tables.moduli[1, 8]) + int(tables.offsets[1, 8])
    assert rows[0, 1, 8] == hashed


def _save_tokenizer(path: Path, words: list[str]) -> None:
    # Fuse only joins pieces, so each id decodes to its word; byte words need the byte decoder.
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, words[0]))
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    tokenizer.add_special_tokens([AddedToken(words[0], special=True)])
    tokenizer.save(str(path))


def test_texts_that_normalise_alike_share_a_class(tmp_path: Path) -> None:
    words = [
        "<pad>",  # 0: a special token keeps its text
        "Cafe",
        "café",  # 1 again: accent and case go
        "  cafe\t",  # 1 again: the ends go
        "a \r\n b",
        "A b",  # 2 again: a run of blanks is one space
        " ",  # 3: one space alone is a text
        "\n",  # 3 again: any run of blanks is one space
        "\u0301",  # 4: a mark alone normalises to nothing and stays itself
        "\u0300",  # 5: likewise, but another one
        "\ufb01",  # 6: ligature fi
        "FI",  # 6 again
        "<0xE2>",  # 7: half a character is known by its vocabulary entry
        "<0xE3>",  # 8
        "\u00a0x",  # 9: a no-break space is a space
        "x",  # 9 again
    ]
    _save_tokenizer(tmp_path / "tokenizer.json", words)
    classes = read_token_classes(tmp_path / "tokenizer.json", len(words))
    assert classes.tolist() == [0, 1, 1, 1, 2, 2, 3, 3, 4, 5, 6, 6, 7, 8, 9, 9]


def test_ids_that_the_tokenizer_lacks_share_one_class(tmp_path: Path) -> None:
    _save_tokenizer(tmp_path / "tokenizer.json", ["<pad>", "a"])
    assert read_token_classes(tmp_path / "tokenizer.json", 5).tolist() == [0, 1, 2, 2, 2]


def test_a_tokenizer_with_other_classes_is_refused(tiny_tables: EngramTables) -> None:
    classes = np.minimum(tiny_tables.token_classes, 270)
    with pytest.raises(ModelConfigError, match="has 271 token classes; expected 272 .*tokenizer"):
        EngramTables.of(ModelConfig.tiny(), classes)


def test_a_table_height_that_does_not_follow_is_refused(tiny_tables: EngramTables) -> None:
    config = dataclasses.replace(ModelConfig.tiny(), engram_num_embeddings=(864, 1055))
    with pytest.raises(ModelConfigError, match=r"\[864, 1055\]; expected \[864, 1054\]"):
        EngramTables.of(config, tiny_tables.token_classes)


def test_a_model_without_engram_has_empty_tables(tiny_tables: EngramTables) -> None:
    config = dataclasses.replace(ModelConfig.tiny(), engram_layer_ids=(), engram_num_embeddings=())
    tables = EngramTables.of(config, tiny_tables.token_classes)
    assert tables.rows(np.zeros((5, 4), np.int32)).shape == (5, 0, 6)


@pytest.mark.parametrize("content", [None, b"{}", b"{", b"\xff"])
def test_a_broken_tokenizer_is_named(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "tokenizer.json"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ValueError, match="tokenizer.json: not a readable tokenizer"):
        read_token_classes(path, 320)
