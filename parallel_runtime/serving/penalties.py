"""Changes of logits that depend on what a request holds already.

Legend: R rows, V this rank's part of the vocabulary.
"""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from parallel_runtime.serving.batch import Chunk

__all__ = ["adjust_logits"]


def adjust_logits(logits_RV: Tensor, chunks: Sequence[Chunk], *, own: range) -> Tensor:
    """Apply the penalties of each request, and forbid its stop tokens until it has made enough.

    Repetition comes first, then frequency and presence. A token is changed where it is, so parts of a row need no exchange.

    Args:
        logits_RV: Float32; not changed.
        chunks: What the rows belong to.
        own: Token ids of the columns.

    Returns:
        The logits to choose from; ``logits_RV`` itself where nothing changes.
    """
    touched = [row for row, chunk in enumerate(chunks) if chunk.sampling.is_penalised or _is_short(chunk)]
    if not touched:
        return logits_RV
    adjusted_RV = logits_RV.clone()
    for row in touched:
        if chunks[row].sampling.is_penalised:
            _penalise(adjusted_RV[row], chunks[row], own)
        if _is_short(chunks[row]):
            adjusted_RV[row, _columns(chunks[row].sampling.stop_token_ids, own)] = -torch.inf
    return adjusted_RV


def _penalise(logits_V: Tensor, chunk: Chunk, own: range) -> None:
    """In place."""
    sampling = chunk.sampling
    if sampling.repetition_penalty != 1:
        seen = _columns(set(chunk.history), own)
        values = logits_V[seen]
        logits_V[seen] = torch.where(values < 0, values * sampling.repetition_penalty, values / sampling.repetition_penalty)
    made = _columns(chunk.history[len(chunk.history) - chunk.num_new_tokens :], own)
    columns, counts = torch.tensor(made, dtype=torch.int64).unique(return_counts=True)  # type: ignore[no-untyped-call]  # torch
    penalty = counts * sampling.frequency_penalty + sampling.presence_penalty
    logits_V[columns.to(logits_V.device)] -= penalty.to(logits_V)


def _is_short(chunk: Chunk) -> bool:
    return chunk.num_new_tokens < chunk.sampling.min_new_tokens


def _columns(ids: Iterable[int], own: range) -> list[int]:
    return [token - own.start for token in ids if token in own]
