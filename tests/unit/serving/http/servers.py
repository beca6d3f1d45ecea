"""A tiny model behind HTTP in a thread of its own, and clients for it."""

import asyncio
import threading
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar, final

import httpx2
from openai import OpenAI

from parallel_runtime.config import ParallelConfig
from parallel_runtime.serving import AsyncEngine, SamplingParams, ServingConfig
from parallel_runtime.serving.http import HttpSettings
from parallel_runtime.serving.http.server import HttpServer

__all__ = ["Served", "served"]

T = TypeVar("T")
_LIMIT_S = 30.0


@final
class Served:
    """A server that runs, and ways to talk with it.

    Args:
        server: Runs in ``loop``.
        loop: Of another thread.
    """

    def __init__(self, server: HttpServer, loop: asyncio.AbstractEventLoop) -> None:
        self.server = server
        self._loop = loop
        self.http = httpx2.Client(base_url=server.url, timeout=_LIMIT_S)
        self.openai = OpenAI(base_url=f"{server.url}/v1", api_key="any", max_retries=0, timeout=_LIMIT_S)

    def do(self, work: Callable[[HttpServer], Coroutine[Any, Any, T]]) -> T:
        """Do something in the server's loop."""
        return asyncio.run_coroutine_threadsafe(work(self.server), self._loop).result(_LIMIT_S)

    def chat(self, **fields: Any) -> Any:
        """A chat through OpenAI's client, whose types want its own dictionaries."""
        create: Any = self.openai.chat.completions.create
        return create(model="tiny", **fields)

    def post(self, body: object, path: str = "/v1/completions", **headers: str) -> httpx2.Response:
        """Send JSON."""
        return self.http.post(path, json=body, headers=headers)

    def error(self, body: object, path: str = "/v1/completions", *, status: int = 400) -> dict[str, Any]:
        """The error that a body earns."""
        response = self.post(body, path)
        assert response.status_code == status, response.text
        error: dict[str, Any] = response.json()["error"]
        assert set(error) == {"message", "type", "param", "code"}
        return error

    def until_idle(self) -> None:
        """Until neither the server nor a rank holds a request, and every block is free."""

        async def wait(server: HttpServer) -> None:
            engine = server.service.engine
            while len(server.service.live) or any(
                status.num_running + status.num_waiting for status in await engine.ask(lambda controls: controls.health())
            ):
                await asyncio.sleep(0.005)

        self.do(wait)


@contextmanager
def served(
    model: Path, *, serving: dict[str, Any] | None = None, sampling: SamplingParams | None = None, **settings: Any
) -> Iterator[Served]:
    """Serve a model with ranks as threads for as long as a block lasts."""
    ready: Future[tuple[HttpServer, asyncio.AbstractEventLoop]] = Future()
    over = asyncio.Event()

    async def main() -> None:
        config = ServingConfig(**{"kv_cache_tokens": 4096, **(serving or {})})
        engine = AsyncEngine(model, parallel=ParallelConfig(tp=2), executor="threads", serving=config, sampling=sampling)
        async with HttpServer(engine, HttpSettings(port=0, **settings)) as server, engine:
            ready.set_result((server, asyncio.get_running_loop()))
            await over.wait()

    def run() -> None:
        try:
            asyncio.run(main())
        except BaseException as error:
            if ready.done():
                raise
            ready.set_exception(error)

    thread = threading.Thread(target=run)
    thread.start()
    server, loop = ready.result(_LIMIT_S)
    each = Served(server, loop)
    try:
        yield each
    finally:
        each.http.close()
        each.openai.close()
        loop.call_soon_threadsafe(over.set)
        thread.join(_LIMIT_S)
        assert not thread.is_alive(), "the server does not end"
