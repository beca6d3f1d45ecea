"""Objects to bytes and back: plain data, containers, tensors and numpy values through msgpack. Pickle only if asked for.

What arrives has the container kinds that were sent (list, tuple, dict, set, frozenset), the order of dict keys, and tensors that
are detached. One tensor object that occurs twice arrives as one. Big tensors stay out of the bytes and travel on their own.

A body is a head (is it pickled, how long are its parts), what its tensors are, the tree, and the bytes of the small tensors.
"""

import pickle as pickling
import struct
from collections.abc import Callable
from typing import Any, Final, NamedTuple, final

import msgspec
import torch
from torch import Tensor

from parallel_runtime.comm.codec.extensions import Reader, Writer, is_plain, type_name
from parallel_runtime.comm.tensors import as_bytes, dense, dtype_named
from parallel_runtime.errors import SerializationError

__all__ = ["Body", "Encoded", "decode", "decode_typed", "encode", "encode_typed", "open_body"]

_HEAD: Final = struct.Struct("<BIQ")
_ENTRIES: Final = msgspec.msgpack.Decoder(list[tuple[str, list[int], bool, bool]])
_ENCODER: Final = msgspec.msgpack.Encoder()
_KEEP_OUT_BYTES: Final = 64 * 1024
_LARGEST: Final = 2**31
"""A piece of more bytes stays out of msgpack, which has room for lengths below 4 GiB."""


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
    tree: memoryview


def encode(value: object, *, pickle: bool = False, keep_out: bool = True, largest: int = _LARGEST) -> Encoded:
    """Turn ``value`` into bytes, before anything is sent.

    Args:
        value: None, bool, int, float, str, bytes, complex, list, tuple, dict, set, tensors, numpy arrays and scalars, dtypes
            and sizes, nested in any way and of any size.
        pickle: Pickle it instead; the receiver has to allow that.
        keep_out: Leave tensors of 64 KiB and more out of the bytes.
        largest: Bytes of the biggest piece that is given to msgpack.

    Returns:
        The bytes, and the tensors that travel on their own.

    Raises:
        SerializationError: It holds something else, or contains itself.
    """
    if pickle:
        try:
            return _finish([], lambda body: body.extend(pickling.dumps(value, protocol=5)), keep_out, pickled=True)
        except Exception as exc:
            raise SerializationError(f"cannot pickle {type_name(value)}: {type(exc).__name__}: {exc}") from exc
    try:
        try:
            writer = Writer(False, largest)
            encoded = _packed(writer, value if is_plain(value) else writer.walk(value), keep_out)
            if len(encoded.body) <= largest:
                return encoded
        except (OverflowError, ValueError) as exc:
            if isinstance(exc, UnicodeEncodeError | SerializationError):
                raise
        writer = Writer(True, largest)  # an integer or a piece that msgpack cannot hold
        return _packed(writer, writer.walk(value), keep_out)
    except RecursionError:
        raise SerializationError(f"cannot encode {type(value).__name__}: it is nested too deeply, or contains itself") from None
    except UnicodeEncodeError as exc:
        raise SerializationError(f"cannot encode a str that is no valid Unicode: {exc}") from exc


def open_body(body: bytes | bytearray | memoryview, device: torch.device) -> Body:
    """Read what a body says about its tensors, and make room for those that are still to come.

    Args:
        body: As made by ``encode``.
        device: Where tensors go that were not on the sender's CPU.

    Returns:
        The parts.

    Raises:
        SerializationError: The bytes are damaged.
    """
    view = memoryview(body)
    tensors: list[Tensor] = []
    buffers: list[Tensor] = []
    try:
        pickled, entries_bytes, tree_bytes = _HEAD.unpack_from(view)
        start = _HEAD.size + entries_bytes
        end = start + tree_bytes
        if end > len(view) or pickled > 1:
            raise SerializationError(f"a message arrived damaged: {len(view)} bytes that start with {bytes(view[:4])!r}")
        for name, shape, on_cpu, is_inside in _ENTRIES.decode(view[_HEAD.size : start]) if entries_bytes else ():
            tensor = torch.empty(shape, dtype=dtype_named(name), device=torch.device("cpu") if on_cpu else device)
            tensors.append(tensor)
            if not is_inside:
                buffers.append(tensor)
            elif tensor.nbytes:
                piece = bytearray(view[end : end + tensor.nbytes])
                as_bytes(tensor).copy_(torch.frombuffer(piece, dtype=torch.uint8))
                end += tensor.nbytes
    except (msgspec.MsgspecError, ValueError, RuntimeError, struct.error) as exc:
        raise SerializationError(f"a message arrived damaged: {exc}") from exc
    return Body(bool(pickled), tensors, buffers, view[start : start + tree_bytes])


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
            return msgspec.msgpack.decode(body.tree, ext_hook=Reader(body.tensors).hook)
        if not pickle:
            raise SerializationError(
                "the message was pickled by its sender; receive it with pickle=True if you trust all members"
            )
        return pickling.loads(body.tree)
    except SerializationError:
        raise
    except Exception as exc:
        raise SerializationError(f"cannot build the object that arrived: {type(exc).__name__}: {exc}") from exc


def encode_typed(value: object) -> Encoded:
    """Encode a value of a schema: msgspec structs, dataclasses, enums and whatever else msgspec knows, with tensors inside.

    Args:
        value: The value. Tensors in it may have any size; everything else together up to 4 GiB.

    Returns:
        The bytes, and the tensors that travel on their own.

    Raises:
        SerializationError: It holds something that msgspec does not know.
    """
    writer = Writer(False, _LARGEST)
    try:
        tree = msgspec.msgpack.Encoder(enc_hook=writer.walk).encode(value)
    except (TypeError, ValueError, OverflowError, RecursionError) as exc:
        raise SerializationError(f"cannot encode {type_name(value)}: {exc}") from exc
    return _finish(writer.tensors, lambda body: body.extend(tree), keep_out=True)


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
        return msgspec.msgpack.decode(body.tree, type=schema, ext_hook=Reader(body.tensors).hook)
    except msgspec.MsgspecError as exc:
        raise SerializationError(f"what arrived is no {schema}: {exc}") from exc


def _packed(writer: Writer, tree: object, keep_out: bool) -> Encoded:
    return _finish(writer.tensors, lambda body: _ENCODER.encode_into(tree, body, -1), keep_out)


def _finish(tensors: list[Tensor], write_tree: Callable[[bytearray], object], keep_out: bool, pickled: bool = False) -> Encoded:
    """Put the parts together."""
    entries: list[tuple[str, list[int], bool, bool]] = []
    inside: list[Tensor] = []
    buffers: list[Tensor] = []
    for tensor in tensors:
        flat = dense(tensor)
        is_inside = not keep_out or flat.nbytes < _KEEP_OUT_BYTES
        (inside if is_inside else buffers).append(flat)
        entries.append((str(tensor.dtype), list(tensor.shape), tensor.device.type == "cpu", is_inside))
    body = bytearray(_HEAD.size)
    if entries:
        _ENCODER.encode_into(entries, body, _HEAD.size)
    start = len(body)
    write_tree(body)
    _HEAD.pack_into(body, 0, pickled, start - _HEAD.size, len(body) - start)
    for flat in inside:
        if flat.numel():
            body += as_bytes(flat.cpu()).numpy().data
    return Encoded(body, buffers)
