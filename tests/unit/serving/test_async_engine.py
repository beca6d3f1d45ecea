"""An engine in an event loop: the answers of the plain one, a loop that stays free, and cancelled calls that leave nothing."""

import asyncio
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing, asynccontextmanager
from pathlib import Path
from typing import TypeVar

import pytest

from parallel_runtime.config import ParallelConfig
from parallel_runtime.errors import CheckpointError, ContextStateError, QueueFullError, RequestError
from parallel_runtime.serving import AsyncEngine, EngineState, FinishReason, SamplingParams, ServingConfig, StreamEvent
from tests.spmd.tiny_models import PROMPTS, greedy_reference, write_tiny_model

pytestmark = pytest.mark.timeout(60)

NEW = 8
LONG = SamplingParams(max_new_tokens=110, ignore_eos=True)
T = TypeVar("T")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("tiny"), vocab_size=300)


def run(model: Path, use: Callable[[AsyncEngine], Awaitable[T]], **serving: int) -> T:
    async def main() -> T:
        async with serve(model, **serving) as engine:
            return await use(engine)

    return asyncio.run(main())


@asynccontextmanager
async def serve(model: Path, **serving: int) -> AsyncIterator[AsyncEngine]:
    settings = ServingConfig.model_validate({"kv_cache_tokens": 4096, **serving})
    async with AsyncEngine(model, parallel=ParallelConfig(tp=2), serving=settings, executor="threads") as engine:
        yield engine


async def until_idle(engine: AsyncEngine) -> None:
    """Until the ranks hold no request."""
    while any(status.num_running + status.num_waiting for status in await engine.ask(lambda controls: controls.health())):
        pass


def test_it_answers_as_the_plain_engine_does(model: Path) -> None:
    expected = greedy_reference(model, PROMPTS, NEW)

    async def use(engine: AsyncEngine) -> None:
        sampling = SamplingParams(max_new_tokens=NEW)
        first, second = await asyncio.gather(engine.generate(PROMPTS, sampling), engine.generate(PROMPTS[:1], sampling))
        assert [completion.token_ids for completion in first] == expected
        assert [completion.token_ids for completion in second] == expected[:1]
        streamed: list[list[int]] = [[] for _ in PROMPTS]
        async for event in engine.stream(PROMPTS, sampling):
            streamed[event.index] += event.token_ids
        assert [tuple(tokens) for tokens in streamed] == expected
        assert await engine.generate([]) == []
        assert engine.tokenizer.vocab_size
        assert len(engine.replicas) == 1

    run(model, use)


def test_the_loop_turns_while_tokens_come(model: Path) -> None:
    async def use(engine: AsyncEngine) -> int:
        answer = asyncio.ensure_future(engine.generate([PROMPTS[0]], LONG))
        turns = 0
        while not answer.done():
            turns += 1
            await asyncio.sleep(0)
        return turns

    assert run(model, use) > 100


def test_a_cancelled_consumer_aborts_its_requests(model: Path) -> None:
    async def use(engine: AsyncEngine) -> None:
        begun = asyncio.Event()

        async def consume() -> None:
            async for _ in engine.stream([PROMPTS[0]] * 3, LONG):
                begun.set()

        task = asyncio.create_task(consume())
        await begun.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await until_idle(engine)
        assert engine.metrics().num_finished == {"abort": 3}

    run(model, use)


def test_leaving_the_loop_early_aborts_the_rest(model: Path) -> None:
    async def use(engine: AsyncEngine) -> None:
        async with aclosing(engine.stream([PROMPTS[0]] * 2, LONG)) as events:
            async for _ in events:
                break
        await until_idle(engine)
        assert engine.metrics().num_finished == {"abort": 2}

    run(model, use)


def test_abort_delivers_what_was_made(model: Path) -> None:
    async def use(engine: AsyncEngine) -> StreamEvent:
        last = None
        async for event in engine.stream([PROMPTS[0]], LONG):
            if last is None:
                await engine.abort(event.request_id)
            last = event
        assert last is not None
        return last

    last = run(model, use)
    assert last.finish_reason is FinishReason.ABORT
    assert 0 < last.usage.num_new_tokens < 110


def test_errors_reach_the_one_who_awaits(model: Path) -> None:
    async def use(engine: AsyncEngine) -> None:
        for prompts, text in (("text", "prompts is a list of prompts"), ([[300]], "has token 300"), ([[]], "empty prompt")):
            with pytest.raises(RequestError, match=text):
                await engine.generate(prompts)
            with pytest.raises(RequestError, match=text):
                async for _ in engine.stream(prompts):
                    pass
        with pytest.raises(RequestError, match="as text"):
            await engine.abort(5)  # type: ignore[arg-type]  # what is tested

    run(model, use)


def test_controls_are_asked_while_requests_run(model: Path) -> None:
    async def use(engine: AsyncEngine) -> None:
        answer = asyncio.ensure_future(engine.generate([PROMPTS[0]], LONG))
        await engine.ask(lambda controls: controls.pause())
        (status,) = await engine.ask(lambda controls: controls.health())
        assert status.is_paused
        assert not answer.done()
        await engine.ask(lambda controls: controls.resume())
        assert (await answer)[0].finish_reason is FinishReason.LENGTH

    run(model, use)


def test_a_full_queue_refuses_at_once(model: Path) -> None:
    async def use(engine: AsyncEngine) -> None:
        busy = engine.stream([PROMPTS[0]] * 2, LONG)
        async with aclosing(busy):
            await anext(busy)
            with pytest.raises(QueueFullError, match="2 requests are under way and the limit is 2"):
                await engine.generate([PROMPTS[1]], SamplingParams(max_new_tokens=1))

    run(model, use, max_waiting=2, max_batch_requests=1)


def test_it_is_closed_whatever_happens(model: Path) -> None:
    before = threading.active_count()

    async def failing() -> None:
        async with serve(model):
            raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        asyncio.run(failing())

    async def cancelled_while_starting() -> None:
        engine = AsyncEngine(model, executor="threads")
        task = asyncio.create_task(engine.__aenter__())
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert engine.state is EngineState.CLOSED

    asyncio.run(cancelled_while_starting())

    async def closed_under_a_stream() -> None:
        engine = await AsyncEngine(model, executor="threads").__aenter__()
        events = engine.stream([PROMPTS[0]], LONG)
        await anext(events)
        await engine.close()
        await engine.close()
        assert [event.finish_reason async for event in events][-1] is FinishReason.ABORT
        with pytest.raises(ContextStateError, match="this AsyncEngine is closed, so it serves nothing"):
            await engine.generate([PROMPTS[0]])

    asyncio.run(closed_under_a_stream())
    with pytest.raises(CheckpointError, match="no model at"):
        asyncio.run(AsyncEngine(model / "nowhere").__aenter__())
    for thread in threading.enumerate():
        if thread.name.startswith("engine"):
            thread.join(10)
    assert threading.active_count() <= before
