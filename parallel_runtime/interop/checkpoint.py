"""``torch.distributed.checkpoint`` over a context: saved on one layout, loaded on any other, without a default process group.

Torch's own ``save`` and ``load`` fall back to a single process where there is no default group. These do the same steps with the
same planners, writers and files, over the context's world.
"""

from collections.abc import MutableMapping
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter

from parallel_runtime.context import ParallelContext

__all__ = ["load_checkpoint", "save_checkpoint"]


def save_checkpoint(ctx: ParallelContext, state: MutableMapping[str, Any], folder: str | Path) -> None:
    """Save a state dict; each rank writes its own shards, once.

    Args:
        ctx: Open.
        state: As for ``torch.distributed.checkpoint.save``: ``DTensor`` values on a ``device_mesh`` are saved shard by shard,
            other tensors and objects are taken to be equal on every rank.
        folder: On a file system that all ranks share.

    Raises:
        PeerFailedError: A rank failed; raised on all of them.

    Collective: all ranks of the world.
    """
    world, leads = ctx.world, ctx.world.is_first_rank
    planner, writer = DefaultSavePlanner(), FileSystemWriter(folder)
    with ctx.guard():
        planner.set_up_planner(dict(state), writer.storage_meta(), leads)
        writer.set_up_storage_writer(leads, rank=world.rank_in_group, use_collectives=True)
        local = writer.prepare_local_plan(planner.create_local_plan())
    plans = world.all_gather_object(local, pickle=True)
    metadata = None
    if leads:
        plans, metadata = planner.create_global_plan(plans)
        plans = writer.prepare_global_plan(plans)
    plan = world.broadcast_object(plans, pickle=True)[world.rank_in_group]
    with ctx.guard():
        written = writer.write_data(planner.finish_plan(plan), planner)
        written.wait()
    results = world.all_gather_object(written.value(), pickle=True)
    with ctx.guard():
        if metadata is not None:
            writer.finish(metadata, results)


def load_checkpoint(ctx: ParallelContext, state: MutableMapping[str, Any], folder: str | Path) -> None:
    """Fill a state dict from a checkpoint of any layout; each rank reads what its shards need.

    Args:
        ctx: Open.
        state: Tensors are written in place, other values are replaced.
        folder: Written by ``save_checkpoint`` or ``torch.distributed.checkpoint.save``.

    Raises:
        PeerFailedError: A rank failed; raised on all of them.

    Collective: all ranks of the world; they meet at its end.
    """
    planner, reader = DefaultLoadPlanner(), FileSystemReader(folder)
    with ctx.guard():
        metadata = reader.read_metadata()
        planner.set_up_planner(state, metadata, ctx.world.is_first_rank)  # type: ignore[arg-type]  # torch wants a dict, uses a mapping
        reader.set_up_storage_reader(metadata, ctx.world.is_first_rank)
        (plan,) = reader.prepare_global_plan([reader.prepare_local_plan(planner.create_local_plan())])
        reader.read_data(planner.finish_plan(plan), planner).wait()
