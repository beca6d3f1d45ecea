"""Members of one shared-memory group, as threads of the test process or as processes."""

import multiprocessing
import os
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

from parallel_runtime.comm.shm import ShmCommunicator, Unavailable

__all__ = ["FileStore", "MemoryStore", "Processes", "Threads", "open_member"]

_T = TypeVar("_T")


class MemoryStore:
    """A store for threads."""

    def __init__(self) -> None:
        self._values: dict[str, bytes] = {}
        self._changed = threading.Condition()

    def set(self, key: str, value: bytes) -> None:
        with self._changed:
            self._values[key] = value
            self._changed.notify_all()

    def get(self, key: str, timeout_s: float) -> bytes:
        with self._changed:
            if not self._changed.wait_for(lambda: key in self._values, timeout_s):
                raise TimeoutError(key)
            return self._values[key]


class FileStore:
    """A store for processes: one file per key."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def set(self, key: str, value: bytes) -> None:
        path = self._folder / key.replace("/", "~")
        draft = path.with_suffix(f".{os.getpid()}")
        draft.write_bytes(value)
        draft.rename(path)

    def get(self, key: str, timeout_s: float) -> bytes:
        path = self._folder / key.replace("/", "~")
        limit = time.monotonic() + timeout_s
        while not path.exists():
            if time.monotonic() > limit:
                raise TimeoutError(key)
            os.sched_yield()
        return path.read_bytes()


def open_member(store: Any, rank: int, world_size: int, key: str = "group", *, direct: bool = True) -> ShmCommunicator:
    """One member; a refusal is an error here."""
    made = ShmCommunicator.create(store, key, rank, world_size, 20.0, direct=direct)
    if isinstance(made, Unavailable):
        raise RuntimeError(made.reason)
    return made


class Threads:
    """A group whose members are threads; ``run`` calls a function on all of them."""

    def __init__(self, world_size: int, *, direct: bool = True) -> None:
        self.world_size = world_size
        store = MemoryStore()
        self.members: list[ShmCommunicator] = self._together(lambda rank: open_member(store, rank, world_size, direct=direct))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for member in self.members:
            member.close()

    def run(self, body: Callable[[ShmCommunicator], _T]) -> list[_T]:
        """What ``body`` returned on every member; the first error if one raised."""
        return self._together(lambda rank: body(self.members[rank]))

    def outcomes(self, body: Callable[[ShmCommunicator], Any]) -> list[Any]:
        """What ``body`` returned, or the exception it raised, on every member."""

        def attempt(rank: int) -> Any:
            try:
                return body(self.members[rank])
            except Exception as exc:
                return exc

        return self._together(attempt)

    def _together(self, call: Callable[[int], _T]) -> list[_T]:
        results: dict[int, _T] = {}
        errors: dict[int, BaseException] = {}

        def work(rank: int) -> None:
            try:
                results[rank] = call(rank)
            except BaseException as exc:
                errors[rank] = exc

        threads = [threading.Thread(target=work, args=(rank,)) for rank in range(self.world_size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
            assert not thread.is_alive(), f"a member hangs; errors so far: {errors}"
        if errors:
            raise errors[min(errors)]
        return [results[rank] for rank in range(self.world_size)]


class Processes:
    """Processes that run ``body(store, rank, world_size, *args)``; started on entering, ended on leaving."""

    def __init__(self, folder: Path, world_size: int, body: Callable[..., Any], *args: Any) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["torch", "numpy", "parallel_runtime.comm.shm"])
        pipes = [context.Pipe(duplex=False) for _ in range(world_size)]
        self._readers = [reader for reader, _ in pipes]
        self.processes = [
            context.Process(target=_run, args=(writer, body, FileStore(folder), rank, world_size, *args))
            for rank, (_, writer) in enumerate(pipes)
        ]
        self._writers = [writer for _, writer in pipes]

    def __enter__(self) -> Self:
        for process in self.processes:
            process.start()
        for writer in self._writers:
            writer.close()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for process in self.processes:
            if kind is not None:
                process.kill()
            process.join(20)
            process.kill()
            process.join()
            process.close()
        for reader in self._readers:
            reader.close()

    def result(self, rank: int) -> Any:
        """What that process returned; what it raised is raised here."""
        assert self._readers[rank].poll(60), f"member {rank} sent nothing"
        value = self._readers[rank].recv()
        if isinstance(value, BaseException):
            raise value
        return value

    def results(self) -> list[Any]:
        """Of all of them, in rank order."""
        return [self.result(rank) for rank in range(len(self.processes))]


def _run(writer: "Connection[Any, Any]", body: Callable[..., Any], *args: Any) -> None:
    try:
        writer.send(body(*args))
    except BaseException as exc:
        writer.send(exc)
