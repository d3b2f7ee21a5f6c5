"""Goal: fields are read with their types and ranges, and fields that we cannot honour are refused
unless their value has no effect.

Method: good and bad values of each reader side by side.
"""

from pathlib import Path

import pytest

from serving.core.request import ConstraintKind, OutputConstraint, SamplingParams
from serving.frontend import fields
from serving.frontend.errors import ApiError


def test_readers_return_values_and_treat_null_as_absent() -> None:
    body = {"i": 3, "f": 2, "b": True, "n": None}
    assert fields.integer(body, "i") == 3
    assert fields.number(body, "f") == 2.0 and isinstance(fields.number(body, "f"), float)
    assert fields.boolean(body, "b") is True
    assert fields.integer(body, "n") is None and fields.number(body, "x") is None
    assert fields.boolean(body, "n") is False


@pytest.mark.parametrize("reader", [fields.integer, fields.number, fields.boolean])
@pytest.mark.parametrize("value", ["3", [3], {"a": 1}])
def test_readers_refuse_other_types(reader: object, value: object) -> None:
    with pytest.raises(ApiError) as caught:
        reader({"name": value}, "name")  # type: ignore[operator]
    assert caught.value.param == "name" and "expected" in caught.value.detail


def test_truth_values_are_no_numbers() -> None:
    for reader in (fields.integer, fields.number):
        with pytest.raises(ApiError):
            reader({"n": True}, "n")
    with pytest.raises(ApiError):
        fields.integer({"n": 1.0}, "n")
    with pytest.raises(ApiError):
        fields.boolean({"n": 1}, "n")


def test_stop_strings() -> None:
    assert fields.stop_strings({}) == ()
    assert fields.stop_strings({"stop": "x"}) == ("x",)
    assert fields.stop_strings({"stop": ["x", "y"]}) == ("x", "y")
    assert len(fields.stop_strings({"stop": ["x"] * 16})) == 16
    for bad in ("", [""], ["x"] * 17, 3, ["x", 3], {"a": "b"}):
        with pytest.raises(ApiError) as caught:
            fields.stop_strings({"stop": bad})
        assert caught.value.param == "stop"


def test_include_usage() -> None:
    wanted = {"stream_options": {"include_usage": True}}
    assert fields.include_usage(wanted, True) is True
    assert fields.include_usage({"stream_options": {}}, True) is False
    assert fields.include_usage({}, False) is False
    for body, is_streamed in ((wanted, False), ({"stream_options": 1}, True)):
        with pytest.raises(ApiError) as caught:
            fields.include_usage(body, is_streamed)
        assert caught.value.param == "stream_options"


def test_sampling_params_from_a_body() -> None:
    body = {"temperature": 0, "top_p": 0.5, "top_k": 4, "stop_token_ids": [7], "ignore_eos": True}
    assert fields.sampling_params(body, max_tokens=9, vocab_size=8, seed=3) == SamplingParams(
        max_tokens=9,
        temperature=0.0,
        top_k=4,
        top_p=0.5,
        seed=3,
        stop_token_ids=(7,),
        ignore_eos=True,
    )
    default = fields.sampling_params({"top_k": -1}, max_tokens=9, vocab_size=8, seed=None)
    assert default == SamplingParams(max_tokens=9)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"temperature": 2.1}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"top_k": -2}, "top_k"),
        ({"stop_token_ids": [8]}, "stop_token_ids"),
        ({"stop_token_ids": [True]}, "stop_token_ids"),
        ({"stop_token_ids": 3}, "stop_token_ids"),
        ({"ignore_eos": "no"}, "ignore_eos"),
    ],
)
def test_bad_sampling_params(body: dict[str, object], param: str) -> None:
    with pytest.raises(ApiError) as caught:
        fields.sampling_params(body, max_tokens=1, vocab_size=8, seed=None)
    assert (caught.value.status, caught.value.param) == (400, param)


@pytest.mark.parametrize(
    ("name", "neutral", "asking"),
    [
        ("min_tokens", 0, 1),
        ("prompt_logprobs", None, 2),
        ("suffix", "", "end"),
        ("functions", [], [{"name": "f"}]),
        ("function_call", "none", "auto"),
        ("audio", None, {}),
        ("prediction", None, {}),
        ("web_search_options", None, {}),
        ("modalities", ["text"], ["text", "audio"]),
    ],
)
def test_unsupported_fields(name: str, neutral: object, asking: object) -> None:
    fields.refuse_unsupported({name: neutral, "user": "anybody"}, fields.CHAT_NEUTRAL)
    with pytest.raises(ApiError) as caught:
        fields.refuse_unsupported({name: asking}, fields.CHAT_NEUTRAL)
    assert (caught.value.status, caught.value.param) == (400, name)


def test_num_samples_is_n_and_best_of_can_only_agree() -> None:
    for body, expected in (({}, 1), ({"n": None}, 1), ({"n": 64}, 64), ({"n": 3, "best_of": 3}, 3)):
        assert fields.num_samples(body) == expected
    for body, param in (
        ({"n": 0}, "n"),
        ({"n": 65}, "n"),
        ({"n": 2.0}, "n"),
        ({"n": True}, "n"),
        ({"best_of": 2}, "best_of"),
        ({"n": 3, "best_of": 1}, "best_of"),
    ):
        with pytest.raises(ApiError) as caught:
            fields.num_samples(body)
        assert (caught.value.status, caught.value.param) == (400, param)


def test_zero_is_not_false() -> None:
    with pytest.raises(ApiError):
        fields.refuse_unsupported({"min_tokens": False}, fields.CHAT_NEUTRAL)


def test_controls_from_a_body() -> None:
    body = {
        "min_p": 0.25,
        "repetition_penalty": 1.5,
        "presence_penalty": -2,
        "frequency_penalty": 0.5,
        "logit_bias": {"7": -100, "0": 2.5},
    }
    found = fields.sampling_params(
        body, max_tokens=9, vocab_size=8, seed=None, logprobs=3, prompt_logprobs=0
    )
    assert found == SamplingParams(
        max_tokens=9,
        min_p=0.25,
        repetition_penalty=1.5,
        presence_penalty=-2.0,
        frequency_penalty=0.5,
        logit_bias=((7, -100.0), (0, 2.5)),
        logprobs=3,
        prompt_logprobs=0,
    )


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"min_p": 1.5}, "min_p"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"presence_penalty": 2.1}, "presence_penalty"),
        ({"frequency_penalty": "much"}, "frequency_penalty"),
        ({"logit_bias": [3]}, "logit_bias"),
        ({"logit_bias": {"8": 1}}, "logit_bias"),
        ({"logit_bias": {"-1": 1}}, "logit_bias"),
        ({"logit_bias": {"x": 1}}, "logit_bias"),
        ({"logit_bias": {"3": "x"}}, "logit_bias"),
        ({"logit_bias": {"3": True}}, "logit_bias"),
        ({"logit_bias": {"3": 101}}, "logit_bias"),
        ({"logit_bias": {"3": 1, "03": 1}}, "logit_bias"),
    ],
)
def test_bad_controls(body: dict[str, object], param: str) -> None:
    with pytest.raises(ApiError) as caught:
        fields.sampling_params(body, max_tokens=1, vocab_size=8, seed=None)
    assert (caught.value.status, caught.value.param) == (400, param)


@pytest.mark.parametrize(
    ("body", "kind", "text", "param"),
    [
        ({"guided_json": {"type": "object"}}, "json", '{"type":"object"}', "guided_json"),
        ({"guided_json": "{}"}, "json", "{}", "guided_json"),
        ({"guided_regex": "a+"}, "regex", "a+", "guided_regex"),
        ({"guided_grammar": "root ::= x"}, "grammar", "root ::= x", "guided_grammar"),
        ({"guided_choice": ["a", '"']}, "grammar", 'start: "a" | "\\""', "guided_choice"),
        ({"guided_choice": ["\x7f\n"]}, "grammar", r'start: "\u007f\n"', "guided_choice"),
        ({"structured_outputs": {"regex": "a"}}, "regex", "a", "structured_outputs"),
    ],
)
def test_guides(body: dict[str, object], kind: str, text: str, param: str) -> None:
    expected = OutputConstraint(ConstraintKind(kind), text, True, param)
    assert fields.guided_constraint(body, after_thinking=True) == expected


def test_without_a_guide_there_is_no_constraint() -> None:
    for body in ({}, {"guided_json": None}, {"structured_outputs": {}}):
        assert fields.guided_constraint(body, after_thinking=False) is None


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"guided_json": 3}, "guided_json"),
        ({"guided_regex": ""}, "guided_regex"),
        ({"guided_choice": []}, "guided_choice"),
        ({"guided_choice": ["a", 3]}, "guided_choice"),
        ({"structured_outputs": {"xml": "a"}}, "structured_outputs"),
        ({"structured_outputs": []}, "structured_outputs"),
        ({"structured_outputs": {"regex": "a", "json": {}}}, "structured_outputs"),
        ({"guided_json": {}, "guided_regex": "a"}, "guided_regex"),
    ],
)
def test_bad_guides(body: dict[str, object], param: str) -> None:
    with pytest.raises(ApiError) as caught:
        fields.guided_constraint(body, after_thinking=False)
    assert (caught.value.status, caught.value.param) == (400, param)


@pytest.mark.parametrize(
    ("dialect", "names"),
    [
        ("all", fields.FOREIGN_NEUTRAL),
        ("chats, completions", fields.CHAT_NEUTRAL),
        ("completions", fields.COMPLETIONS_NEUTRAL.keys() - fields.CHAT_NEUTRAL),
        ("Responses", fields.RESPONSES_NEUTRAL),
        ("Messages", fields.MESSAGES_NEUTRAL),
    ],
)
def test_the_readme_names_every_field_that_is_refused(
    dialect: str, names: dict[str, object]
) -> None:
    readme = (Path(fields.__file__).parents[1] / "README.md").read_text(encoding="utf-8")
    (row,) = (line for line in readme.splitlines() if line.startswith(f"  | {dialect} |"))
    refused = row.split("|")[2]
    assert all(f"`{name}`" in refused for name in names), set(names)


def test_forms_of_one_object_are_told_apart() -> None:
    both = {"structured_outputs": {"regex": "a", "choice": ["a"]}}
    with pytest.raises(ApiError, match=r"structured_outputs\.regex and structured_outputs\.choice"):
        fields.guided_constraint(both, after_thinking=False)


@pytest.mark.parametrize("choice", ["required", {"type": "function"}, {"type": "any"}])
def test_a_call_is_not_demanded_of_no_tools(choice: object) -> None:
    for tools in ({}, {"tools": []}, {"tools": None}):
        with pytest.raises(ApiError) as caught:
            fields.check_tool_choice({"tool_choice": choice} | tools)
        assert caught.value.param == "tool_choice"
    fields.check_tool_choice({"tool_choice": choice, "tools": [{}]})
    for harmless in (None, "auto", "none", {"type": "auto"}, {"type": "none"}):
        fields.check_tool_choice({"tool_choice": harmless})


@pytest.mark.parametrize(
    ("neutral_values", "refused"),
    [
        (fields.CHAT_NEUTRAL, ("text", "output_format", "output_config")),
        (fields.COMPLETIONS_NEUTRAL, ("response_format", "text", "output_format", "output_config")),
        (fields.RESPONSES_NEUTRAL, ("response_format", "output_format", "output_config")),
        (fields.MESSAGES_NEUTRAL, ("response_format", "text")),
    ],
)
def test_forms_of_other_dialects_are_refused(
    neutral_values: dict[str, tuple[object, ...]], refused: tuple[str, ...]
) -> None:
    for name in refused:
        fields.refuse_unsupported({name: None}, neutral_values)
        with pytest.raises(ApiError) as caught:
            fields.refuse_unsupported({name: {"type": "json_object"}}, neutral_values)
        assert caught.value.param == name
    fields.refuse_unsupported({"tools": [], "tool_choice": "auto"}, neutral_values)
    fields.refuse_unsupported({"response_format": {"type": "text"}}, neutral_values)
