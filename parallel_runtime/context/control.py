"""How a monitor answers: one listening socket, one thread, a secret in the store, JSON, and nothing that blocks for long."""

import hmac
import json
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Hashable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final, TypeVar, final

import msgspec

from parallel_runtime.context.liveness import has_ended, machine
from parallel_runtime.context.reports import Report
from parallel_runtime.context.threads import start_thread
from parallel_runtime.errors import ConfigError

__all__ = ["Address", "Answering", "ask", "ask_all"]

_SERVE_S: Final = 1.0
_TICK_S: Final = 0.25
_TOKEN_BYTES: Final = 16
_K = TypeVar("_K", bound=Hashable)
_MAX_ASKED: Final = 64
"""How many ranks are asked at once; a story about more would help nobody."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Address:
    """Where a rank's monitor answers.

    Attributes:
        host: Name of the rank's host, for people.
        machine: Equal for processes that see the same process ids.
        pid: Of the rank.
        address: To connect to.
        port: To connect to.
        token: To be sent first.
    """

    host: str
    machine: str
    pid: int
    address: str
    port: int
    token: str

    def to_json(self) -> str:
        """As text for the store."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: bytes | str) -> "Address":
        """Read it back.

        Args:
            text: From ``to_json``.

        Returns:
            An equal address.
        """
        return cls(**json.loads(text))

    @property
    def is_ended(self) -> bool:
        """Whether the process is known to have ended; ``False`` where it runs on another machine."""
        return self.machine == machine() and has_ended(self.pid)

    @property
    def is_stopped(self) -> bool:
        """Whether the process is stopped by a signal or a debugger; ``False`` where it runs on another machine."""
        if self.machine != machine():
            return False
        with suppress(OSError):
            return Path(f"/proc/{self.pid}/stat").read_text(errors="replace").rpartition(")")[2].split()[0] in "Tt"
        return False


@final
class Answering:
    """Answers whoever knows a token, until it is closed. Several contexts of a process share one, each with its own token.

    Args:
        address: Of this host, on which to listen.
        host: Name of this host.

    Raises:
        ConfigError: Nobody can listen at ``address``, or this process may not have another thread or socket.
    """

    def __init__(self, address: str, host: str) -> None:
        self._host = host
        self._address = address
        self._is_over = False
        self._clients: dict[str, tuple[Callable[[], bytes], Callable[[], None]]] = {}
        try:
            self._listener = socket.create_server((address, 0), family=socket.AF_INET6 if ":" in address else socket.AF_INET)
        except OSError as error:
            raise ConfigError(f"a rank answers for itself at {address}, which is not possible here: {error}") from error
        self._listener.settimeout(_TICK_S)
        self._thread = threading.Thread(target=self._serve, name="parallel-runtime-monitor", daemon=True)
        try:
            start_thread(self._thread, "to answer for its rank")
        except ConfigError:
            self._listener.close()
            raise

    def add(self, answer: Callable[[], bytes], look: Callable[[], None]) -> Address:
        """Answer for one more context.

        Args:
            answer: Makes the text to send; called in the answering thread.
            look: Called in that thread a few times per second.

        Returns:
            Where, and with which token, to ask.
        """
        token = secrets.token_hex(_TOKEN_BYTES)
        self._clients[token] = (answer, look)
        port = int(self._listener.getsockname()[1])
        return Address(host=self._host, machine=machine(), pid=os.getpid(), address=self._address, port=port, token=token)

    def drop(self, address: Address) -> None:
        """Answer for a context no longer. Twice is nothing.

        Args:
            address: From ``add``.
        """
        self._clients.pop(address.token, None)

    def close(self) -> None:
        """Stop answering. Twice is nothing."""
        self._clients.clear()
        self._is_over = True
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes the thread
        self._thread.join(2 * _SERVE_S)
        self._listener.close()

    def _serve(self) -> None:
        looked_at = time.monotonic()
        while True:
            try:
                connection, _ = self._listener.accept()
            except TimeoutError:
                pass
            except OSError:
                if self._is_over:
                    return
                time.sleep(_TICK_S)  # no descriptor is left for who asks; this thread is also the one that ends vain waits
            else:
                with connection, suppress(OSError):
                    self._answer(connection)
            if time.monotonic() - looked_at >= _TICK_S:
                for _, look in tuple(self._clients.values()):
                    look()
                looked_at = time.monotonic()

    def _answer(self, connection: socket.socket) -> None:
        connection.settimeout(_SERVE_S)
        asked = connection.recv(2 * _TOKEN_BYTES, socket.MSG_WAITALL)
        for token, (answer, _) in tuple(self._clients.items()):
            if hmac.compare_digest(asked, token.encode()):
                connection.sendall(answer())
                return


def ask(address: Address, timeout_s: float) -> Report:
    """Ask one monitor.

    Args:
        address: Where it answers.
        timeout_s: Longest wait in seconds.

    Returns:
        What the rank says of itself.

    Raises:
        OSError: It does not answer, or in time.
    """
    until = time.monotonic() + timeout_s
    with socket.create_connection((address.address, address.port), timeout=timeout_s) as connection:
        connection.sendall(address.token.encode())
        parts = []
        while True:
            connection.settimeout(max(until - time.monotonic(), 0.001))
            if not (part := connection.recv(1 << 16)):
                break
            parts.append(part)
    try:
        return msgspec.json.decode(b"".join(parts), type=Report)
    except msgspec.MsgspecError as error:
        raise OSError(f"no report came back: {error}") from error


def ask_all(addresses: Mapping[_K, Address], timeout_s: float) -> dict[_K, Report]:
    """Ask several monitors at once.

    Args:
        addresses: By rank, or whatever tells them apart.
        timeout_s: Longest wait for all of them together, in seconds.

    Returns:
        Reports of those that answered.
    """
    reports: dict[_K, Report] = {}

    def ask_one(rank: _K, address: Address) -> None:
        with suppress(OSError):
            reports[rank] = ask(address, timeout_s)

    threads = [
        threading.Thread(target=ask_one, args=item, name="parallel-runtime-ask", daemon=True)
        for item in list(addresses.items())[:_MAX_ASKED]
    ]
    until = time.monotonic() + timeout_s
    started = [thread for thread in threads if _has_started(thread)]
    for thread in started:
        thread.join(max(0.0, until - time.monotonic()))
    return dict(reports)


def _has_started(thread: threading.Thread) -> bool:
    """Start it; a process at its limit asks fewer ranks, and tells what it knows."""
    with suppress(RuntimeError):
        thread.start()
        return True
    return False
