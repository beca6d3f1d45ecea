"""Runs a tiny model on any split and returns what ``transformers`` can be compared with."""

from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor

from parallel_runtime.config import ParallelConfig
from parallel_runtime.context import ParallelContext
from parallel_runtime.errors import ConfigError
from parallel_runtime.layers import ExpertGroups
from parallel_runtime.layers.attention import Attention
from parallel_runtime.models import CausalLM, SlotKvCache, load_model, open_checkpoint
from parallel_runtime.terms import DenseAxis
from parallel_runtime.topology.shards import split_layers

__all__ = ["PROMPTS", "logits_on_rank", "reference_logits", "splits"]

PROMPTS: tuple[tuple[int, ...], ...] = (
    (1, 50, 100, 7, 51, 99, 3, 3, 0, 64, 20),
    (),
    (9, 8, 7),
    (42,),
    (5, 17, 99, 2, 2, 2, 81),
    (),
    (100, 4),
    (30, 31, 32, 33, 34),
)
"""What each data-parallel rank computes; some have nothing."""


def splits(
    world_size: int, *, num_experts: int, max_pp: int = 2, orders: Sequence[tuple[DenseAxis, ...]]
) -> list[ParallelConfig]:
    """Every layout of so many ranks over tp, pp, dp, ep and etp that a model with so many experts fits."""
    found: dict[ParallelConfig, None] = {}
    for tp, pp, dp in _factors(world_size):
        for ep in range(1, tp * dp + 1):
            for etp in range(1, tp * dp // ep + 1):
                if pp > max_pp or (num_experts or 1) % ep or (not num_experts and etp != tp):
                    continue
                for order in orders:
                    try:
                        found[ParallelConfig(tp=tp, pp=pp, dp=dp, ep=ep, etp=etp, order=order)] = None
                    except ConfigError:
                        continue
    return list(found)


def _factors(world_size: int) -> Iterator[tuple[int, int, int]]:
    for tp in range(1, world_size + 1):
        for pp in range(1, world_size // tp + 1):
            if world_size % (tp * pp) == 0:
                yield tp, pp, world_size // (tp * pp)


@torch.inference_mode()
def logits_on_rank(ctx: ParallelContext, folder: Path, dtype: torch.dtype) -> Tensor | None:
    """The logits of this data-parallel rank's prompt: all but its last token in one step, the last one in another."""
    with open_checkpoint(folder) as checkpoint:
        layers = split_layers(checkpoint.config.num_layers, num_stages=ctx.pp.world_size)[ctx.pp.rank_in_group]
        groups = ExpertGroups(tp=ctx.tp, ep=ctx.ep, etp=ctx.etp)
        model = load_model(checkpoint, tp=ctx.tp, experts=groups, layers=layers, dtype=dtype)
    prompt = torch.tensor(PROMPTS[ctx.coordinate.dp], dtype=torch.int64)
    cache = SlotKvCache(
        num_layers=len(layers),
        num_kv_heads=model.num_kv_heads,
        head_dim=model.head_dim,
        num_slots=1,
        max_length=16,
        dtype=dtype,
    )
    rows = []
    for part in (slice(0, len(prompt) - 1), slice(len(prompt) - 1, len(prompt))) if len(prompt) else (slice(0, 0),) * 2:
        count = len(prompt[part])
        step = cache.step([0], [count]) if count else cache.step([], [])
        hidden = _stage(ctx, model, prompt[part], torch.arange(len(prompt))[part], step)
        rows.append(model.logits(hidden) if model.is_last_stage else hidden)
    return torch.cat(rows) if model.is_last_stage else None


def _stage(ctx: ParallelContext, model: CausalLM, ids: Tensor, positions: Tensor, step: Attention) -> Tensor:
    pp = ctx.pp
    inputs = ids if model.is_first_stage else pp.recv(src=pp.rank_in_group - 1)
    hidden: Tensor = model(inputs, positions, step)
    if not model.is_last_stage:
        pp.send(hidden, dst=pp.rank_in_group + 1)
    return hidden


@torch.inference_mode()
def reference_logits(folder: Path, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """What ``transformers`` reads out of the same directory and says about every prompt."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    said: list[Tensor] = []
    for prompt in PROMPTS:
        said.append(model(torch.tensor([prompt])).logits[0] if prompt else torch.empty(0, model.config.vocab_size, dtype=dtype))
    return said
