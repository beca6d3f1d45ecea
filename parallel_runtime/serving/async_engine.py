"""An engine for asyncio: the same calls, none of which holds up the event loop."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from os import PathLike
from types import TracebackType
from typing import Self, TypeVar, Unpack, final

from parallel_runtime.errors import ContextStateError, ParallelRuntimeError
from parallel_runtime.models import Tokenizer
from parallel_runtime.serving.answers import AnswerReader, Completion, JoinedAnswers, StreamEvent
from parallel_runtime.serving.arguments import Prompt
from parallel_runtime.serving.calls import Call
from parallel_runtime.serving.deliveries import Delivery
from parallel_runtime.serving.engine import Engine, EngineState
from parallel_runtime.serving.engine_config import EngineConfig, EngineSettings
from parallel_runtime.serving.engine_controls import EngineControls
from parallel_runtime.serving.messages import Ready
from parallel_runtime.serving.metrics import MetricsSnapshot
from parallel_runtime.serving.sampling_params import SamplingParams

__all__ = ["AsyncEngine"]

_T = TypeVar("_T")


@final
class AsyncEngine:
    """An ``Engine`` whose calls are awaited, for as long as an ``async with`` block lasts, in one event loop.

    Whatever may take long (starting, reading prompts, sending) runs in one thread of its own, in the order of the calls; tokens
    come from the engine's threads. A call whose consumer is cancelled, or that is closed early, aborts its requests.

    Args:
        model: As for ``Engine``.
        **settings: As for ``Engine``.

    Attributes:
        engine: What it stands on. Its own methods wait: call none of them in the event loop but those that only look.

    Raises:
        ParallelRuntimeError: As for ``Engine``.
    """

    def __init__(self, model: str | PathLike[str] | EngineConfig = "smollm2", **settings: Unpack[EngineSettings]) -> None:
        self.engine = Engine(model, **settings)
        self._work = ThreadPoolExecutor(1, thread_name_prefix="engine-async")

    async def __aenter__(self) -> Self:
        """Start the ranks and wait until all of them serve. Where that is cancelled, they are ended first.

        Raises:
            ContextStateError: It was entered before.
            ParallelRuntimeError: As for ``Engine``.
        """
        start = asyncio.ensure_future(self._run(self.engine.__enter__))
        try:
            await asyncio.shield(start)
        except BaseException:
            await asyncio.wait([start])
            await self.close()
            raise
        return self

    async def __aexit__(
        self, error_type: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End every request and every rank."""
        await self._leave(error_type, error, trace)

    async def close(self) -> None:
        """End every request and every rank, for owners that do not use ``async with``. Twice is nothing."""
        await self._leave(None, None, None)

    @property
    def state(self) -> EngineState:
        """Where it is in its life."""
        return self.engine.state

    @property
    def failure(self) -> ParallelRuntimeError | None:
        """What has ended it, though nobody closed it; ``None`` where nothing has."""
        return self.engine.failure

    @property
    def replicas(self) -> tuple[Ready, ...]:
        """What each data-parallel rank said when it was last ready."""
        return self.engine.replicas

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer.

        Raises:
            RequestError: The model has none that is known here.
        """
        return self.engine.tokenizer

    def metrics(self) -> MetricsSnapshot:
        """Requests, tokens and times since the engine was opened, as its front sees them."""
        return self.engine.metrics()

    async def generate(
        self,
        prompts: Iterable[Prompt],
        sampling: SamplingParams | Iterable[SamplingParams] | None = None,
        *,
        dp_rank: int | None = None,
        priority: int = 0,
    ) -> list[Completion]:
        """Continue prompts to their end.

        Args:
            prompts: As for ``Engine.generate``.
            sampling: As for ``Engine.generate``.
            dp_rank: As for ``Engine.generate``.
            priority: As for ``Engine.generate``.

        Returns:
            ``n`` completions per prompt, those of one prompt together, in the order of ``prompts``.

        Raises:
            ParallelRuntimeError: As for ``Engine.generate``.
        """
        answers = await self._run(lambda: self.engine.read_prompts(prompts, sampling, priority=priority))
        joined = JoinedAnswers(answers)
        async with aclosing(self._events(answers, dp_rank)) as events:
            async for event in events:
                joined.add(event)
        return joined.completions()

    async def stream(
        self,
        prompts: Iterable[Prompt],
        sampling: SamplingParams | Iterable[SamplingParams] | None = None,
        *,
        dp_rank: int | None = None,
        priority: int = 0,
    ) -> AsyncGenerator[StreamEvent, None]:
        """Continue prompts and hand out their tokens as they come.

        Leaving the loop early aborts what still runs as soon as the iterator is closed: at once with ``contextlib.aclosing``, or
        when the event loop finalises it.

        Args:
            prompts: As for ``Engine.generate``.
            sampling: As for ``Engine.generate``.
            dp_rank: As for ``Engine.generate``.
            priority: As for ``Engine.generate``.

        Yields:
            Events of all prompts, interleaved as they happen.

        Raises:
            ParallelRuntimeError: As for ``Engine.stream``.
        """
        answers = await self._run(lambda: self.engine.read_prompts(prompts, sampling, priority=priority))
        async with aclosing(self._events(answers, dp_rank)) as events:
            async for event in events:
                yield event

    async def abort(self, request_id: str | None = None) -> None:
        """End a request, or all of them; what it made so far is delivered with the reason ``abort``. Unknown ones are nothing.

        Args:
            request_id: As events and completions name it; ``None`` for all.

        Raises:
            ContextStateError: The engine is not open.
            RequestError: ``request_id`` is no text.
        """
        await self._run(lambda: self.engine.abort(request_id))

    async def ask(self, question: Callable[[EngineControls], _T]) -> _T:
        """Ask something of all replicas, such as ``await engine.ask(lambda controls: controls.pause())``; calls go on meanwhile.

        Args:
            question: Called with ``Engine.controls`` in a thread of its own, where it may wait.

        Returns:
            Its result.

        Raises:
            ContextStateError: The engine is not open.
            PeerError: A replica could not, or is lost.
        """
        return await asyncio.to_thread(question, self.engine.controls)

    async def _events(self, answers: list[AnswerReader], dp_rank: int | None) -> AsyncGenerator[StreamEvent, None]:
        sink = _LoopSink(asyncio.get_running_loop())
        call: Call = self.engine.open_call(answers, sink, dp_rank=dp_rank)
        try:
            while not call.is_over:
                if call.has_more:
                    await self._run(call.submit)
                event = call.take(await sink.get())
                if event is not None:
                    yield event
        finally:
            if not call.is_over:
                self._close_later(call)

    def _close_later(self, call: Call) -> None:
        """After a submission that may be under way; nobody waits for it."""
        try:
            self._work.submit(call.close)
        except RuntimeError:  # the engine is closed, so there is none
            call.close()

    async def _run(self, function: Callable[[], _T]) -> _T:
        try:
            future = asyncio.get_running_loop().run_in_executor(self._work, function)
        except RuntimeError as exc:
            raise ContextStateError("this AsyncEngine is closed, so it serves nothing; make a new one") from exc
        return await future

    async def _leave(
        self, error_type: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """A cancelled caller waits for the end all the same: it is bounded, and ranks are not left behind."""
        if self.engine.state is EngineState.CLOSED:
            self._work.shutdown(wait=False)
            return
        end = asyncio.ensure_future(self._run(lambda: self.engine.__exit__(error_type, error, trace)))
        try:
            await asyncio.shield(end)
        except asyncio.CancelledError:
            await asyncio.wait([end])
            raise
        finally:
            self._work.shutdown(wait=False)


@final
class _LoopSink:
    """Deliveries from any thread, for one coroutine."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._queue: asyncio.Queue[Delivery] = asyncio.Queue()

    def put(self, item: Delivery, /) -> None:
        try:
            self._loop.call_soon_threadsafe(self._queue.put_nowait, item)
        except RuntimeError:
            return  # the loop is closed: nobody waits any more

    async def get(self) -> Delivery:
        return await self._queue.get()
