"""Choosing tokens where every rank of a group holds the logits of a part of the vocabulary. Whole rows of logits seldom travel.

- The most likely token, and a draw from the whole softmax (the greatest of score + noise): one key per rank and row.
- A draw behind ``top_k``, ``top_p`` or ``min_p``: every rank sends its likeliest tokens and the logarithm of its share of the
  softmax. Merged, they are the likeliest of all down to the greatest of the keys that ranks sent last. Where what is kept ends
  above it the choice is exact, and every rank makes it alone from equal numbers. Where it does not, that row is gathered.
- Log-probabilities: the chosen logit, the logarithm of each rank's sum and its likeliest tokens, all in one message.

The noise of a token depends on (seed of the request, position, id), so that the same request gives the same tokens on every
layout, alone or in a batch, and after it was put back and computed again; torch's global random state is not touched.

Legend: R rows, V vocabulary (in ``_RV`` this rank's part), C candidates of a rank, G ranks of the group.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import log
from typing import final

import torch
from torch import Tensor

from parallel_runtime.comm import GroupCoordinator
from parallel_runtime.serving.batch import Chunk
from parallel_runtime.serving.messages import Sampled, TokenLogprobs
from parallel_runtime.serving.penalties import adjust_logits
from parallel_runtime.serving.sampling_params import SamplingParams
from parallel_runtime.serving.token_keys import LOWEST_KEY, gumbel_noise, key_ids, key_scores, make_keys, mix_seed, top_keys

__all__ = ["TokenSampler"]

_MIN_CANDIDATES = 128
_MAX_CANDIDATES = 1024
_MAX_TEMPERATURE = torch.finfo(torch.float32).max


@final
class TokenSampler:
    """Chooses the next tokens of a batch on the ranks of a group, all of which make the same calls.

    Args:
        tp: Group the vocabulary is split over. Borrowed.
        shards: Token ids of each member, in order.
        base_seed: For requests without a seed of their own; equal on all members.
    """

    def __init__(self, tp: GroupCoordinator, shards: Sequence[range], *, base_seed: int) -> None:
        self._tp = tp
        self._sizes = [len(shard) for shard in shards]
        self._own = shards[tp.rank_in_group]
        self._base_seed = base_seed

    def choose(self, chunks: Sequence[Chunk], logits_RV: Tensor) -> Sampled:
        """Choose a token for each row.

        Args:
            chunks: What the rows belong to; equal on every member.
            logits_RV: This member's part of each row.

        Returns:
            The tokens, and the log-probabilities that are wanted; equal on every member.

        Collective: up to three all_gathers of keys (draws from candidates; other choices; log-probabilities) and one all_gatherv
            of the rows whose candidates do not suffice, each only where a row needs it; all members, same order.
        """
        logits_RV = logits_RV.detach().to(torch.float32)
        scores_RV = adjust_logits(logits_RV, chunks, own=self._own)
        tokens = [0] * len(chunks)
        filtered = [row for row, chunk in enumerate(chunks) if _is_filtered(chunk.sampling)]
        others = [row for row, chunk in enumerate(chunks) if not _is_filtered(chunk.sampling)]
        for rows, choose in ((filtered, self._choose_filtered), (others, self._choose_highest)):
            if rows:
                for row, token in zip(rows, choose([chunks[row] for row in rows], scores_RV[rows]), strict=True):
                    tokens[row] = token
        return Sampled(token_ids=tuple(tokens), logprobs=self._logprobs(chunks, logits_RV, tokens))

    def _choose_highest(self, chunks: Sequence[Chunk], scores_RV: Tensor) -> list[int]:
        """Greedy rows, and rows that draw from the whole vocabulary."""
        own_ids_V = torch.arange(self._own.start, self._own.stop, device=scores_RV.device)
        winners = []
        for chunk, scores_V in zip(chunks, scores_RV, strict=True):
            if not chunk.sampling.is_greedy:
                scores_V = _tempered(scores_V, chunk.sampling) + gumbel_noise(self._seed(chunk), own_ids_V)
            score, index = scores_V.max(-1)
            winners.append(make_keys(score.reshape(1), index + self._own.start))
        return [int(token) for token in key_ids(self._gather(torch.stack(winners)).amax(0)[:, 0])]

    def _choose_filtered(self, chunks: Sequence[Chunk], scores_RV: Tensor) -> list[int]:
        """Rows that draw from the likeliest tokens only."""
        scores_RV = torch.stack([_tempered(row, chunk.sampling) for row, chunk in zip(scores_RV, chunks, strict=True)])
        wanted = max(_MIN_CANDIDATES, *(chunk.sampling.top_k or 0 for chunk in chunks))
        lists = self._likeliest(scores_RV, count=min(wanted, _MAX_CANDIDATES))
        kept = [candidates.kept(chunk.sampling) for candidates, chunk in zip(lists, chunks, strict=True)]
        if missing := [row for row, keys in enumerate(kept) if keys is None]:
            full_RV = self._tp.all_gatherv(scores_RV[missing], self._sizes, dim=-1)
            for row, scores_V in zip(missing, full_RV, strict=True):
                kept[row] = _whole(scores_V).kept(chunks[row].sampling)
        return [self._draw(chunk, keys) for chunk, keys in zip(chunks, kept, strict=True) if keys is not None]

    def _likeliest(self, scores_RV: Tensor, *, count: int) -> "list[_Candidates]":
        """The likeliest tokens of each row, at least those of which every member can be sure."""
        keys_RC, log_sum_R1 = top_keys(scores_RV, count=count, first_id=self._own.start), _log_sums(scores_RV)
        all_GRC = self._gather(torch.cat((keys_RC, log_sum_R1.view(torch.int64)), dim=-1))
        keys_GRC, log_sum_GR = all_GRC[..., :-1], all_GRC[..., -1].contiguous().view(torch.float64)
        is_cut_G = torch.tensor([size > count for size in self._sizes], device=keys_GRC.device)
        bound_R = keys_GRC[..., -1].where(is_cut_G[:, None], LOWEST_KEY + 1).amax(0)
        merged_RK = keys_GRC.transpose(0, 1).flatten(1).sort(descending=True).values
        lengths = (merged_RK >= bound_R[:, None]).sum(-1).tolist()
        log_sums, is_all = log_sum_GR.logsumexp(0).tolist(), not any(size > count for size in self._sizes)
        return [
            _Candidates(keys=keys_K[:length], log_sum=log_sum, is_all=is_all)
            for keys_K, length, log_sum in zip(merged_RK, lengths, log_sums, strict=True)
        ]

    def _draw(self, chunk: Chunk, keys_C: Tensor) -> int:
        ids_C = key_ids(keys_C)
        noise_C = gumbel_noise(self._seed(chunk), ids_C)
        return int(ids_C[(key_scores(keys_C) + noise_C).argmax()])

    def _logprobs(self, chunks: Sequence[Chunk], logits_RV: Tensor, tokens: Sequence[int]) -> dict[str, TokenLogprobs]:
        counts = {row: chunk.sampling.logprobs for row, chunk in enumerate(chunks) if chunk.sampling.logprobs is not None}
        if not counts:
            return {}
        rows = list(counts)
        logits_RV = logits_RV[rows]
        most = max(counts.values())
        chosen_R1 = torch.tensor([[tokens[row]] for row in rows], device=logits_RV.device) - self._own.start
        is_own_R1 = (chosen_R1 >= 0) & (chosen_R1 < len(self._own))
        logit_R1 = logits_RV.gather(-1, chosen_R1.where(is_own_R1, 0)).where(is_own_R1, -torch.inf).double()
        sums_R2 = torch.cat((logit_R1, _log_sums(logits_RV)), dim=-1)
        keys_RC = top_keys(logits_RV, count=most, first_id=self._own.start)
        all_GRC = self._gather(torch.cat((keys_RC, sums_R2.view(torch.int64)), dim=-1))
        sums_GR2 = all_GRC[..., most:].contiguous().view(torch.float64)
        log_sum_R = sums_GR2[..., 1].logsumexp(0)
        logprobs = (sums_GR2[..., 0].amax(0) - log_sum_R).tolist()
        keys_RK = all_GRC[..., :most].transpose(0, 1).flatten(1).sort(descending=True).values[:, : min(most, sum(self._sizes))]
        ids, values = key_ids(keys_RK).tolist(), (key_scores(keys_RK).double() - log_sum_R[:, None]).tolist()
        return {
            chunks[row].request_id: TokenLogprobs(logprob, tuple(zip(ids[index], values[index], strict=True))[: counts[row]])
            for index, (row, logprob) in enumerate(zip(rows, logprobs, strict=True))
        }

    def _gather(self, mine: Tensor) -> Tensor:
        return self._tp.all_gather(mine.unsqueeze(0), dim=0)

    def _seed(self, chunk: Chunk) -> int:
        seed = chunk.sampling.seed
        return mix_seed(mix_seed(self._base_seed, chunk.arrival) if seed is None else seed, chunk.length)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class _Candidates:
    """The likeliest tokens of one row, in order, without a gap.

    Attributes:
        keys: Of these tokens.
        log_sum: Logarithm of the sum of ``exp(score)`` over the whole vocabulary.
        is_all: Whether they are the whole vocabulary.
    """

    keys: Tensor
    log_sum: float
    is_all: bool

    def kept(self, sampling: SamplingParams) -> Tensor | None:
        """Those to draw from; ``None`` where there may be more of them than are known here."""
        keys, is_all, log_sum = self.keys, self.is_all, self.log_sum
        if sampling.top_k is not None and (sampling.top_k <= len(keys) or is_all):
            keys, is_all = keys[: sampling.top_k], True
            log_sum = float(key_scores(keys).double().logsumexp(-1))
        scores_C = key_scores(keys).double()
        is_kept_C = scores_C > -torch.inf
        if sampling.top_p < 1:
            probabilities_C = (scores_C - log_sum).exp()
            is_kept_C &= probabilities_C.cumsum(-1) - probabilities_C < sampling.top_p
        if sampling.min_p > 0:
            is_kept_C &= scores_C >= scores_C[:1] + log(sampling.min_p)
        num_kept = max(1, int(is_kept_C.sum()))
        return keys[:num_kept] if is_all or num_kept < len(keys) else None


def _is_filtered(sampling: SamplingParams) -> bool:
    return not sampling.is_greedy and (sampling.top_k is not None or sampling.top_p < 1 or sampling.min_p > 0)


def _tempered(scores_V: Tensor, sampling: SamplingParams) -> Tensor:
    return scores_V / min(sampling.temperature, _MAX_TEMPERATURE)


def _log_sums(scores_RV: Tensor) -> Tensor:
    """``(R, 1)`` float64: the logarithm of the sum of ``exp(score)`` of each row."""
    highest_R1 = scores_RV.amax(-1, keepdim=True).clamp_min_(torch.finfo(torch.float32).min)  # a part may be all impossible
    return (scores_RV - highest_R1).exp_().sum(-1, keepdim=True, dtype=torch.float64).log_() + highest_R1


def _whole(scores_V: Tensor) -> _Candidates:
    ordered_V, ids_V = scores_V.sort(descending=True, stable=True)
    return _Candidates(keys=make_keys(ordered_V, ids_V), log_sum=float(_log_sums(scores_V.unsqueeze(0))), is_all=True)
