"""The HTTP server from start to end: it listens before the model is loaded, drains when told to stop, and leaves nothing."""

import asyncio
import errno
import signal
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from types import TracebackType
from typing import Self, final

import uvicorn

from parallel_runtime.errors import ConfigError, ParallelRuntimeError
from parallel_runtime.serving.async_engine import AsyncEngine
from parallel_runtime.serving.http.app import make_app
from parallel_runtime.serving.http.connections import Connections
from parallel_runtime.serving.http.service import Service, ServiceState
from parallel_runtime.serving.http.settings import HttpSettings

__all__ = ["HttpServer", "serve_http"]

_TICK_S = 0.2
_LAST_WORDS_S = 2.0
_STOPS = (signal.SIGINT, signal.SIGTERM)


@final
class HttpServer:
    """An engine behind HTTP, for as long as an ``async with`` block lasts. It listens at once, and serves once that is open.

    Args:
        engine: Serves. Borrowed: whoever enters it closes it, before or after the server.
        settings: Of the server.

    Attributes:
        service: What it offers.

    Raises:
        ConfigError: The address cannot be listened on.
    """

    def __init__(self, engine: AsyncEngine, settings: HttpSettings | None = None) -> None:
        settings = settings or HttpSettings()
        self.service = Service(engine, settings)
        self._connections = Connections(settings)
        options = uvicorn.Config(
            make_app(self.service),
            http=self._connections,  # type: ignore[arg-type]  # it is called as a class would be
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            timeout_graceful_shutdown=_LAST_WORDS_S,  # type: ignore[arg-type]  # handed on to asyncio, which takes any number
        )
        self._server = uvicorn.Server(options)
        self._socket: socket.socket | None = None
        self._loops: list[asyncio.Task[None]] = []

    @property
    def url(self) -> str:
        """Where it listens, such as ``http://127.0.0.1:8000``."""
        assert self._socket is not None, "it has not been entered"
        host, port = self._socket.getsockname()[:2]
        return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"

    async def __aenter__(self) -> Self:
        """Begin to listen.

        Raises:
            ConfigError: The address cannot be listened on.
        """
        settings = self.service.settings
        self._socket = _listen(settings.host, settings.port)
        self._server.config.load()
        self._server.lifespan = self._server.config.lifespan_class(self._server.config)
        await self._server.startup(sockets=[self._socket])
        self._loops = [asyncio.create_task(self._server.main_loop()), asyncio.create_task(self._tick())]
        return self

    async def __aexit__(
        self, error_type: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Listen no more, and end every connection."""
        for loop in self._loops:
            loop.cancel()
        await asyncio.wait(self._loops)
        self.service.is_draining = True
        try:
            await self._server.shutdown(sockets=[self._socket] if self._socket is not None else [])
        finally:
            self._connections.abort()
            await self.service.close()

    async def drain(self, timeout_s: float | None = None) -> bool:
        """Take no more requests, and wait until those under way have ended.

        Args:
            timeout_s: Longest wait; ``None`` is ``drain_s`` of the settings.

        Returns:
            Whether none is left.
        """
        self.service.is_draining = True
        limit = self.service.settings.drain_s if timeout_s is None else timeout_s
        with suppress(TimeoutError):
            async with asyncio.timeout(limit):
                while len(self.service.live):
                    await asyncio.sleep(_TICK_S / 4)
        return not len(self.service.live)

    async def until_failed(self) -> ParallelRuntimeError:
        """Wait until no replica is left.

        Returns:
            Why the last one was lost.
        """
        while self.service.state is not ServiceState.FAILED:
            await asyncio.sleep(_TICK_S)
        while True:
            try:
                await asyncio.to_thread(self.service.engine.engine.supervisor.drain, 0, 0.0)
            except ParallelRuntimeError as error:
                return error
            await asyncio.sleep(_TICK_S)  # the last replica is lost, and the engine is about to say so

    async def _tick(self) -> None:
        while True:
            self.service.tick()
            await asyncio.sleep(_TICK_S)


async def serve_http(engine: AsyncEngine, settings: HttpSettings, *, say: Callable[[HttpServer, str], None]) -> int:
    """Serve until SIGTERM or Ctrl-C, or until the engine has failed.

    The first signal lets running requests end, within ``drain_s``; a second one ends them at once; a third one ends the process.
    While the model is being loaded a second one ends the process, and its ranks with it.

    Args:
        engine: Not entered yet; it is entered and closed here.
        settings: Of the server.
        say: Told ``"listening"``, ``"ready"``, ``"draining"`` and ``"cut short"``.

    Returns:
        The number of the signal that ended it.

    Raises:
        ConfigError: The address cannot be listened on.
        ParallelRuntimeError: The engine could not be started, or no replica is left.
    """
    with _Signals() as signals:
        async with HttpServer(engine, settings) as server:
            say(server, "listening")
            start = asyncio.ensure_future(engine.__aenter__())
            stop = asyncio.ensure_future(signals.next())
            await asyncio.wait((start, stop), return_when=asyncio.FIRST_COMPLETED)
            if not start.done():
                signals.release()
                say(server, "cut short")
                start.cancel()
                await asyncio.wait((start,))
                return stop.result()
            try:
                start.result()
                say(server, "ready")
                return await _serve(server, signals, stop, say)
            finally:
                stop.cancel()
                await engine.close()


async def _serve(
    server: HttpServer, signals: "_Signals", stop: "asyncio.Future[int]", say: Callable[[HttpServer, str], None]
) -> int:
    failed = asyncio.ensure_future(server.until_failed())
    await asyncio.wait((failed, stop), return_when=asyncio.FIRST_COMPLETED)
    if failed.done():
        await server.drain(_LAST_WORDS_S)  # of those who are told so
        raise failed.result()
    failed.cancel()
    say(server, "draining")
    drained = asyncio.ensure_future(server.drain())
    again = asyncio.ensure_future(signals.next())
    await asyncio.wait((drained, again), return_when=asyncio.FIRST_COMPLETED)
    if not (drained.done() and drained.result()):
        signals.release()
        say(server, "cut short")
        with suppress(ParallelRuntimeError):
            await server.service.engine.abort()
        await server.drain(_LAST_WORDS_S)
    drained.cancel()
    again.cancel()
    return stop.result()


@final
class _Signals:
    """SIGINT and SIGTERM as something to await, in the main thread; elsewhere none come."""

    def __init__(self) -> None:
        self._came: asyncio.Queue[int] = asyncio.Queue()
        self._before = {number: signal.getsignal(number) for number in _STOPS}
        self._is_held = False

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            for number in _STOPS:
                asyncio.get_running_loop().add_signal_handler(number, self._came.put_nowait, int(number))
            self._is_held = True
        return self

    def __exit__(self, *exc: object) -> None:
        self._drop()
        for number, handler in self._before.items():
            if threading.current_thread() is threading.main_thread():
                signal.signal(number, handler)

    async def next(self) -> int:
        """Wait for one."""
        return await self._came.get()

    def release(self) -> None:
        """The next one ends the process."""
        self._drop()

    def _drop(self) -> None:
        if self._is_held:
            self._is_held = False
            for number in _STOPS:
                asyncio.get_running_loop().remove_signal_handler(number)
                signal.signal(number, signal.SIG_DFL)


def _listen(host: str, port: int) -> socket.socket:
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    except OSError as error:
        raise ConfigError(f"host={host!r} is no address to listen on: {error.strerror}") from error
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen()
    except OSError as error:
        listener.close()
        hint = "another program listens there; choose another port, or 0 for any free one"
        reason = hint if error.errno == errno.EADDRINUSE else error.strerror
        raise ConfigError(f"cannot listen on {host} port {port}: {reason}") from error
    listener.setblocking(False)
    return listener
