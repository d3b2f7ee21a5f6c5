"""What an engine may use, which requests it can never serve within it, and what those become that
it can.
"""

from dataclasses import dataclass

import numpy as np

from serving.core.blocks import BLOCK_SIZE
from serving.core.buckets import BucketTable, StepKind
from serving.core.controls import controls_of
from serving.core.grammar import Grammar
from serving.core.prefix import root_key
from serving.core.replay import ReplayRule
from serving.core.request import Request, RequestError
from serving.core.sequence import Sequence


@dataclass(frozen=True, slots=True)
class EngineLimits:
    """What an engine may use and accept.

    Attributes:
        num_blocks: KV blocks on the device, the padding block 0 included.
        num_slots: state slots on the device, the padding slot 0 included; one less run at a time.
        context_max: tokens of a sequence, prompt and output, at which it ends.
        vocab_size: token ids lie below it.
        eos_token_id: the token that ends a sequence by itself; None if there is none.
        waiting_max: requests that may wait beyond those that free slots can take at once.
        num_snapshots: states of prefixes that are kept for other requests, in further slots of
            the device after the `num_slots`; with 0 nothing is shared.
        fingerprint: names the model and the form of its cache in the keys of prefixes.
        block_size: tokens of a block.
        num_drafts: tokens that the device drafts after each one it samples; 0 if it does not.
        in_flight_max: steps planned but not committed at one time; 1 is the synchronous engine.
        replay: which tokens of a prompt pass the upper layers; None for all.
    """

    num_blocks: int
    num_slots: int
    context_max: int
    vocab_size: int
    eos_token_id: int | None
    waiting_max: int = 1024
    num_snapshots: int = 0
    fingerprint: bytes = b""
    block_size: int = BLOCK_SIZE
    in_flight_max: int = 1
    num_drafts: int = 0
    replay: ReplayRule | None = None

    @property
    def prefix_fingerprint(self) -> bytes:
        """What prefixes must agree in to share blocks and states, besides their tokens."""
        return self.fingerprint + (b"" if self.replay is None else self.replay.fingerprint)


def check_limits(limits: EngineLimits, buckets: BucketTable) -> None:
    """Raise `ValueError` if they contradict each other or the buckets."""
    for name in ("context_max", "vocab_size", "block_size", "in_flight_max"):
        if getattr(limits, name) < 1:
            raise ValueError(f"{name} is {getattr(limits, name)}; expected at least 1")
    for name in ("waiting_max", "num_snapshots", "num_drafts"):
        if getattr(limits, name) < 0:
            raise ValueError(f"{name} is {getattr(limits, name)}; expected 0 or more")
    if limits.context_max < 2:
        raise ValueError("context_max is 1; expected at least 2, a prompt token and one more")
    for kind in StepKind:
        num_tokens = buckets.largest(kind).num_blocks * limits.block_size
        if num_tokens < limits.context_max:
            raise ValueError(
                f"context_max is {limits.context_max}, but the widest {kind.value} bucket holds "
                f"{num_tokens} tokens; expected a bucket with at least "
                f"{-(-limits.context_max // limits.block_size)} blocks, or a smaller context_max"
            )


def length_max(limits: EngineLimits) -> int:
    """Tokens at which a sequence ends: `context_max`, or what the pool holds if that is less."""
    return min(limits.context_max, (limits.num_blocks - 1) * limits.block_size)


def check_request(request: Request, limits: EngineLimits, buckets: BucketTable) -> None:
    """Raise `RequestError` if the request can never be served."""
    num_tokens = len(request.prompt_token_ids)
    if num_tokens == 0:
        raise RequestError("the prompt has no tokens; expected at least one", "prompt")
    if num_tokens >= limits.context_max:
        raise RequestError(
            f"the prompt has {num_tokens} tokens; expected at most {limits.context_max - 1}, to "
            f"leave room for one more in a context of {limits.context_max}",
            "prompt",
        )
    if num_tokens >= length_max(limits):
        raise RequestError(
            f"the prompt has {num_tokens} tokens; expected at most {length_max(limits) - 1}, "
            f"because the pool has {limits.num_blocks - 1} blocks of {limits.block_size} tokens; "
            "enlarge the pool or shorten the prompt",
            "prompt",
        )
    _check_resumed(request, limits)
    _check_ids(request.prompt_token_ids, limits.vocab_size, "prompt")
    _check_ids(request.sampling.stop_token_ids, limits.vocab_size, "stop_token_ids")
    biased = tuple(token for token, _ in request.sampling.logit_bias)
    _check_ids(biased, limits.vocab_size, "logit_bias")
    _check_constraint(request, limits)
    _check_images(request, limits, buckets)
    if limits.replay is not None and request.sampling.prompt_logprobs is not None:
        raise RequestError(
            f"prompt_logprobs is {request.sampling.prompt_logprobs}, but of a prompt only the last "
            f"{limits.replay.num_kept} tokens pass all layers (engine.replay is "
            f"{limits.replay.mode.value!r}), and the others have no logits; expected none, or "
            "engine.replay 'off'",
            "prompt_logprobs",
        )


def make_sequence(
    request: Request, limits: EngineLimits, sequence_id: int, seed: int, grammar: Grammar | None
) -> Sequence:
    """The sequence of a checked request; `grammar` is that of its constraint, if it has one."""
    prompt = np.array(request.prompt_token_ids, np.int32)
    sampling = request.sampling
    stops = set(sampling.stop_token_ids)
    if limits.eos_token_id is not None and not sampling.ignore_eos:
        stops.add(limits.eos_token_id)
    controls = controls_of(request, grammar)
    if controls is not None:
        controls.advance(request.resumed_token_ids)
    return Sequence(
        sequence_id=sequence_id,
        request=request,
        prompt=prompt,
        seed=seed,
        stop_token_ids=tuple(sorted(stops)),
        length_limit=min(len(prompt) + sampling.max_tokens, length_max(limits)),
        added=list(request.resumed_token_ids),
        root_key=root_key(limits.prefix_fingerprint, request.cache_salt),
        controls=controls,
        tail_start=0 if limits.replay is None else limits.replay.tail_start(len(prompt)),
    )


def _check_resumed(request: Request, limits: EngineLimits) -> None:
    """One more token has to be wanted behind those that were generated before."""
    num_resumed = len(request.resumed_token_ids)
    left = min(request.sampling.max_tokens, length_max(limits) - len(request.prompt_token_ids))
    if num_resumed and num_resumed >= left:
        raise RequestError(
            f"resumed_token_ids has {num_resumed} tokens; expected fewer than the {left} that can "
            "be generated",
            "resumed_token_ids",
        )
    _check_ids(request.resumed_token_ids, limits.vocab_size, "resumed_token_ids")


def _check_constraint(request: Request, limits: EngineLimits) -> None:
    """A constrained text must be able to end where its constraint is satisfied, and only there."""
    if request.constraint is None:
        return
    param = request.constraint.param
    if limits.eos_token_id is None:
        raise RequestError(
            f"{param} needs a model with an end-of-sequence token; this one has none", param
        )
    if request.sampling.ignore_eos:
        raise RequestError(
            f"ignore_eos together with {param}: a constrained text ends with that token; leave "
            "one of them out",
            "ignore_eos",
        )
    if set(request.sampling.stop_token_ids) - {limits.eos_token_id}:
        raise RequestError(
            f"stop_token_ids together with {param}: they could end the text before it has the "
            "wanted form, or within a call; leave one of them out",
            "stop_token_ids",
        )


def _check_images(request: Request, limits: EngineLimits, buckets: BucketTable) -> None:
    """An image must lie in the prompt, and in a single prefill step of some bucket."""
    stop_before = 0
    for index, image in enumerate(request.images):
        if not stop_before <= image.start < image.stop <= len(request.prompt_token_ids):
            raise RequestError(
                f"image {index + 1} covers tokens {image.start} to {image.stop - 1}; expected "
                f"tokens from {stop_before} to {len(request.prompt_token_ids) - 1}",
                "images",
            )
        stop_before = image.stop
        fits = buckets.smallest(
            StepKind.PREFILL, 1, image.num_tokens, -(-image.stop // limits.block_size)
        )
        if fits is None:
            num_tokens = buckets.largest(StepKind.PREFILL).num_tokens
            raise RequestError(
                f"image {index + 1} has {image.num_tokens} tokens; expected at most "
                f"{num_tokens}, because an image is computed in one prefill step; send a "
                "smaller image or add a larger prefill size",
                "images",
            )


def _check_ids(token_ids: tuple[int, ...], vocab_size: int, param: str) -> None:
    if token_ids and not (min(token_ids) >= 0 and max(token_ids) < vocab_size):
        index = next(i for i, token in enumerate(token_ids) if not 0 <= token < vocab_size)
        raise RequestError(
            f"token {index} of {param} is {token_ids[index]}; expected 0 to {vocab_size - 1}",
            param,
        )
