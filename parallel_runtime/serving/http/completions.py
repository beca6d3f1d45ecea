"""``/v1/completions``: texts or token ids, continued."""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final, final

from parallel_runtime.errors import RequestError
from parallel_runtime.models import Tokenizer
from parallel_runtime.serving.checks import check_integer, shown
from parallel_runtime.serving.http.asked import Asked, Piece, read_streaming, token_text
from parallel_runtime.serving.http.bodies import SAMPLING_FIELDS, check_fields, read_flag, read_priority, sampling_settings
from parallel_runtime.serving.messages import TokenLogprobs

__all__ = ["CompletionStyle", "read_completions"]

_KNOWN: Final = frozenset(
    ("model", "prompt", "max_tokens", "logprobs", "stream", "stream_options", "return_token_ids", "priority", *SAMPLING_FIELDS)
)
_WITHOUT_EFFECT: Final = frozenset(("user",))
_NEUTRAL: Final = MappingProxyType({"echo": (False,), "best_of": (1,), "suffix": ("",), "logit_bias": ({},)})
_DEFAULT_TOKENS: Final = 16
_WANTED: Final = "prompt must be a text, a list of texts, a list of token ids, or a list of such lists"


@final
class CompletionStyle:
    """As OpenAI writes completions down."""

    prefix = "cmpl-"
    object_name = "text_completion"
    chunk_name = "text_completion"

    def opening(self) -> None:
        """Nothing comes before the first token."""

    def piece(self, piece: Piece, tokenizer: Tokenizer | None) -> dict[str, Any]:
        """A piece of a streamed answer.

        Args:
            piece: The piece.
            tokenizer: Of the model.
        """
        return self.whole(piece, tokenizer)

    def whole(self, piece: Piece, tokenizer: Tokenizer | None) -> dict[str, Any]:
        """A whole answer.

        Args:
            piece: All of it.
            tokenizer: Of the model.
        """
        logprobs = _told(piece, tokenizer) if piece.logprobs else None
        return {"text": piece.text, "logprobs": logprobs, "finish_reason": piece.finish_reason}


def read_completions(body: Mapping[str, Any]) -> Asked:
    """Understand a request for completions.

    Args:
        body: The request.

    Returns:
        What it asks for.

    Raises:
        RequestError: A field breaks its rule.
        RefusedError: There are fields that are not served.
    """
    check_fields(body, known=_KNOWN, without_effect=_WITHOUT_EFFECT, neutral=_NEUTRAL)
    prompts = _read_prompts(body.get("prompt"))
    settings = sampling_settings(body)
    if (logprobs := body.get("logprobs")) is not None:
        check_integer("logprobs", logprobs, low=0)
        settings["logprobs"] = logprobs
    max_tokens = body.get("max_tokens")
    if max_tokens is not None:
        check_integer("max_tokens", max_tokens, low=1)
    is_streamed, includes_usage = read_streaming(body)
    return Asked(
        style=CompletionStyle(),
        num_prompts=len(prompts),
        encode=lambda tokenizer: [_encode(prompt, tokenizer) for prompt in prompts],
        needs_tokenizer=any(isinstance(prompt, str) for prompt in prompts),
        settings=settings,
        max_new_tokens=_DEFAULT_TOKENS if max_tokens is None else max_tokens,
        is_streamed=is_streamed,
        includes_usage=includes_usage,
        returns_token_ids=read_flag(body, "return_token_ids"),
        model=body.get("model"),
        priority=read_priority(body),
    )


def _read_prompts(prompt: object) -> Sequence[str | list[int]]:
    if isinstance(prompt, str):
        return [prompt]
    if not isinstance(prompt, list) or not prompt:
        raise RequestError(f"{_WANTED}; got {shown(prompt)[:60]}")
    if all(type(item) is int for item in prompt):
        return [prompt]
    for index, item in enumerate(prompt):
        is_ids = isinstance(item, list) and all(type(token) is int for token in item)
        if not (isinstance(item, str) or is_ids):
            raise RequestError(f"{_WANTED}; item {index} is {shown(item)[:60]}")
    return prompt


def _encode(prompt: str | list[int], tokenizer: Tokenizer | None) -> tuple[int, ...]:
    if isinstance(prompt, list):
        return tuple(prompt)
    assert tokenizer is not None
    return tuple(tokenizer.encode(prompt))


def _told(piece: Piece, tokenizer: Tokenizer | None) -> dict[str, Any]:
    texts = [token_text(token, tokenizer) for token in piece.token_ids]
    offsets, offset = [], piece.offset
    for text in texts:
        offsets.append(offset)
        offset += len(text)
    return {
        "tokens": texts,
        "token_logprobs": [told.logprob for told in piece.logprobs],
        "top_logprobs": [_top(told, tokenizer) for told in piece.logprobs],
        "text_offset": offsets,
    }


def _top(told: TokenLogprobs, tokenizer: Tokenizer | None) -> dict[str, float]:
    """By text; of tokens with equal texts the likeliest counts."""
    return {token_text(token, tokenizer): logprob for token, logprob in reversed(told.top)}
