"""Text to token ids and back for clients, as the model would see them."""

from typing import Any

import deepseek_recipe as recipe

from serving.frontend import fields
from serving.frontend.completions import check_model
from serving.frontend.conversion import ServedModel, chat_changes, check_room, convert, encode
from serving.frontend.errors import bad_request, decode_body, recipe_errors
from serving.frontend.images import check_image_parts


def tokenize(raw: bytes, model: ServedModel) -> dict[str, Any]:
    """The tokens of a raw `prompt`, or of `messages` in the model's chat format.

    A begin-of-sentence token, where the checkpoint wants one, is left out of a prompt if
    `add_special_tokens` is false; `return_token_strs` adds the text of each token.

    Raises:
        ApiError: 400, the body is not acceptable.
    """
    body = decode_body(raw)
    check_model(body, model)
    prompt = body.get("prompt")
    if (prompt is None) == (body.get("messages") is None):
        raise bad_request("expected one of prompt and messages", "prompt")
    if prompt is None:
        with recipe_errors(body):
            check_image_parts(body)
            changes = chat_changes(body)
            request = recipe.ChatCompletionRequest(body | changes if changes else raw)
            converted = convert(request, model)
            ids = encode(converted, model, "messages").token_ids
    else:
        ids = _of_prompt(body, prompt, model)
    answer = {"count": len(ids), "max_model_len": model.context_max, "tokens": ids}
    if fields.boolean(body, "return_token_strs"):
        answer["token_strs"] = [model.codec.decode([token]) for token in ids]
    return answer


def detokenize(raw: bytes, model: ServedModel) -> dict[str, Any]:
    """The text of `tokens`.

    Raises:
        ApiError: 400, the body is not acceptable.
    """
    body = decode_body(raw)
    check_model(body, model)
    tokens = body.get("tokens")
    if not isinstance(tokens, list) or not all(
        fields.is_token_id(token, model.vocab_size) for token in tokens
    ):
        raise bad_request(
            f"tokens: expected a list of ids from 0 to {model.vocab_size - 1}", "tokens"
        )
    return {"prompt": model.codec.decode(tokens)}


def _of_prompt(body: dict[str, Any], prompt: object, model: ServedModel) -> tuple[int, ...]:
    if not isinstance(prompt, str):
        raise bad_request("prompt: expected text", "prompt")
    check_room(model.codec.fewest_tokens(len(prompt)), model, "prompt", "at least ")
    adds = body.get("add_special_tokens") is None or fields.boolean(body, "add_special_tokens")
    try:
        return model.codec.encode_text(prompt, adds_bos=adds)
    except ValueError as error:
        raise bad_request(f"prompt cannot be encoded: {error}", "prompt") from None
