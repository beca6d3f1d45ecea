"""B064: after a hundred contexts with children, by exception or not, everything is where it was, store keys included."""

import gc
import os
from typing import Any

import pytest
import torch
import torch.distributed as dist

from parallel_runtime.config import ParallelConfig
from parallel_runtime.context import ParallelContext
from parallel_runtime.launch import launch, run_threads

CONFIG = ParallelConfig(tp=2)


def tasks() -> frozenset[str]:
    """Threads of this process, by their number in the system."""
    return frozenset(os.listdir("/proc/self/task"))


def usage(ctx: ParallelContext, earlier: frozenset[str]) -> dict[str, Any]:
    """What there is, once every rank has closed what it had; ``earlier`` threads may end at any time and do not count."""
    ctx.world.barrier()
    gc.collect()
    assert ctx.store is not None
    seen = {
        "descriptors": len(os.listdir("/proc/self/fd")),
        "threads": len(tasks() - earlier),
        "keys": sorted(ctx.store.list_keys()),
        "groups of torch": len(dist.distributed_c10d._world.pg_map),
    }
    ctx.world.barrier()
    return seen


def once(ctx: ParallelContext, backend: str, *, fails: bool) -> None:
    config = ParallelConfig.model_validate({"tp": 2, "backend": backend})
    try:
        with ParallelContext(config, identity=ctx.identity, store=ctx.store, hub=ctx.hub) as outer:
            child = outer.derive(ParallelConfig(pp=2, backend=config.backend)).__enter__()
            child.pp.all_reduce(torch.ones(1))
            outer.duplicate("second").__enter__().open_group("tp", "pp").barrier()
            outer.world.barrier()
            if fails:
                raise KeyError("out")
    except KeyError:
        pass


def hundred(ctx: ParallelContext, backend: str, earlier: frozenset[str] = frozenset()) -> list[dict[str, Any]]:
    seen = []
    for number in range(100):
        once(ctx, backend, fails=bool(number % 2))
        if number in (1, 9, 99):
            seen.append(usage(ctx, earlier))
    return seen


@pytest.mark.processes
@pytest.mark.timeout(240)
def test_b064_a_hundred_contexts_in_processes() -> None:
    for first, _, last in launch(hundred, CONFIG, "gloo", timeout_s=220):
        assert last == first


@pytest.mark.timeout(240)
def test_b064_a_hundred_contexts_in_threads() -> None:
    for first, _, last in run_threads(hundred, CONFIG, "local", tasks(), timeout_s=220):
        assert last["keys"] == first["keys"]
        assert last["threads"] == first["threads"]


def count_closes(ctx: ParallelContext) -> tuple[int, float]:
    """Aliases of one connection: each closes once, and the connection with the last of them."""
    with ctx.derive(CONFIG) as child:
        assert child.tp.ranks == child.world.ranks == ctx.tp.ranks
        child.close()
        child.close()
    return len(ctx.groups()), ctx.tp.all_reduce(torch.ones(1)).item()


@pytest.mark.parametrize("backend", ["local", "gloo"])
def test_b064_shared_connections_outlive_the_child(backend: str) -> None:
    assert run_threads(count_closes, ParallelConfig.model_validate({"tp": 2, "backend": backend})) == [(10, 2.0)] * 2
