"""Goal: what a request gets does not depend on who shares its steps.

Method: prompts generated alone, then together and in another order, greedy and sampled; with an
unquantised cache the tokens must be the same ones. With `engine.batch_invariant` and the quantised
cache, tokens and log probabilities must be the same bits, also after preemption, with a prefix
that was computed before, and with drafts that are verified in varying numbers.
"""

import dataclasses
import random
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import numpy as np
import pytest

from serving import LLM, SamplingParams
from serving.cluster import make_engine
from serving.config import ServingConfig
from serving.core.request import ConstraintKind, OutputConstraint, Request, TokenLogprob
from serving.engine.engine import EngineStatus, run_step
from serving.loading import LoadedModel, load_model
from sharding.config_file import override
from tests.e2e.server import ServerProcess


def test_alone_equals_in_company(llm: LLM, rng: np.random.Generator) -> None:
    # Lengths around the window, a prefill chunk and a block, and more rows than run at once.
    prompts = [rng.integers(3, 300, length).tolist() for length in (1, 9, 64, 65, 130, 200) * 2]
    params = [
        SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)
        if index < 6
        else SamplingParams(max_tokens=12, temperature=1.0, top_k=20, seed=index, ignore_eos=True)
        for index in range(12)
    ]
    alone = [llm.generate([p], [s])[0].token_ids for p, s in zip(prompts, params, strict=True)]
    together = [output.token_ids for output in llm.generate(prompts, params)]
    order = rng.permutation(12).tolist()
    shuffled = llm.generate([prompts[i] for i in order], [params[i] for i in order])
    assert together == alone
    assert [output.token_ids for output in shuffled] == [alone[i] for i in order]
    assert len({tuple(tokens) for tokens in alone}) == 12


INVARIANT = override(
    ServingConfig(),
    {
        "engine.batch_invariant": True,
        "engine.max_context": 384,
        "engine.num_blocks": 17,
        "engine.prefill_tokens": [32],
        "engine.prefill_rows": 4,
        "engine.decode_rows": [4],
        "engine.prefix_snapshots": 8,
    },
)
DRAFTING = override(INVARIANT, {"engine.has_drafts": True})
FEW_BLOCKS = 6

Outputs = dict[str, tuple[list[int], list[TokenLogprob]]]


@pytest.fixture(scope="module")
def invariant_model() -> LoadedModel:
    return load_model(INVARIANT, lambda line: None)


@pytest.fixture(scope="module")
def drafting_model() -> LoadedModel:
    return load_model(DRAFTING, lambda line: None)


def requests_of(rng: np.random.Generator, has_logprobs: bool) -> list[Request]:
    """Prompts around a tile and a block, two of which begin alike; half of them greedy."""
    long = rng.integers(3, 300, 140).tolist()
    prompts = [rng.integers(3, 300, length).tolist() for length in (1, 15, 33, 124, 127)]
    prompts += [long, [*long[:131], *rng.integers(3, 300, 7).tolist()]]
    return [
        Request(
            str(index),
            tuple(prompt),
            SamplingParams(
                max_tokens=10,
                temperature=float(index % 2),
                top_p=0.9,
                seed=index,
                ignore_eos=True,
                logprobs=3 if has_logprobs and index % 3 else None,
            ),
        )
        for index, prompt in enumerate(prompts)
    ]


class Run:
    """Runs requests on an engine of its own around a model, whose pool may be smaller."""

    def __init__(
        self, config: ServingConfig, model: LoadedModel, num_blocks: int | None = None
    ) -> None:
        options = dataclasses.replace(
            config.engine, num_blocks=num_blocks or config.engine.num_blocks
        )
        self.engine = make_engine(options, model.facts, random.Random(0))
        self._executor, self._grammars = model.executor, model.grammars
        self.num_cached = 0

    def __call__(self, requests: list[Request]) -> Outputs:
        outputs: Outputs = {request.request_id: ([], []) for request in requests}
        for request in requests:
            grammar = None
            if request.constraint is not None:
                assert self._grammars is not None
                grammar = self._grammars.compile(request.constraint)
            self.engine.admit(request, grammar)
        while self.engine.has_work:
            for delta in run_step(self.engine, self._executor):
                tokens, logprobs = outputs[delta.request_id]
                tokens.extend(delta.token_ids)
                logprobs.extend(delta.logprobs)
                self.num_cached += delta.num_cached_tokens
        return outputs

    @property
    def status(self) -> EngineStatus:
        return self.engine.status()


def alone(config: ServingConfig, model: LoadedModel, requests: list[Request]) -> Outputs:
    outputs: Outputs = {}
    for request in requests:
        outputs |= Run(config, model)([request])
    return outputs


@pytest.mark.parametrize("has_drafts", [False, True])
def test_bits_do_not_depend_on_company_or_prefixes(
    has_drafts: bool, request: pytest.FixtureRequest, rng: np.random.Generator
) -> None:
    config = DRAFTING if has_drafts else INVARIANT
    model = request.getfixturevalue("drafting_model" if has_drafts else "invariant_model")
    requests = requests_of(rng, has_logprobs=True)
    expected = alone(config, model, requests)
    assert len({tuple(tokens) for tokens, _ in expected.values()}) == len(requests)
    assert sum(len(logprobs) for _, logprobs in expected.values()) == 40
    together = Run(config, model)
    assert together(requests) == expected
    assert together(requests[::-1]) == expected, "with prefixes of before"
    assert together.num_cached >= 3 * 128
    if has_drafts:
        assert sum(together.status.num_accepted) > 0


def test_bits_do_not_depend_on_preemption(
    invariant_model: LoadedModel, rng: np.random.Generator
) -> None:
    """Prompts that fit side by side, and grow until they do not."""
    sampling = SamplingParams(max_tokens=24, temperature=0, ignore_eos=True, logprobs=1)
    requests = [
        Request(str(length), tuple(rng.integers(3, 300, length).tolist()), sampling)
        for length in (124, 125, 126, 127)
    ]
    crowded = Run(INVARIANT, invariant_model, FEW_BLOCKS)
    assert crowded(requests) == alone(INVARIANT, invariant_model, requests)
    assert crowded.status.num_preemptions > 0


def test_drafts_change_no_token_of_greedy_and_sampled_requests(
    invariant_model: LoadedModel, drafting_model: LoadedModel, rng: np.random.Generator
) -> None:
    requests = requests_of(rng, has_logprobs=False)
    expected = alone(INVARIANT, invariant_model, requests)
    run = Run(DRAFTING, drafting_model)
    assert run(requests) == expected
    status = run.status
    assert 0 < sum(status.num_accepted) < sum(status.num_verified)
    # Lengths of what is verified vary with the times of steps, which change nothing else.
    eager = dataclasses.replace(drafting_model.facts, step_ms={})
    assert Run(DRAFTING, dataclasses.replace(drafting_model, facts=eager))(requests) == expected


def test_drafts_change_no_token_of_constrained_requests(
    invariant_model: LoadedModel, drafting_model: LoadedModel
) -> None:
    """Drawn with a seed too: a draft is accepted if it is what is drawn under the mask."""
    patterns = ("[^q]{1,40}", "([a-f]{3}|[0-9]+-)*x", "[ -~]{20}")
    requests = [
        Request(
            f"{pattern} {temperature}",
            (5, 6, 7),
            SamplingParams(max_tokens=30, temperature=temperature, seed=7),
            constraint=OutputConstraint(ConstraintKind.REGEX, pattern),
        )
        for pattern in patterns
        for temperature in (0.0, 1.0)
    ]
    expected = alone(INVARIANT, invariant_model, requests)
    assert len({tuple(tokens) for tokens, _ in expected.values()}) == len(requests)
    run = Run(DRAFTING, drafting_model)
    assert run(requests) == expected
    assert sum(run.status.num_verified) > 0


def test_bits_over_http_do_not_depend_on_company(rng: np.random.Generator) -> None:
    options = ["batch_invariant=true", "max_context=384", "num_blocks=17", "prefill_tokens=[32]"]
    options += ["prefill_rows=4", "decode_rows=[4]", "prefix_snapshots=8"]
    server = ServerProcess([word for option in options for word in ("--set", f"engine.{option}")])

    def choice(index: int) -> dict[str, object]:
        body = {
            "model": "tiny-v41",
            "prompt": rng.integers(3, 300, 20 + 9 * index).tolist(),
            "max_tokens": 8,
            "temperature": index % 2,
            "seed": index,
            "logprobs": 2,
            "ignore_eos": True,
        }
        return {"url": f"{server.url}/v1/completions", "json": body, "timeout": 60}

    def ask(call: dict[str, Any]) -> object:
        return httpx.post(**call).json()["choices"]

    try:
        calls = [choice(index) for index in range(6)]
        one_by_one = [ask(call) for call in calls]
        with ThreadPoolExecutor(6) as pool:
            assert list(pool.map(ask, calls)) == one_by_one
    finally:
        server.stop()
    assert all(choices[0]["logprobs"]["token_logprobs"] for choices in one_by_one)  # type: ignore
