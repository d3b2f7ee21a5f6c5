"""Training rows: packed conversations of one length, made on demand from a seed and a number.

Row n of a stage is the same whenever and wherever it is made, so a run that resumes at step s just
starts reading at row s times the batch size.
"""

# Rows are numpy arrays until they enter a step; their fields are declared as jax's.
# pyright: reportArgumentType=false

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from random import Random

import grain
import numpy as np

from deepinfer_jax.engram_tables import EngramTables
from scripts.tiny_model import tasks
from scripts.tiny_model.network import SEGMENT_ALIGNMENT, Rows
from scripts.tiny_model.prompts import Codec, Encoded, training_exchanges
from scripts.tiny_model.small_config import VOCAB_SIZE
from scripts.tiny_model.tokenizer import special_tokens

NUM_SPECIAL = len(special_tokens())
"""Special tokens have the lowest ids."""


@dataclass(frozen=True)
class RowSource:
    """What rows are made from.

    Attributes:
        codec, tables: prompt encoding and Engram constants.
        length: T.
        seed: of the text.
        pairs_max: most pairs in a list to remember.
        words_max: most words to copy.
        drills: tasks to practise alone, and how often each is drawn.
        drill_share: share of the other conversations that practise one task.
        found_weight: loss weight of the words that answers take from a list, where others have 1:
            most of such an answer is easy, and these words alone show whether it was looked up.
        long_share: share of rows that begin with a list as long as the row allows, or a tool call.
    """

    codec: Codec
    tables: EngramTables
    length: int
    seed: int
    pairs_max: int
    words_max: int
    long_share: float
    drill_share: float
    drills: Mapping[str, float] = field(default_factory=lambda: tasks.DRILLS)
    found_weight: float = 1.0

    def batches(self, batch_size: int, first_step: int) -> Iterator[Rows]:
        """Batches from `first_step` on, endlessly."""
        numbers = grain.MapDataset.range(first_step * batch_size, 2**40)
        rows = numbers.map(self.row).batch(batch_size, batch_fn=_stack)
        options = grain.ReadOptions(num_threads=1, prefetch_buffer_size=2)
        return iter(rows.to_iter_dataset(options))

    def row(self, number: int) -> Rows:
        """One row [T]: conversations until no more fits, each at an aligned place."""
        rng = Random(self.seed * 2**42 + number)
        token_ids = np.full(self.length, 2, np.int32)
        segment = np.zeros(self.length, np.int32)
        position = np.arange(self.length, dtype=np.int32)
        said = np.zeros(self.length, np.float32)
        classes = np.full((self.length, self.tables.multipliers.shape[1]), self.tables.pad_class)
        place = misses = count = 0
        while misses < 3 and place < self.length:
            left = self.length - place
            one = self.conversation(
                rng, left, is_long=place == 0 and rng.random() < self.long_share
            )
            size = len(one.token_ids)
            if size > left:
                misses += 1
                continue
            here = slice(place, place + size)
            count += 1
            token_ids[here], segment[here] = one.token_ids, count
            position[here] = np.arange(size)
            is_found = np.isin(one.token_ids, self.codec.properties)
            said[here] = one.said * np.where(is_found, self.found_weight, 1.0)
            own = self.tables.token_classes[one.token_ids]
            for back in range(classes.shape[1]):
                classes[place + back : place + size, back] = own[: max(size - back, 0)]
            place += size + -size % SEGMENT_ALIGNMENT
        engram_rows = self.tables.rows(classes).astype(np.int32)
        return Rows(token_ids, position, segment, engram_rows, said)

    def conversation(self, rng: Random, left: int, *, is_long: bool) -> Encoded:
        """A conversation that may turn out longer than `left`."""
        thinking = rng.random() < 0.5
        if not is_long or self.length < 256:
            return (
                self._drill(rng, left)
                if rng.random() < self.drill_share
                else self._mixed(rng, left, thinking)
            )
        if self.length >= 512 and rng.random() < 0.5:
            return self.codec.encode([tasks.tool_call(rng)], thinking=thinking)
        # A pair takes four tokens, a question and its answer up to twenty.
        queries = rng.randint(2, 6)
        room = (self.length - 60 - 20 * queries) // 4
        pairs = rng.randint(max(3, room // 2), room)
        one = tasks.recall(rng, min(pairs, len(tasks.w.WORDS)), queries)
        return self.codec.encode([one], thinking=thinking)

    def _mixed(self, rng: Random, left: int, thinking: bool) -> Encoded:
        makers = tasks.MAKERS | {
            "recall": lambda rng: tasks.recall(rng, rng.randint(2, self.pairs_max))
        }
        weights = dict(tasks.WEIGHTS)
        if left < 480:
            weights["tool_call"] = 0
        return self.codec.encode(training_exchanges(rng, makers, weights), thinking=thinking)

    def _drill(self, rng: Random, left: int) -> Encoded:
        """Many turns of one task, cut to what fits: the most answers per token."""
        name = rng.choices(list(self.drills), list(self.drills.values()))[0]
        if name == "ngrams":
            return repeated_ngrams(rng, left)
        if name == "recall":
            pairs = rng.randint(2, min(self.pairs_max, max(2, (left - 60) // 5)))
            exchanges = [tasks.recall(rng, pairs, 2 + left // 12)]
        elif name == "reciting":
            pairs = rng.randint(2, min(self.pairs_max, max(2, (left - 30) // 5)))
            exchanges = [tasks.reciting(rng, pairs, max(1, (left - 4 * pairs - 16) // 4))]
        elif name == "copying":
            # Farther than a window, so that looking things up in the entries pays.
            exchanges = [tasks.copying(rng, self.words_max) for _ in range(2 + left // 14)]
        else:
            exchanges = [tasks.MAKERS[name](rng) for _ in range(2 + left // 14)]
        whole = self.codec.encode(exchanges, thinking=False)
        ends = [end for end in self.codec.ends(whole) if end <= left]
        end = ends[-1] if ends else len(whole.token_ids)
        return Encoded(whole.token_ids[:end], whole.said[:end])


def repeated_ngrams(rng: Random, length: int) -> Encoded:
    """[length] tokens: a few n-grams of two to four random tokens, again and again in random
    order. What follows the first token of one that was seen before counts as said."""
    ids = range(NUM_SPECIAL, VOCAB_SIZE)
    grams = [rng.choices(ids, k=rng.randint(2, 4)) for _ in range(rng.randint(3, 16))]
    token_ids: list[int] = []
    said: list[bool] = []
    seen: set[int] = set()
    while len(token_ids) < length:
        number = rng.randrange(len(grams))
        token_ids += grams[number]
        said += [False] + [number in seen] * (len(grams[number]) - 1)
        seen.add(number)
    return Encoded(np.asarray(token_ids[:length], np.int32), np.asarray(said[:length]))


def _stack(rows: list[Rows]) -> Rows:
    return Rows(*(np.stack(parts) for parts in zip(*rows, strict=True)))
