"""Text to token ids and back, with the checkpoint's own tokenizer."""

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import deepseek_recipe as recipe

from sharding.config_file import ConfigError

# Names that no vocabulary holds, so that the parser finds no reasoning and no tool call in
# completions: their text is passed on as it is.
_NO_MARKERS = recipe.SpecialTokens(
    thinking_start="\x00thinking", thinking_end="\x00/thinking", dsml="\x00dsml"
)


class TextCodec:
    """Encodes prompts and decodes answers. Safe to use from several threads.

    Attributes:
        tokenizer: deepseek-recipe's tokenizer, for the stream parsers.
        thinking_end: the token that ends thinking, None where no single one does.
        special_tokens: how this tokenizer spells them, for converting requests.
    """

    def __init__(
        self,
        tokenizer: recipe.Tokenizer,
        bos_token: str | None = None,
        image_token: str | None = None,
        token_chars_max: int | None = None,
    ) -> None:
        self.tokenizer = tokenizer
        self.special_tokens = recipe.SpecialTokens(image=image_token)
        self._bos_token = bos_token
        self._token_chars_max = token_chars_max
        encoding = recipe.DeepseekV41Encoding().with_tokenizer(tokenizer)
        self._encoding = encoding.with_special_tokens(self.special_tokens)
        self._newline = tokenizer.encode("\n")
        thinking_end = tokenizer.encode("</think>")
        self.thinking_end = thinking_end[0] if len(thinking_end) == 1 else None

    @classmethod
    def load(cls, model_dir: Path) -> "TextCodec":
        """Reads `tokenizer.json`, and `tokenizer_config.json` where there is one.

        Raises:
            ConfigError: a file is missing where it must not be, or is damaged.
        """
        path = model_dir / "tokenizer.json"
        if not path.is_file():
            raise ConfigError(f"{path}: no such file; a checkpoint directory has a tokenizer.json")
        try:
            tokenizer = recipe.Tokenizer.from_file(str(path))
        except RuntimeError as error:
            raise ConfigError(f"{path}: not a tokenizer: {error}") from None
        longest = _longest_token(json.loads(path.read_text(encoding="utf-8")))
        bos_token = _bos_of(model_dir / "tokenizer_config.json")
        return cls(tokenizer, bos_token, token_chars_max=longest)

    def with_image_token(self, token_id: int) -> "TextCodec":
        """A codec whose chats may hold images; each is the one token `token_id` in the prompt.

        Raises:
            ConfigError: the tokenizer has no special token of that id.
        """
        spelling = self.decode([token_id])
        codec = TextCodec(self.tokenizer, self._bos_token, spelling, self._token_chars_max)
        if spelling and codec._knows_image(token_id, spelling):
            return codec
        raise ConfigError(
            f"tokenizer.json: id {token_id} is {spelling!r}; expected a special token there, "
            "because config.json says that this id stands for images"
        )

    def fewest_tokens(self, num_chars: int) -> int:
        """A lower bound of the tokens in so many characters, known without encoding them.

        0 where the tokenizer gives no bound.
        """
        return 0 if self._token_chars_max is None else -(-num_chars // self._token_chars_max)

    def encode_text(self, text: str, *, adds_bos: bool = True) -> tuple[int, ...]:
        """A raw prompt; special tokens spelled in it count as such, as completions need it.

        The begin-of-sentence token is put in front when the tokenizer's configuration says so and
        `adds_bos` does not forbid it.

        Raises:
            ValueError: the text holds half of a surrogate pair.
        """
        if adds_bos and self._bos_token and not text.startswith(self._bos_token):
            text = self._bos_token + text
        return tuple(self.tokenizer.encode(text))

    def encode_chat(self, conversation: recipe.Conversation) -> tuple[int, ...]:
        """A conversation in the model's chat format; its plain text cannot inject special tokens.

        Raises:
            RuntimeError: the format needs a special token that the tokenizer lacks.
        """
        return tuple(self._encoding.encode(conversation))

    def _knows_image(self, token_id: int, spelling: str) -> bool:
        image = recipe.BytesImageSource(b"")
        message = recipe.UserMessage(spelling, [image], image_token=spelling)
        try:
            self.encode_chat(recipe.Conversation([recipe.UserMessage("-")]))
        except RuntimeError:
            return True  # Without the other tokens of the format there are no chats to hold one.
        try:
            return token_id in self.encode_chat(recipe.Conversation([message]))
        except RuntimeError:
            return False

    def decode(self, token_ids: Iterable[int]) -> str:
        """The whole text of token ids; bytes that are not UTF-8 become U+FFFD."""
        decoder = PlainDecoder(self)
        text, _ = decoder.push(tuple(token_ids))
        # The decoder holds back an unfinished character; a newline after it lets it out.
        tail, _ = decoder.push(self._newline)
        return (text + tail).removesuffix("\n")


class PlainDecoder:
    """Decodes a stream of tokens into text exactly, and ends it at a stop string.

    A character that is not complete yet is held back until it is, and so is text that may be the
    beginning of a stop string.
    """

    def __init__(self, codec: TextCodec, stop: Sequence[str] = ()) -> None:
        conversation = recipe.Conversation([recipe.UserMessage("-")])
        request = recipe.ConversationRequest(conversation, recipe.ModelVersion.DeepseekV41Flash)
        options = recipe.ParsingOptions(
            parse_tool_calls=False,
            stop_sequences=stop,
            special_tokens=_NO_MARKERS,
            # The one stage that keeps leading newlines.
            thinking_initial_stage=recipe.ThinkingInitialStage.ContentContinuation,
        )
        generator = recipe.ChatCompletionRequest.chunk_generator(request, "-", "-")
        self._processor = recipe.StreamProcessor(generator, options, codec.tokenizer)
        self._processor.push(recipe.InferenceChunk.ready())

    def push(self, token_ids: Sequence[int]) -> tuple[str, bool]:
        """The text that became certain, and whether a stop string ended it."""
        if self._processor.finished:
            return "", True
        chunks = self._processor.push(recipe.InferenceChunk.tokens(token_ids))
        return _content(chunks), self._processor.finished

    def finish(self) -> str:
        """What was held back for a stop string that did not come."""
        return _content(self._processor.finish())


def _content(chunks: Sequence[Any]) -> str:
    text = ""
    for chunk in chunks:
        delta = json.loads(chunk.to_json())["choices"][0]["delta"]
        text += delta.get("content") or ""
    return text


def _longest_token(tokenizer: dict[str, Any]) -> int | None:
    """The most characters of text that one token can stand for, None where nothing bounds them.

    A byte-level vocabulary spells each byte as one character, and no character of text has less
    than one byte. A normaliser could take any number of characters out, so then there is no bound.
    """
    normalizer = tokenizer.get("normalizer") or {"normalizers": []}
    decoder = tokenizer.get("decoder") or {}
    if normalizer.get("normalizers") != [] or decoder.get("type") != "ByteLevel":
        return None
    added = [token["content"] for token in tokenizer.get("added_tokens", ())]
    return max((len(token) for token in [*tokenizer["model"]["vocab"], *added]), default=None)


def _bos_of(path: Path) -> str | None:
    """The text to put before raw prompts, None for nothing."""
    if not path.is_file():
        return None
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
        token = values.get("bos_token") if values.get("add_bos_token") else None
    except (ValueError, AttributeError) as error:
        raise ConfigError(f"{path}: not a tokenizer configuration: {error}") from None
    text = token.get("content") if isinstance(token, dict) else token
    if token is not None and not isinstance(text, str):
        raise ConfigError(
            f"{path}: bos_token is {token!r}; expected a text, or an object with its content"
        )
    return text
