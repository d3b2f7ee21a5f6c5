"""Conversations become the tokens that serving would give the model, with the answers marked.

Goal: a prompt of the library followed by the marked answer is the training text.
Method: for every task and mode, the prompt has to begin the whole, and what is marked right
after it has to decode to reasoning and answer.
"""

from random import Random

import pytest
from tokenizers import Tokenizer

from scripts.tiny_model import tasks
from scripts.tiny_model.prompts import training_exchanges
from tests.scripts.tiny_model import tokenised


@pytest.mark.parametrize("thinking", [False, True])
@pytest.mark.parametrize("task", list(tasks.MAKERS))
def test_prompt_then_answer_is_the_whole(task: str, thinking: bool) -> None:
    codec = tokenised.codec()
    tokenizer = Tokenizer.from_file(str(tokenised.directory() / "tokenizer.json"))
    whole = tasks.MAKERS[task](Random(6))
    exchange = tasks.Exchange(whole.turns[:1], whole.tools, whole.wants_json)
    turn = exchange.turns[0]
    prompt = codec.prompt([exchange], thinking=thinking, num_messages=1)
    encoded = codec.encode([exchange], thinking=thinking)
    assert encoded.token_ids[: len(prompt)].tolist() == prompt
    assert not encoded.said[: len(prompt)].any()
    end = codec.ends(encoded)[0]
    assert encoded.said[len(prompt) : end].all()
    text = tokenizer.decode(
        encoded.token_ids[len(prompt) : end].tolist(), skip_special_tokens=False
    )
    assert text.endswith("<｜end▁of▁sentence｜>")
    if thinking:
        assert text.startswith(f"{turn.reasoning}</think>")
    if turn.call is None:
        assert text.removeprefix(f"{turn.reasoning}</think>").startswith(turn.answer)
    else:
        assert f'invoke name="{turn.call[0]}"' in text


def test_earlier_turns_are_said_without_reasoning() -> None:
    codec = tokenised.codec()
    exchange = tasks.recall(Random(7), num_pairs=3, num_queries=3)
    encoded = codec.encode([exchange], thinking=True)
    runs = [int(a) for a in encoded.said.astype(int)[1:] - encoded.said.astype(int)[:-1]].count(1)
    assert runs == 3
    assert len(codec.ends(encoded)) == 3


def test_tools_and_json_mode_stand_alone() -> None:
    for seed in range(60):
        exchanges = training_exchanges(Random(seed), tasks.MAKERS, tasks.WEIGHTS)
        special = [e for e in exchanges if e.tools or e.wants_json]
        assert not special or len(exchanges) == 1
