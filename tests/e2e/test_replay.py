"""Goal: prompts longer than `engine.replay_keep` are answered by a server that replays their tails,
and the answers depend on nothing but the prompt.

Method: a server with a small tail; the same long prompt alone, again behind its kept prefix, and in
company; the golden continuation for a prompt that is all tail.
"""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from serving.frontend.text import TextCodec
from tests.e2e.server import SMALL_ENGINE, ServerProcess

KEEP = 30
"""The model's window has 8 tokens; a step of 64 leaves tokens out in this size."""

OPTIONS = ("engine.replay=compact", f"engine.replay_keep={KEEP}", "model.cache_format=noq")
"""A cache that rounds nothing, so that no value near a rounding midpoint can flip."""


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    changes = [word for option in OPTIONS for word in ("--set", option)]
    running = ServerProcess((*SMALL_ENGINE, *changes))
    yield running
    assert running.stop() == 0


def ask(server: ServerProcess, prompt: list[int], **more: Any) -> tuple[list[str], int]:
    """Texts of the greedy tokens after a prompt, and how many of its own were cached."""
    body = {"model": "tiny-v41", "prompt": prompt, "max_tokens": 10, "temperature": 0, **more}
    body |= {"ignore_eos": True, "logprobs": 0}
    answer = httpx.post(f"{server.url}/v1/completions", json=body, timeout=120).json()
    usage = answer["usage"]
    assert usage["prompt_tokens"] == len(prompt)
    (choice,) = answer["choices"]
    return choice["logprobs"]["tokens"], usage["prompt_tokens_details"]["cached_tokens"]


def test_long_prompts_are_answered_alike_however_they_are_computed(
    server: ServerProcess, rng: np.random.Generator
) -> None:
    prompts = [rng.integers(3, 300, length).tolist() for length in (KEEP + 1, 129, 300, 300)]
    alone = [ask(server, prompt) for prompt in prompts]
    assert [cached for _, cached in alone] == [0] * 4
    again = [ask(server, prompt) for prompt in prompts]
    assert [tokens for tokens, _ in again] == [tokens for tokens, _ in alone]
    # The whole blocks of each, but for its last token.
    assert [cached for _, cached in again] == [0, 128, 256, 256]
    with ThreadPoolExecutor(8) as pool:
        calls = [
            pool.submit(ask, server, prompt, cache_salt=salt)
            for salt in ("one", "other")
            for prompt in prompts
        ]
        company = [call.result() for call in calls]
    assert [tokens for tokens, _ in company] == [tokens for tokens, _ in alone * 2]
    assert len({tuple(tokens) for tokens, _ in alone}) == 4


def test_a_prompt_that_is_all_tail_is_answered_exactly(server: ServerProcess, golden: Path) -> None:
    data = np.load(golden / "greedy.npz")
    prompt, expected = data["prompt"].tolist(), data["tokens_noq"][:10].tolist()
    assert len(prompt) <= KEEP
    tokens, _ = ask(server, prompt)
    codec = TextCodec.load(golden / "tiny-v41")
    assert "".join(tokens) == codec.decode(expected)
