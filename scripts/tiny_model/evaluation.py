"""How good the small model is: exact answers per task, and tokens per step with drafts.

Questions come from another seed than the training text, and sums are of pairs that it never held.
An answer counts when its text, after the reasoning if there is any, is exactly the expected one.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from random import Random

import numpy as np

from scripts.tiny_model import tasks
from scripts.tiny_model.prompts import Codec

LONG_LIST_PAIRS = 124
"""Pairs in a list to remember that makes a prompt of a little more than 512 tokens."""

TASKS: dict[str, tasks.Maker] = {
    **tasks.MAKERS,
    "addition": partial(tasks.addition, held_out=True),
    "recall": partial(tasks.recall, num_pairs=10, num_queries=1),
    "recall_512": partial(tasks.recall, num_pairs=LONG_LIST_PAIRS, num_queries=1),
}


@dataclass(frozen=True, slots=True)
class Case:
    """One question: the task, the prompt, and the token ids that would be right."""

    task: str
    is_thinking: bool
    prompt: list[int]
    expected: list[int]


@dataclass(frozen=True, slots=True)
class Score:
    """Right answers of one task in one mode."""

    task: str
    is_thinking: bool
    num_right: int
    num_cases: int

    @property
    def share(self) -> float:
        """Of right answers."""
        return self.num_right / self.num_cases


def make_cases(codec: Codec, seed: int, count: int) -> list[Case]:
    """`count` questions per task, without and with thinking."""
    cases = []
    for task, maker in TASKS.items():
        rng = Random(f"{seed} {task}")
        for thinking in (False, True):
            for _ in range(count):
                whole = maker(rng)
                first = tasks.Exchange(whole.turns[:1], whole.tools, whole.wants_json)
                prompt = codec.prompt([first], thinking=thinking, num_messages=1)
                encoded = codec.encode([first], thinking=thinking)
                end = next(end for end in codec.ends(encoded) if end > len(prompt))
                expected = encoded.token_ids[len(prompt) : end].tolist()
                cases.append(Case(task, thinking, prompt, expected))
    return cases


def score(
    cases: Sequence[Case], answers: Iterable[Sequence[int]], text_of: Callable[[list[int]], str]
) -> list[Score]:
    """Scores per task and mode, from the generated token ids of each case."""
    right: dict[tuple[str, bool], list[bool]] = {}
    for case, answer in zip(cases, answers, strict=True):
        is_right = said_text(answer, text_of) == said_text(case.expected, text_of)
        right.setdefault((case.task, case.is_thinking), []).append(is_right)
    return [Score(*key, sum(values), len(values)) for key, values in right.items()]


def said_text(token_ids: Sequence[int], text_of: Callable[[list[int]], str]) -> str:
    """Text of an answer without its reasoning; an answer that does not end differs from all that
    do."""
    return text_of(list(token_ids)).rsplit("</think>", 1)[-1]


def table(scores: Sequence[Score]) -> list[str]:
    """Lines of a Markdown table, tasks down, modes across."""
    lines = ["| task | chat | thinking |", "| --- | ---: | ---: |"]
    for task in dict.fromkeys(score.task for score in scores):
        shares = {score.is_thinking: score.share for score in scores if score.task == task}
        lines.append(f"| {task} | {shares[False]:.0%} | {shares[True]:.0%} |")
    return lines


def mean_accepted(num_tokens: Sequence[int], num_steps: Sequence[int]) -> float:
    """Tokens per decode step over all answers."""
    return float(np.sum(num_tokens) / max(np.sum(num_steps), 1))
