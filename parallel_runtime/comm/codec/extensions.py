"""How values that msgpack lacks, or would change, travel in it: as extension values; tensors and what is too big go beside it."""

import marshal
from collections.abc import Callable, Mapping, Sequence
from enum import IntEnum
from types import MappingProxyType
from typing import Any, Final, final

import msgspec
import numpy as np
import torch
from torch import Tensor

from parallel_runtime.comm.frames import raw_tensor
from parallel_runtime.comm.tensors import dtype_named
from parallel_runtime.errors import SerializationError

__all__ = ["Code", "Reader", "Writer", "is_plain", "type_name"]

_SCALARS: Final = frozenset({type(None), bool, int, float, str, bytes})
_KEYS: Final = frozenset({str})
_FEW: Final = 32
"""So short a list of integers is not worth a way of its own."""
_MARSHAL_HEAD: Final = 5
_MARSHAL_INT: Final = np.dtype([("code", "S1"), ("value", "<i4")])


class Code(IntEnum):
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
    BYTES = 13
    STR = 14
    BESIDE = 15
    INTS = 16


@final
class Writer:
    """Replaces what msgpack lacks or would change by extension values, and collects tensors.

    Args:
        careful: Look at every value; otherwise msgpack finds integers and pieces that it cannot hold, and raises.
        largest: The most bytes that one piece may have in msgpack; what is bigger goes beside it, like a tensor.

    Attributes:
        tensors: What goes beside the tree, by number.

    Raises:
        SerializationError: A value of another kind.
    """

    def __init__(self, careful: bool, largest: int) -> None:
        self.tensors: list[Tensor] = []
        self._careful = careful
        self._largest = largest
        self._numbers: dict[int, int] = {}

    def walk(self, value: Any) -> object:
        """``value`` in terms that msgpack keeps as they are."""
        kind = type(value)
        if kind in _SCALARS:
            return self._held(value) if self._careful else value
        if kind is list:
            if len(value) > _FEW and type(value[0]) is int and (ints := _small_ints(value)):
                return self.ext(Code.INTS, ints)
            return value if self._all_plain(value) else [self.walk(item) for item in value]
        if kind is dict:
            return self._dict(value)
        maker = _MAKERS.get(kind)
        if maker is not None:
            return maker(self, value)
        if isinstance(value, Tensor) and kind in (Tensor, torch.nn.Parameter):
            return self.packed(Code.TENSOR, self._number(value))
        if isinstance(value, np.generic) and not isinstance(value, np.object_):
            return self.packed(Code.NUMPY_SCALAR, (value.dtype.str, value.tobytes()))
        raise SerializationError(
            f"cannot encode {type_name(value)}: send plain data, containers, tensors and numpy values, use a channel with a "
            "schema, or opt in to pickle=True"
        )

    def packed(self, code: Code, content: object) -> msgspec.msgpack.Ext:
        """An extension value with ``content`` in msgpack."""
        return self.ext(code, msgspec.msgpack.encode(content))

    def ext(self, code: Code, data: bytes | bytearray) -> msgspec.msgpack.Ext:
        """An extension value; where it is too big, what it holds goes beside the tree."""
        if not self._careful or len(data) <= self._largest:
            return msgspec.msgpack.Ext(int(code), data)
        beside = msgspec.msgpack.encode((int(code), self._beside(data)))
        return msgspec.msgpack.Ext(int(Code.BESIDE), beside)

    def items(self, code: Code, values: Sequence[object]) -> msgspec.msgpack.Ext:
        """A container of values."""
        return self.packed(code, values if self._all_plain(values) else [self.walk(item) for item in values])

    def array(self, value: np.ndarray[tuple[int, ...], np.dtype[np.generic]]) -> msgspec.msgpack.Ext:
        """A numpy array; its elements travel like those of a tensor."""
        if value.dtype.hasobject or value.dtype.names is not None:
            raise SerializationError(f"cannot encode a numpy array of dtype {value.dtype}; convert it to a plain dtype")
        return self.packed(Code.NDARRAY, (value.dtype.str, value.shape, self._beside(value.tobytes())))

    def _beside(self, data: bytes | bytearray) -> int:
        self.tensors.append(raw_tensor(bytearray(data)))
        return len(self.tensors) - 1

    def _held(self, value: Any) -> object:
        """A scalar; an integer that msgpack cannot hold as digits, a string that it cannot hold beside the tree."""
        if type(value) is int and not -(2**63) <= value < 2**64:
            return self.packed(Code.BIG_INT, format(value, "x"))
        if type(value) is bytes and len(value) > self._largest:
            return self.ext(Code.BYTES, value)
        if type(value) is str and len(value) * 4 > self._largest:
            return self.ext(Code.STR, value.encode())
        return value

    def _all_plain(self, values: Sequence[object]) -> bool:
        if self._careful:
            return False
        kinds = list(map(type, values))
        is_uniform = bool(kinds) and kinds.count(kinds[0]) == len(kinds)  # much faster than a set of all kinds
        return kinds[0] in _SCALARS if is_uniform else set(kinds) <= _SCALARS

    def _dict(self, value: dict[object, object]) -> object:
        if set(map(type, value)) <= {str} and not self._careful:
            return value if self._all_plain(tuple(value.values())) else {key: self.walk(item) for key, item in value.items()}
        return self.packed(Code.DICT, [[self.walk(key), self.walk(item)] for key, item in value.items()])

    def _number(self, tensor: Tensor) -> int:
        number = self._numbers.setdefault(id(tensor), len(self.tensors))
        if number == len(self.tensors):
            self.tensors.append(tensor)
        return number


def is_plain(value: Any) -> bool:
    """Whether msgpack keeps ``value`` as it is: scalars, dicts with keys of str, short lists of such. Most messages are no more.

    Args:
        value: Anything; integers and pieces that msgpack cannot hold count as plain.

    Returns:
        ``False`` where a closer look is needed.
    """
    kind = type(value)
    if kind is dict and set(map(type, value)) <= _KEYS:
        items = value.values()
    elif kind is list and len(value) <= _FEW:
        items = value
    else:
        return kind in _SCALARS
    if set(map(type, items)) <= _SCALARS:
        return True
    return all(map(is_plain, items))


def _small_ints(values: list[object]) -> bytes:
    """``values`` in the form that marshal gives a list of ints of 32 bits; ``b""`` if they are anything else, bools included.

    Marshal writes such an int, and nothing else, as ``i`` and four bytes, faster than anything else looks at the types.
    """
    try:
        written = marshal.dumps(values, 2)[_MARSHAL_HEAD:]
    except ValueError:  # a subclass of int, or what marshal does not know
        return b""
    is_so = len(written) == _MARSHAL_INT.itemsize * len(values) and written[:: _MARSHAL_INT.itemsize] == b"i" * len(values)
    return written if is_so else b""


def _ints(written: memoryview) -> list[int]:
    found: list[int] = np.frombuffer(written, _MARSHAL_INT)["value"].astype("<i4").tolist()
    return found


_MAKERS: Final[Mapping[type, Callable[[Writer, Any], object]]] = MappingProxyType(
    {
        tuple: lambda writer, value: writer.items(Code.TUPLE, value),
        set: lambda writer, value: writer.items(Code.SET, list(value)),
        frozenset: lambda writer, value: writer.items(Code.FROZENSET, list(value)),
        complex: lambda writer, value: writer.packed(Code.COMPLEX, (value.real, value.imag)),
        bytearray: lambda writer, value: writer.ext(Code.BYTEARRAY, value),
        torch.Size: lambda writer, value: writer.packed(Code.SIZE, list(value)),
        torch.dtype: lambda writer, value: writer.packed(Code.DTYPE, str(value)),
        np.ndarray: lambda writer, value: writer.array(value),
    }
)


@final
class Reader:
    """Turns extension values back.

    Args:
        tensors: What came beside the tree, by number.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._tensors = tensors

    def hook(self, code: int, data: memoryview) -> object:
        """Called by msgspec for every extension value, in document order."""
        if code in _RAW:
            return _RAW[Code(code)](data)
        content = msgspec.msgpack.decode(data, ext_hook=self.hook)
        if code == Code.TENSOR:
            return self._tensors[content]
        if code == Code.BESIDE:
            return self.hook(content[0], memoryview(self._tensors[content[1]].numpy()))
        if code == Code.NDARRAY:
            return self._tensors[content[2]].numpy().view(content[0]).reshape(content[1])
        return _BUILDERS[Code(code)](content)


_RAW: Final[Mapping[Code, Callable[[memoryview], object]]] = MappingProxyType(
    {Code.BYTEARRAY: bytearray, Code.BYTES: bytes, Code.STR: lambda data: str(data, "utf-8"), Code.INTS: _ints}
)
_BUILDERS: Final[Mapping[Code, Callable[[Any], object]]] = MappingProxyType(
    {
        Code.TUPLE: tuple,
        Code.DICT: dict,
        Code.SET: set,
        Code.FROZENSET: frozenset,
        Code.COMPLEX: lambda content: complex(*content),
        Code.BIG_INT: lambda content: int(content, 16),
        Code.SIZE: torch.Size,
        Code.DTYPE: dtype_named,
        Code.NUMPY_SCALAR: lambda content: np.frombuffer(content[1], dtype=content[0])[0],
    }
)


def type_name(value: object) -> str:
    """Name the type; its ``repr`` is not called, since it may raise."""
    kind = type(value)
    return f"an object of type {kind.__module__}.{kind.__qualname__}"
