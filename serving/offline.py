"""Offline generation: many prompts through the engine of the server, in this process.

    from serving import LLM, SamplingParams

    llm = LLM("path/to/checkpoint")
    for output in llm.generate(["Once upon a time"], SamplingParams(max_tokens=32)):
        ...

A row of a prompt file is a JSON object with one of `prompt` (text), `messages` (chat) and
`prompt_token_ids`, and optional sampling fields under the names of `SamplingParams`.
"""

import operator
import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, cast

import deepseek_recipe as recipe
import msgspec
import numpy as np
from tqdm import tqdm

from serving.cluster import make_engine
from serving.config import ServingConfig, load_config
from serving.core.request import FinishReason, Request, RequestError, SamplingParams
from serving.engine.engine import run_step
from serving.frontend import fields
from serving.frontend.errors import ApiError, bad_request, decode_body, recipe_errors
from serving.frontend.images import EncodedPrompt, ImageReader, check_image_parts
from serving.loading import LoadedModel, load_model
from sharding.config_file import override

Prompt = str | Sequence[int] | np.ndarray | Sequence[Mapping[str, Any]]
"""Text, token ids, or the messages of a chat."""

_PROMPT_KEYS = ("prompt", "messages", "prompt_token_ids")
_CHAT_KEYS = ("thinking", "reasoning_effort", "tools")
_SAMPLING_KEYS = tuple(SamplingParams.__dataclass_fields__)
_WAITING_MAX = 2**31
"""Offline every prompt may wait: the caller holds all of them in memory anyway."""


class RowError(ValueError):
    """A row of a prompt file that cannot be used; the message names file and line."""


@dataclass(frozen=True, slots=True)
class Row:
    """One object of a prompt file, and the line it stands on."""

    line: int
    values: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Output:
    """What was generated for one prompt.

    `token_ids` holds every sampled token, `text` leaves out the one that stopped the sequence.
    `finish_reason` is `stop` or `length`; token counts are those of the prompt.
    """

    text: str
    token_ids: list[int]
    finish_reason: str
    prompt_tokens: int
    cached_tokens: int


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
        flags = {"model.path": model and str(model), "model.cache_format": cache_format}
        changes = dict(options or {}) | {k: v for k, v in flags.items() if v is not None}
        used = override(load_config(config), changes, source="LLM")
        self._set_up(used, load_model(used, lambda line: None))

    @classmethod
    def of_model(cls, config: ServingConfig, model: LoadedModel) -> "LLM":
        """An LLM around a model that is already loaded with `config`."""
        llm = cls.__new__(cls)
        llm._set_up(config, model)
        return llm

    def _set_up(self, config: ServingConfig, model: LoadedModel) -> None:
        self._model = model
        self._context_max = config.engine.max_context
        self._images = ImageReader(model.facts.images, config.images)
        options = replace(config.engine, waiting_max=_WAITING_MAX)
        self._engine = make_engine(options, model.facts, random.Random())

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        progress: bool = False,
    ) -> list[Output]:
        """Generates for each prompt; outputs are in the order of the prompts.

        `sampling_params` is one for all prompts or one each. With `progress` a bar is shown.

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
        requests = []
        for index, (prompt, sampling) in enumerate(zip(many, sampling_params, strict=True)):
            try:
                requests.append(_request(str(index), self._encode(prompt), sampling))
            except ApiError as error:
                raise RequestError(f"prompt {index}: {error}", error.param) from None
        return list(
            self._run(requests, [f"prompt {index}" for index in range(len(many))], progress)
        )

    def generate_rows(
        self, rows: Sequence[Row], *, source: str, progress: bool = False
    ) -> list[Output]:
        """Generates for the rows of a prompt file called `source`, in their order.

        Raises:
            RowError: a row cannot be used; nothing is generated then.
        """
        requests = []
        for index, row in enumerate(rows):
            try:
                requests.append(self._request_of(str(index), row.values))
            except ApiError as error:
                raise RowError(f"{source}:{row.line}: {error}") from None
        names = [f"{source}:{row.line}" for row in rows]
        try:
            return self._run(requests, names, progress)
        except RequestError as error:
            raise RowError(str(error)) from None

    def _request_of(self, request_id: str, values: dict[str, Any]) -> Request:
        max_tokens = fields.integer(values, "max_tokens")
        sampling = fields.sampling_params(
            values,
            max_tokens=SamplingParams().max_tokens if max_tokens is None else max_tokens,
            vocab_size=self._model.facts.vocab_size,
            seed=fields.integer(values, "seed"),
        )
        if "prompt" in values:
            prompt = EncodedPrompt(self._encode_text(values["prompt"]))
        elif "messages" in values:
            chat = {key: values[key] for key in _CHAT_KEYS if key in values}
            prompt = self._encode_chat(values["messages"], chat)
        else:
            prompt = EncodedPrompt(self._checked_ids(values["prompt_token_ids"]))
        return _request(request_id, prompt, sampling)

    def _encode(self, prompt: Prompt) -> EncodedPrompt:
        """A prompt of any form. Raises ApiError."""
        if isinstance(prompt, str):
            return EncodedPrompt(self._encode_text(prompt))
        if len(prompt) and isinstance(prompt[0], Mapping):
            return self._encode_chat([dict(cast(Any, message)) for message in prompt], {})
        return EncodedPrompt(self._checked_ids(prompt))

    def _encode_text(self, text: str) -> tuple[int, ...]:
        with recipe_errors({"model": "-", "messages": "-"}):
            return self._model.codec.encode_text(text)

    def _encode_chat(self, chat: list[Any], options: dict[str, Any]) -> EncodedPrompt:
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
            return self._images.encode(converted.conversation, codec)

    def _checked_ids(self, token_ids: Iterable[Any]) -> tuple[int, ...]:
        vocab_size = self._model.facts.vocab_size
        ids = [_as_int(token) for token in token_ids]
        for index, token in enumerate(ids):
            if not fields.is_token_id(token, vocab_size):
                raise bad_request(
                    f"token {index} of the prompt is {token!r}; expected 0 to {vocab_size - 1}",
                    "prompt_token_ids",
                )
        return tuple(cast(list[int], ids))

    def _run(
        self, requests: Sequence[Request], names: Sequence[str], progress: bool
    ) -> list[Output]:
        """Runs all requests to their ends. `names` say in errors which one is meant."""
        engine = self._engine
        for request, name in zip(requests, names, strict=True):
            try:
                engine.admit(request)
            except RequestError as error:
                engine.fail()
                raise RequestError(f"{name}: {error}", error.param) from None
        token_ids: dict[str, list[int]] = {request.request_id: [] for request in requests}
        outputs: dict[str, Output] = {}
        with tqdm(total=len(requests), unit="prompt", disable=not progress) as bar:
            try:
                while engine.has_work:
                    for delta in run_step(engine, self._model.executor):
                        token_ids[delta.request_id].extend(delta.token_ids)
                        if delta.finish_reason is not None:
                            request = requests[int(delta.request_id)]
                            outputs[delta.request_id] = self._output(
                                request,
                                token_ids[delta.request_id],
                                delta.finish_reason,
                                delta.num_cached_tokens,
                            )
                            bar.update()
            finally:
                # Of effect only when a step raised: the next call must not meet old requests.
                engine.fail()
        return [outputs[request.request_id] for request in requests]

    def _output(
        self, request: Request, token_ids: list[int], reason: FinishReason, num_cached: int
    ) -> Output:
        is_stopped = reason is FinishReason.STOP
        text = self._model.codec.decode(token_ids[:-1] if is_stopped else token_ids)
        num_prompt = len(request.prompt_token_ids)
        return Output(text, token_ids, reason.value, num_prompt, num_cached)


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


def write_rows(path: Path, outputs: Iterable[Output]) -> None:
    """Writes one JSON object per output, in order. Raises OSError."""
    encode = msgspec.json.encode
    path.write_bytes(b"".join(encode(asdict(output)) + b"\n" for output in outputs))


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
    allowed = (given[0], *_SAMPLING_KEYS, *(_CHAT_KEYS if given[0] == "messages" else ()))
    for key in values:
        if key not in allowed:
            raise RowError(
                f"{path}:{line}: unknown key {key!r}; expected {', '.join(sorted(allowed))}"
            )
    kind = str if given[0] == "prompt" else list
    if not isinstance(values[given[0]], kind):
        raise RowError(f"{path}:{line}: {given[0]} is no {'text' if kind is str else 'list'}")
    return Row(line, values)


def _request(request_id: str, prompt: EncodedPrompt, sampling: SamplingParams) -> Request:
    return Request(request_id, prompt.token_ids, sampling, images=prompt.images)


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
