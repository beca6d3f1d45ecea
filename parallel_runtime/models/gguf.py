"""Reader of the GGUF format: metadata and tensor directory at once, everything long only when asked for.

The file is mapped, never read whole. Vocabulary arrays are skipped over when it is opened and parsed when they are asked for;
of a tensor only the blocks that cover the wanted rows and columns are touched. Source: the GGUF specification, versions 2
and 3, in the documentation of ggml.
"""

import mmap
import struct
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType, ModuleType
from typing import TypeAlias, final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from parallel_runtime.errors import CheckpointError, ContextStateError
from parallel_runtime.models.gguf_blocks import BLOCK, BLOCK_BYTES, decode_blocks

__all__ = ["GgufArray", "GgufFile", "GgufTensor", "GgufValue"]

_MAGIC = b"GGUF"
_SCALARS = MappingProxyType(
    {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"},
)
_STRING, _ARRAY = 8, 9
_F32, _F16, _BF16 = 0, 1, 30
_MAX_DIMS = 4


@final
class GgufArray:
    """An array of the metadata, parsed when it is asked for.

    Args:
        reader: Cursor at its first item.
        kind: Type number of its items.
        length: Number of items.
    """

    def __init__(self, reader: "_Cursor", kind: int, length: int) -> None:
        self._reader = reader
        self._kind = kind
        self._length = length

    def __len__(self) -> int:
        return self._length

    def numbers(self) -> list[int | float | bool]:
        """The items of an array of numbers.

        Raises:
            CheckpointError: It holds something else.
            ContextStateError: The file is closed.
        """
        if self._kind not in _SCALARS:
            raise CheckpointError(f"{self._reader.path}: expected an array of numbers, found one of type {self._kind}")
        raw = self._reader.copy().take(self._length * struct.calcsize(_SCALARS[self._kind]))
        numbers: list[int | float | bool] = np.frombuffer(raw, dtype=_SCALARS[self._kind]).tolist()
        return numbers

    def strings(self) -> list[str]:
        """The items of an array of strings.

        Raises:
            CheckpointError: It holds something else, or text that is not UTF-8.
            ContextStateError: The file is closed.
        """
        if self._kind != _STRING:
            raise CheckpointError(f"{self._reader.path}: expected an array of strings, found one of type {self._kind}")
        reader = self._reader.copy()
        return [reader.string() for _ in range(self._length)]


GgufValue: TypeAlias = int | float | bool | str | GgufArray
"""A value of the metadata."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class GgufTensor:
    """Where a tensor lies in its file.

    Attributes:
        name: As the file has it.
        shape: Slowest dim first, as torch counts.
        kind: GGML type number.
        offset: Bytes from the start of the file.
        row_bytes: Bytes of one row of the last dim.
        block: Elements that are quantised together along the last dim; 1 where nothing is.
        block_bytes: Bytes of one block.
    """

    name: str
    shape: tuple[int, ...]
    kind: int
    offset: int
    row_bytes: int
    block: int
    block_bytes: int

    @property
    def num_rows(self) -> int:
        """Product of all dims but the last."""
        rows = 1
        for size in self.shape[:-1]:
            rows *= size
        return rows

    @property
    def nbytes(self) -> int:
        """Bytes of the whole tensor."""
        return self.num_rows * self.row_bytes

    @property
    def dtype(self) -> torch.dtype:
        """What reading it gives: its own dtype, or float32 where it is quantised."""
        return {_F16: torch.float16, _BF16: torch.bfloat16}.get(self.kind, torch.float32)


@final
class GgufFile:
    """An open GGUF file.

    Args:
        path: The file.

    Attributes:
        path: The file.
        metadata: Every key and its value.
        tensors: Every tensor by name.

    Raises:
        CheckpointError: Missing, not GGUF, of an unknown version, cut short, or damaged.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._map = _map_file(path)
        try:
            cursor = _Cursor(path, self._map)
            num_tensors, num_keys = _read_header(cursor)
            self.metadata: Mapping[str, GgufValue] = MappingProxyType(dict(_read_metadata(cursor, num_keys)))
            self.tensors: Mapping[str, GgufTensor] = MappingProxyType(
                {tensor.name: tensor for tensor in _read_directory(cursor, num_tensors, self._alignment())}
            )
            self._check_size()
        except BaseException:
            self.close()
            raise

    def read(self, name: str, rows: range, columns: range) -> Tensor:
        """Read a part of a tensor, seen as a matrix of ``num_rows`` rows; a 1-D tensor is one row.

        Args:
            name: Of the tensor.
            rows: Consecutive rows.
            columns: Consecutive columns.

        Returns:
            New tensor ``(len(rows), len(columns))``: float32, or the tensor's own dtype where it is F16 or BF16.

        Raises:
            CheckpointError: Its type needs a package that is not installed, or is not known.
            ContextStateError: The file is closed.
        """
        _check_open(self.path, self._map)
        tensor = self.tensors[name]
        first, last = columns.start // tensor.block, -(-columns.stop // tensor.block)
        raw = np.frombuffer(
            self._map, dtype=np.uint8, count=len(rows) * tensor.row_bytes, offset=tensor.offset + rows.start * tensor.row_bytes
        )
        matrix = raw.reshape(len(rows), tensor.row_bytes)[:, first * tensor.block_bytes : last * tensor.block_bytes]
        values = self._decode(tensor, np.array(matrix, order="C"))
        start = columns.start - first * tensor.block
        return values[:, start : start + len(columns)].contiguous()

    def close(self) -> None:
        """Unmap the file. Tensors that were read stay good."""
        with suppress(BufferError):  # an error on its way still holds a view of the map: it goes when the error goes
            self._map.close()

    def _decode(self, tensor: GgufTensor, matrix: NDArray[np.uint8]) -> Tensor:
        if matrix.size == 0:
            return torch.empty(matrix.shape[0], matrix.shape[1] // tensor.block_bytes * tensor.block, dtype=tensor.dtype)
        if tensor.kind in (_F32, _F16, _BF16):
            return torch.from_numpy(matrix).view(tensor.dtype)
        if tensor.kind in BLOCK_BYTES:
            return decode_blocks(torch.from_numpy(matrix), tensor.kind)
        gguf = _gguf_package(self.path)
        try:
            return torch.from_numpy(gguf.quants.dequantize(matrix, gguf.GGMLQuantizationType(tensor.kind)))
        except NotImplementedError as exc:
            raise CheckpointError(
                f"{self.path}: tensor {tensor.name!r} has GGML type {tensor.kind}, which cannot be dequantised here"
            ) from exc

    def _alignment(self) -> int:
        alignment = self.metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment < 1:
            raise CheckpointError(f"{self.path}: general.alignment is {alignment!r}; expected a positive integer")
        return alignment

    def _check_size(self) -> None:
        size = len(self._map)
        for tensor in self.tensors.values():
            end = tensor.offset + tensor.nbytes
            if end > size:
                raise CheckpointError(
                    f"{self.path}: tensor {tensor.name!r} ends at byte {end}, but the file has {size}; it was cut short"
                )


@final
class _Cursor:
    """A position in the mapped file; whatever would reach past its end is a truncated file."""

    def __init__(self, path: Path, data: mmap.mmap, position: int = 0) -> None:
        self.path = path
        self.position = position
        self._data = data

    def copy(self) -> "_Cursor":
        return _Cursor(self.path, self._data, self.position)

    def take(self, count: int) -> bytes:
        start = self.position
        self.skip(count)
        return self._data[start : self.position]

    def skip(self, count: int) -> None:
        _check_open(self.path, self._data)
        if self.position + count > len(self._data):
            raise CheckpointError(
                f"{self.path}: {count} bytes wanted at byte {self.position}, but the file has {len(self._data)}; "
                "it was cut short or is damaged"
            )
        self.position += count

    def number(self, code: str) -> int:
        value: int = struct.unpack(code, self.take(struct.calcsize(code)))[0]
        return value

    def string(self) -> str:
        raw = self.take(self.number("<Q"))
        try:
            return raw.decode()
        except UnicodeDecodeError as exc:
            raise CheckpointError(f"{self.path}: text before byte {self.position} is not UTF-8; the file is damaged") from exc

    def skip_strings(self, count: int) -> None:
        position, unpack, data = self.position, struct.Struct("<Q").unpack_from, self._data
        try:
            for _ in range(count):
                position += 8 + unpack(data, position)[0]
        except struct.error:
            position = len(data) + 1
        self.skip(position - self.position)


def _map_file(path: Path) -> mmap.mmap:
    try:
        with path.open("rb") as file:
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except (OSError, ValueError) as exc:  # ValueError: an empty file cannot be mapped
        raise CheckpointError(f"{path}: cannot be opened as a GGUF file: {exc}") from exc


def _check_open(path: Path, data: mmap.mmap) -> None:
    if data.closed:
        raise ContextStateError(f"{path} is closed; read it while it is open")


def _read_header(cursor: _Cursor) -> tuple[int, int]:
    magic = cursor.take(4)
    if magic != _MAGIC:
        raise CheckpointError(f"{cursor.path}: starts with {magic!r}; a GGUF file starts with {_MAGIC!r}")
    version = cursor.number("<I")
    if version not in (2, 3):
        raise CheckpointError(f"{cursor.path}: GGUF version {version}; versions 2 and 3, little-endian, are read")
    return cursor.number("<Q"), cursor.number("<Q")


def _read_metadata(cursor: _Cursor, num_keys: int) -> Iterator[tuple[str, GgufValue]]:
    for _ in range(num_keys):
        key = cursor.string()
        yield key, _read_value(cursor, key, cursor.number("<I"))


def _read_value(cursor: _Cursor, key: str, kind: int) -> GgufValue:
    if kind in _SCALARS:
        return cursor.number(_SCALARS[kind])
    if kind == _STRING:
        return cursor.string()
    if kind != _ARRAY:
        raise CheckpointError(f"{cursor.path}: metadata {key!r} has unknown type {kind}; the file is damaged")
    item_kind, length = cursor.number("<I"), cursor.number("<Q")
    array = GgufArray(cursor.copy(), item_kind, length)
    if item_kind == _STRING:
        cursor.skip_strings(length)
    elif item_kind in _SCALARS:
        cursor.skip(length * struct.calcsize(_SCALARS[item_kind]))
    else:
        raise CheckpointError(
            f"{cursor.path}: metadata {key!r} is an array of type {item_kind}; arrays of numbers and strings are read"
        )
    return array


def _read_directory(cursor: _Cursor, num_tensors: int, alignment: int) -> list[GgufTensor]:
    entries = [_read_entry(cursor) for _ in range(num_tensors)]
    start = -(-cursor.position // alignment) * alignment
    return [_place(cursor.path, start, *entry) for entry in entries]


def _read_entry(cursor: _Cursor) -> tuple[str, tuple[int, ...], int, int]:
    name, num_dims = cursor.string(), cursor.number("<I")
    if not 1 <= num_dims <= _MAX_DIMS:
        raise CheckpointError(f"{cursor.path}: tensor {name!r} has {num_dims} dims; 1 to {_MAX_DIMS} are possible")
    shape = tuple(cursor.number("<Q") for _ in range(num_dims))[::-1]
    return name, shape, cursor.number("<I"), cursor.number("<Q")


def _place(path: Path, start: int, name: str, shape: tuple[int, ...], kind: int, offset: int) -> GgufTensor:
    block, block_bytes = _block_size(path, name, kind)
    if shape[-1] % block:
        raise CheckpointError(f"{path}: tensor {name!r} has rows of {shape[-1]}; its type {kind} needs a multiple of {block}")
    row_bytes = shape[-1] // block * block_bytes
    return GgufTensor(
        name=name, shape=shape, kind=kind, offset=start + offset, row_bytes=row_bytes, block=block, block_bytes=block_bytes
    )


def _block_size(path: Path, name: str, kind: int) -> tuple[int, int]:
    if kind in (_F32, _F16, _BF16):
        return 1, 4 if kind == _F32 else 2
    if kind in BLOCK_BYTES:
        return BLOCK, BLOCK_BYTES[kind]
    gguf = _gguf_package(path)
    try:
        block, block_bytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType(kind)]
    except (ValueError, KeyError) as exc:
        raise CheckpointError(f"{path}: tensor {name!r} has GGML type {kind}, which this version of gguf does not know") from exc
    return block, block_bytes


def _gguf_package(path: Path) -> ModuleType:
    try:
        import gguf
        import gguf.quants
    except ImportError as exc:
        raise CheckpointError(f"{path} is quantised; reading it needs: pip install 'parallel-runtime[demo]'") from exc
    package: ModuleType = gguf
    return package
