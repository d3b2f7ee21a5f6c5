"""What comes of offline requests: collected while they run, then one output each."""

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

import msgspec

from serving.core.request import FinishReason, Request, TokenDelta, TokenLogprob
from serving.frontend.answer_tokens import PlainAnswer, visible_tokens
from serving.frontend.gateway import Update
from serving.frontend.text import TextCodec


@dataclass(frozen=True, slots=True)
class Output:
    """One sample of what was generated for one prompt.

    `sample` is its number from 0 on, None if one alone was wanted.
    `token_ids` holds every sampled token, `text` leaves out the one that stopped the sequence.
    `finish_reason` is `stop` or `length`, or `error` if the grammar of this output failed, and
    `error` says how. Token counts are those of the prompt. `logprobs` has an entry per token of
    the output and `prompt_logprobs` one per token of the prompt (None for the first and for those
    of images), where they were asked for; of several samples the first has those of the prompt.
    """

    text: str
    token_ids: list[int]
    finish_reason: str
    prompt_tokens: int
    cached_tokens: int
    logprobs: list[TokenLogprob] | None = None
    prompt_logprobs: list[TokenLogprob | None] | None = None
    error: str | None = None
    sample: int | None = None


class Collected:
    """What has come of one request, whose text ends at the first of the texts `stops`."""

    def __init__(
        self, request: Request, codec: TextCodec, eos: int | None, stops: tuple[str, ...]
    ) -> None:
        self._request = request
        self._codec = codec
        self._eos = eos
        # Without stops the text is made once, at the end.
        self._answer = PlainAnswer(codec, request.sampling, eos, stops) if stops else None
        self._token_ids: list[int] = []
        self._logprobs: list[TokenLogprob] = []
        self._prompt_logprobs: list[TokenLogprob | None] = []
        self._last: TokenDelta | None = None

    @property
    def is_cut(self) -> bool:
        """Whether a stop has ended the text; more tokens are of no use then."""
        return self._answer is not None and self._answer.is_cut

    @property
    def is_over(self) -> bool:
        """Whether nothing more comes."""
        return self.is_cut or (self._last is not None and self._last.finish_reason is not None)

    def add(self, delta: TokenDelta) -> None:
        """Take what a step has brought."""
        self._token_ids.extend(delta.token_ids)
        self._logprobs.extend(delta.logprobs)
        self._prompt_logprobs.extend(delta.prompt_logprobs)
        self._last = delta
        if self._answer is not None:
            self._answer.take(Update(0, list(delta.token_ids), delta.finish_reason))
            # A step may bring tokens behind the stop.
            num_delivered = self._answer.tokens.num_generated
            del self._token_ids[num_delivered:], self._logprobs[num_delivered:]

    def output(self) -> Output:
        """The output of a request that is over."""
        request, last = self._request, self._last
        assert last is not None and self.is_over, request.request_id
        sampling = request.sampling
        if self._answer is not None and self.is_cut:
            text, reason = self._answer.text, FinishReason.STOP
        else:
            assert last.finish_reason is not None
            visible = visible_tokens(
                Update(0, self._token_ids, last.finish_reason), sampling, self._eos
            )
            text, reason = self._codec.decode(visible), last.finish_reason
        return Output(
            text=text,
            token_ids=self._token_ids,
            finish_reason=reason.value,
            prompt_tokens=len(request.prompt_token_ids),
            cached_tokens=last.num_cached_tokens,
            logprobs=None if sampling.logprobs is None else self._logprobs,
            prompt_logprobs=None if sampling.prompt_logprobs is None else self._prompt_logprobs,
            error=None if self.is_cut else last.error,
            sample=None if request.fork_group is None else request.sample_index,
        )


def write_rows(path: Path, outputs: Iterable[Output]) -> None:
    """Writes one JSON object per output, in order, of what the output has. Raises OSError."""
    rows = (
        {name: value for name, value in asdict(output).items() if value is not None}
        for output in outputs
    )
    path.write_bytes(b"".join(msgspec.json.encode(row) + b"\n" for row in rows))
