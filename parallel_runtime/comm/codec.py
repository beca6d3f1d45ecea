"""Objects to bytes and back: plain data, containers, tensors and numpy values through msgpack. Pickle only if asked for.

What arrives has the container kinds that were sent (list, tuple, dict, set, frozenset), the order of dict keys, and tensors that
are detached. One tensor object that occurs twice arrives as one. Big tensors stay out of the bytes and travel on their own.
"""

import pickle as pickling
from collections.abc import Callable, Mapping, Sequence
from enum import IntEnum
from types import MappingProxyType
from typing import Any, Final, NamedTuple, final

import msgspec
import numpy as np
import torch
from torch import Tensor

from parallel_runtime.comm.tensors import as_bytes, dense
from parallel_runtime.errors import SerializationError

__all__ = ["Body", "Encoded", "decode", "decode_typed", "dtype_named", "encode", "encode_typed", "open_body"]

_SCALARS: Final = frozenset({type(None), bool, int, float, str, bytes})
_ENVELOPE: Final = msgspec.msgpack.Decoder(tuple[bool, list[tuple[str, list[int], bool, bytes | None]], msgspec.Raw])
_KEEP_OUT_BYTES: Final = 64 * 1024


class _Code(IntEnum):
    """Msgpack extension codes."""

    TUPLE = 1
    DICT = 2
    SET = 3
    FROZENSET = 4
    TENSOR = 5
    NDARRAY = 6
    NUMPY_SCALAR = 7
    COMPLEX = 8
    BIG_INT = 9
    DTYPE = 10
    BYTEARRAY = 11
    SIZE = 12


def dtype_named(name: str) -> torch.dtype:
    """The dtype called ``name``, like ``"torch.float32"``.

    Raises:
        ValueError: There is none.
    """
    dtype = getattr(torch, name.removeprefix("torch."), None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"unknown dtype {name}")
    return dtype


@final
class Encoded(NamedTuple):
    """An object on its way.

    Attributes:
        body: Everything but the big tensors.
        buffers: The big tensors, contiguous, to be moved after ``body`` in this order.
    """

    body: bytearray
    buffers: list[Tensor]


@final
class Body(NamedTuple):
    """A body that arrived, not decoded yet.

    Attributes:
        pickled: Whether ``tree`` is a pickle.
        tensors: One per tensor of the object; the big ones are empty buffers that are still to be filled.
        buffers: Those that are still to be filled, in order.
        tree: The rest.
    """

    pickled: bool
    tensors: list[Tensor]
    buffers: list[Tensor]
    tree: bytes | msgspec.Raw


def encode(value: object, *, pickle: bool = False, keep_out: bool = True) -> Encoded:
    """Turn ``value`` into bytes, before anything is sent.

    Args:
        value: None, bool, int, float, str, bytes, complex, list, tuple, dict, set, tensors, numpy arrays and scalars, dtypes
            and sizes, nested in any way.
        pickle: Pickle it instead; the receiver has to allow that.
        keep_out: Leave tensors of 64 KiB and more out of the bytes.

    Returns:
        The bytes, and the tensors that travel on their own.

    Raises:
        SerializationError: It holds something else, or contains itself.
    """
    if pickle:
        try:
            data = pickling.dumps(value, protocol=5)
        except Exception as exc:
            raise SerializationError(f"cannot pickle {_short(value)}: {type(exc).__name__}: {exc}") from exc
        return Encoded(_packed((True, [], data)), [])
    for careful in (False, True):
        writer = _Writer(careful)
        try:
            return writer.finish(writer.walk(value), keep_out)
        except OverflowError:
            continue
        except RecursionError:
            raise SerializationError(
                f"cannot encode {type(value).__name__}: it is nested too deeply, or contains itself"
            ) from None
        except UnicodeEncodeError as exc:
            raise SerializationError(f"cannot encode a str that is no valid Unicode: {exc}") from exc
    raise SerializationError(f"cannot encode {_short(value)}")


def open_body(body: bytearray | memoryview, device: torch.device) -> Body:
    """Read what a body says about its tensors, and make room for those that are still to come.

    Args:
        body: As made by ``encode``.
        device: Where tensors go that were not on the sender's CPU.

    Returns:
        The parts.

    Raises:
        SerializationError: The bytes are damaged.
    """
    try:
        pickled, entries, tree = _ENVELOPE.decode(body)
        tensors, buffers = [], []
        for name, shape, on_cpu, data in entries:
            place = torch.device("cpu") if on_cpu else device
            tensor = torch.empty(shape, dtype=dtype_named(name), device=place)
            if data:
                as_bytes(tensor).copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))
            elif data is None:
                buffers.append(tensor)
            tensors.append(tensor)
    except (msgspec.MsgspecError, ValueError) as exc:
        raise SerializationError(f"a message arrived damaged: {exc}") from exc
    return Body(pickled, tensors, buffers, tree)


def decode(body: Body, *, pickle: bool = False) -> object:
    """Build the object, once its buffers are filled.

    Args:
        body: From ``open_body``.
        pickle: Allow a pickled one.

    Returns:
        A new object, equal to the one that was sent.

    Raises:
        SerializationError: It is pickled and that is not allowed, or it cannot be built here.
    """
    try:
        if not body.pickled:
            return msgspec.msgpack.decode(body.tree, ext_hook=_Reader(body.tensors).hook)
        if not pickle:
            raise SerializationError(
                "the message was pickled by its sender; receive it with pickle=True if you trust all members"
            )
        return pickling.loads(msgspec.msgpack.decode(body.tree, type=bytes))
    except SerializationError:
        raise
    except Exception as exc:
        raise SerializationError(f"cannot build the object that arrived: {type(exc).__name__}: {exc}") from exc


def encode_typed(value: object) -> Encoded:
    """Encode a value of a schema: msgspec structs, dataclasses, enums and whatever else msgspec knows, with tensors inside.

    Args:
        value: The value.

    Returns:
        The bytes, and the tensors that travel on their own.

    Raises:
        SerializationError: It holds something that msgspec does not know.
    """
    writer = _Writer(careful=False)
    try:
        tree = msgspec.msgpack.Encoder(enc_hook=writer.walk).encode(value)
    except (TypeError, ValueError, OverflowError, RecursionError) as exc:
        raise SerializationError(f"cannot encode {_short(value)}: {exc}") from exc
    return writer.finish(msgspec.Raw(tree), keep_out=True)


def decode_typed(body: Body, schema: Any) -> Any:
    """Build a value of ``schema``, once the buffers are filled.

    Args:
        body: From ``open_body``.
        schema: Any type that msgspec understands.

    Returns:
        A value of that type.

    Raises:
        SerializationError: What arrived is not of that type.
    """
    try:
        return msgspec.msgpack.decode(body.tree, type=schema, ext_hook=_Reader(body.tensors).hook)
    except msgspec.MsgspecError as exc:
        raise SerializationError(f"what arrived is no {schema}: {exc}") from exc


@final
class _Writer:
    """Replaces what msgpack lacks or would change by extension values, and collects tensors."""

    def __init__(self, careful: bool) -> None:
        self._careful = careful
        self._tensors: list[Tensor] = []
        self._numbers: dict[int, int] = {}

    def walk(self, value: Any) -> object:
        """``value`` in terms that msgpack keeps as they are."""
        kind = type(value)
        if kind in _SCALARS:
            return self._big_int(value) if self._careful and kind is int else value
        if kind is list:
            return value if self._all_plain(value) else [self.walk(item) for item in value]
        if kind is dict:
            return self._dict(value)
        maker = _MAKERS.get(kind)
        if maker is not None:
            return maker(self, value)
        if isinstance(value, Tensor) and kind in (Tensor, torch.nn.Parameter):
            return self._ext(_Code.TENSOR, self._number(value))
        if isinstance(value, np.generic) and not isinstance(value, np.object_):
            return self._ext(_Code.NUMPY_SCALAR, (value.dtype.str, value.tobytes()))
        raise SerializationError(
            f"cannot encode {_short(value)}: send plain data, containers, tensors and numpy values, use a channel with a schema, "
            "or opt in to pickle=True"
        )

    def finish(self, tree: object, keep_out: bool) -> Encoded:
        """Put the parts together."""
        entries: list[tuple[str, list[int], bool, object]] = []
        buffers: list[Tensor] = []
        for tensor in self._tensors:
            flat = dense(tensor)
            data: object = None
            if keep_out and flat.nbytes >= _KEEP_OUT_BYTES:
                buffers.append(flat)
            else:
                data = as_bytes(flat.cpu()).numpy().data if flat.numel() else b""
            entries.append((str(tensor.dtype), list(tensor.shape), tensor.device.type == "cpu", data))
        return Encoded(_packed((False, entries, tree)), buffers)

    def _ext(self, code: _Code, content: object) -> msgspec.msgpack.Ext:
        return msgspec.msgpack.Ext(int(code), msgspec.msgpack.encode(content))

    def _all_plain(self, values: Sequence[object]) -> bool:
        if self._careful:
            return False
        kinds = list(map(type, values))
        is_uniform = bool(kinds) and kinds.count(kinds[0]) == len(kinds)  # much faster than a set of all kinds
        return kinds[0] in _SCALARS if is_uniform else set(kinds) <= _SCALARS

    def _big_int(self, value: int) -> object:
        if -(2**63) <= value < 2**64:
            return value
        return self._ext(_Code.BIG_INT, format(value, "x"))

    def _dict(self, value: dict[object, object]) -> object:
        if set(map(type, value)) <= {str}:
            return value if self._all_plain(tuple(value.values())) else {key: self.walk(item) for key, item in value.items()}
        return self._ext(_Code.DICT, [[self.walk(key), self.walk(item)] for key, item in value.items()])

    def _number(self, tensor: Tensor) -> int:
        number = self._numbers.setdefault(id(tensor), len(self._tensors))
        if number == len(self._tensors):
            self._tensors.append(tensor)
        return number

    def _items(self, code: _Code, values: Sequence[object]) -> msgspec.msgpack.Ext:
        return self._ext(code, values if self._all_plain(values) else [self.walk(item) for item in values])

    def _array(self, value: np.ndarray[tuple[int, ...], np.dtype[np.generic]]) -> msgspec.msgpack.Ext:
        if value.dtype.hasobject or value.dtype.names is not None:
            raise SerializationError(f"cannot encode a numpy array of dtype {value.dtype}; convert it to a plain dtype")
        return self._ext(_Code.NDARRAY, (value.dtype.str, value.shape, value.tobytes()))


_MAKERS: Final[Mapping[type, Callable[[_Writer, Any], object]]] = MappingProxyType(
    {
        tuple: lambda writer, value: writer._items(_Code.TUPLE, value),
        set: lambda writer, value: writer._items(_Code.SET, list(value)),
        frozenset: lambda writer, value: writer._items(_Code.FROZENSET, list(value)),
        complex: lambda writer, value: writer._ext(_Code.COMPLEX, (value.real, value.imag)),
        bytearray: lambda writer, value: msgspec.msgpack.Ext(int(_Code.BYTEARRAY), bytes(value)),
        torch.Size: lambda writer, value: writer._ext(_Code.SIZE, list(value)),
        torch.dtype: lambda writer, value: writer._ext(_Code.DTYPE, str(value)),
        np.ndarray: lambda writer, value: writer._array(value),
    }
)


@final
class _Reader:
    """Turns extension values back."""

    def __init__(self, tensors: list[Tensor]) -> None:
        self._tensors = tensors

    def hook(self, code: int, data: memoryview) -> object:
        """Called by msgspec for every extension value, in document order."""
        if code == _Code.BYTEARRAY:
            return bytearray(data)
        content = msgspec.msgpack.decode(data, ext_hook=self.hook)
        if code == _Code.TENSOR:
            return self._tensors[content]
        return _BUILDERS[_Code(code)](content)


_BUILDERS: Final[Mapping[_Code, Callable[[Any], object]]] = MappingProxyType(
    {
        _Code.TUPLE: tuple,
        _Code.DICT: dict,
        _Code.SET: set,
        _Code.FROZENSET: frozenset,
        _Code.COMPLEX: lambda content: complex(*content),
        _Code.BIG_INT: lambda content: int(content, 16),
        _Code.SIZE: torch.Size,
        _Code.DTYPE: dtype_named,
        _Code.NDARRAY: lambda content: np.frombuffer(content[2], dtype=content[0]).reshape(content[1]).copy(),
        _Code.NUMPY_SCALAR: lambda content: np.frombuffer(content[1], dtype=content[0])[0],
    }
)


def _packed(parts: tuple[bool, list[tuple[str, list[int], bool, object]], object]) -> bytearray:
    body = bytearray()
    msgspec.msgpack.Encoder().encode_into(parts, body)
    return body


def _short(value: object) -> str:
    """Name the type; its ``repr`` is not called, since it may raise."""
    kind = type(value)
    return f"an object of type {kind.__module__}.{kind.__qualname__}"
