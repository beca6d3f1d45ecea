"""The two endpoints that make answers: read, serve, write down as it comes or at the end. A client that leaves ends its work."""

import asyncio
import time
import uuid
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping
from contextlib import aclosing
from dataclasses import asdict, dataclass
from typing import Any, final

import msgspec
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from parallel_runtime.errors import ParallelRuntimeError, RequestError
from parallel_runtime.models import Tokenizer
from parallel_runtime.serving.async_engine import AsyncEngine
from parallel_runtime.serving.http.asked import Asked, Piece, piece_of, token_text, whole_piece
from parallel_runtime.serving.http.bodies import read_json
from parallel_runtime.serving.http.live import LiveRequest
from parallel_runtime.serving.http.refusals import RefusedError, error_body, error_response, refusal_of
from parallel_runtime.serving.http.service import Service
from parallel_runtime.serving.sampling_params import SamplingParams

__all__ = ["Answering"]

_HEADERS = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
)


@final
class Answering:
    """One endpoint, as an ASGI application.

    Args:
        read: Understands a request.
        service: Serves it. Borrowed.
    """

    def __init__(self, read: Callable[[Mapping[str, Any]], Asked], service: Service) -> None:
        self._read = read
        self._service = service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request, as ASGI calls it."""
        request = Request(scope, receive)
        body: dict[str, Any] = {}
        try:
            self._service.check_open()
            with self._service.live.entered(uuid.uuid4().hex, request.url.path) as entry:
                limits = self._service.settings
                body.update(await read_json(request, max_bytes=limits.max_body_bytes, timeout_s=limits.read_s))
                asked = self._check(self._read(body))
                answer = _Answer(asked, entry, self._service)
                await _while_there(receive, answer.respond(scope, receive, send))
        except ParallelRuntimeError as error:
            await error_response(refusal_of(error, body))(scope, receive, send)
        except ClientDisconnect:
            return

    def _check(self, asked: Asked) -> Asked:
        if asked.model is not None:
            self._service.check_model(asked.model)
        count, limit = asked.num_prompts * asked.num_samples, self._service.settings.max_answers
        if count > limit:
            message = f"{asked.num_prompts} prompts with n={asked.num_samples} are {count} answers; the limit is {limit}"
            raise RefusedError(400, message, param="n", code="too_many_answers")
        return asked


async def _while_there(receive: Receive, work: Coroutine[Any, Any, None]) -> None:
    """Do the work, or cancel it when the client goes away. The body has been read, so nothing else can be received."""
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(receive())
    try:
        await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
    finally:
        for each in (task, gone):
            each.cancel()
        await asyncio.wait((task, gone))
    if not task.cancelled():
        task.result()


@dataclass(slots=True, kw_only=True)
class _Usage:
    """Tokens of all answers to one request."""

    prompt_tokens: int = 0
    completion_tokens: int = 0

    def told(self) -> dict[str, int]:
        return {**asdict(self), "total_tokens": self.prompt_tokens + self.completion_tokens}


@final
class _Answer:
    """The answer to one HTTP request."""

    def __init__(self, asked: Asked, entry: LiveRequest, service: Service) -> None:
        self._asked = asked
        self._entry = entry
        self._engine = engine = service.engine
        self._tokenizer: Tokenizer | None = engine.tokenizer if asked.needs_tokenizer else _tokenizer_of(engine)
        self._usage = _Usage()
        self._head = {"id": f"{asked.style.prefix}{entry.name}", "created": int(time.time()), "model": service.model}
        entry.is_streamed, entry.num_answers = asked.is_streamed, asked.num_prompts * asked.num_samples

    async def respond(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self._asked.is_streamed:
            await self._stream(send)
        else:
            body = msgspec.json.encode(await self._whole())
            await Response(body, media_type="application/json")(scope, receive, send)

    async def _whole(self) -> dict[str, Any]:
        parts: dict[int, list[Piece]] = {index: [] for index in range(self._entry.num_answers)}
        async with aclosing(self._pieces()) as pieces:
            async for index, piece in pieces:
                parts[index].append(piece)
        choices = [self._choice(index, whole_piece(part), is_whole=True) for index, part in parts.items()]
        return {**self._head, "object": self._asked.style.object_name, "choices": choices, "usage": self._usage.told()}

    async def _stream(self, send: Send) -> None:
        """Nothing is sent before the first tokens are there, so that a request that cannot be served gets its own status."""
        async with aclosing(self._chunks()) as chunks:
            chunk = await anext(chunks)
            await send({"type": "http.response.start", "status": 200, "headers": _HEADERS})
            await _send_event(send, chunk)
            try:
                async for chunk in chunks:
                    await _send_event(send, chunk)
            except ParallelRuntimeError as error:
                await _send_event(send, error_body(refusal_of(error)))
            else:
                await send({"type": "http.response.body", "body": b"data: [DONE]\n\n", "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _chunks(self) -> AsyncGenerator[dict[str, Any], None]:
        style, begun = self._asked.style, set()
        rest: dict[str, Any] = {"usage": None} if self._asked.includes_usage else {}
        head = {**self._head, "object": style.chunk_name}
        async with aclosing(self._pieces()) as pieces:
            async for index, piece in pieces:
                if index not in begun and (opening := style.opening()) is not None:
                    yield {**head, "choices": [{"index": index, **opening}], **rest}
                begun.add(index)
                yield {**head, "choices": [self._choice(index, piece)], **rest}
        if self._asked.includes_usage:
            yield {**head, "choices": [], "usage": self._usage.told()}

    async def _pieces(self) -> AsyncGenerator[tuple[int, Piece], None]:
        prompts, sampling = await self._prepare()
        samples, offsets = self._asked.num_samples, dict.fromkeys(range(self._entry.num_answers), 0)
        async with aclosing(self._engine.stream(prompts, sampling, priority=self._asked.priority)) as events:
            async for event in events:
                index = event.index * samples + event.sample
                piece = piece_of(event, offset=offsets[index])
                if piece.logprobs:
                    offsets[index] += sum(len(token_text(token, self._tokenizer)) for token in piece.token_ids)
                self._usage.completion_tokens += len(event.token_ids)
                self._entry.num_new_tokens = self._usage.completion_tokens
                self._entry.dp_ranks.add(event.dp_rank)
                if piece.text or piece.token_ids or piece.finish_reason:
                    yield index, piece

    async def _prepare(self) -> tuple[list[tuple[int, ...]], list[SamplingParams]]:
        prompts = await asyncio.to_thread(self._asked.encode, self._tokenizer)
        self._usage.prompt_tokens = self._entry.num_prompt_tokens = sum(map(len, prompts))
        default = self._engine.engine.config.sampling
        settings = msgspec.structs.asdict(default)
        if default == SamplingParams():
            settings["temperature"] = 1.0
        settings.update({"logprobs": None, **self._asked.settings, "n": self._asked.num_samples})
        limit = min(ready.max_request_tokens for ready in self._engine.replicas)
        lengths = [self._new_tokens(len(prompt), limit) for prompt in prompts]
        return prompts, [SamplingParams(**{**settings, "max_new_tokens": length}) for length in lengths]

    def _new_tokens(self, num_prompt_tokens: int, limit: int) -> int:
        wanted = self._asked.max_new_tokens
        room = limit - num_prompt_tokens
        if room < (wanted or 1):
            said = "no room for an answer" if wanted is None else f"max_tokens={wanted} is {num_prompt_tokens + wanted} together"
            message = f"the prompt has {num_prompt_tokens} tokens, and {said}; the limit is {limit} tokens"
            raise RefusedError(400, message, code="context_length_exceeded")
        return room if wanted is None else wanted

    def _choice(self, index: int, piece: Piece, *, is_whole: bool = False) -> dict[str, Any]:
        write = self._asked.style.whole if is_whole else self._asked.style.piece
        told = {"index": index, **write(piece, self._tokenizer)}
        return {**told, "token_ids": piece.token_ids} if self._asked.returns_token_ids else told


def _tokenizer_of(engine: AsyncEngine) -> Tokenizer | None:
    try:
        return engine.tokenizer
    except RequestError:
        return None


async def _send_event(send: Send, event: object) -> None:
    await send({"type": "http.response.body", "body": b"data: %s\n\n" % msgspec.json.encode(event), "more_body": True})
