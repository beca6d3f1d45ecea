"""The function and its arguments on their way to another process: pickled by value, checked before any process exists."""

import io
import pickle
import sys
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from multiprocessing.queues import Queue, SimpleQueue
from multiprocessing.synchronize import SemLock
from types import FunctionType, MethodType
from typing import Any, final

from parallel_runtime.errors import LaunchError

__all__ = ["name_of", "pack_call", "unpack_call"]

_HANDLES = (Connection, Queue, SimpleQueue, SemLock)
"""What only ``multiprocessing`` itself can hand to a process, and only while that process is being started."""


@final
class _CallPickler(pickle.Pickler):
    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, protocol=pickle.HIGHEST_PROTOCOL)
        self.handles: list[object] = []

    def persistent_id(self, obj: object) -> int | None:
        if not isinstance(obj, _HANDLES):
            return None
        self.handles.append(obj)
        return len(self.handles) - 1

    def reducer_override(self, obj: object) -> Any:
        if isinstance(obj, FunctionType | type) and obj.__module__ == "__main__" and not _is_main_importable():
            raise pickle.PicklingError(
                f"{obj.__qualname__} was defined in an interactive session or with -c, which other processes cannot import"
            )
        return NotImplemented


@final
class _CallUnpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, handles: Sequence[object]) -> None:
        super().__init__(file)
        self._handles = handles

    def persistent_load(self, pid: int) -> object:
        return self._handles[pid]


def _is_main_importable() -> bool:
    main = sys.modules["__main__"]
    return getattr(main, "__spec__", None) is not None or hasattr(main, "__file__")


def pack_call(fn: Callable[..., object], args: Sequence[object]) -> tuple[bytes, list[object]]:
    """Pickle a call for another process.

    Args:
        fn: A function that other processes can import by name.
        args: Its arguments; each rank gets a copy. Connections, queues and locks of ``multiprocessing`` may be among them.

    Returns:
        The pickled call, and the connections, queues and locks in it, which travel beside it.

    Raises:
        LaunchError: The function or an argument cannot be pickled; names it.
    """
    try:
        return _dump((fn, tuple(args)))
    except Exception as error:
        named = [("the function", fn), *((f"argument {i}", arg) for i, arg in enumerate(args, start=1))]
        label, culprit = next(((label, value) for label, value in named if not _can_dump(value)), named[0])
        raise LaunchError(
            f"{label}, {_describe(culprit)}, cannot be sent to another process: {error}. Ranks import the function by name "
            f"and get their arguments pickled: use a function at the top level of a module, and arguments that can be pickled"
        ) from error


def unpack_call(data: bytes, handles: Sequence[object]) -> tuple[Callable[..., object], tuple[object, ...]]:
    """Undo ``pack_call`` in the process that runs the call.

    Args:
        data: From ``pack_call``, over a private pipe.
        handles: What travelled beside it.

    Returns:
        The function and its arguments.
    """
    fn, args = _CallUnpickler(io.BytesIO(data), handles).load()
    return fn, args


def name_of(fn: Callable[..., object]) -> str:
    """Name a function for people.

    Args:
        fn: Any callable.

    Returns:
        Such as ``"train.step"``; the type's name for callable objects.
    """
    name = getattr(fn, "__qualname__", type(fn).__qualname__)
    return f"{getattr(fn, '__module__', type(fn).__module__)}.{name}"


def _dump(value: object) -> tuple[bytes, list[object]]:
    buffer = io.BytesIO()
    pickler = _CallPickler(buffer)
    pickler.dump(value)
    return buffer.getvalue(), pickler.handles


def _can_dump(value: object) -> bool:
    try:
        _dump(value)
    except Exception:
        return False
    return True


def _describe(value: object) -> str:
    if isinstance(value, MethodType):
        return f"the method {value.__qualname__} bound to a {type(value.__self__).__qualname__}"
    if isinstance(value, FunctionType):
        return f"{value.__qualname__} ({value.__code__.co_filename}:{value.__code__.co_firstlineno})"
    return f"a {type(value).__qualname__}"
