"""From a request that deepseek-recipe understands to a prompt, its limits and its constraint.

The dialects of chats share this; what differs between them is where a field stands in the body.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import deepseek_recipe as recipe
import msgspec

from serving.core.request import TOOL_KINDS, ConstraintKind, OutputConstraint
from serving.frontend import fields
from serving.frontend.errors import bad_request
from serving.frontend.images import EncodedPrompt, ImageReader
from serving.frontend.text import TextCodec

RecipeRequest = recipe.ChatCompletionRequest | recipe.ResponsesRequest | recipe.MessagesRequest


@dataclass(frozen=True, slots=True)
class ServedModel:
    """What the dialects need to know of the model.

    `context_max` is the most tokens a prompt and its answer may have together; `images` reads the
    images of chats, or refuses them.
    """

    name: str
    codec: TextCodec
    vocab_size: int
    context_max: int
    eos_token_id: int | None
    images: ImageReader = ImageReader()


@dataclass(frozen=True, slots=True)
class SentSchemas:
    """The JSON schemas of a request as the client sent them.

    `answer` is that of the answer, which the field `param` asks for; `has_form` says whether that
    asks for a form of any kind. `tools` are those of the parameters of tools, by name.
    """

    answer: Any = None
    tools: Mapping[str, Any] = field(default_factory=dict[str, Any])
    param: str = ""
    has_form: bool = False


def conversion_options(model: ServedModel) -> recipe.ConversionOptions:
    """What deepseek-recipe has to know of the model."""
    return (
        recipe.ConversionOptions()
        .with_special_tokens(model.codec.special_tokens)
        .with_model_versions_by_name({model.name: recipe.ModelVersion.DeepseekV41Flash})
        .with_thinking_max_tokens_upper_bound(model.context_max)
        .with_non_thinking_max_tokens_upper_bound(model.context_max)
    )


def convert(request: RecipeRequest, model: ServedModel) -> recipe.ConversationRequest:
    """The conversation in a request, and what is asked of it."""
    return request.convert(conversion_options(model))


def chat_changes(body: Mapping[str, Any]) -> dict[str, Any]:
    """What of a chat body to change so that deepseek-recipe makes the prompt that is meant.

    Newer clients call the system's role `developer`, which it does not know; for thinking see
    `fields.without_thinking`.
    """
    return _known_roles(body) | fields.without_thinking(body, "thinking", fields.NO_THINKING)


def _known_roles(body: Mapping[str, Any]) -> dict[str, Any]:
    messages = body.get("messages")
    found = messages if isinstance(messages, list) else []
    roles = [message.get("role") if isinstance(message, dict) else None for message in found]
    if "developer" not in roles:
        return {}
    return {
        "messages": [
            message | {"role": "system"} if role == "developer" else message
            for message, role in zip(found, roles, strict=True)
        ]
    }


def encode(converted: recipe.ConversationRequest, model: ServedModel, param: str) -> EncodedPrompt:
    """The prompt of a conversation; `param` is the field that holds it.

    Raises:
        ApiError: 400, its text cannot fit the context, which is known before it is encoded.
    """
    conversation = converted.conversation
    num_chars = sum(len(message.content) for message in conversation.messages)
    check_room(model.codec.fewest_tokens(num_chars), model, param, "at least ")
    return model.images.encode(conversation, model.codec)


def tokens_left(
    converted: recipe.ConversationRequest, prompt: EncodedPrompt, model: ServedModel, param: str
) -> int:
    """How many tokens may be generated: as asked for, or what there is room for.

    Raises:
        ApiError: 400, the prompt leaves no room.
        deepseek_recipe.ConversionError: less room than is asked for.
    """
    num_tokens = len(prompt.token_ids)
    check_room(num_tokens, model, param)
    return converted.resolve_max_tokens(num_tokens, model.context_max)


def starts_thinking(converted: recipe.ConversationRequest) -> bool:
    """Whether the answer begins with thinking."""
    stage = converted.parsing_options.thinking_initial_stage
    return stage is not None and stage.starts_in_reasoning()


def check_room(num_tokens: int, model: ServedModel, param: str, how_sure: str = "") -> None:
    """Raises ApiError 400 for a prompt that leaves no room for a token."""
    if num_tokens >= model.context_max:
        raise bad_request(
            f"The {param} has {how_sure}{num_tokens} tokens; the context of {model.context_max} "
            "needs room for one more",
            param,
            "context_length_exceeded",
        )


_CONSTRAINT_PARAMS = {
    ConstraintKind.TOOL_CALL: "tools",
    ConstraintKind.TOOL_CALL_REQUIRED: "tool_choice",
}


def constraint_of(
    body: Mapping[str, Any], converted: recipe.ConversationRequest, sent: SentSchemas
) -> OutputConstraint | None:
    """The form that the answer must have, by the public protocol or beyond it.

    Raises:
        ApiError: 400, two forms at once, or one that is not understood.
    """
    fields.check_tool_choice(body)
    after_thinking = starts_thinking(converted)
    guided = fields.guided_constraint(body, after_thinking=after_thinking)
    wanted = converted.inference_options.output_constraint
    if wanted is None:
        return guided
    kind = ConstraintKind(wanted.kind)
    param = _CONSTRAINT_PARAMS.get(kind, sent.param)
    # Of tools and a form deepseek-recipe keeps the tools.
    lost = sent.param if kind in TOOL_KINDS and sent.has_form else guided and guided.param
    if lost:
        raise bad_request(f"received {lost} and {param}; expected at most one of them", lost)
    text = _with_whole_schemas(kind, wanted.schema, sent)
    has_one_call = kind in TOOL_KINDS and fields.wants_one_call(body)
    return OutputConstraint(kind, text, after_thinking, param, has_one_call)


def _with_whole_schemas(kind: ConstraintKind, text: str, sent: SentSchemas) -> str:
    """A constraint with the schemas as the client sent them.

    The converter drops limits such as `maxLength` from those that it is to hold strictly.
    """
    if kind is ConstraintKind.JSON and text:
        return msgspec.json.encode(sent.answer).decode()
    if kind in TOOL_KINDS:
        tools = msgspec.json.decode(text)
        for tool in tools:
            name = tool["function"]["name"]
            if name in sent.tools:
                tool["function"]["parameters"] = sent.tools[name]
        return msgspec.json.encode(tools).decode()
    return text
