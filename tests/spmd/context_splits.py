"""Runs a tiny model where sequences are cut over ranks, through the paged cache, and gathers the logits of every token."""

from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor

from parallel_runtime.config import ModelShape, ParallelConfig
from parallel_runtime.context import ParallelContext
from parallel_runtime.errors import ConfigError
from parallel_runtime.layers import ExpertGroups
from parallel_runtime.models import load_model, open_checkpoint
from parallel_runtime.serving import Batch, SamplingParams
from parallel_runtime.serving.batch import Chunk
from parallel_runtime.serving.context_groups import ContextGroups
from parallel_runtime.serving.runner import ModelRunner
from parallel_runtime.terms import DenseAxis
from parallel_runtime.topology.shards import split_layers
from tests.spmd.model_splits import PROMPTS

__all__ = ["context_logits", "context_splits", "prompts_of"]

PAGE = 3
_STEPS = 3


def context_splits(world_size: int, *, shape: ModelShape, orders: Sequence[tuple[DenseAxis, ...]]) -> list[ParallelConfig]:
    """Every layout of so many ranks with cp or dcp above 1 that a model of this shape fits, up to two stages."""
    found: dict[ParallelConfig, None] = {}
    for tp, cp, dp, pp in _factors(world_size):
        widths = (1, *(cp * width for width in range(1, tp + 1)))
        for ep in range(1, tp * cp * dp + 1) if shape.num_experts else (1,):
            for etp in range(1, tp * cp * dp // ep + 1) if shape.num_experts else (None,):
                for dcp, order in ((dcp, order) for dcp in widths for order in orders):
                    try:
                        parallel = ParallelConfig(tp=tp, cp=cp, dp=dp, pp=pp, ep=ep, etp=etp, dcp=dcp, order=order)
                        parallel.check_model(shape)
                    except ConfigError:
                        continue
                    if max(cp, dcp) > 1:
                        found[parallel] = None
    return list(found)


def _factors(world_size: int) -> Iterator[tuple[int, int, int, int]]:
    sizes = range(1, world_size + 1)
    for pp in (1, 2):
        for tp in sizes:
            for cp in sizes:
                if world_size % (tp * cp * pp) == 0:
                    yield tp, cp, world_size // (tp * cp * pp), pp


def prompts_of(dp_rank: int) -> tuple[int, ...]:
    """Which of ``PROMPTS`` a data-parallel rank computes, those of no tokens left out."""
    return tuple(prompt for prompt in (dp_rank, dp_rank + 2) if prompt < len(PROMPTS) and PROMPTS[prompt])


@torch.inference_mode()
def context_logits(ctx: ParallelContext, folder: Path, dtype: torch.dtype) -> dict[tuple[int, int], Tensor]:
    """The logits that this rank computed, by prompt and position: a half of each prompt, the rest but one token, the last one."""
    with open_checkpoint(folder) as checkpoint:
        config = checkpoint.config
        layers = split_layers(config.num_layers, num_stages=ctx.pp.world_size)[ctx.pp.rank_in_group]
        groups = ExpertGroups(tp=ctx.tp, ep=ctx.ep, etp=ctx.etp)
        model = load_model(checkpoint, tp=ctx.tp, experts=groups, layers=layers, dtype=dtype)
    context = ContextGroups.of(ctx, config)
    runner = ModelRunner(model, page_size=PAGE, context=context)
    runner.open_cache(12)
    found: dict[tuple[int, int], Tensor] = {}
    for step in range(_STEPS):
        batch = Batch(chunks=tuple(_chunks(prompts_of(ctx.coordinate.dp), step)))
        hidden = runner.forward(batch, None if model.is_first_stage else ctx.pp.recv(src=ctx.pp.rank_in_group - 1))
        if not model.is_last_stage:
            ctx.pp.send(hidden, dst=ctx.pp.rank_in_group + 1)
            continue
        own = context.share(batch)[ctx.cp.rank_in_group]
        places = [(int(chunk.request_id), at) for chunk in own.chunks for at in range(chunk.start, chunk.length)]
        found |= dict(zip(places, model.logits(hidden), strict=True))
    return found


def _chunks(prompts: Sequence[int], step: int) -> Iterator[Chunk]:
    for place, prompt in enumerate(prompts):
        tokens = PROMPTS[prompt]
        cuts = (0, len(tokens) // 2, max(len(tokens) // 2, len(tokens) - 1), len(tokens))
        start, stop = cuts[step : step + 2]
        if start < stop:
            yield Chunk(
                request_id=str(prompt),
                arrival=prompt,
                start=start,
                token_ids=tokens[start:stop],
                blocks=tuple(range(11 - place, -1, -len(prompts)))[: -(-stop // PAGE)],
                is_sampled=stop == len(tokens),
                sampling=SamplingParams(),
            )
