"""Offline generation: many prompts through the engine of the server, in this process.

    from serving import LLM, SamplingParams

    llm = LLM("path/to/checkpoint")
    for output in llm.generate(["Once upon a time"], SamplingParams(max_tokens=32)):
        ...

A row of a prompt file is a JSON object with one of `prompt` (text), `messages` (chat) and
`prompt_token_ids`, and optional sampling fields under the names of `SamplingParams`. `stop` has
texts that end the output, which has none of them. A field `guided_json`, `guided_regex`,
`guided_choice` or `guided_grammar` gives the output a form, and the `tools` of a chat give one to
their calls. A row with a smaller `priority` is generated first. A row with `n` has that many
outputs, one after another, each on a line of its own.
"""

import contextlib
import operator
import random
import weakref
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import deepseek_recipe as recipe
import numpy as np
from tqdm import tqdm

from serving.cluster import make_engine, offload_limits
from serving.config import COUNT_MAX, ServingConfig, load_config
from serving.core.admission import check_request
from serving.core.forking import fork
from serving.core.grammar import Grammar
from serving.core.request import (
    OutputConstraint,
    Request,
    RequestError,
    SamplingParams,
)
from serving.engine.engine import Engine
from serving.engine.step_times import TimedExecutor
from serving.frontend import fields
from serving.frontend.conversion import constraint_of
from serving.frontend.errors import ApiError, bad_request, decode_body, recipe_errors
from serving.frontend.images import (
    EncodedPrompt,
    ImageReader,
    check_image_parts,
    refuse_placeholders,
)
from serving.frontend.protocols import refuse_stop_strings, sent_schemas
from serving.kv.offload import CachePort
from serving.loading import LoadedModel, load_model
from serving.offline_outputs import Collected, Output
from serving.offline_tiers import OfflineTiers, open_link, run_requests
from serving.transport.driver import SystemClock
from sharding.config_file import override

Prompt = str | Sequence[int] | np.ndarray | Sequence[Mapping[str, Any]]
"""Text, token ids, or the messages of a chat."""

_PROMPT_KEYS = ("prompt", "messages", "prompt_token_ids")
_CHAT_KEYS = ("thinking", "reasoning_effort", "tools")
_SAMPLING_KEYS = tuple(SamplingParams.__dataclass_fields__)
_GUIDE_KEYS = tuple(f"guided_{name}" for name in fields.GUIDES)
_WAITING_MAX = COUNT_MAX
"""Offline every prompt may wait: the caller holds all of them in memory anyway."""


class RowError(ValueError):
    """A row of a prompt file that cannot be used; the message names file and line."""


@dataclass(frozen=True, slots=True)
class Row:
    """One object of a prompt file, and the line it stands on."""

    line: int
    values: dict[str, Any]


@dataclass(frozen=True, slots=True)
class _Wanted:
    """A request, what errors call it, and the texts that end its output."""

    request: Request
    name: str
    stops: tuple[str, ...]


class LLM:
    """A model, loaded and compiled.

    Args:
        model: checkpoint directory; None takes the small one of this repository.
        cache_format: `kvq`, the KV cache quantised, or `noq`.
        config: TOML file with serving options.
        options: changes to the options, such as `{"engine.max_context": 8192}`.

    Raises:
        sharding.config_file.ConfigError: the checkpoint or an option cannot be used.
    """

    def __init__(
        self,
        model: str | Path | None = None,
        *,
        cache_format: str | None = None,
        config: str | Path | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        self._open = contextlib.ExitStack()
        flags = {"model.path": model and str(model), "model.cache_format": cache_format}
        changes = dict(options or {}) | {k: v for k, v in flags.items() if v is not None}
        used = override(load_config(config), changes, source="LLM")
        loaded = load_model(used, lambda line: None)
        cache = None
        if used.kv.is_on:
            assert loaded.facts.kv_form is not None, "loaded without transfers"
            cache = self._open.enter_context(open_link(used.kv, used.cluster, loaded.facts.kv_form))
            # What was computed is written when the process ends, if nobody closes before.
            weakref.finalize(self, self._open.close)
        self._set_up(used, loaded, cache)

    @classmethod
    def of_model(
        cls, config: ServingConfig, model: LoadedModel, cache: CachePort | None = None
    ) -> "LLM":
        """An LLM around a model that is already loaded with `config`.

        `cache` is the way to the KV tiers; None keeps nothing beyond the device.
        """
        llm = cls.__new__(cls)
        llm._open = contextlib.ExitStack()
        llm._set_up(config, model, cache)
        return llm

    def close(self) -> None:
        """Let go of the KV tiers; what is on its way there is written. It generates no more."""
        self._open.close()

    def __enter__(self) -> "LLM":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _set_up(
        self, config: ServingConfig, model: LoadedModel, cache: CachePort | None = None
    ) -> None:
        self._model = model
        self._context_max = config.engine.max_context
        self._images = ImageReader(model.facts.images, config.images)
        self._executor = TimedExecutor(model.executor, SystemClock().now_ns)
        options = replace(config.engine, waiting_max=_WAITING_MAX)
        self._engine = make_engine(options, model.facts, random.Random())
        self._tiers: OfflineTiers | None = None
        if cache is not None:
            assert isinstance(self._engine, Engine), "blocks of several ranks do not move"
            limits, clock = offload_limits(config.kv), SystemClock()
            self._tiers = OfflineTiers(self._engine, self._executor, cache, limits, clock)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        n: int = 1,
        constraint: OutputConstraint | None = None,
        stop: str | Sequence[str] = (),
        priorities: Sequence[int] | None = None,
        progress: bool = False,
    ) -> list[Output]:
        """Generates for each prompt; outputs are in the order of the prompts.

        `sampling_params` is one for all prompts or one each. Each prompt has `n` outputs, one after
        another, of seeds of their own. `constraint` is a form that every
        output must have, after its thinking if the prompt begins that. `stop` has texts that end
        any output, which has none of them. `priorities` has a number for each prompt; who has a
        smaller one is served first. With `progress` a bar is shown.

        Raises:
            RequestError: a prompt can never be served; nothing is generated then.
        """
        many = _as_many(prompts)
        if sampling_params is None or isinstance(sampling_params, SamplingParams):
            sampling_params = [sampling_params or SamplingParams()] * len(many)
        if len(sampling_params) != len(many):
            raise RequestError(
                f"{len(sampling_params)} sampling_params for {len(many)} prompts; expected one "
                "for all or one for each",
                "sampling_params",
            )
        if priorities is None:
            priorities = [0] * len(many)
        if len(priorities) != len(many):
            raise RequestError(
                f"{len(priorities)} priorities for {len(many)} prompts; expected one for each",
                "priorities",
            )
        try:
            stops = _as_stops({"stop": stop if isinstance(stop, str) else list(stop)}, constraint)
        except ApiError as error:
            raise RequestError(str(error), error.param) from None
        wanted: list[_Wanted] = []
        each = zip(many, sampling_params, priorities, strict=True)
        for index, (prompt, sampling, priority) in enumerate(each):
            try:
                encoded = self._encode(prompt)
                request = self._request(str(index), encoded, sampling, constraint, priority)
                wanted += [_Wanted(one, f"prompt {index}", stops) for one in fork(request, n)]
            except (ApiError, RequestError) as error:
                raise RequestError(f"prompt {index}: {error}", error.param) from None
        return self._run(wanted, progress)

    def generate_rows(
        self, rows: Sequence[Row], *, source: str, progress: bool = False
    ) -> list[Output]:
        """Generates for the rows of a prompt file called `source`, in their order.

        A row has as many outputs, one after another, as its `n` says.

        Raises:
            RowError: a row cannot be used; nothing is generated then.
        """
        wanted: list[_Wanted] = []
        for index, row in enumerate(rows):
            name = f"{source}:{row.line}"
            try:
                request = self._request_of(str(index), row.values)
                stops = _as_stops(row.values, request.constraint)
                samples = fork(request, fields.num_samples(row.values))
            except ApiError as error:
                raise RowError(f"{name}: {error}") from None
            wanted += [_Wanted(one, name, stops) for one in samples]
        try:
            return self._run(wanted, progress)
        except RequestError as error:
            raise RowError(str(error)) from None

    def _request_of(self, request_id: str, values: dict[str, Any]) -> Request:
        max_tokens = fields.integer(values, "max_tokens")
        sampling = fields.sampling_params(
            values,
            max_tokens=SamplingParams().max_tokens if max_tokens is None else max_tokens,
            vocab_size=self._model.facts.vocab_size,
            seed=fields.integer(values, "seed"),
            logprobs=fields.integer(values, "logprobs"),
            prompt_logprobs=fields.integer(values, "prompt_logprobs"),
        )
        constraint = fields.guided_constraint(values, after_thinking=False)
        if "prompt" in values:
            prompt = EncodedPrompt(self._encode_text(values["prompt"]))
        elif "messages" in values:
            chat = {key: values[key] for key in _CHAT_KEYS if key in values}
            prompt, converted = self._encode_chat(values["messages"], chat)
            constraint = constraint_of(values, converted, sent_schemas(values))
        else:
            prompt = EncodedPrompt(self._checked_ids(values["prompt_token_ids"]))
        priority = fields.priority(values)
        return self._request(request_id, prompt, sampling, constraint, priority)

    def _request(
        self,
        request_id: str,
        prompt: EncodedPrompt,
        sampling: SamplingParams,
        constraint: OutputConstraint | None,
        priority: int,
    ) -> Request:
        if constraint is not None:
            think = self._model.codec.tokenizer.encode("<think>")
            constraint = replace(constraint, after_thinking=[*prompt.token_ids[-1:]] == think)
        return Request(
            request_id,
            prompt.token_ids,
            sampling,
            images=prompt.images,
            constraint=constraint,
            priority=priority,
        )

    def _encode(self, prompt: Prompt) -> EncodedPrompt:
        """A prompt of any form. Raises ApiError."""
        if isinstance(prompt, str):
            return EncodedPrompt(self._encode_text(prompt))
        if len(prompt) and isinstance(prompt[0], Mapping):
            return self._encode_chat([dict(cast(Any, message)) for message in prompt], {})[0]
        return EncodedPrompt(self._checked_ids(prompt))

    def _encode_text(self, text: str) -> tuple[int, ...]:
        with recipe_errors({"model": "-", "messages": "-"}):
            token_ids = self._model.codec.encode_text(text)
        refuse_placeholders(token_ids, self._model.facts.images, "prompt")
        return token_ids

    def _encode_chat(
        self, chat: list[Any], options: dict[str, Any]
    ) -> tuple[EncodedPrompt, recipe.ConversationRequest]:
        body = {"model": "offline", "messages": chat, **options}
        codec = self._model.codec
        conversion = (
            recipe.ConversionOptions()
            .with_special_tokens(codec.special_tokens)
            .with_model_versions_by_name({"offline": recipe.ModelVersion.DeepseekV41Flash})
        )
        with recipe_errors(body):
            check_image_parts(body)
            converted = recipe.ChatCompletionRequest(body).convert(conversion)
            return self._images.encode(converted.conversation, codec), converted

    def _checked_ids(self, token_ids: Iterable[Any]) -> tuple[int, ...]:
        vocab_size = self._model.facts.vocab_size
        ids = [_as_int(token) for token in token_ids]
        for index, token in enumerate(ids):
            if not fields.is_token_id(token, vocab_size):
                raise bad_request(
                    f"token {index} of the prompt is {token!r}; expected 0 to {vocab_size - 1}",
                    "prompt_token_ids",
                )
        token_ids = tuple(cast(list[int], ids))
        refuse_placeholders(token_ids, self._model.facts.images, "prompt_token_ids")
        return token_ids

    def _run(self, wanted: Sequence["_Wanted"], progress: bool) -> list[Output]:
        """Runs all requests to their ends."""
        engine, tiers, model = self._engine, self._tiers, self._model
        checked: list[tuple[Request, Grammar | None]] = []
        for one in wanted:
            try:
                check_request(one.request, engine.limits, engine.buckets)
                checked.append((one.request, self._grammar_of(one.request)))
            except RequestError as error:
                raise RequestError(f"{one.name}: {error}", error.param) from None
        eos = model.facts.eos_token_id
        collected = {
            one.request.request_id: Collected(one.request, model.codec, eos, one.stops)
            for one in wanted
        }
        with tqdm(total=len(wanted), unit="prompt", disable=not progress) as bar:
            try:
                for delta in run_requests(engine, self._executor, checked, tiers):
                    of = collected[delta.request_id]
                    of.add(delta)
                    if of.is_cut:
                        engine.abort(delta.request_id)
                    bar.update(of.is_over)
            finally:
                # Of effect only when a step raised: the next call must not meet old requests.
                engine.fail()
                if tiers is not None:
                    tiers.drop()
        return [of.output() for of in collected.values()]

    def _grammar_of(self, request: Request) -> Grammar | None:
        """Raises GrammarError."""
        if request.constraint is None:
            return None
        if self._model.grammars is None:
            raise RequestError("this model has no grammars", request.constraint.param)
        return self._model.grammars.compile(request.constraint)


def read_rows(path: Path) -> list[Row]:
    """Reads a prompt file through grain; empty lines are passed over.

    Raises:
        RowError: the file cannot be read, or a row is not an object with the known keys.
    """
    import grain.python as grain  # Takes a second, which a server need not spend.

    try:
        lines = JsonLines(path)
    except OSError as error:
        raise RowError(f"{path}: cannot be read: {error.strerror}") from None
    return list(grain.MapDataset.source(lines).map(lambda item: _row(path, *item)))


class JsonLines:
    """A random access source of the lines of a file that are not empty: (line number, bytes)."""

    def __init__(self, path: Path) -> None:
        self._lines = [
            (number, line)
            for number, line in enumerate(path.read_bytes().splitlines(), 1)
            if line.strip()
        ]

    def __len__(self) -> int:
        return len(self._lines)

    def __getitem__(self, index: int) -> tuple[int, bytes]:
        return self._lines[index]


def _row(path: Path, line: int, text: bytes) -> Row:
    try:
        values = decode_body(text)
    except ApiError as error:
        raise RowError(f"{path}:{line}: {str(error).replace('The body', 'the row')}") from None
    given = [key for key in _PROMPT_KEYS if key in values]
    if len(given) != 1:
        raise RowError(
            f"{path}:{line}: received {' and '.join(given) or 'no prompt'}; expected exactly one "
            f"of {', '.join(_PROMPT_KEYS)}"
        )
    allowed = (
        given[0],
        *_SAMPLING_KEYS,
        *_GUIDE_KEYS,
        "priority",
        "n",
        "stop",
        *(_CHAT_KEYS if given[0] == "messages" else ()),
    )
    for key in values:
        if key not in allowed:
            raise RowError(
                f"{path}:{line}: unknown key {key!r}; expected {', '.join(sorted(allowed))}"
            )
    kind = str if given[0] == "prompt" else list
    if not isinstance(values[given[0]], kind):
        raise RowError(f"{path}:{line}: {given[0]} is no {'text' if kind is str else 'list'}")
    return Row(line, values)


def _as_stops(values: Mapping[str, Any], constraint: OutputConstraint | None) -> tuple[str, ...]:
    """The texts that end an output with this form. Raises ApiError."""
    stops = fields.stop_strings(values)
    refuse_stop_strings(stops, constraint)
    return stops


def _as_int(token: object) -> object:
    """Integers of numpy and the like as plain ones; anything else as it is."""
    try:
        return token if isinstance(token, bool) else operator.index(cast(Any, token))
    except TypeError:
        return token


def _as_many(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """A list of prompts from one prompt or several; ids may be in arrays."""
    if isinstance(prompts, str):
        return [prompts]
    is_one = len(prompts) > 0 and (
        isinstance(prompts[0], Mapping) or not hasattr(prompts[0], "__len__")
    )
    return [cast(Prompt, prompts)] if is_one else list(cast(Sequence[Prompt], prompts))
