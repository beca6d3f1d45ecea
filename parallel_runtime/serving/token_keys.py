"""Tokens of one row as single integers that sort like their scores, and the noise that draws among them.

A key holds the score in its upper half and the id, reversed, in its lower half: a greater key is a likelier token, and of equal
scores the one with the lower id. So keys of several ranks merge into one order without a tie that ranks could break differently.
The noise of a token depends on (seed, position, id) alone: a rank makes that of its own part of the vocabulary, or of a few ids.

Legend: V vocabulary, or some tokens of it.
"""

from functools import reduce

import torch
from torch import Tensor

__all__ = ["LOWEST_KEY", "gumbel_noise", "key_ids", "key_scores", "make_keys", "mix_seed"]

LOWEST_KEY = -(2**63)
"""Less than the key of every token."""

_MASK = 2**64 - 1
_STEP = 0x9E3779B97F4A7C15
_FIRST_FACTOR = 0xBF58476D1CE4E5B9
_SECOND_FACTOR = 0x94D049BB133111EB
_LOW_HALF = 2**32 - 1


def make_keys(scores_V: Tensor, *, first_id: int) -> Tensor:
    """Make keys of consecutive tokens.

    Args:
        scores_V: Float32, ``(..., V)``.
        first_id: Id of the first of them; the last one is below 2**32.

    Returns:
        ``(..., V)`` int64.
    """
    bits_V = (scores_V + 0.0).view(torch.int32)  # + 0.0 makes one zero of two
    ordered_V = bits_V ^ ((bits_V >> 31) & 0x7FFFFFFF)
    ids_V = torch.arange(first_id, first_id + scores_V.shape[-1], device=scores_V.device)
    return (ordered_V.to(torch.int64) << 32) | (_LOW_HALF - ids_V)


def key_ids(keys_V: Tensor) -> Tensor:
    """The ids in keys.

    Args:
        keys_V: As ``make_keys`` made them.
    """
    return _LOW_HALF - (keys_V & _LOW_HALF)


def key_scores(keys_V: Tensor) -> Tensor:
    """The scores in keys, float32.

    Args:
        keys_V: As ``make_keys`` made them.
    """
    ordered_V = (keys_V >> 32).to(torch.int32)
    return (ordered_V ^ ((ordered_V >> 31) & 0x7FFFFFFF)).view(torch.float32)


def gumbel_noise(seed: int, ids_V: Tensor) -> Tensor:
    """Standard Gumbel noise: the greatest of ``score + noise`` is a draw from the softmax of the scores.

    Args:
        seed: Of the row, 63 bits; see ``mix_seed``.
        ids_V: Token ids, int64.

    Returns:
        Float32 of the same shape. The noise of an id does not depend on the others.

    Source: Gumbel 1954, "Statistical theory of extreme values and some practical applications"; Steele, Lea and Flood 2014 for
        the integers.
    """
    bits_V = _finalise(ids_V * _signed(_STEP) + seed)
    uniform_V = (((bits_V >> 11) & (2**53 - 1)).to(torch.float32) * 2.0**-53).clamp_(2.0**-60, 1 - 2.0**-24)
    return uniform_V.neg_().log1p_().neg_().log_().neg_()


def mix_seed(*parts: int) -> int:
    """Make one seed of several integers, such that neighbouring inputs give unrelated seeds.

    Args:
        parts: Non-negative integers; their order matters.

    Returns:
        A seed of 63 bits.

    Source: Steele, Lea and Flood 2014, "Fast splittable pseudorandom number generators", the finaliser of SplitMix64.
    """
    return reduce(_mix, parts, 0) >> 1


def _mix(state: int, part: int) -> int:
    value = (state + _STEP + part) & _MASK
    value = ((value ^ (value >> 30)) * _FIRST_FACTOR) & _MASK
    value = ((value ^ (value >> 27)) * _SECOND_FACTOR) & _MASK
    return value ^ (value >> 31)


def _finalise(value_V: Tensor) -> Tensor:
    """The same in tensors, whose integers have a sign and wrap around."""
    value_V = (value_V ^ _shifted(value_V, 30)) * _signed(_FIRST_FACTOR)
    value_V = (value_V ^ _shifted(value_V, 27)) * _signed(_SECOND_FACTOR)
    return value_V ^ _shifted(value_V, 31)


def _shifted(value_V: Tensor, count: int) -> Tensor:
    return (value_V >> count) & ((1 << (64 - count)) - 1)


def _signed(value: int) -> int:
    return value - 2**64
