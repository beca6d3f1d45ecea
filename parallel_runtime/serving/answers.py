"""What callers of an engine get: the new tokens of an answer as they come, with their text, and whole answers."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import final

from parallel_runtime.models import StreamDecoder, Tokenizer
from parallel_runtime.serving.messages import FinishReason, Request, StepOutput, TokenLogprobs
from parallel_runtime.serving.stop_strings import StopStrings

__all__ = ["AnswerReader", "Completion", "JoinedAnswers", "StreamEvent", "Usage"]


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """Tokens of one answer.

    Attributes:
        num_prompt_tokens: Of its prompt.
        num_new_tokens: Made so far.
    """

    num_prompt_tokens: int
    num_new_tokens: int

    @property
    def num_tokens(self) -> int:
        """Both together."""
        return self.num_prompt_tokens + self.num_new_tokens


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class StreamEvent:
    """New tokens of one answer.

    Attributes:
        index: Position of the prompt among those of the call.
        sample: Which of the ``n`` answers to that prompt.
        request_id: For ``Engine.abort``.
        token_ids: New tokens.
        text: Text that is certain now; it may lag behind while a character or a stop text is incomplete. ``""`` where the model
            has no tokenizer.
        logprobs: Of each of ``token_ids``, where they are wanted.
        finish_reason: Why it ended; ``None`` while it goes on.
        stopped_by: The text or token that ended it, where ``finish_reason`` is ``stop``.
        usage: Tokens so far.
        weights_version: Of the weights that chose ``token_ids``; see ``EngineControls.update_weights``.
        dp_rank: The data-parallel rank that serves it.
    """

    index: int
    sample: int = 0
    request_id: str
    token_ids: tuple[int, ...]
    text: str
    logprobs: tuple[TokenLogprobs, ...] = ()
    finish_reason: FinishReason | None
    stopped_by: str | int | None = None
    usage: Usage
    weights_version: int = 0
    dp_rank: int


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """One whole answer.

    Attributes:
        index: Position of the prompt among those of the call.
        sample: Which of the ``n`` answers to that prompt.
        request_id: Name of its request.
        prompt_token_ids: The prompt.
        token_ids: New tokens; the one that ended it is included.
        text: Their text, without what ended it. ``""`` where the model has no tokenizer.
        logprobs: Of each of ``token_ids``, where they are wanted.
        finish_reason: Why it ended.
        stopped_by: The text or token that ended it, where ``finish_reason`` is ``stop``.
        weights_version: Of the weights that chose the last of ``token_ids``.
        dp_rank: The data-parallel rank that served it.
    """

    index: int
    sample: int = 0
    request_id: str
    prompt_token_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    text: str
    logprobs: tuple[TokenLogprobs, ...] = ()
    finish_reason: FinishReason
    stopped_by: str | int | None = None
    weights_version: int = 0
    dp_rank: int

    @property
    def usage(self) -> Usage:
        """Its tokens."""
        return Usage(num_prompt_tokens=len(self.prompt_token_ids), num_new_tokens=len(self.token_ids))


@final
class AnswerReader:
    """Turns the tokens of one request into events: text without half a character, up to the first stop text.

    Args:
        request: As it is served.
        index: Position of its prompt among those of the call.
        sample: Which of the answers to that prompt.
        stops: Stop texts.
        tokenizer: Of the model, where it has one.

    Attributes:
        request: As it is served.
        index: Position of its prompt among those of the call.
        sample: Which of the answers to that prompt.
        is_over: Whether the last event was given.
    """

    def __init__(
        self, request: Request, *, index: int, sample: int = 0, stops: Iterable[str] = (), tokenizer: Tokenizer | None = None
    ) -> None:
        self.request = request
        self.index = index
        self.sample = sample
        self.is_over = False
        skip = request.sampling.skip_special_tokens
        self._decoder: StreamDecoder | None = None if tokenizer is None else tokenizer.stream(skip_special_tokens=skip)
        self._stops = StopStrings(tuple(stops))
        self._num_new_tokens = 0

    def read(self, output: StepOutput, *, dp_rank: int = 0) -> StreamEvent:
        """Take what a replica made.

        Args:
            output: New tokens of this request.
            dp_rank: Who made them.

        Returns:
            The event. Where it has a finish reason that ``output`` has not, a stop text has come: the request is to be aborted.
        """
        sampling, tokens = self.request.sampling, output.token_ids
        reason, stopped_by, text = output.finish_reason, None, ""
        for count, token in enumerate(tokens, 1):
            is_end = reason is FinishReason.STOP and count == len(tokens) and token in sampling.stop_token_ids
            if is_end:
                stopped_by = token
            elif self._decoder is not None:
                text += self._watch(self._decoder.push(token), self._num_new_tokens + count)
            if self._stops.found is not None:
                tokens, reason = tokens[:count], FinishReason.STOP
                break
        self._num_new_tokens += len(tokens)
        if reason is not None and self._stops.found is None and self._decoder is not None:
            text += self._watch(self._decoder.flush(), self._num_new_tokens) + self._stops.flush()
        if self._stops.found is not None:
            reason = FinishReason.STOP
        self.is_over = reason is not None
        return StreamEvent(
            index=self.index,
            sample=self.sample,
            request_id=self.request.request_id,
            token_ids=tokens,
            text=text,
            logprobs=output.logprobs[: len(tokens)],
            finish_reason=reason,
            stopped_by=stopped_by if self._stops.found is None else self._stops.found,
            usage=Usage(num_prompt_tokens=len(self.request.prompt), num_new_tokens=self._num_new_tokens),
            weights_version=output.weights_version,
            dp_rank=dp_rank,
        )

    def _watch(self, text: str, num_new_tokens: int) -> str:
        return self._stops.push(text) if num_new_tokens > self.request.sampling.min_new_tokens else text


@final
class JoinedAnswers:
    """Whole answers, out of events.

    Args:
        answers: In the order of the completions.
    """

    def __init__(self, answers: Sequence[AnswerReader]) -> None:
        self._requests = [(answer.request, answer.index, answer.sample) for answer in answers]
        self._events: dict[str, list[StreamEvent]] = {answer.request.request_id: [] for answer in answers}

    def add(self, event: StreamEvent) -> None:
        """Take an event.

        Args:
            event: Of one of the answers.
        """
        self._events[event.request_id].append(event)

    def completions(self) -> list[Completion]:
        """The answers; every one of them has ended."""
        return [self._completion(*request) for request in self._requests]

    def _completion(self, request: Request, index: int, sample: int) -> Completion:
        events = self._events[request.request_id]
        last = events[-1]
        assert last.finish_reason is not None
        return Completion(
            index=index,
            sample=sample,
            request_id=request.request_id,
            prompt_token_ids=request.prompt,
            token_ids=tuple(token for event in events for token in event.token_ids),
            text="".join(event.text for event in events),
            logprobs=tuple(told for event in events for told in event.logprobs),
            finish_reason=last.finish_reason,
            stopped_by=last.stopped_by,
            weights_version=last.weights_version,
            dp_rank=last.dp_rank,
        )
