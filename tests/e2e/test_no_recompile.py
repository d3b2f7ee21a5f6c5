"""Goal: after start-up nothing is compiled any more, whatever shapes and settings requests have.

Method: the runtime's own compilation events are counted while prompts from one token to several
chunks, in batches from one to more than fit, are generated with every kind of sampling.
"""

from collections.abc import Iterator

import jax
import pytest

from serving import LLM, SamplingParams
from serving.core.request import ConstraintKind, OutputConstraint
from tests.e2e.pictures import chat, picture

COMPILED = "/jax/core/compile/backend_compile_duration"


@pytest.fixture
def compilations() -> Iterator[list[str]]:
    """Grows by one entry per compilation."""
    seen: list[str] = []

    def listen(event: str, duration_secs: float, **kwargs: str | int) -> None:
        if event == COMPILED:
            seen.append(event)

    jax.monitoring.register_event_duration_secs_listener(listen)
    yield seen
    jax.monitoring.unregister_event_duration_listener(listen)


def test_nothing_compiles_after_start_up(llm: LLM, compilations: list[str]) -> None:
    greedy = SamplingParams(max_tokens=4, temperature=0, ignore_eos=True)
    sampled = SamplingParams(max_tokens=9, top_k=5, top_p=0.9, seed=3, ignore_eos=True)
    for lengths in ([1], [63, 64, 65], [300, 2], [7] * 12):
        prompts = [[3 + length % 9] * length for length in lengths]
        for params in (greedy, sampled):
            assert len(llm.generate(prompts, params)) == len(prompts)
    assert compilations == []


def test_nothing_compiles_for_controls(llm: LLM, compilations: list[str]) -> None:
    reported = SamplingParams(max_tokens=3, logprobs=3, prompt_logprobs=2)
    bias = tuple((token, 1.0) for token in range(300))
    changed = SamplingParams(max_tokens=3, min_p=0.1, presence_penalty=1.0, logit_bias=bias)
    prompts = [list(range(3, 303)), [4] * 9]
    assert len(llm.generate(prompts, [reported, changed])) == 2
    form = OutputConstraint(ConstraintKind.REGEX, "[a-c]{4}")
    assert len(llm.generate(prompts, SamplingParams(max_tokens=6), constraint=form)) == 2
    assert compilations == []


def test_nothing_compiles_for_images_of_any_size(llm: LLM, compilations: list[str]) -> None:
    greedy = SamplingParams(max_tokens=2, temperature=0, ignore_eos=True)
    for sizes in ([(1, 1)], [(60, 40), (9, 90)], [(400, 300)], [(20, 2000)]):
        messages = chat(*(picture(3, width, height) for width, height in sizes))
        assert len(llm.generate([messages], greedy)) == 1
    assert compilations == []


def test_the_listener_sees_compilations(compilations: list[str]) -> None:
    jax.jit(lambda x: x * 17 + 4)(3.0).block_until_ready()
    assert compilations
