"""Tokens of one row as single integers that sort like their scores, and the noise that draws among them.

A key holds the score in its upper half and the id, reversed, in its lower half: a greater key is a likelier token, and of equal
scores the one with the lower id. So keys of several ranks merge into one order without a tie that ranks could break differently.
The noise of a token depends on (seed, position, id) alone: a rank makes that of its own part of the vocabulary, or of a few ids.

Legend: R rows, V vocabulary, or some tokens of it, C candidates.
"""

from functools import reduce

import torch
from torch import Tensor

__all__ = ["LOWEST_KEY", "gumbel_noise", "key_ids", "key_scores", "make_keys", "mix_seed", "top_keys"]

LOWEST_KEY = -(2**63)
"""Less than the key of every token."""

_MASK = 2**64 - 1
_STEP = 0x9E3779B97F4A7C15
_FIRST_FACTOR = 0xBF58476D1CE4E5B9
_SECOND_FACTOR = 0x94D049BB133111EB
_LOW_HALF = 2**32 - 1


def make_keys(scores_V: Tensor, ids_V: Tensor) -> Tensor:
    """Make keys.

    Args:
        scores_V: Float32.
        ids_V: Int64, of the same shape, below 2**32.

    Returns:
        Int64 of the same shape.
    """
    bits_V = (scores_V + 0.0).view(torch.int32)  # + 0.0 makes one zero of two
    ordered_V = bits_V ^ ((bits_V >> 31) & 0x7FFFFFFF)
    return (ordered_V.to(torch.int64) << 32) | (_LOW_HALF - ids_V)


def top_keys(scores_RV: Tensor, *, count: int, first_id: int) -> Tensor:
    """The keys of the likeliest consecutive tokens of each row.

    Args:
        scores_RV: Float32.
        count: How many.
        first_id: Id of the first column.

    Returns:
        ``(R, count)``, greatest first; filled up with ``LOWEST_KEY`` where there are fewer tokens.
    """
    width = scores_RV.shape[-1]
    taken = min(count, width)
    scores_RC, columns_RC = scores_RV.topk(min(taken + 1, width))
    if 0 < taken < width:
        for row in (scores_RC[:, taken - 1] == scores_RC[:, taken]).nonzero()[:, 0].tolist():
            columns_RC[row, :taken] = _lowest_of_equals(scores_RV[row], scores_RC[row], columns_RC[row], taken)
    keys_RC = make_keys(scores_RC[:, :taken], columns_RC[:, :taken] + first_id).sort(descending=True).values
    return torch.nn.functional.pad(keys_RC, (0, count - taken), value=LOWEST_KEY)


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


def _lowest_of_equals(scores_V: Tensor, top_C: Tensor, columns_C: Tensor, count: int) -> Tensor:
    """The columns of the ``count`` greatest, where ``topk`` has picked any of those that equal the last one."""
    last = top_C[count - 1]
    above = columns_C[top_C > last]
    return torch.cat((above, (scores_V == last).nonzero()[: count - len(above), 0]))


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
