"""The fixed first frame of every message: small bodies ride in it, so that most messages cost one round."""

import struct
from enum import IntEnum
from typing import Final, NamedTuple, final

import torch
from torch import Tensor

from parallel_runtime.errors import SerializationError

__all__ = [
    "FRAME_BYTES",
    "Content",
    "Frame",
    "Kind",
    "blank_frame",
    "bytes_of",
    "has_arrived",
    "odd_content",
    "pack_frame",
    "raw_tensor",
    "read_frame",
]

FRAME_BYTES: Final = 1024
_HEAD: Final = struct.Struct("<BB6xQQ8s")
_INLINE_BYTES: Final = FRAME_BYTES - _HEAD.size - 1


class Kind(IntEnum):
    """What a frame announces."""

    VALUE = 1
    ERROR = 2


class Content(IntEnum):
    """What the sender called a message; a receiver takes only what it asked for."""

    BYTES = 0
    TENSOR = 1
    OBJECT = 2
    TENSOR_DICT = 3
    CHANNEL = 4
    SHAPE = 5

    def __str__(self) -> str:
        words = ("bytes", "a tensor", "an object", "a tensor dict", "a message of a channel", "the shape of a scatter")
        return words[self]


def odd_content(sent: Content, wanted: Content) -> str:
    """What is wrong where one side sent ``sent`` and the other one receives ``wanted``; nothing where they are the same."""
    return "" if sent is wanted else f"the sender sent {sent}, the receiver takes {wanted}"


@final
class Frame(NamedTuple):
    """A frame that arrived.

    Attributes:
        kind: A value, or a failure of the sender with its text as body.
        content: What the sender called it.
        length: Bytes of the body.
        sequence: Number of the message in its stream.
        digest: Of the schema; zeros where there is none.
        inline: The body where it fitted, else ``None``: it follows on its own.
    """

    kind: Kind
    content: Content
    length: int
    sequence: int
    digest: bytes
    inline: bytearray | None


def blank_frame() -> Tensor:
    """Room to receive a frame."""
    return torch.zeros(FRAME_BYTES, dtype=torch.uint8)


def pack_frame(
    body: bytearray,
    *,
    kind: Kind = Kind.VALUE,
    content: Content = Content.BYTES,
    sequence: int = 0,
    digest: bytes = bytes(8),
) -> tuple[Tensor, bool]:
    """Make a frame.

    Args:
        body: The message; the text of an error is cut to fit.
        kind: A value or an error.
        content: What it is.
        sequence: Number in its stream.
        digest: Eight bytes.

    Returns:
        The frame, uint8 ``(FRAME_BYTES,)``, and whether ``body`` has to follow on its own.
    """
    if kind is Kind.ERROR:
        body = body[:_INLINE_BYTES]
    data = bytearray(FRAME_BYTES)
    _HEAD.pack_into(data, 0, kind, content, len(body), sequence, digest)
    follows = len(body) > _INLINE_BYTES
    if not follows:
        data[_HEAD.size : _HEAD.size + len(body)] = body
    data[-1] = 1
    return raw_tensor(data), follows


def read_frame(tensor: Tensor) -> Frame:
    """Read a frame that arrived.

    Raises:
        SerializationError: It is no frame.
    """
    data = bytes_of(tensor)
    kind, content, length, sequence, digest = _HEAD.unpack_from(data)
    if kind not in tuple(Kind) or content not in tuple(Content):
        raise SerializationError(f"a message arrived damaged: its first bytes are {kind} and {content}")
    inline = data[_HEAD.size : _HEAD.size + length] if length <= _INLINE_BYTES else None
    return Frame(Kind(kind), Content(content), length, sequence, digest, inline)


def has_arrived(tensor: Tensor) -> bool:
    """Whether a blank frame that is being received is complete; its last byte is written last and is never zero."""
    return bool(tensor[-1])


def raw_tensor(data: bytearray) -> Tensor:
    """``data`` as uint8, sharing its memory."""
    return torch.frombuffer(data, dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)


def bytes_of(tensor: Tensor) -> bytearray:
    """A copy of a uint8 tensor's bytes."""
    return bytearray(tensor.numpy().data)
