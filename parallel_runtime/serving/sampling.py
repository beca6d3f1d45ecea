"""Choosing tokens from logits, from random streams that depend on nothing but integers.

The noise of a token is drawn from (seed of the request, position of the token), so that the same request gives the same tokens on
every layout, alone or in a batch, and after it was put back and computed again; torch's global random state is not touched.

Legend: V vocabulary.
"""

from functools import reduce

import torch
from torch import Tensor

from parallel_runtime.serving.messages import SamplingParams

__all__ = ["mix_seed", "sample_token"]

_MASK = 2**64 - 1
_MAX_TEMPERATURE = torch.finfo(torch.float32).max


def mix_seed(*parts: int) -> int:
    """Make one seed of several integers, such that neighbouring inputs give unrelated seeds.

    Args:
        parts: Non-negative integers; their order matters.

    Returns:
        A seed of 63 bits.

    Source: Steele, Lea and Flood 2014, "Fast splittable pseudorandom number generators", the finaliser of SplitMix64.
    """
    return reduce(_mix, parts, 0) >> 1


def sample_token(logits_V: Tensor, sampling: SamplingParams, *, seed: int, position: int) -> int:
    """Draw one token.

    Args:
        logits_V: Logits of the whole vocabulary.
        sampling: Temperature, ``top_k`` and ``top_p``; not greedy.
        seed: Seed of the request's stream.
        position: Position the token will have in its sequence.

    Returns:
        The token id.
    """
    logits_V = logits_V.detach().to("cpu", torch.float32)
    scores_V = (logits_V - logits_V.max()) / min(sampling.temperature, _MAX_TEMPERATURE)  # the likeliest one stays at 0
    if sampling.top_k is not None and sampling.top_k < scores_V.numel():
        kept = scores_V.topk(sampling.top_k).indices
        scores_V = torch.full_like(scores_V, -torch.inf).index_copy_(0, kept, scores_V[kept])
    probabilities_V = scores_V.softmax(-1)
    if sampling.top_p < 1:
        sorted_V, order_V = probabilities_V.sort(descending=True, stable=True)
        is_beyond = sorted_V.cumsum(-1) - sorted_V >= sampling.top_p
        is_beyond[0] = False  # where float32 has no number as small as top_p
        probabilities_V[order_V[is_beyond]] = 0
    generator = torch.Generator().manual_seed(mix_seed(seed, position))
    noise_V = torch.empty_like(probabilities_V).exponential_(generator=generator)
    return int((probabilities_V / noise_V).argmax())


def _mix(state: int, part: int) -> int:
    value = (state + 0x9E3779B97F4A7C15 + part) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)
