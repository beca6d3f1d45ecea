"""Combining the members' elements, always in the order of their ranks.

numpy where it has the type and does it at memory speed; torch for float16 and bfloat16. Two low-precision operands are added
in float32 and rounded once by torch itself; more of them, and averages, go through a float32 accumulator and are rounded once.
An overflow is an infinity and no warning, as in torch: numpy keeps its error state in a context variable, so every reducer has a
context of its own in which that state is "ignore". Entering it costs a tenth of what ``np.errstate`` does.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextvars import Context, copy_context
from types import MappingProxyType
from typing import Any, Final, TypeAlias, cast, final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from parallel_runtime.comm.communicator import ReduceOp
from parallel_runtime.errors import DtypeError

__all__ = ["ARITHMETIC_DTYPES", "LOW_PRECISION", "Reducer", "Vector", "make_reducer"]

Vector: TypeAlias = npt.NDArray[np.generic] | Tensor
"""Elements of one dtype, one after the other."""

_NUMPY_DTYPES: Final = MappingProxyType(
    {
        torch.bool: np.dtype(np.bool_),
        torch.uint8: np.dtype(np.uint8),
        torch.uint16: np.dtype(np.uint16),
        torch.uint32: np.dtype(np.uint32),
        torch.uint64: np.dtype(np.uint64),
        torch.int8: np.dtype(np.int8),
        torch.int16: np.dtype(np.int16),
        torch.int32: np.dtype(np.int32),
        torch.int64: np.dtype(np.int64),
        torch.float32: np.dtype(np.float32),
        torch.float64: np.dtype(np.float64),
        torch.complex64: np.dtype(np.complex64),
        torch.complex128: np.dtype(np.complex128),
    }
)
LOW_PRECISION: Final = (torch.float16, torch.bfloat16)
"""What is accumulated in float32."""

_BLOCK: Final = 32768  # float32 accumulator and operand of a block stay in the cache
_BLOCK_BYTES: Final = 128 << 10
_UFUNCS: Final = MappingProxyType(
    {
        ReduceOp.SUM: np.add,
        ReduceOp.AVG: np.add,
        ReduceOp.MAX: np.maximum,
        ReduceOp.MIN: np.minimum,
        ReduceOp.PRODUCT: np.multiply,
    }
)
_TORCH_FUNCTIONS: Final[Mapping[ReduceOp, Callable[..., Tensor]]] = MappingProxyType(
    {
        ReduceOp.SUM: torch.add,
        ReduceOp.AVG: torch.add,
        ReduceOp.MAX: torch.maximum,
        ReduceOp.MIN: torch.minimum,
        ReduceOp.PRODUCT: torch.mul,
    }
)

ARITHMETIC_DTYPES: Final = frozenset((*_NUMPY_DTYPES, *LOW_PRECISION))
"""What can be reduced; every other dtype only travels."""


class Reducer(ABC):
    """Combines vectors of one dtype."""

    @abstractmethod
    def vector(self, memory: memoryview) -> Vector:
        """The elements in ``memory``; a view."""

    @abstractmethod
    def combine(self, sources: Sequence[Vector], out: Vector) -> None:
        """Combine two or more vectors in order into ``out``, which may be one of the first two."""


def make_reducer(op: ReduceOp, dtype: torch.dtype, world_size: int) -> Reducer:
    """How ``world_size`` members' elements of ``dtype`` are combined.

    Args:
        op: The reduction. On booleans sum and max are "or", product and min are "and".
        dtype: Of the elements.
        world_size: Number of members, at least 2.

    Returns:
        The reducer; it may keep some scratch memory.

    Raises:
        DtypeError: ``op`` makes no sense on ``dtype``, or ``dtype`` only travels.
    """
    if dtype not in ARITHMETIC_DTYPES:
        raise DtypeError(f"shared memory only moves {dtype}, it cannot reduce it with {op}; convert it first")
    if dtype.is_complex and op in (ReduceOp.MAX, ReduceOp.MIN):
        raise DtypeError(f"{op} of {dtype}: complex numbers have no order; use sum, avg or product")
    if dtype is torch.bool and op is ReduceOp.AVG:
        raise DtypeError("avg of torch.bool is not a bool; convert it, or use sum or max (or), min or product (and)")
    if dtype in LOW_PRECISION:
        if world_size == 2 and op is not ReduceOp.AVG:
            return _TorchPair(_TORCH_FUNCTIONS[op], dtype)
        return _TorchAccumulated(_TORCH_FUNCTIONS[op], dtype, world_size if op is ReduceOp.AVG else 1)
    if world_size == 2 and op is not ReduceOp.AVG:
        return _NumpyPair(_UFUNCS[op], _NUMPY_DTYPES[dtype])
    return _Numpy(_UFUNCS[op], _NUMPY_DTYPES[dtype], world_size if op is ReduceOp.AVG else 1)


@final
class _Numpy(Reducer):
    def __init__(self, ufunc: np.ufunc, dtype: np.dtype[Any], divisor: int) -> None:
        self._ufunc = ufunc
        self._dtype = dtype
        self._divisor = divisor
        self._run = _quiet_context().run

    def vector(self, memory: memoryview) -> Vector:
        return np.frombuffer(memory, self._dtype)

    def combine(self, sources: Sequence[Vector], out: Vector) -> None:
        self._run(self._combine, sources, out)

    def _combine(self, sources: Sequence[Vector], out: Vector) -> None:
        ufunc, size = self._ufunc, len(out)
        block = _BLOCK_BYTES // self._dtype.itemsize
        for start in range(0, size, block):  # the sum of a block stays in the cache while the others are added
            stop = start + block
            part = out if size <= block else out[start:stop]
            ufunc(sources[0][start:stop], sources[1][start:stop], out=part)
            for source in sources[2:]:
                ufunc(part, source[start:stop], out=part)
            if self._divisor != 1:
                self._divide(cast("npt.NDArray[Any]", part))

    def _divide(self, out: npt.NDArray[Any]) -> None:
        if self._dtype.kind in "fc":
            np.divide(out, self._divisor, out=out)
        else:  # towards zero, as C does
            negative = (out < 0) & (out % self._divisor != 0)
            np.floor_divide(out, self._divisor, out=out)
            np.add(out, 1, out=out, where=negative)


@final
class _NumpyPair(Reducer):
    def __init__(self, ufunc: np.ufunc, dtype: np.dtype[Any]) -> None:
        self._ufunc = ufunc
        self._dtype = dtype
        self._run = _quiet_context().run

    def vector(self, memory: memoryview) -> Vector:
        return np.frombuffer(memory, self._dtype)

    def combine(self, sources: Sequence[Vector], out: Vector) -> None:
        self._run(self._ufunc, sources[0], sources[1], out=out)


@final
class _TorchPair(Reducer):
    def __init__(self, function: Callable[..., Tensor], dtype: torch.dtype) -> None:
        self._function = function
        self._dtype = dtype

    def vector(self, memory: memoryview) -> Vector:
        return torch.frombuffer(memory, dtype=self._dtype)

    def combine(self, sources: Sequence[Vector], out: Vector) -> None:
        self._function(sources[0], sources[1], out=out)


@final
class _TorchAccumulated(Reducer):
    def __init__(self, function: Callable[..., Tensor], dtype: torch.dtype, divisor: int) -> None:
        self._function = function
        self._dtype = dtype
        self._divisor = divisor
        self._scratch = torch.empty(2, _BLOCK)
        self._views = tuple(self._scratch)  # of the length that came last

    def vector(self, memory: memoryview) -> Vector:
        return torch.frombuffer(memory, dtype=self._dtype)

    def combine(self, sources: Sequence[Vector], out: Vector) -> None:
        vectors, result = cast("Sequence[Tensor]", sources), cast("Tensor", out)
        if len(result) <= _BLOCK:
            self._combine(vectors, result)
            return
        for start in range(0, len(result), _BLOCK):
            stop = start + _BLOCK
            self._combine([vector[start:stop] for vector in vectors], result[start:stop])

    def _combine(self, vectors: Sequence[Tensor], result: Tensor) -> None:
        if len(self._views[0]) != len(result):
            self._views = tuple(self._scratch[:, : len(result)])
        total, term = self._views
        total.copy_(vectors[0])
        for vector in vectors[1:]:
            term.copy_(vector)
            self._function(total, term, out=total)
        if self._divisor != 1:
            total.div_(self._divisor)
        result.copy_(total)


def _quiet_context() -> Context:
    """A context in which numpy says nothing about overflows and the like."""
    context = copy_context()
    context.run(np.seterr, all="ignore")
    return context
