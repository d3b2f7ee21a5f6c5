"""Goal: prompts that leave no room are refused by the name of their field, before they are encoded
where that is possible; limits come out as asked for.

Method: conversations through each request type of deepseek-recipe, at the edges of a small context.
"""

import json
from typing import Any

import deepseek_recipe as recipe
import pytest

from serving.frontend.conversion import check_room, convert, encode, tokens_left
from serving.frontend.errors import ApiError
from tests.serving.frontend.test_protocols import MODEL


def converted(text: str, **changes: object) -> Any:
    messages = [{"role": "user", "content": text}]
    body = {"model": "tiny", "messages": messages, "thinking": {"type": "disabled"}} | changes
    return convert(recipe.ChatCompletionRequest(json.dumps(body)), MODEL)


def test_room_is_what_the_prompt_leaves() -> None:
    conversation = converted("Hello")
    prompt = encode(conversation, MODEL, "messages")
    assert tokens_left(conversation, prompt, MODEL, "messages") == 256 - len(prompt.token_ids)
    asking = converted("Hello", max_tokens=7)
    assert tokens_left(asking, prompt, MODEL, "messages") == 7
    with pytest.raises(recipe.ConversionError):
        tokens_left(converted("Hello", max_tokens=256), prompt, MODEL, "messages")


def test_refusals_name_the_field() -> None:
    with pytest.raises(ApiError, match="has at least 257 tokens") as caught:
        encode(converted("x" * (256 * 21 + 1)), MODEL, "input")
    assert (caught.value.param, caught.value.code) == ("input", "context_length_exceeded")
    long = converted("Hello " * 100)
    prompt = encode(long, MODEL, "input")
    with pytest.raises(ApiError, match=f"has {len(prompt.token_ids)} tokens"):
        tokens_left(long, prompt, MODEL, "input")
    check_room(255, MODEL, "input")
    with pytest.raises(ApiError, match="The input has 256 tokens"):
        check_room(256, MODEL, "input")
