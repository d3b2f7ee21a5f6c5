"""Structured outputs: which tokens may come next, so that the whole text has a given form.

`GrammarCompiler` knows the vocabulary and turns a request's constraint into a `Grammar`; that may
take a while and depends on nothing else, so it is done away from the engine. `Grammar.start`
gives the state of one sequence, which moves only by tokens that the sequence has really got:

1. Before a step, `num_legal` says how many of the draft tokens the grammar allows, and
   `fill_masks` writes one mask for each token that the step samples.
2. After it, `advance` takes the accepted tokens.

A sequence may begin with text that is free: its thinking, up to `</think>`, and where tools may be
called, what it says before it calls one. Where the answer must have a form it may not end in its
thinking, before it has any. While any token may come next, `is_free` is true and no mask is needed.

The end-of-sequence token is legal exactly where the text may end, and nothing else is legal where
it must. Special tokens are never legal inside the constrained text, however they are spelled.
"""

import functools
import json
import secrets
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, cast

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from llguidance.gbnf_to_lark import GbnfToLarkError, gbnf_to_lark, is_lark_syntax

from serving.core.lark_text import ConstraintTextError, check_gbnf, check_lark, check_schema
from serving.core.request import TOOL_KINDS, ConstraintKind, OutputConstraint, RequestError
from serving.core.tool_grammar import (
    ToolGrammarError,
    tool_calls_grammar,
    with_bounded_whitespace,
    without_schemas,
)

THINK_END = "</think>"
DSML = "｜DSML｜"

GRAMMARS_KEPT = 64
"""Compiled grammars kept for requests to come: their first tokens are the slow ones."""

TEXT_MAX = 256 * 2**10
"""Characters of a constraint, since the time to compile grows with them."""

STEP_ITEMS_MAX = 10_000
"""Work for the mask of one token, for which the steps of all requests wait: some 50 ms. A schema of
500 optional properties needs less."""


class GrammarError(RequestError):
    """A constraint that cannot be enforced. `param` names the request field that it came from."""


def mask_words(vocab_size: int) -> int:
    """32-bit words of one mask."""
    return -(-vocab_size // 32)


class GrammarCompiler:
    """Compiles constraints for one vocabulary. Safe to use from several threads.

    Building one takes seconds with a large vocabulary.

    Args:
        tokenizer_json: the text of a `tokenizer.json`.
        vocab_size: number of logits of the model, at least that of the tokenizer.
        eos_token_id: the token that ends a text.

    Raises:
        ValueError: the tokenizer cannot be used, or has more tokens than the model.
    """

    def __init__(self, tokenizer_json: str, vocab_size: int, eos_token_id: int) -> None:
        description = json.loads(tokenizer_json)
        added = description.get("added_tokens", [])
        self._added: dict[str, int] = {token["content"]: token["id"] for token in added}
        _hide_spellings(description)
        try:
            self._tokenizer = LLTokenizer(
                json.dumps(description), n_vocab=vocab_size, eos_token=eos_token_id
            )
        except Exception as error:  # The library documents no narrower type.
            raise ValueError(f"tokenizer.json cannot be used for grammars: {error}") from None
        self._vocab_size = vocab_size
        self._eos = eos_token_id
        self._limits = LLParserLimits(verbose_errors=False, step_max_items=STEP_ITEMS_MAX)
        self._compiled = functools.lru_cache(GRAMMARS_KEPT)(self._compile)

    def compile(self, constraint: OutputConstraint) -> "Grammar":
        """The grammar of a constraint.

        Raises:
            GrammarError: it is not well formed, too large or complex, or not supported.
        """
        if len(constraint.text) > TEXT_MAX:
            raise GrammarError(
                f"{constraint.param} has {len(constraint.text)} characters; expected at most "
                f"{TEXT_MAX}",
                constraint.param,
            )
        return self._compiled(constraint)

    def _compile(self, constraint: OutputConstraint) -> "Grammar":
        triggers: list[int] = []
        if constraint.after_thinking:
            triggers.append(self._marker(THINK_END, constraint))
        if constraint.kind is ConstraintKind.TOOL_CALL:
            triggers.append(self._marker(DSML, constraint))
        try:
            matcher = self._matcher(constraint)
        except GrammarError:
            loose = without_schemas(constraint.text) if constraint.kind in TOOL_KINDS else None
            if loose is None:
                raise
            return self._compile(replace(constraint, text=loose))
        # The first mask is the slow one, and shows a grammar that is too complex.
        try:
            _fill(matcher, np.zeros(mask_words(self._vocab_size), np.int32))
        except GrammarError as error:
            raise _error(constraint, str(error)) from None
        ends_free = constraint.kind is ConstraintKind.TOOL_CALL
        return Grammar(matcher, tuple(triggers), ends_free, self._vocab_size, self._eos)

    def _matcher(self, constraint: OutputConstraint) -> LLMatcher:
        try:
            text = self._lark(constraint)
        except GrammarError:
            raise
        except (
            ConstraintTextError,
            GbnfToLarkError,
            ToolGrammarError,
            json.JSONDecodeError,
        ) as error:
            raise _error(constraint, str(error)) from None
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
            # Definitions are checked only as far as they are used, so faults show as any type.
            raise _error(constraint, f"{type(error).__name__}: {error}") from None
        matcher = LLMatcher(self._tokenizer, text, log_level=0, limits=self._limits)
        if matcher.is_error():
            raise _error(constraint, matcher.get_error())
        return matcher

    def _marker(self, spelling: str, constraint: OutputConstraint) -> int:
        if spelling not in self._added:
            raise _error(constraint, f"this model's tokenizer has no {spelling} token")
        return self._added[spelling]

    def _lark(self, constraint: OutputConstraint) -> str:
        """The constraint in a language of the library."""
        match constraint.kind:
            case ConstraintKind.JSON:
                schema: Any = json.loads(constraint.text or '{"type": "object"}')
                if not isinstance(schema, dict | bool):
                    raise _error(constraint, "it is no JSON object")
                check_schema(schema)
                bounded = with_bounded_whitespace(schema)
                return LLMatcher.grammar_from_json_schema(json.dumps(bounded))
            case ConstraintKind.REGEX:
                return LLMatcher.grammar_from_regex(constraint.text)
            case ConstraintKind.GRAMMAR:
                text = constraint.text
                # The library does not know Lark by rules such as `?start`.
                if "::=" in text and not is_lark_syntax(text):
                    check_gbnf(text)
                    text = _lark_of_gbnf(text)
                check_lark(text)
                return LLMatcher.grammar_from_lark(text)
            case ConstraintKind.TOOL_CALL | ConstraintKind.TOOL_CALL_REQUIRED:
                is_opened = constraint.kind is ConstraintKind.TOOL_CALL_REQUIRED
                dsml = self._marker(DSML, constraint)
                return tool_calls_grammar(
                    constraint.text,
                    dsml,
                    is_opened=is_opened,
                    has_one_call=constraint.has_one_call,
                )


class Grammar:
    """A compiled constraint; never changes. Made by `GrammarCompiler.compile`."""

    def __init__(
        self,
        matcher: LLMatcher,
        triggers: tuple[int, ...],
        ends_free: bool,
        vocab_size: int,
        eos_token_id: int,
    ) -> None:
        self._matcher = matcher
        self._triggers = triggers
        self._ends_free = ends_free
        self._vocab_size = vocab_size
        self._eos = eos_token_id

    def start(self) -> "GrammarState":
        """The state before the first generated token."""
        # A copy shares what the library has found out about the grammar so far.
        matcher = self._matcher.deep_copy()
        return GrammarState(matcher, self._triggers, self._ends_free, self._vocab_size, self._eos)


class GrammarState:
    """Where one sequence stands in its grammar. Made by `Grammar.start`.

    The matcher never sees the end-of-sequence token: whether it records it, so that it can be
    taken back, depends on where it stands.
    """

    def __init__(
        self,
        matcher: LLMatcher,
        triggers: tuple[int, ...],
        ends_free: bool,
        vocab_size: int,
        eos_token_id: int,
    ) -> None:
        self._matcher = matcher
        self._triggers = triggers
        self._ends_free = ends_free
        self._num_words = mask_words(vocab_size)
        self._eos = eos_token_id
        self._has_ended = False

    @property
    def is_free(self) -> bool:
        """Whether any token may come next."""
        return self._ends_free and bool(self._triggers)

    @property
    def may_end(self) -> bool:
        """Whether the text so far satisfies the constraint (or need not have come to it)."""
        if self._triggers:
            return self._ends_free
        return self._has_ended or self._matcher.is_accepting()

    def num_legal(self, drafts: Sequence[int]) -> int:
        """How many of the tokens, from the first on, may follow one after another."""
        num_free, body, ends = self._parts(drafts)
        if self._has_ended:
            return 0
        if self._ends_early(drafts[:num_free]):
            return drafts.index(self._eos)
        num_legal = self._matcher.validate_tokens(body)
        if num_legal == len(body) and ends:
            self._matcher.try_consume_tokens(body)
            num_legal += self._matcher.is_accepting()
            self._matcher.rollback(len(body))
        return num_free + num_legal

    def fill_masks(self, drafts: Sequence[int], masks: np.ndarray) -> None:
        """Write which tokens may come next, and next after each of the drafts.

        Args:
            drafts: N tokens, all of them legal.
            masks: [N + 1, W] int32, W = `mask_words(vocab_size)`; bit b of word w is token
                32 w + b. Positions where any token may come get all bits, those past the
                vocabulary too. After the end-of-sequence token only that one may come.

        Raises:
            ValueError: `masks` has another shape or type, or a draft is not legal.
            GrammarError: the grammar has become too complex; the state is of no use any more.
        """
        expected = (len(drafts) + 1, self._num_words)
        if masks.shape != expected or masks.dtype != np.int32:
            raise ValueError(f"masks are {masks.dtype} {masks.shape}; expected int32 {expected}")
        if self.num_legal(drafts) != len(drafts):
            raise ValueError(f"drafts {list(drafts)} are not all legal; cut them with num_legal")
        num_free, body, _ = self._parts(drafts)
        masks[:] = -1
        is_open = self._num_triggered(drafts) < len(self._triggers)
        if not self._ends_free:
            free = masks if is_open else masks[:num_free]
            free[:, self._eos // 32] &= ~np.int32(1 << self._eos % 32)
        if is_open:
            return
        masks[num_free:] = 0
        masks[num_free:, self._eos // 32] = np.int32(1 << self._eos % 32)
        num_consumed = 0
        try:
            _fill(self._matcher, masks[num_free])
            for token in body:
                num_consumed += self._matcher.try_consume_tokens([token])
                _fill(self._matcher, masks[num_free + num_consumed])
        finally:
            self._matcher.rollback(num_consumed)

    def advance(self, tokens: Sequence[int]) -> None:
        """Take tokens that the sequence has got.

        Raises:
            GrammarError: one of them is not legal, or the grammar has become too complex; the
                state is of no use any more.
        """
        num_free, body, ends = self._parts(tokens)
        if self._ends_early(tokens[:num_free]):
            raise GrammarError("the output ended before its answer began")
        self._triggers = self._triggers[self._num_triggered(tokens) :]
        num_consumed = 0 if self._has_ended else self._matcher.try_consume_tokens(body)
        if self._matcher.is_error():
            raise _too_complex(self._matcher)
        is_end_wrong = ends and (self._has_ended or not self._matcher.is_accepting())
        if num_consumed < len(body) or is_end_wrong:
            raise GrammarError(f"the output left its grammar by token {num_consumed} of {body}")
        self._has_ended = ends

    def _ends_early(self, free: Sequence[int]) -> bool:
        return not self._ends_free and self._eos in free

    def _parts(self, tokens: Sequence[int]) -> tuple[int, list[int], bool]:
        """How many tokens are free, those after them, and whether an end follows these."""
        num_triggered = num_free = 0
        while num_triggered < len(self._triggers) and num_free < len(tokens):
            num_triggered += tokens[num_free] == self._triggers[num_triggered]
            num_free += 1
        body = list(tokens[num_free:])
        ends = self._eos in body
        return num_free, body[: body.index(self._eos)] if ends else body, ends

    def _num_triggered(self, tokens: Sequence[int]) -> int:
        """How many triggers the tokens pull."""
        num_triggered = 0
        for token in tokens:
            if num_triggered == len(self._triggers):
                break
            num_triggered += token == self._triggers[num_triggered]
        return num_triggered


def _hide_spellings(tokenizer: dict[str, Any]) -> None:
    """Give the special tokens of a `tokenizer.json` spellings that no text has.

    The library takes text that can go on in one way only as its tokenizer does, which finds
    special tokens in it. With secret spellings it finds none, and writes the text plainly.
    """
    hidden: dict[str, str] = {}
    for token in tokenizer.get("added_tokens", []):
        # Otherwise the text of a JSON string could be written with the token of a marker.
        token["special"] = True
        spelling = f"<{secrets.token_hex(16)}>"
        hidden[token["content"]], token["content"] = spelling, spelling
    model = tokenizer.get("model", {})
    vocab = model.get("vocab")
    if isinstance(vocab, dict):
        known = cast(dict[str, int], vocab)
        model["vocab"] = {hidden.get(key, key): token for key, token in known.items()}


def _lark_of_gbnf(text: str) -> str:
    """Raises GbnfToLarkError, RecursionError, or ConstraintTextError for any other fault."""
    try:
        return gbnf_to_lark(text)
    except (GbnfToLarkError, RecursionError):
        raise
    except Exception as error:  # A rule that is missing or there twice has no type of its own.
        raise ConstraintTextError(str(error)) from None


def _fill(matcher: LLMatcher, mask: np.ndarray) -> None:
    """Write the mask of the next token into contiguous memory.

    Raises:
        GrammarError: the grammar has become too complex; the matcher is of no use any more.
    """
    matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
    if matcher.is_error():
        raise _too_complex(matcher)


def _too_complex(matcher: LLMatcher) -> GrammarError:
    if "NoExtension" in matcher.get_error():
        return GrammarError("no token of this model can continue the text")
    return GrammarError(f"the grammar is too complex: {_first_line(matcher.get_error())}")


def _error(constraint: OutputConstraint, detail: str) -> GrammarError:
    what = {
        ConstraintKind.JSON: "the JSON schema",
        ConstraintKind.REGEX: "the regular expression",
        ConstraintKind.GRAMMAR: "the grammar",
    }.get(constraint.kind, "the tools")
    message = f"{what} of {constraint.param} cannot be enforced: {_first_line(detail)}"
    return GrammarError(message, constraint.param)


def _first_line(detail: str) -> str:
    """The first lines of a message, without the dump of the parser's state that may follow."""
    lines = [line.strip() for line in detail.splitlines() if line.strip() and "<state>" not in line]
    return " ".join(lines)[:300]
