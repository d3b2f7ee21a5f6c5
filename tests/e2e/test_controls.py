"""Goal: with the real model, constrained outputs have their form, controls do what their names say,
log probabilities are those of the model, and nobody else's tokens change by any of it.

Method: offline generation with the golden checkpoint, against its golden logits and greedy tokens.
"""

import json
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from serving import LLM, SamplingParams
from serving.core.request import ConstraintKind, OutputConstraint

GREEDY = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)
REGEX = OutputConstraint(ConstraintKind.REGEX, "[a-f]{3}-[0-9]{2,9}")


@pytest.fixture(scope="module")
def data(golden: Path) -> dict[str, np.ndarray]:
    return dict(np.load(golden / "greedy.npz")) | dict(np.load(golden / "forward.npz"))


def test_outputs_have_their_form(llm: LLM) -> None:
    schema = {
        "type": "object",
        "properties": {"ok": {"type": "boolean"}, "kind": {"enum": ["ab", "cd"]}},
        "required": ["ok", "kind"],
        "additionalProperties": False,
    }
    as_json = OutputConstraint(ConstraintKind.JSON, json.dumps(schema))
    for seed in range(2):
        hot = SamplingParams(max_tokens=300, temperature=1.5, seed=seed)
        (output,) = llm.generate("x", hot, constraint=as_json)
        found = json.loads(output.text)
        assert found.keys() == {"ok", "kind"} and found["kind"] in ("ab", "cd")
        assert output.finish_reason == "stop"
        (output,) = llm.generate("x", hot, constraint=REGEX)
        assert re.fullmatch(REGEX.text, output.text)


def test_a_constrained_output_is_the_same_in_any_company(llm: LLM) -> None:
    hot = SamplingParams(max_tokens=60, temperature=1.0, seed=9)
    (alone,) = llm.generate("abc", hot, constraint=REGEX)
    together = llm.generate(["abc", "q", "abc"], hot, constraint=REGEX)
    assert together[0].text == together[2].text == alone.text


def test_others_are_not_disturbed(llm: LLM, data: dict[str, np.ndarray]) -> None:
    ids = data["ids_24"].tolist()
    first = int(data["tokens_noq"][0])
    params = [
        GREEDY,
        replace(GREEDY, logit_bias=((first, -100.0),)),
        replace(GREEDY, repetition_penalty=2.0, frequency_penalty=2.0),
        replace(GREEDY, temperature=1.0, seed=3, min_p=1.0),
    ]
    plain, biased, penalised, floored = llm.generate([ids] * 4, params)
    assert plain.token_ids == data["tokens_noq"][:12].tolist()
    assert first not in biased.token_ids
    assert len(set(penalised.token_ids)) >= len(set(plain.token_ids))
    assert floored.token_ids == plain.token_ids, "only the best token reaches the floor"


def test_penalties_spread_the_output_over_more_tokens(llm: LLM) -> None:
    # All but four tokens are out of reach, and each use costs more than they differ by.
    bias = tuple((token, 50.0 + token / 10) for token in (70, 71, 72, 73))
    params = replace(GREEDY, max_tokens=4, logit_bias=bias, presence_penalty=2.0)
    twice = replace(params, max_tokens=8, frequency_penalty=2.0)
    (plain,) = llm.generate("x", replace(params, presence_penalty=0.0))
    (once,) = llm.generate("x", twice)
    assert set(plain.token_ids) <= {70, 71, 72, 73}
    assert len(set(once.token_ids)) > len(set(plain.token_ids))


def test_log_probabilities(llm: LLM, data: dict[str, np.ndarray]) -> None:
    ids = data["ids_130"].tolist()
    logits = data["logits_noq_130"].astype(np.float64)
    expected = logits - np.log(np.exp(logits - logits.max(1, keepdims=True)).sum(1, keepdims=True))
    expected -= logits.max(1, keepdims=True)
    params = replace(GREEDY, max_tokens=2, logprobs=20, prompt_logprobs=3)
    (output,) = llm.generate([ids], params)
    assert output.logprobs is not None and output.prompt_logprobs is not None
    assert output.prompt_logprobs[0] is None and len(output.prompt_logprobs) == 130
    for position, entry in enumerate(output.prompt_logprobs[1:], 1):
        assert entry is not None and len(entry.top) == 3
        row = expected[position - 1]
        assert entry.logprob == pytest.approx(row[ids[position]], abs=1e-4)
        assert entry.top[0][1] == pytest.approx(row.max(), abs=1e-4)
    found = output.logprobs[0]
    assert found.top[0] == (output.token_ids[0], found.logprob)
    assert found.logprob == pytest.approx(expected[-1].max(), abs=1e-4)
    assert [value for _, value in found.top] == pytest.approx(
        np.sort(expected[-1])[::-1][:20].tolist(), abs=1e-4
    )
