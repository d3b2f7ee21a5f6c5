"""The tokenizer of the small model: byte-level BPE with DeepSeek's special tokens.

Digits are tokens of their own, so that sums and positions of digits can be learned.
"""

import json
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from random import Random

import deepseek_recipe as recipe
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from scripts.tiny_model import tasks
from scripts.tiny_model.prompts import conversation_of, training_exchanges

BOS, EOS, PAD = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜▁pad▁｜>"
IMAGE, NOISE = "<｜deepseek_image｜>", "<｜noise｜>"
_TASKS = ("action", "query", "authority", "domain", "title", "read_url")


def special_tokens() -> list[str]:
    """Special tokens in their real spelling; the first three have the ids 0, 1 and 2."""
    kinds = [getattr(recipe.SpecialToken, name) for name in dir(recipe.SpecialToken)]
    known = [kind.default_str() for kind in kinds if isinstance(kind, recipe.SpecialToken)]
    tasks = [f"<｜{name}｜>" for name in _TASKS]
    return list(dict.fromkeys([BOS, EOS, PAD, *sorted(known), *tasks, IMAGE, NOISE]))


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """A tokenizer with exactly `vocab_size` tokens, learned from `texts`.

    Raises:
        ValueError: the texts are too poor for so many tokens.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r"\d"), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=special_tokens(),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    if tokenizer.get_vocab_size() != vocab_size:
        raise ValueError(
            f"the text gives {tokenizer.get_vocab_size()} tokens; expected {vocab_size}: give "
            "more text or ask for a smaller vocabulary"
        )
    return tokenizer


def sample_texts(seed: int, count: int) -> Iterator[str]:
    """Texts of `count` conversations, without special tokens."""
    rng = Random(seed)
    encoding = recipe.DeepseekV41Encoding()
    pattern = re.compile("|".join(map(re.escape, special_tokens())))
    for _ in range(count):
        exchanges = training_exchanges(rng, tasks.MAKERS, tasks.WEIGHTS)
        conversation = conversation_of(exchanges, thinking=rng.random() < 0.5)
        pieces = pattern.split(encoding.render_conversation(conversation).prompt)
        # The library leaves out most reasoning, since it lies in the past.
        pieces += [turn.reasoning for exchange in exchanges for turn in exchange.turns]
        yield from (piece for piece in pieces if piece)


def write_tokenizer(tokenizer: Tokenizer, directory: Path) -> None:
    """`tokenizer.json` and `tokenizer_config.json`."""
    tokenizer.save(str(directory / "tokenizer.json"))
    described = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BOS,
        "eos_token": EOS,
        "pad_token": PAD,
        "add_bos_token": False,
        "add_eos_token": False,
        "model_max_length": 1048576,
    }
    text = json.dumps(described, indent=1, ensure_ascii=False) + "\n"
    (directory / "tokenizer_config.json").write_text(text, encoding="utf-8")
