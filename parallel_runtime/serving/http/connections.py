"""What one connection may do: be one of so many, say something soon, and take what it asked for."""

import asyncio
from typing import Any, Final, final

import msgspec
from uvicorn.protocols.http.h11_impl import H11Protocol

from parallel_runtime.serving.http.refusals import RefusedError, error_body
from parallel_runtime.serving.http.settings import HttpSettings

__all__ = ["BoundedConnection", "Connections"]

_CLOSED: Final = b"HTTP/1.1 503 Service Unavailable\r\ncontent-type: application/json\r\nretry-after: 1\r\nconnection: close\r\n"


@final
class Connections:
    """Makes the protocol of each connection, as uvicorn asks for it.

    Args:
        settings: Limits.

    Attributes:
        settings: Limits.
        open: Connections that are served.
    """

    def __init__(self, settings: HttpSettings) -> None:
        self.settings = settings
        self.open: set[BoundedConnection] = set()

    def __call__(self, **options: Any) -> "BoundedConnection":
        """Make the protocol of a new connection.

        Args:
            **options: Of uvicorn's own protocol.
        """
        return BoundedConnection(H11Protocol(**options), self)

    def abort(self) -> None:
        """End all of them, whatever they wait for."""
        for connection in tuple(self.open):
            connection.abort()


@final
class BoundedConnection(asyncio.Protocol):
    """Uvicorn's protocol within limits.

    A client that does not read for ``write_s`` what waits for it loses its connection, so that neither its answer nor the memory
    of it outlives it; meanwhile only its own request waits.

    Args:
        inner: Does the work.
        connections: Counts.
    """

    def __init__(self, inner: H11Protocol, connections: Connections) -> None:
        self._inner = inner
        self._connections = connections
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._transport: asyncio.Transport | None = None
        self._is_served = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Serve it, or say that there is no room."""
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        limits = self._connections.settings
        if len(self._connections.open) >= limits.max_connections:
            self._turn_away(transport, limits.max_connections)
            return
        self._is_served = True
        self._connections.open.add(self)
        self._timer = self._loop.call_later(limits.read_s, self._end_if_silent)
        self._inner.connection_made(transport)

    def connection_lost(self, exc: Exception | None) -> None:
        """It has ended."""
        self._stop_timer()
        if self._is_served:
            self._connections.open.discard(self)
            self._inner.connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Hand on what came."""
        if self._is_served:
            self._inner.data_received(data)

    def eof_received(self) -> None:
        """The client says no more, which ends the connection."""
        if self._is_served:
            self._inner.eof_received()

    def pause_writing(self) -> None:
        """More waits for the client than it should."""
        self._stop_timer()
        if self._is_served:
            self._timer = self._loop.call_later(self._connections.settings.write_s, self.abort)
            self._inner.pause_writing()

    def resume_writing(self) -> None:
        """The client has read most of it."""
        self._stop_timer()
        if self._is_served:
            self._inner.resume_writing()

    def abort(self) -> None:
        """End it at once; what waits for the client is dropped."""
        if self._transport is not None:
            self._transport.abort()

    def _end_if_silent(self) -> None:
        if getattr(self._inner, "scope", None) is None:  # no request has begun
            self.abort()

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _turn_away(self, transport: asyncio.Transport, limit: int) -> None:
        message = f"{limit} connections are open, which is the limit; try again later"
        body = msgspec.json.encode(error_body(RefusedError(503, message, code="too_many_connections")))
        transport.write(_CLOSED + b"content-length: %d\r\n\r\n" % len(body) + body)
        transport.close()
