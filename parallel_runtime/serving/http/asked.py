"""What a client asks for, and how one of its answers is written down: what the two kinds of completions have in common."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, final

from parallel_runtime.errors import RequestError
from parallel_runtime.models import Tokenizer
from parallel_runtime.serving.answers import StreamEvent
from parallel_runtime.serving.checks import shown
from parallel_runtime.serving.http.bodies import read_flag
from parallel_runtime.serving.http.refusals import RefusedError
from parallel_runtime.serving.messages import FinishReason, TokenLogprobs

__all__ = ["Asked", "Piece", "Style", "piece_of", "read_streaming", "token_bytes", "token_text", "whole_piece"]


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """New tokens of one answer, or all of them.

    Attributes:
        text: Their text.
        token_ids: The tokens that the client sees: one that ended the answer is not among them.
        logprobs: Of each of ``token_ids``, where they are wanted.
        finish_reason: Why the answer ended; ``None`` while it goes on.
        offset: Characters of the answer's tokens before these.
    """

    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...]
    finish_reason: str | None
    offset: int = 0


class Style(Protocol):
    """How one kind of completions is written down."""

    @property
    def prefix(self) -> str:
        """Of the names of answers."""
        ...

    @property
    def object_name(self) -> str:
        """What a whole answer is called."""
        ...

    @property
    def chunk_name(self) -> str:
        """What a piece of an answer is called."""
        ...

    def opening(self) -> dict[str, Any] | None:
        """What a streamed answer begins with, before any token."""
        ...

    def piece(self, piece: Piece, tokenizer: Tokenizer | None) -> dict[str, Any]:
        """A piece of a streamed answer."""
        ...

    def whole(self, piece: Piece, tokenizer: Tokenizer | None) -> dict[str, Any]:
        """A whole answer."""
        ...


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """One request, understood.

    Attributes:
        style: How its answers are written down.
        num_prompts: Its prompts.
        encode: Makes token ids of them; a tokenizer is needed where ``needs_tokenizer``.
        needs_tokenizer: Whether there is text among them.
        settings: Of ``SamplingParams``, those that it says.
        max_new_tokens: Tokens of each answer at most; ``None`` leaves it to the server.
        is_streamed: Whether answers are wanted as they come.
        includes_usage: Whether the stream ends with the tokens of all answers.
        returns_token_ids: Whether the ids of tokens are wanted.
        model: What it calls the model.
        priority: Of its answers in the queue.
    """

    style: Style
    num_prompts: int
    encode: Callable[[Tokenizer | None], list[tuple[int, ...]]]
    needs_tokenizer: bool
    settings: Mapping[str, Any]
    max_new_tokens: int | None
    is_streamed: bool
    includes_usage: bool
    returns_token_ids: bool
    model: str | None
    priority: int

    @property
    def num_samples(self) -> int:
        """Answers to each prompt."""
        return int(self.settings.get("n", 1))


def read_streaming(body: Mapping[str, Any]) -> tuple[bool, bool]:
    """Read whether answers are wanted as they come, and whether the stream ends with their tokens.

    Args:
        body: The request.

    Returns:
        Both.

    Raises:
        RequestError: A field is of another type.
        RefusedError: There are other options.
    """
    is_streamed, options = read_flag(body, "stream"), body.get("stream_options")
    if options is None:
        return is_streamed, False
    if not isinstance(options, dict):
        raise RequestError(f"stream_options must be an object such as {{'include_usage': true}}, got {shown(options)[:60]}")
    if not is_streamed:
        raise RequestError("stream_options needs stream=true")
    if unknown := sorted(set(options) - {"include_usage", "include_obfuscation"}):
        message = f"unknown field{'s' if len(unknown) > 1 else ''} {', '.join(unknown)} of stream_options; there is include_usage"
        raise RefusedError(400, message, param="stream_options", code="unknown_parameter")
    return True, read_flag(options, "include_usage")


def piece_of(event: StreamEvent, *, offset: int) -> Piece:
    """Make a piece of what an engine says.

    Args:
        event: Of one answer.
        offset: Characters of the answer's tokens before.

    Returns:
        The piece.

    Raises:
        RefusedError: The answer was ended before it was whole.
    """
    if event.finish_reason is FinishReason.ABORT:
        raise RefusedError(503, "the server ended this answer before it was whole", code="aborted", retry_s=1)
    is_ended_by_token = isinstance(event.stopped_by, int)
    count = len(event.token_ids) - is_ended_by_token
    reason = None if event.finish_reason is None else str(event.finish_reason)
    return Piece(
        text=event.text,
        token_ids=event.token_ids[:count],
        logprobs=event.logprobs[:count],
        finish_reason=reason,
        offset=offset,
    )


def whole_piece(pieces: Sequence[Piece]) -> Piece:
    """Join the pieces of one answer.

    Args:
        pieces: All of them, at least one.
    """
    return Piece(
        text="".join(piece.text for piece in pieces),
        token_ids=_joined(piece.token_ids for piece in pieces),
        logprobs=tuple(told for piece in pieces for told in piece.logprobs),
        finish_reason=pieces[-1].finish_reason,
    )


def token_text(token: int, tokenizer: Tokenizer | None) -> str:
    """The text of one token, or ``token_id:7`` where the model has no tokenizer.

    Args:
        token: Its id.
        tokenizer: Of the model.
    """
    return f"token_id:{token}" if tokenizer is None else tokenizer.decode((token,), skip_special_tokens=False)


def token_bytes(text: str) -> list[int] | None:
    """The bytes of one token; ``None`` where it is a part of a character, of which the tokenizer tells no bytes.

    Args:
        text: Of the token.
    """
    return None if "\ufffd" in text else list(text.encode())


def _joined(parts: Iterable[tuple[int, ...]]) -> tuple[int, ...]:
    return tuple(token for part in parts for token in part)
