"""The simple quantised forms of GGUF, decoded with few passes over memory: blocks of 32 weights, each with a scale.

They decode to the bits that the ``gguf`` package gives, in a fraction of its time. Other forms are left to that package.

Legend: N blocks.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

import torch
from torch import Tensor

__all__ = ["BLOCK", "BLOCK_BYTES", "decode_blocks"]

BLOCK: Final = 32
"""Weights in a block of any of these forms."""

_Q4_0, _Q4_1, _Q8_0 = 2, 3, 8

BLOCK_BYTES: Final[Mapping[int, int]] = MappingProxyType({_Q4_0: 18, _Q4_1: 20, _Q8_0: 34})
"""Bytes of a block of each form that is decoded here, by its GGML type number."""

_LOW_HALVES: Final = 0x0F0F0F0F0F0F0F0F

_BLOCKS_AT_ONCE: Final = 4096
"""Half a megabyte of weights, which stays in the cache from one pass to the next."""


def decode_blocks(raw: Tensor, kind: int) -> Tensor:
    """Decode whole blocks.

    Args:
        raw: ``(rows, bytes)``, uint8, contiguous, with whole blocks in each row.
        kind: GGML type number, one of ``BLOCK_BYTES``.

    Returns:
        New float32 tensor ``(rows, weights)``.
    """
    size = BLOCK_BYTES[kind]
    blocks = raw.view(-1, size)
    out = torch.empty(len(blocks), BLOCK)
    decode = _eights if kind == _Q8_0 else _fours
    for blocks_N, out_N in zip(torch.split(blocks, _BLOCKS_AT_ONCE), torch.split(out, _BLOCKS_AT_ONCE), strict=True):
        decode(blocks_N, out_N, kind)
    return out.view(raw.shape[0], raw.shape[1] // size * BLOCK)


def _eights(blocks_N: Tensor, out_N: Tensor, kind: int) -> None:
    """Whole numbers of 8 bits, times the scale."""
    out_N.copy_(blocks_N[:, 2:].contiguous().view(torch.int8))
    out_N.mul_(_halves(blocks_N, 0))


def _fours(blocks_N: Tensor, out_N: Tensor, kind: int) -> None:
    """Whole numbers of 4 bits: the low halves of 16 bytes come first, then the high ones. Times the scale, plus an offset."""
    packed_N = blocks_N[:, 2 if kind == _Q4_0 else 4 :].contiguous().view(torch.int64)  # eight bytes at a time
    out_N.copy_(torch.cat((packed_N & _LOW_HALVES, (packed_N >> 4) & _LOW_HALVES), dim=1).view(torch.uint8))
    if kind == _Q4_0:
        out_N.sub_(8.0)
    out_N.mul_(_halves(blocks_N, 0))
    if kind == _Q4_1:
        out_N.add_(_halves(blocks_N, 2))


def _halves(blocks_N: Tensor, start: int) -> Tensor:
    """The float16 at a place of each block, as float32 ``(N, 1)``."""
    return blocks_N[:, start : start + 2].contiguous().view(torch.float16).float()
