"""The tasks give right answers.

Goal: what the model is taught is true, and evaluation sums never appear in training.
Method: answers are worked out again from the question's text; both sides of the split are searched.
"""

import json
import re
from random import Random

import pytest

from scripts.tiny_model import tasks, words


def numbers(text: str) -> list[int]:
    return [int(found) for found in re.findall(r"\d+", text)]


def test_sums_are_right_and_split() -> None:
    rng = Random(0)
    for held_out in (False, True):
        for _ in range(300):
            turn = tasks.addition(rng, held_out=held_out).turns[0]
            a, b = numbers(turn.user)
            assert turn.answer == str(a + b)
            assert tasks.is_held_out(a, b) is held_out
    assert tasks.is_held_out(12, 57) == tasks.is_held_out(57, 12)


def test_reasoning_of_sums_names_each_column() -> None:
    rng = Random(1)
    for _ in range(100):
        turn = tasks.addition(rng).turns[0]
        for left, right in re.findall(r"([\d+ ]+) = (\d+)", turn.reasoning):
            assert sum(numbers(left)) == int(right), turn.reasoning


@pytest.mark.parametrize("seed", range(20))
def test_sorting_and_comparison(seed: int) -> None:
    turn = tasks.sorting(Random(seed)).turns[0]
    assert numbers(turn.answer) == sorted(numbers(turn.user))
    turn = tasks.comparison(Random(seed)).turns[0]
    choose = max if "larger" in turn.user else min
    assert numbers(turn.answer) == [choose(numbers(turn.user))]


def test_copying_and_reversing() -> None:
    turn = tasks.copying(Random(2)).turns[0]
    assert turn.user.endswith(f": {turn.answer}")
    turn = tasks.reversing(Random(2)).turns[0]
    assert turn.user.removeprefix("Reverse: ").split() == turn.answer.split()[::-1]


def listed_pairs(text: str) -> dict[str, str]:
    return dict(re.findall(r"the (\w+) (\w+)", text.removeprefix("Remember: ").split(".")[0]))


def test_recall_answers_from_the_list() -> None:
    exchange = tasks.recall(Random(3), num_pairs=20, num_queries=25)
    listed = listed_pairs(exchange.turns[0].user)
    assert len(listed) == 20
    asked = []
    for turn in exchange.turns:
        (key,) = (key for key in listed if re.search(rf"\b{key}\b", turn.user.split(". ")[-1]))
        assert turn.answer == f"The {key} {listed[key]}."
        assert f"the {key} {listed[key]}" in turn.reasoning
        asked.append(key)
    assert set(asked[:20]) == set(listed)


def test_reciting_says_pairs_of_the_list() -> None:
    turn = tasks.reciting(Random(5), num_pairs=6, num_said=30).turns[0]
    listed = listed_pairs(turn.user)
    said = re.findall(r"[Tt]he (\w+) (\w+)", turn.answer)
    assert len(listed) == 6
    assert len(said) == 30
    assert all(listed[key] == value for key, value in said)
    assert [key for key, _ in said[:6]] != list(listed)


def test_json_objects_hold_what_was_said() -> None:
    for seed in range(20):
        turn = tasks.json_object(Random(seed)).turns[0]
        for key, value in json.loads(turn.answer).items():
            assert f"{key} {value}" in turn.user


def test_tool_calls_use_a_given_tool() -> None:
    seen = set()
    for seed in range(40):
        exchange = tasks.tool_call(Random(seed))
        call = exchange.turns[0].call
        assert call is not None
        name, arguments = call
        tool = next(tool for tool in exchange.tools if tool["name"] == name)
        assert list(tool["parameters"]["properties"]) == list(arguments)
        seen.add(name)
    assert seen == set(tasks.TOOLS)


def test_questions_have_one_answer_each() -> None:
    rng, answers = Random(4), {}
    for _ in range(2000):
        turn = tasks.question(rng).turns[0]
        assert answers.setdefault(turn.user, turn.answer) == turn.answer
    assert answers["What is the capital of Peru?"] == "The capital of Peru is Lima."
    assert answers["What comes after Sunday?"] == "Monday."


def test_words_are_distinct() -> None:
    listed = [*words.WORDS, *words.PROPERTIES]
    assert len(set(listed)) == len(listed)
    greetings = [user for users, _ in words.SMALL_TALK for user in users]
    assert len(set(greetings)) == len(greetings)


def test_the_seed_decides_everything() -> None:
    for name, maker in tasks.MAKERS.items():
        assert maker(Random(5)) == maker(Random(5)), name
    assert set(tasks.WEIGHTS) == set(tasks.MAKERS)
    assert set(tasks.DRILLS) <= {*tasks.MAKERS, "reciting"}


def test_repeating_says_it_as_often_as_asked() -> None:
    for seed in range(10):
        turn = tasks.repeating(Random(seed)).turns[0]
        match = re.fullmatch(r"Say (\d) times: (.*)", turn.user)
        assert match is not None
        times, text = match.groups()
        assert turn.answer.split(", ") == [text] * int(times)
