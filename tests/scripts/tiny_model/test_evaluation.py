"""Scores count exact answers.

Goal: a wrong, an unfinished and a reasoned answer are judged rightly; evaluation sums are unseen.
Method: cases are made, then answered rightly and wrongly by hand.
"""

import re

from tokenizers import Tokenizer

from scripts.tiny_model import evaluation, tasks
from tests.scripts.tiny_model import tokenised


def text_of(token_ids: list[int]) -> str:
    path = str(tokenised.directory() / "tokenizer.json")
    return Tokenizer.from_file(path).decode(token_ids, skip_special_tokens=False)


def test_right_answers_score_one_and_others_nothing() -> None:
    cases = evaluation.make_cases(tokenised.codec(), 7, 1)
    assert len(cases) == 2 * len(evaluation.TASKS)
    right = evaluation.score(cases, [case.expected for case in cases], text_of)
    assert all(score.share == 1.0 for score in right)
    unfinished = evaluation.score(cases, [case.expected[:-1] for case in cases], text_of)
    assert all(score.share == 0.0 for score in unfinished)
    lines = evaluation.table(right)
    assert "| recall_512 | 100% | 100% |" in lines
    assert len(lines) == 2 + len(evaluation.TASKS)


def test_reasoning_may_differ() -> None:
    case = next(c for c in evaluation.make_cases(tokenised.codec(), 7, 1) if c.is_thinking)
    ends_thinking = text_of(case.expected).index("</think>")
    assert ends_thinking > 0
    marker = Tokenizer.from_file(str(tokenised.directory() / "tokenizer.json")).token_to_id(
        "</think>"
    )
    assert marker is not None
    answer = case.expected[case.expected.index(marker) :]
    assert evaluation.score([case], [[10, 11, *answer]], text_of)[0].num_right == 1


def test_cases_are_long_unseen_and_repeatable() -> None:
    cases = evaluation.make_cases(tokenised.codec(), 7, 2)
    assert cases == evaluation.make_cases(tokenised.codec(), 7, 2)
    assert all(len(case.prompt) > 500 for case in cases if case.task == "recall_512")
    for case in cases:
        if case.task == "addition":
            question = text_of(case.prompt).split("<｜User｜>")[1]
            a, b = map(int, re.findall(r"\d+", question))
            assert tasks.is_held_out(a, b)


def test_mean_accepted() -> None:
    assert evaluation.mean_accepted([6, 4], [2, 3]) == 2.0
