"""What a client asked for, and what it gets back, as plain values.

`Request` is the only thing that enters an engine and `TokenDelta` the only thing that leaves it.
Both are frozen, hold no text and know nothing of HTTP, so the same objects travel in one process,
between processes and through the simulator.
"""

import enum
from dataclasses import dataclass, field

import msgspec
import numpy as np

COUNT_MAX = 2**31 - 1
"""Counts and token ids travel as 32-bit integers."""

SEED_MAX = 2**63 - 1
"""Seeds are non-negative 63-bit integers, the range that the public protocols allow."""

PRIORITY_MAX = 2**15 - 1
"""Priorities lie between this and its negative."""

STOP_TOKEN_IDS_MAX = 64
"""Stop tokens are compared for every row of every step, so their number is bounded."""

LOGIT_BIASES_MAX = 300
"""Room for biases is compiled into every step."""

REPETITION_PENALTY_MIN = 0.01
"""Logits are divided by it as 32-bit numbers: far smaller ones leave nothing of the others."""

TOP_LOGPROBS_MAX = 20
"""The most likely tokens that a step reports for each token."""


class FinishReason(enum.Enum):
    """Why a sequence ended. The value is the spelling that offline output rows use."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


class RequestError(ValueError):
    """A request that can never be served. `param` names the field at fault where it is known."""

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class QueueFullError(RuntimeError):
    """The engine holds as many waiting requests as it may; the same request may be sent later."""

    def __init__(self, num_waiting: int, waiting_max: int) -> None:
        super().__init__(
            f"{num_waiting} requests wait already and the limit is {waiting_max}; "
            "send it again later"
        )
        self.num_waiting = num_waiting
        self.waiting_max = waiting_max


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How to choose tokens and when to stop.

    `temperature` 0 is greedy; `top_k` 0 keeps every token; `top_p` 1 keeps all mass.
    `max_tokens` counts generated tokens. `seed` None lets the engine pick one per request;
    the draw for a token depends only on the seed and the token's absolute position.
    `stop_token_ids` end a sequence like the end-of-sequence token does, and `ignore_eos` makes
    the end-of-sequence token an ordinary one.

    `min_p` leaves out the tokens less likely than that share of the most likely one.
    `repetition_penalty` (1 is none) divides the positive logits of tokens in prompt or output and
    multiplies negative ones; `presence_penalty` is taken from the logit of each token in the
    output and `frequency_penalty` as often as it occurs there. `logit_bias` are pairs of token and
    what is added to its logit.

    `logprobs` and `prompt_logprobs` ask for the log probability of each output or prompt token and
    of so many of the most likely tokens beside it; None asks for nothing.

    Raises:
        RequestError: a value lies outside its range, or a list is too long.
    """

    max_tokens: int = 256
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int | None = None
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    logprobs: int | None = None
    prompt_logprobs: int | None = None

    @property
    def has_penalties(self) -> bool:
        """Whether the next token depends on how often others have occurred."""
        return (
            self.repetition_penalty != 1
            or self.presence_penalty != 0
            or self.frequency_penalty != 0
        )

    def __post_init__(self) -> None:
        if not 1 <= self.max_tokens <= COUNT_MAX:
            raise RequestError(
                f"max_tokens is {self.max_tokens}; expected 1 to {COUNT_MAX}", "max_tokens"
            )
        if not 0.0 <= self.temperature <= 2.0:
            raise RequestError(
                f"temperature is {self.temperature}; expected 0 to 2 (0 is greedy)", "temperature"
            )
        if not 0 <= self.top_k <= COUNT_MAX:
            raise RequestError(
                f"top_k is {self.top_k}; expected 0 (keep all) to {COUNT_MAX}", "top_k"
            )
        if not 0.0 < self.top_p <= 1.0:
            raise RequestError(
                f"top_p is {self.top_p}; expected more than 0 and at most 1", "top_p"
            )
        if self.seed is not None and not 0 <= self.seed <= SEED_MAX:
            raise RequestError(f"seed is {self.seed}; expected 0 to {SEED_MAX}", "seed")
        if len(self.stop_token_ids) > STOP_TOKEN_IDS_MAX:
            raise RequestError(
                f"stop_token_ids has {len(self.stop_token_ids)} ids; expected at most "
                f"{STOP_TOKEN_IDS_MAX}",
                "stop_token_ids",
            )
        for token in self.stop_token_ids:
            if not 0 <= token <= COUNT_MAX:
                raise RequestError(
                    f"stop_token_ids names {token}; expected 0 to {COUNT_MAX}", "stop_token_ids"
                )
        self._check_controls()

    def _check_controls(self) -> None:
        """Comparisons are written so that not-a-number fails them."""
        ranges = {
            "min_p": (0.0, 1.0),
            "presence_penalty": (-2.0, 2.0),
            "frequency_penalty": (-2.0, 2.0),
        }
        for name, (low, high) in ranges.items():
            value = getattr(self, name)
            if not low <= value <= high:
                raise RequestError(f"{name} is {value}; expected {low:g} to {high:g}", name)
        if not REPETITION_PENALTY_MIN <= self.repetition_penalty <= 2.0:
            raise RequestError(
                f"repetition_penalty is {self.repetition_penalty}; expected "
                f"{REPETITION_PENALTY_MIN:g} to 2 (1 is none)",
                "repetition_penalty",
            )
        for name in ("logprobs", "prompt_logprobs"):
            value = getattr(self, name)
            if value is not None and not 0 <= value <= TOP_LOGPROBS_MAX:
                raise RequestError(
                    f"{name} is {value}; expected 0 to {TOP_LOGPROBS_MAX} most likely tokens", name
                )
        if len(self.logit_bias) > LOGIT_BIASES_MAX:
            raise RequestError(
                f"logit_bias has {len(self.logit_bias)} tokens; expected at most "
                f"{LOGIT_BIASES_MAX}",
                "logit_bias",
            )
        if len({token for token, _ in self.logit_bias}) < len(self.logit_bias):
            raise RequestError("logit_bias names a token twice; expected once", "logit_bias")
        for token, value in self.logit_bias:
            if not -100.0 <= value <= 100.0:
                raise RequestError(
                    f"logit_bias of token {token} is {value}; expected -100 to 100", "logit_bias"
                )


class ConstraintKind(enum.Enum):
    """What the text of an `OutputConstraint` is.

    JSON: a JSON schema, itself JSON; empty for any JSON object. REGEX: a regular expression for
    the whole answer. GRAMMAR: a Lark or GBNF grammar. TOOL_CALL: a JSON list of function tools
    that the answer may call after free text; TOOL_CALL_REQUIRED: the same, but the prompt has
    already opened the block of calls and the answer goes on in it.
    """

    JSON = "json"
    REGEX = "regex"
    GRAMMAR = "grammar"
    TOOL_CALL = "tool_call"
    TOOL_CALL_REQUIRED = "tool_call_required"


TOOL_KINDS = (ConstraintKind.TOOL_CALL, ConstraintKind.TOOL_CALL_REQUIRED)


@dataclass(frozen=True, slots=True)
class OutputConstraint:
    """A form that the generated text must have.

    `after_thinking` says that the answer begins with thinking, which is free; the constraint
    holds from the end of it on. `param` is the request field that it came from. Where tools may
    be called, `has_one_call` allows for a single call.
    """

    kind: ConstraintKind
    text: str
    after_thinking: bool = False
    param: str = "response_format"
    has_one_call: bool = False


@dataclass(frozen=True, slots=True)
class RequestImage:
    """An image of a prompt, scaled and cut into patches, and the tokens that stand for it.

    Attributes:
        start: position of its first token in the prompt.
        num_tokens: tokens of its span.
        patch_rows, patch_cols: its grid of patches.
        digest: names the picture; equal digests mean equal pixels and grids.
        pixels: [patch_rows * patch_cols, 3 * patch_size ** 2] uint8, patches row by row, each
            flattened as channel, row, column. Nobody writes to it. Left to the digest when images
            are compared.
    """

    start: int
    num_tokens: int
    patch_rows: int
    patch_cols: int
    digest: bytes
    pixels: np.ndarray = field(compare=False, repr=False)

    @property
    def stop(self) -> int:
        """The position after its last token."""
        return self.start + self.num_tokens


@dataclass(frozen=True, slots=True)
class Request:
    """One prompt, tokenised, with its sampling settings. `arrival_ns` is a clock reading.

    `images` are in the order of their spans, which do not overlap. Computed prefixes are shared
    only among requests of equal `cache_salt`. `constraint` is enforced by the grammar that
    `core.grammar` compiles it to. `fork_group` names the samples of one prompt, of
    which this is number `sample_index` (`core.forking`). `resumed_token_ids` were generated for it
    elsewhere before: they count as generated and are not reported again. `cache_owner` is whose
    share of the device's memory its prefix is kept in; requests of different owners have
    different salts. `traceparent` names the span of its call, by the header of that name; empty if
    nobody traces it.
    """

    request_id: str
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams
    arrival_ns: int = 0
    images: tuple[RequestImage, ...] = ()
    cache_salt: str = ""
    constraint: OutputConstraint | None = None
    priority: int = 0
    fork_group: str | None = None
    sample_index: int = 0
    resumed_token_ids: tuple[int, ...] = ()
    cache_owner: str = ""
    traceparent: str = ""

    def __post_init__(self) -> None:
        if not -PRIORITY_MAX <= self.priority <= PRIORITY_MAX:
            raise RequestError(
                f"priority is {self.priority}; expected -{PRIORITY_MAX} to {PRIORITY_MAX} "
                "(smaller ones are served first)",
                "priority",
            )


class TokenLogprob(msgspec.Struct, frozen=True, gc=False):
    """The natural logarithm of a token's probability, and those of the most likely tokens.

    They are the model's own, before penalties, biases, masks and temperature. `top` are pairs of
    token and log probability, the likeliest first, as many as were asked for.
    """

    logprob: float
    top: tuple[tuple[int, float], ...] = ()


class TokenDelta(msgspec.Struct, frozen=True, gc=False):
    """The tokens that one step added to one request, in order; the last delta has a reason.

    The token that ended a sequence (end-of-sequence or a stop token) is among `token_ids`: it was
    generated and counts as such. Whoever makes text leaves it out when the reason is `STOP`.
    `token_ids` may be empty in the last delta (an abort). `num_cached_tokens` is the part of the
    prompt whose KV was reused rather than computed.

    `logprobs` has an entry for each of `token_ids`, if they were asked for. `prompt_logprobs`
    comes once, with the first token: an entry for each prompt token, None for the first one and
    for those of images. `error` says why the reason is `ERROR`, where that concerns this request
    alone.

    *Why a msgspec struct*: one is made per row of every step, at a tenth of the cost of a frozen
    dataclass.
    """

    request_id: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None = None
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    logprobs: tuple[TokenLogprob, ...] = ()
    prompt_logprobs: tuple[TokenLogprob | None, ...] = ()
    error: str | None = None
