"""A tokenizer trained once for the tests of this folder."""

import functools
import tempfile
from pathlib import Path

from scripts.tiny_model.prompts import Codec
from scripts.tiny_model.tokenizer import sample_texts, train_tokenizer, write_tokenizer


@functools.cache
def directory() -> Path:
    """A folder with `tokenizer.json`; it lives as long as the process."""
    folder = tempfile.TemporaryDirectory()
    _KEPT.append(folder)
    path = Path(folder.name)
    write_tokenizer(train_tokenizer(sample_texts(0, 1500), 1024), path)
    return path


@functools.cache
def codec() -> Codec:
    """A codec with that tokenizer."""
    return Codec(directory() / "tokenizer.json")


_KEPT: list[tempfile.TemporaryDirectory[str]] = []
