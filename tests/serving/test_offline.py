"""Goal: offline generation answers every prompt in order with what the engine sampled, and refuses
a bad row, with its line, before generating anything.

Method: an LLM around a scripted executor; prompt files written for each case.
"""

import json
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from serving.config import DEFAULT_MODEL_DIR, ServingConfig
from serving.core.grammar import DSML, GrammarCompiler
from serving.core.request import (
    ConstraintKind,
    OutputConstraint,
    RequestError,
    SamplingParams,
)
from serving.frontend.text import TextCodec
from serving.loading import LoadedModel
from serving.offline import LLM, RowError, read_rows
from serving.offline_outputs import Output, write_rows
from sharding.config_file import override
from tests.serving.running_service import FACTS, GRAMMARS, MODEL_DIR, SMALL
from tests.serving.scripted import ScriptedExecutor

CODEC = TextCodec.load(MODEL_DIR)
LETTERS = [CODEC.encode_text(letter)[0] for letter in "abcdefghijklmnopqrstuvwxyz"]


def make_llm(executor: ScriptedExecutor | None = None) -> LLM:
    executor = executor or ScriptedExecutor(lambda position: LETTERS[position % 26])
    model = LoadedModel(executor, FACTS, CODEC, GRAMMARS)
    return LLM.of_model(override(ServingConfig(), SMALL), model)


def letters(start: int, count: int) -> str:
    return "".join("abcdefghijklmnopqrstuvwxyz"[(start + i) % 26] for i in range(count))


def test_outputs_are_in_the_order_of_the_prompts() -> None:
    # More prompts than run at once, and later ones end before earlier ones.
    prompts = [[3] * (1 + n % 5) for n in range(40)]
    params = [SamplingParams(max_tokens=41 - n) for n in range(40)]
    outputs = make_llm().generate(prompts, params)
    for n, output in enumerate(outputs):
        start = len(prompts[n])
        assert output.text == letters(start, 41 - n)
        assert output.token_ids == [LETTERS[(start + i) % 26] for i in range(41 - n)]
        assert (output.finish_reason, output.prompt_tokens) == ("length", start)


def test_prompts_of_a_smaller_priority_come_first() -> None:
    executor = ScriptedExecutor(lambda position: LETTERS[position % 26])
    # More than run at once, so some have to wait.
    prompts = [[3] * 9 for _ in range(40)]
    params = SamplingParams(max_tokens=3)
    make_llm(executor).generate(prompts, params, priorities=[2, *[0] * 39])
    firsts: dict[int, int] = {}
    for plan in executor.plans:
        for sequence_id in plan.sequence_ids.tolist():
            firsts.setdefault(sequence_id, plan.step_index)
    assert all(firsts[other] < firsts[0] for other in range(1, 30))
    with pytest.raises(RequestError, match="1 priorities for 40 prompts"):
        make_llm().generate(prompts, params, priorities=[1])
    with pytest.raises(RequestError, match="prompt 0: priority is 99999"):
        make_llm().generate([[3]], params, priorities=[99999])


def test_text_ids_and_messages_are_prompts() -> None:
    llm = make_llm()
    params = SamplingParams(max_tokens=2)
    chat = [{"role": "user", "content": "Hello"}]
    text, ids, messages = llm.generate(["ab", [3, 4, 5], chat], params)
    assert text.prompt_tokens == len(CODEC.encode_text("ab")) and ids.prompt_tokens == 3
    assert messages.prompt_tokens > 5
    assert [output.text for output in llm.generate("ab", params)] == [text.text]
    assert [output.text for output in llm.generate([3, 4, 5], params)] == [ids.text]
    assert llm.generate([], params) == []
    array = np.array([3, 4, 5], np.int32)
    assert llm.generate(array, params) == [ids] == llm.generate([array], params)
    assert llm.generate(chat, params) == [messages]


def test_end_token_stops_and_is_in_the_ids_only() -> None:
    llm = make_llm(ScriptedExecutor(lambda position: 1 if position == 4 else LETTERS[position]))
    (output,) = llm.generate([3, 3], SamplingParams(max_tokens=9))
    assert (output.text, output.finish_reason) == ("cd", "stop")
    assert output.token_ids == [LETTERS[2], LETTERS[3], 1]
    (ignored,) = llm.generate([3, 3], SamplingParams(max_tokens=4, ignore_eos=True))
    assert (ignored.text, ignored.finish_reason) == ("cd<｜end▁of▁sentence｜>f", "length")


@pytest.mark.parametrize("stop", ["fg", ["zzz", "fg"]])
def test_stop_texts_end_an_output(stop: str | list[str]) -> None:
    executor = ScriptedExecutor(lambda position: LETTERS[position % 26])
    llm = make_llm(executor)
    params = SamplingParams(max_tokens=200, logprobs=0)
    first, second = llm.generate([[3, 3], [3] * 10], params, stop=stop)
    assert (first.text, first.finish_reason) == ("cde", "stop")
    assert first.token_ids == LETTERS[2:7], "up to the token that completes the stop"
    assert first.logprobs is not None and len(first.logprobs) == 5
    assert second.text == letters(10, 21) and len(second.token_ids) == 23
    # It ends when the text does, but for the steps in flight.
    assert len(executor.plans) < 40
    (whole,) = llm.generate([[3, 3]], SamplingParams(max_tokens=4), stop="fg")
    assert (whole.text, whole.finish_reason) == ("cdef", "length"), "half of a stop is text"
    with pytest.raises(RequestError, match="stop is ''"):
        llm.generate([[3, 3]], params, stop="")


def test_a_stop_and_the_end_of_the_sequence_in_one() -> None:
    llm = make_llm(ScriptedExecutor(lambda position: 1 if position == 4 else LETTERS[position]))
    (output,) = llm.generate([3, 3], SamplingParams(max_tokens=9), stop=["x"])
    assert (output.text, output.finish_reason) == ("cd", "stop")
    assert output.token_ids == [LETTERS[2], LETTERS[3], 1]
    (output,) = llm.generate([3, 3], SamplingParams(max_tokens=2), stop=["d"])
    assert (output.text, output.finish_reason) == ("c", "stop")


def test_samples_and_rows_have_stops_too(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        {"prompt_token_ids": [3, 3], "max_tokens": 30, "stop": ["ef"], "n": 3},
        {"prompt_token_ids": [3, 3], "max_tokens": 5},
    )
    outputs = make_llm().generate_rows(read_rows(path), source="f")
    assert [output.text for output in outputs] == ["cd"] * 3 + ["cdefg"]
    assert [len(output.token_ids) for output in outputs] == [4] * 3 + [5]


def test_bad_prompt_refuses_all_and_leaves_the_engine_usable() -> None:
    executor = ScriptedExecutor(lambda position: LETTERS[0])
    llm = make_llm(executor)
    with pytest.raises(RequestError, match="prompt 1: .*999"):
        llm.generate([[3], [999]])
    with pytest.raises(RequestError, match="prompt 1: .*no tokens"):
        llm.generate([[3], []])
    with pytest.raises(RequestError, match="prompt 0: .*600 tokens"):
        llm.generate([[3] * 600])
    with pytest.raises(RequestError, match="prompt 0: .*surrogates"):
        llm.generate(["\ud800"])
    with pytest.raises(RequestError, match="2 sampling_params for 1 prompts"):
        llm.generate([[3]], [SamplingParams()] * 2)
    assert executor.plans == []
    assert len(llm.generate([[3]], SamplingParams(max_tokens=2))[0].token_ids) == 2


def test_failing_step_reaches_the_caller() -> None:
    llm = make_llm(ScriptedExecutor(lambda position: LETTERS[0], failing_step=2))
    with pytest.raises(RuntimeError, match="the device is on fire"):
        llm.generate([[3], [4]], SamplingParams(max_tokens=9))


def test_every_output_has_the_wanted_form() -> None:
    constraint = OutputConstraint(ConstraintKind.REGEX, "x[0-9]{2}", param="constraint")
    outputs = make_llm().generate(["a", "bcd"], SamplingParams(max_tokens=9), constraint=constraint)
    for output in outputs:
        assert re.fullmatch("x[0-9]{2}", output.text) and output.finish_reason == "stop"


def test_a_form_holds_after_the_thinking_that_a_prompt_begins() -> None:
    end, think = CODEC.encode_text("</think>")[0], CODEC.encode_text("<think>")[0]
    llm = make_llm(ScriptedExecutor(lambda position: end if position == 4 else LETTERS[position]))
    constraint = OutputConstraint(ConstraintKind.REGEX, "[0-9]{2}")
    (output,) = llm.generate([3, think], SamplingParams(max_tokens=9), constraint=constraint)
    assert re.fullmatch("cd</think>[0-9]{2}", output.text)


def test_a_form_that_cannot_be_is_refused() -> None:
    llm = make_llm()
    bad = OutputConstraint(ConstraintKind.REGEX, "[a-", param="constraint")
    with pytest.raises(RequestError, match="prompt 0: .*unclosed") as caught:
        llm.generate(["a"], constraint=bad)
    assert caught.value.param == "constraint"
    assert llm.generate([[3]], SamplingParams(max_tokens=2))[0].finish_reason == "length"


def test_log_probabilities_of_output_and_prompt() -> None:
    params = [SamplingParams(max_tokens=3, logprobs=1, prompt_logprobs=0), SamplingParams()]
    reported, plain = make_llm().generate([[3, 4, 5], [3]], params)
    assert plain.logprobs is None and plain.prompt_logprobs is None
    assert reported.logprobs is not None and reported.prompt_logprobs is not None
    expected = [-token / 100 for token in reported.token_ids]
    assert [entry.logprob for entry in reported.logprobs] == pytest.approx(expected)
    assert [entry.top[0][0] for entry in reported.logprobs] == reported.token_ids
    first, *others = reported.prompt_logprobs
    # The executor makes up that of the token after token t: it stands for t + 1.
    assert first is None and [e and e.logprob for e in others] == pytest.approx([-0.04, -0.05])


def test_samples_of_a_prompt_follow_one_another() -> None:
    executor = ScriptedExecutor(lambda position: LETTERS[position % 26])
    params = SamplingParams(max_tokens=2, seed=5, prompt_logprobs=0)
    outputs = make_llm(executor).generate([[3] * 300, [4]], params, n=3)
    assert [output.text for output in outputs] == [letters(300, 2)] * 3 + [letters(1, 2)] * 3
    assert [output.sample for output in outputs] == [0, 1, 2] * 2
    assert [output.prompt_tokens for output in outputs] == [300] * 3 + [1] * 3
    assert [output.cached_tokens for output in outputs] == [0, 256, 256, 0, 0, 0]
    has_prompt = [output.prompt_logprobs is not None for output in outputs]
    assert has_prompt == [True, False, False] * 2
    seeds = {seed for plan in executor.plans for seed in plan.seeds.tolist()}
    assert len(seeds) == 3 and 5 in seeds
    assert make_llm().generate([[4]], SamplingParams(max_tokens=2))[0].sample is None
    for n in (0, 65):
        with pytest.raises(RequestError, match=f"prompt 0: n is {n}; expected 1 to 64") as caught:
            make_llm().generate([[4]], params, n=n)
        assert caught.value.param == "n"


def test_rows_have_samples_too(tmp_path: Path) -> None:
    path = write(tmp_path, {"prompt_token_ids": [3, 4], "n": 2, "max_tokens": 1}, {"prompt": "a"})
    outputs = make_llm().generate_rows(read_rows(path), source="prompts.jsonl")
    assert [output.sample for output in outputs] == [0, 1, None]
    write_rows(tmp_path / "out.jsonl", outputs)
    written = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert [row.get("sample") for row in written] == [0, 1, None]
    bad = write(tmp_path, {"prompt": "a", "n": 0})
    with pytest.raises(RowError, match=r"prompts.jsonl:1: n is 0; expected 1 to 64"):
        make_llm().generate_rows(read_rows(bad), source="prompts.jsonl")


def write(tmp_path: Path, *rows: object) -> Path:
    path = tmp_path / "prompts.jsonl"
    lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
    path.write_text("\n".join(lines) + "\n")
    return path


def test_file_to_file(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        {"prompt": "ab", "max_tokens": 3},
        "",
        {"prompt_token_ids": [3, 4, 5], "max_tokens": 2, "temperature": 0, "ignore_eos": True},
        {"messages": [{"role": "user", "content": "x"}], "max_tokens": 1},
    )
    out = tmp_path / "out.jsonl"
    rows = read_rows(path)
    assert [row.line for row in rows] == [1, 3, 4]
    write_rows(out, make_llm().generate_rows(rows, source="prompts.jsonl"))
    written = [json.loads(line) for line in out.read_text().splitlines()]
    start = len(CODEC.encode_text("ab"))
    assert written[0] == {
        "text": letters(start, 3),
        "token_ids": [LETTERS[(start + i) % 26] for i in range(3)],
        "finish_reason": "length",
        "prompt_tokens": start,
        "cached_tokens": 0,
    }
    assert [len(row["token_ids"]) for row in written] == [3, 2, 1]


def test_thinking_of_a_row_changes_its_prompt(tmp_path: Path) -> None:
    chat = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 1}
    path = write(tmp_path, chat, chat | {"thinking": {"type": "disabled"}})
    thinking, plain = make_llm().generate_rows(read_rows(path), source="f")
    assert thinking.prompt_tokens > plain.prompt_tokens


def test_sampling_fields_reach_the_engine(tmp_path: Path) -> None:
    executor = ScriptedExecutor(lambda position: LETTERS[0])
    path = write(
        tmp_path,
        {"prompt": "a", "max_tokens": 1, "temperature": 0.5, "top_k": 2, "top_p": 0.25, "seed": 6},
    )
    make_llm(executor).generate_rows(read_rows(path), source="f")
    (plan,) = executor.plans
    assert (plan.temperatures[0], plan.top_ks[0]) == (0.5, 2)
    assert (plan.top_ps[0], plan.seeds[0]) == (0.25, 6)


def test_controls_of_rows(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        {"prompt": "ab", "guided_choice": ["yes", "no"], "max_tokens": 9},
        {"prompt_token_ids": [3, 4], "max_tokens": 1, "logprobs": 1, "prompt_logprobs": 0},
        {"prompt": "a", "max_tokens": 1, "min_p": 0.5, "logit_bias": {"7": -1}, "priority": 2},
    )
    executor = ScriptedExecutor(lambda position: LETTERS[position % 26])
    outputs = make_llm(executor).generate_rows(read_rows(path), source="f")
    assert outputs[0].text in ("yes", "no")
    (controls,) = (plan.controls for plan in executor.plans if plan.controls and plan.num_rows == 3)
    assert controls.min_ps[2] == 0.5 and controls.bias_tokens[2, 0] == 7
    write_rows(tmp_path / "out.jsonl", outputs)
    written = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert "logprobs" not in written[0]
    token = outputs[1].token_ids[0]
    assert written[1]["logprobs"] == [
        {"logprob": pytest.approx(-token / 100), "top": [[token, pytest.approx(-token / 100)]]}
    ]
    assert written[1]["prompt_logprobs"] == [None, {"logprob": pytest.approx(-0.04), "top": []}]


def test_calls_of_the_tools_of_a_row_have_their_form(tmp_path: Path) -> None:
    codec = TextCodec.load(DEFAULT_MODEL_DIR)
    text = (DEFAULT_MODEL_DIR / "tokenizer.json").read_text(encoding="utf-8")
    grammars = GrammarCompiler(text, 1024, 1)
    dsml = codec.tokenizer.encode(DSML)[0]
    facts = replace(FACTS, vocab_size=1024, images=None)
    model = LoadedModel(ScriptedExecutor(lambda position: dsml), facts, codec, grammars)
    parameters = {"type": "object", "properties": {"x": {"enum": ["ab"]}}, "required": ["x"]}
    tools = [{"type": "function", "function": {"name": "f", "parameters": parameters}}]
    row = {"messages": [{"role": "user", "content": "a"}], "tools": tools, "max_tokens": 60}
    row["thinking"] = {"type": "disabled"}
    path = write(tmp_path, row, row | {"guided_regex": "a"})
    llm = LLM.of_model(override(ServingConfig(), SMALL), model)
    output = llm.generate_rows(read_rows(path)[:1], source="-")[0]
    head = f'{DSML} calls>\n<{DSML} invoke name="f">\n<{DSML} parameter name="x" string="true">ab</'
    assert output.text.startswith(head)
    with pytest.raises(RowError, match="received guided_regex and tools"):
        llm.generate_rows(read_rows(path), source="-")


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("{", "not valid JSON"),
        ("[1]", "not an object"),
        ({}, "no prompt; expected exactly one of"),
        ({"prompt": "a", "prompt_token_ids": [3]}, "prompt and prompt_token_ids"),
        ({"prompt": "a", "max_token": 3}, "unknown key 'max_token'"),
        ({"prompt": "a", "thinking": {}}, "unknown key 'thinking'"),
        ({"prompt": 3}, "prompt is no text"),
        ({"messages": "x"}, "messages is no list"),
        ({"prompt": ""}, "no tokens"),
        ({"prompt_token_ids": [3, 320]}, "320"),
        ({"prompt_token_ids": [3, 318]}, "318, which stands for an image"),
        ({"prompt_token_ids": [3, "a"]}, "token 1"),
        ({"prompt_token_ids": [3, True]}, "token 1"),
        ({"prompt_token_ids": [3] * 600}, "600 tokens"),
        ({"prompt": "a", "max_tokens": 0}, "max_tokens is 0"),
        ({"prompt": "a", "max_tokens": "5"}, "max_tokens is '5'"),
        ({"prompt": "a", "temperature": 3}, "temperature is 3"),
        ({"prompt": "a", "seed": -1}, "seed is -1"),
        ({"prompt": "a", "priority": 0.5}, "priority is 0.5"),
        ({"prompt": "a", "stop_token_ids": [400]}, "stop_token_ids"),
        ({"prompt": "a", "stop": [""]}, "stop is"),
        ({"prompt": "a", "stop": "b", "guided_regex": "a"}, "stop together with guided_regex"),
        ({"prompt": "a", "logprobs": 21}, "logprobs is 21"),
        ({"prompt": "a", "logit_bias": {"320": 1}}, "320"),
        ({"prompt": "a", "guided_regex": "[a-"}, "unclosed"),
        ({"prompt": "a", "guided_regex": "a", "ignore_eos": True}, "ignore_eos"),
        ({"messages": []}, "(?i)empty"),
        ({"messages": [{"role": "king", "content": "x"}]}, "king"),
        ({"messages": [3]}, "(?i)message"),
    ],
)
def test_bad_row_names_file_and_line(tmp_path: Path, row: object, message: str) -> None:
    executor = ScriptedExecutor(lambda position: LETTERS[0])
    path = write(tmp_path, {"prompt": "fine"}, row)
    with pytest.raises(RowError, match=message) as caught:
        make_llm(executor).generate_rows(read_rows(path), source=str(path))
    assert str(caught.value).startswith(f"{path}:2: ")
    assert executor.plans == []


def test_unreadable_file(tmp_path: Path) -> None:
    with pytest.raises(RowError, match="No such file"):
        read_rows(tmp_path / "none.jsonl")


def test_output_is_a_plain_value() -> None:
    assert Output("a", [1], "stop", 2, 0) == Output("a", [1], "stop", 2, 0)


def test_names_of_the_package_are_lazy() -> None:
    code = (
        "import sys, serving; assert 'jax' not in sys.modules and 'tqdm' not in sys.modules;"
        "from serving import LLM, SamplingParams; assert 'jax' not in sys.modules;"
        "assert SamplingParams(max_tokens=3).max_tokens == 3 and LLM.__name__ == 'LLM'\n"
        "try:\n    serving.nothing\nexcept AttributeError:\n    print('fine')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "fine\n"
