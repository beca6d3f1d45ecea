"""Where the ranks' output goes: the caller's own streams, a file per rank, or the streams with the rank before each line."""

import os
import selectors
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from threading import Thread
from types import TracebackType
from typing import Self, final

from parallel_runtime.context.threads import start_thread
from parallel_runtime.errors import LaunchError

__all__ = ["RankOutput", "close_all", "fill_standard_descriptors", "log_path"]

_STDOUT, _STDERR = 1, 2
_LONGEST_LINE_BYTES = 1 << 16
_LOOK_S = 0.2
_DRAIN_S = 2.0
"""How long what ended ranks have written may take to arrive; a process that a rank left behind may hold its end open."""


def log_path(log_dir: Path, rank: int) -> Path:
    """The file that takes a rank's output.

    Args:
        log_dir: Folder of them all.
        rank: Which.

    Returns:
        ``rank-<rank>.log`` in that folder.
    """
    return log_dir / f"rank-{rank}.log"


def fill_standard_descriptors() -> list[int]:
    """Open ``/dev/null`` in the place of each standard descriptor that is closed, so that nothing else takes its number.

    Returns:
        Those that were opened; the caller closes them.
    """
    filled = []
    for fd in (0, 1, 2):
        try:
            os.fstat(fd)
        except OSError:
            filled.append(os.open(os.devnull, os.O_RDWR))
            os.set_inheritable(filled[-1], True)
    return filled


def close_all(descriptors: Sequence[int]) -> None:
    """Close them.

    Args:
        descriptors: Open.
    """
    for fd in descriptors:
        os.close(fd)


@final
@dataclass(slots=True)
class _Stream:
    """One stream of one rank on its way through the parent."""

    prefix: bytes
    sinks: tuple[int, ...]
    rest: bytearray = field(default_factory=bytearray)

    def take(self, chunk: bytes) -> None:
        """Pass on whole lines; at the end, and where a line does not end, whatever there is."""
        self.rest += chunk
        end = self.rest.rfind(b"\n") + 1
        if not chunk or len(self.rest) - end > _LONGEST_LINE_BYTES:
            end = len(self.rest)
        whole, self.rest = bytes(self.rest[:end]), self.rest[end:]
        if not whole:
            return
        lines = whole.removesuffix(b"\n").split(b"\n")
        terminal, *files = self.sinks
        _write_all(terminal, b"".join(self.prefix + line + b"\n" for line in lines))
        for fd in files:
            _write_all(fd, whole)


@final
class RankOutput:
    """Descriptors for the ranks to write to, for as long as a ``with`` block lasts.

    Args:
        world_size: Number of ranks.
        log_dir: Folder of their log files, made if it is not there; a file of an earlier run is replaced.
        prefix_output: Whether the caller's streams show ``[rank N]`` before each line; a thread passes lines on.
    """

    def __init__(self, world_size: int, *, log_dir: Path | None = None, prefix_output: bool = False) -> None:
        self._world_size = world_size
        self._log_dir = log_dir
        self._prefix_output = prefix_output
        self._selector = selectors.DefaultSelector()
        self._ends: list[tuple[int, int]] = []
        self._thread: Thread | None = None
        self._is_over = False
        self._to_hand_over = ExitStack()
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        """Open them.

        Raises:
            LaunchError: A log file cannot be opened.
        """
        with ExitStack() as stack:
            stack.enter_context(self._selector)
            self._ends = [self._open(rank, stack) for rank in range(self._world_size)]
            stack.callback(self._to_hand_over.close)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, error_type: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """Pass on what has been written, for a bounded time, and close them."""
        self.handed_over()
        if self._thread is not None:
            self._thread.join(_DRAIN_S)
            self._is_over = True
            self._thread.join()
        self._stack.close()

    def of(self, rank: int) -> tuple[int, int]:
        """Where a rank writes.

        Args:
            rank: Which.

        Returns:
            Descriptors for its stdout and stderr.
        """
        return self._ends[rank]

    def handed_over(self) -> None:
        """The ranks have their ends: close this process's, so that the end of the ranks is the end of the streams.

        Raises:
            ConfigError: This process may not have another thread.
        """
        self._to_hand_over.close()
        if self._prefix_output and self._thread is None:
            thread = Thread(target=self._pass_on, name="rank-output", daemon=True)
            start_thread(thread, "to pass the ranks' output on")
            self._thread = thread

    def _open(self, rank: int, stack: ExitStack) -> tuple[int, int]:
        file = () if self._log_dir is None else (self._open_log(self._log_dir, rank, stack),)
        if not self._prefix_output:
            return (file[0], file[0]) if file else (_STDOUT, _STDERR)
        first, second = (self._open_pipe(rank, (terminal, *file), stack) for terminal in (_STDOUT, _STDERR))
        return first, second

    def _open_log(self, log_dir: Path, rank: int, stack: ExitStack) -> int:
        path = log_path(log_dir, rank)
        try:
            log_dir.mkdir(parents=True, exist_ok=True)
            fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND, 0o644)
        except OSError as error:
            raise LaunchError(f"the output of rank {rank} cannot be kept in {path}: {error}") from error
        stack.callback(os.close, fd)
        return fd

    def _open_pipe(self, rank: int, sinks: Sequence[int], stack: ExitStack) -> int:
        read_end, write_end = os.pipe()
        stack.callback(os.close, read_end)
        self._to_hand_over.callback(os.close, write_end)
        self._selector.register(read_end, selectors.EVENT_READ, _Stream(f"[rank {rank}] ".encode(), tuple(sinks)))
        return write_end

    def _pass_on(self) -> None:
        while self._selector.get_map() and not self._is_over:
            for key, _ in self._selector.select(_LOOK_S):
                chunk = os.read(key.fd, 1 << 16)
                key.data.take(chunk)
                if not chunk:
                    self._selector.unregister(key.fd)


def _write_all(fd: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]
