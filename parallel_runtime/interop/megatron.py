"""Megatron-core on the groups of a context."""

from typing import Any

from torch import distributed as dist

from parallel_runtime.config import ParallelConfig
from parallel_runtime.context import ParallelContext
from parallel_runtime.errors import ConfigError

__all__ = ["megatron_process_groups"]


def megatron_process_groups(ctx: ParallelContext) -> Any:
    """A ``ProcessGroupCollection`` of Megatron-core whose groups are those of a context.

    Hand it to arguments called ``pg_collection``, or its members to ``tp_group`` and the like; ``parallel_state`` stays unset.
    ``hcp`` and ``inter_dist_opt`` (several optimizer instances) are not set. The groups close with the context.

    Megatron-core 0.16 computes on one rank, without a word, where torch has no default process group, even though it is handed
    groups and never uses the default one. So there has to be one; any will do, such as one of a single rank in each process:
    ``torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)``.

    Args:
        ctx: Open; for Megatron's own order of ranks, from ``ParallelConfig.from_megatron``.

    Returns:
        The collection.

    Raises:
        ConfigError: megatron-core is not installed, or torch has no default process group.
        ContextStateError: The context is not open.

    Collective: all ranks, once for each context; it opens the groups over several axes.
    """
    try:
        from megatron.core.process_groups_config import ProcessGroupCollection
    except ImportError as error:
        raise ConfigError("Megatron's groups need megatron-core: pip install --no-deps 'megatron-core>=0.16'") from error
    if not dist.is_initialized():
        raise ConfigError(
            "Megatron-core ignores the groups it is handed while torch has no default process group; make any first, such as by "
            'torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)'
        )
    over_both, whole_experts = ctx.open_group("dp", "cp"), ctx.open_group("etp", "ep", "pp")
    groups = {
        "tp": ctx.tp,
        "pp": ctx.pp,
        "cp": ctx.cp,
        "dp": ctx.dp,
        "mp": ctx.open_group("tp", "pp"),
        "tp_cp": ctx.open_group("tp", "cp"),
        "dp_cp": over_both,
        "intra_dp_cp": over_both,
        "tp_dp_cp": ctx.stage,
        "ep": ctx.ep,
        "expt_tp": ctx.etp,
        "tp_ep": ctx.open_group("etp", "ep"),
        "tp_ep_pp": whole_experts,
        "expt_dp": ctx.edp,
        "intra_expt_dp": ctx.edp,
        "intra_dist_opt": ctx.world,
    }
    embeddings = _embedding_groups(ctx)
    return ProcessGroupCollection(**{name: group.process_group for name, group in groups.items()}, **embeddings)


def _embedding_groups(ctx: ParallelContext) -> dict[str, object]:
    """Of the stages with word embeddings, first and last, and of that with position embeddings, the first; ``None`` elsewhere."""
    first, last = ctx.pp.first_rank, ctx.pp.last_rank
    return {"pos_embd": _of_ranks(ctx, (first,), "pos_embd"), "embd": _of_ranks(ctx, tuple(dict.fromkeys((first, last))), "embd")}


def _of_ranks(ctx: ParallelContext, ranks: tuple[int, ...], name: str) -> object:
    """A group of any ranks, if this is one of them: the world of a child, which closes with its parent."""
    if ctx.rank not in ranks:
        return None
    config = ctx.config
    sizes = ParallelConfig(
        dp=len(ranks), backend=config.backend, deadlines=config.deadlines, shm=config.shm, checked=config.checked
    )
    return ctx.derive(sizes, ranks=ranks, name=name).__enter__().world.process_group
