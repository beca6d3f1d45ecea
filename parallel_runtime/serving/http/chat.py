"""``/v1/chat/completions``: chats, continued by the assistant's turn."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final, final

from parallel_runtime.errors import RequestError
from parallel_runtime.models import Tokenizer
from parallel_runtime.serving.checks import check_integer, shown
from parallel_runtime.serving.http.asked import Asked, Piece, read_streaming, token_bytes, token_text
from parallel_runtime.serving.http.bodies import SAMPLING_FIELDS, check_fields, read_flag, read_priority, sampling_settings
from parallel_runtime.serving.http.refusals import RefusedError
from parallel_runtime.serving.messages import TokenLogprobs

__all__ = ["ChatStyle", "read_chat"]

_KNOWN: Final = frozenset(
    (
        *("model", "messages", "max_tokens", "max_completion_tokens", "logprobs", "top_logprobs", "stream", "stream_options"),
        *("return_token_ids", "priority", *SAMPLING_FIELDS),
    )
)
_WITHOUT_EFFECT: Final = frozenset(
    ("user", "metadata", "safety_identifier", "prompt_cache_key", "prompt_cache_retention", "parallel_tool_calls")
)
_NEUTRAL: Final = MappingProxyType(
    {
        **dict.fromkeys(("tools", "functions"), ([],)),
        "tool_choice": ("none", "auto"),
        "function_call": ("none", "auto"),
        "response_format": ({"type": "text"},),
        "logit_bias": ({},),
        "modalities": (["text"],),
        "service_tier": ("auto", "default"),
        "store": (False,),
        **dict.fromkeys(("audio", "prediction", "reasoning_effort", "verbosity", "web_search_options", "moderation"), ()),
    }
)
_ROLES: Final = MappingProxyType({"developer": "system"})
"""Roles that chat templates know under another name."""


@final
class ChatStyle:
    """As OpenAI writes chat completions down."""

    prefix = "chatcmpl-"
    object_name = "chat.completion"
    chunk_name = "chat.completion.chunk"

    def opening(self) -> dict[str, Any]:
        """The role comes before the first token."""
        return {"delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}

    def piece(self, piece: Piece, tokenizer: Tokenizer | None) -> dict[str, Any]:
        """A piece of a streamed answer.

        Args:
            piece: The piece.
            tokenizer: Of the model.
        """
        delta = {"content": piece.text} if piece.text or piece.logprobs else {}
        return {"delta": delta, "logprobs": _told(piece, tokenizer), "finish_reason": piece.finish_reason}

    def whole(self, piece: Piece, tokenizer: Tokenizer | None) -> dict[str, Any]:
        """A whole answer.

        Args:
            piece: All of it.
            tokenizer: Of the model.
        """
        message = {"role": "assistant", "content": piece.text, "refusal": None}
        return {"message": message, "logprobs": _told(piece, tokenizer), "finish_reason": piece.finish_reason}


def read_chat(body: Mapping[str, Any]) -> Asked:
    """Understand a request for chat completions.

    Args:
        body: The request.

    Returns:
        What it asks for.

    Raises:
        RequestError: A field breaks its rule.
        RefusedError: There are fields that are not served.
    """
    check_fields(body, known=_KNOWN, without_effect=_WITHOUT_EFFECT, neutral=_NEUTRAL)
    messages = _read_messages(body.get("messages"))
    settings = sampling_settings(body)
    settings.update(_read_logprobs(body))
    is_streamed, includes_usage = read_streaming(body)

    def encode(tokenizer: Tokenizer | None) -> list[tuple[int, ...]]:
        assert tokenizer is not None
        return [tuple(tokenizer.chat(messages))]

    return Asked(
        style=ChatStyle(),
        num_prompts=1,
        encode=encode,
        needs_tokenizer=True,
        settings=settings,
        max_new_tokens=_read_max_tokens(body),
        is_streamed=is_streamed,
        includes_usage=includes_usage,
        returns_token_ids=read_flag(body, "return_token_ids"),
        model=body.get("model"),
        priority=read_priority(body),
    )


def _read_max_tokens(body: Mapping[str, Any]) -> int | None:
    names = [name for name in ("max_completion_tokens", "max_tokens") if body.get(name) is not None]
    for name in names:
        check_integer(name, body[name], low=1)
    return body[names[0]] if names else None


def _read_logprobs(body: Mapping[str, Any]) -> dict[str, int]:
    top = body.get("top_logprobs")
    if top is not None:
        check_integer("top_logprobs", top, low=0)
    if read_flag(body, "logprobs"):
        return {"logprobs": top or 0}
    if top:
        raise RequestError("top_logprobs needs logprobs=true")
    return {}


def _read_messages(messages: object) -> list[dict[str, str]]:
    if not isinstance(messages, list) or not messages:
        raise RequestError(f"messages must be a list of at least one message, got {shown(messages)[:60]}")
    return [_read_message(index, message) for index, message in enumerate(messages)]


def _read_message(index: int, message: object) -> dict[str, str]:
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise RequestError(f"messages[{index}] must be an object with a text 'role' and a 'content', got {shown(message)[:60]}")
    if others := sorted(name for name in message if name not in ("role", "content") and message[name] is not None):
        told = f"messages[{index}] has {', '.join(others)}, which this server does not support; there are role and content"
        raise RefusedError(400, told, param="messages", code="unsupported_parameter")
    role = message["role"]
    return {"role": _ROLES.get(role, role), "content": _read_content(index, message.get("content"))}


def _read_content(index: int, content: object) -> str:
    if isinstance(content, str):
        return content
    texts: list[str] = []
    for part in content if isinstance(content, list) else [content]:
        if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            rule = "must be a text, or a list of parts {'type': 'text', 'text': ...}"
            raise RequestError(f"messages[{index}].content {rule}, got {shown(part)[:60]}")
        texts.append(part["text"])
    return "".join(texts)


def _told(piece: Piece, tokenizer: Tokenizer | None) -> dict[str, Any] | None:
    if not piece.logprobs:
        return None
    pairs = zip(piece.token_ids, piece.logprobs, strict=True)
    return {"content": [_token(token, told, tokenizer) for token, told in pairs], "refusal": None}


def _token(token: int, told: TokenLogprobs, tokenizer: Tokenizer | None) -> dict[str, Any]:
    top = [_entry(other, logprob, tokenizer) for other, logprob in told.top]
    return {**_entry(token, told.logprob, tokenizer), "top_logprobs": top}


def _entry(token: int, logprob: float, tokenizer: Tokenizer | None) -> dict[str, Any]:
    text = token_text(token, tokenizer)
    return {"token": text, "logprob": logprob, "bytes": token_bytes(text)}
