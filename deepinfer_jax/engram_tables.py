"""The fixed numbers of the Engram hash: token classes, multipliers, moduli and row offsets.

Engram looks up table rows by hashes of the last few tokens. Nothing of the hash is stored in a
checkpoint: it all follows from the config and the tokenizer, and a single wrong token class
changes the multipliers and with them every row. So what can be checked is checked: the number of
classes and the table heights must equal those in the config.

The rules, for token t with classes c_0 (its own), c_1 (one before), ...:

1. H_n = XOR over r < n of c_r * m_r in 64-bit integers, for n = 2 .. engram_max_ngram_size;
2. row(n, head) = H_n mod modulus(n, head) + offset(n, head).

Moduli are consecutive primes from `engram_vocab_size` up, walked layer by layer, then n, then
head; offsets are their running sums within a layer, so a layer's table holds one region per
(n, head) and its height is the sum of its moduli.
"""

import itertools
import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from tokenizers import Regex, Tokenizer, normalizers

from deepinfer_jax.config import ModelConfig, ModelConfigError

_SEED_STEP = 10007
"""Multipliers of layer L are drawn with seed 10007 L."""

_LARGEST = 2**63 - 1


@dataclass(frozen=True, slots=True, eq=False)
class EngramTables:
    """Constants of all Engram layers, L of them, with N = `engram_max_ngram_size` and
    K = (N - 1) * `engram_n_heads` rows per token and layer, n-major.

    Attributes:
        token_classes: [vocab_size] int32, class of each token id.
        pad_class: class that stands for tokens before the sequence and for image tokens.
        multipliers: [L, N] int64, odd.
        moduli: [L, K] int64, primes.
        offsets: [L, K] int64, first row of each region.
    """

    token_classes: np.ndarray
    pad_class: int
    multipliers: np.ndarray
    moduli: np.ndarray
    offsets: np.ndarray

    @classmethod
    def of(cls, config: ModelConfig, token_classes: np.ndarray) -> "EngramTables":
        """Constants for a config and the classes of its tokenizer (`read_token_classes`).

        Raises:
            ModelConfigError: the number of classes or a table height is not that of the config.
        """
        num_classes = int(token_classes.max()) + 1
        if num_classes != config.engram_compressed_vocab_size:
            raise ModelConfigError(
                f"the tokenizer has {num_classes} token classes; expected "
                f"{config.engram_compressed_vocab_size} (engram_compressed_vocab_size): use the "
                "tokenizer.json that belongs to this checkpoint"
            )
        moduli = _moduli(config)
        heights = moduli.sum(axis=1).tolist()
        if heights != list(config.engram_num_embeddings):
            raise ModelConfigError(
                f"engram_num_embeddings is {list(config.engram_num_embeddings)}; expected "
                f"{heights}, the sums of the primes from engram_vocab_size "
                f"({config.engram_vocab_size}) up"
            )
        return cls(
            token_classes=token_classes,
            pad_class=int(token_classes[config.engram_pad_token_id]),
            multipliers=_multipliers(config),
            moduli=moduli,
            offsets=np.cumsum(moduli, axis=1) - moduli,
        )

    def rows(self, classes: np.ndarray) -> np.ndarray:
        """Table rows of tokens, the meaning that every faster way has to equal.

        `classes` is [..., N] integer: the token's class, then those before it, with `pad_class`
        from the first position on that is before the sequence or an image token. Returns
        [..., L, K] int64. Products stay below 2^63 by the choice of multipliers.
        """
        products = classes.astype(np.int64)[..., None, :] * self.multipliers
        hashes = np.bitwise_xor.accumulate(products, axis=-1)[..., 1:]
        heads = self.moduli.shape[-1] // hashes.shape[-1]
        return np.repeat(hashes, heads, axis=-1) % self.moduli + self.offsets


def read_token_classes(tokenizer_file: Path, vocab_size: int) -> np.ndarray:
    """Classes [vocab_size] int32 of all token ids, numbered by first appearance in id order.

    Two ids share a class when their texts are equal after normalisation: compatibility forms
    unified, accents stripped, lower case, runs of blanks made one, ends stripped. An id that is
    not a whole text by itself (part of a UTF-8 sequence) is known by its vocabulary entry.

    Raises:
        ValueError: the file cannot be read as a tokenizer.
    """
    try:
        tokenizer = Tokenizer.from_file(str(tokenizer_file))
    except Exception as error:  # the library raises plain Exception for every failure
        raise ValueError(f"{tokenizer_file}: not a readable tokenizer ({error})") from error
    normaliser = _normaliser()
    texts = tokenizer.decode_batch([[i] for i in range(vocab_size)], skip_special_tokens=False)
    classes: dict[str | None, int] = {}
    found = np.empty(vocab_size, np.int32)
    for token_id, text in enumerate(texts):
        if "\ufffd" in text:
            key = tokenizer.id_to_token(token_id)
        else:
            # A text of nothing but blanks and marks normalises to nothing; it stays itself.
            key = normaliser.normalize_str(text) or text
        found[token_id] = classes.setdefault(key, len(classes))
    return found


def _normaliser() -> normalizers.Normalizer:
    # One single space is a text of its own: it hides behind a private character while the ends
    # are stripped.
    hidden_space = "\ue000"
    return normalizers.Sequence(
        [
            normalizers.NFKC(),
            normalizers.NFD(),
            normalizers.StripAccents(),
            normalizers.Lowercase(),
            normalizers.Replace(Regex(r"[ \t\r\n]+"), " "),
            normalizers.Replace(Regex(r"^ $"), hidden_space),
            normalizers.Strip(),
            normalizers.Replace(hidden_space, " "),
        ]
    )


def _multipliers(config: ModelConfig) -> np.ndarray:
    """[L, N] odd int64, small enough that class times multiplier fits 63 bits."""
    bound = max(1, _LARGEST // config.engram_compressed_vocab_size // 2)
    size = config.engram_max_ngram_size
    rows = [
        np.random.default_rng(_SEED_STEP * layer).integers(0, bound, size) * 2 + 1
        for layer in config.engram_layer_ids
    ]
    return np.array(rows, np.int64).reshape(len(rows), size)


def _moduli(config: ModelConfig) -> np.ndarray:
    num_layers = len(config.engram_layer_ids)
    per_layer = (config.engram_max_ngram_size - 1) * config.engram_n_heads
    primes = filter(_is_prime, itertools.count(config.engram_vocab_size))
    some = list(itertools.islice(primes, num_layers * per_layer))
    return np.array(some, np.int64).reshape(num_layers, per_layer)


def _is_prime(number: int) -> bool:
    return number > 1 and all(number % d for d in range(2, math.isqrt(number) + 1))
