"""B025: two live contexts in one process do not disturb each other."""

import os

import pytest
import torch

from parallel_runtime.config import ParallelConfig
from parallel_runtime.context import ParallelContext
from parallel_runtime.launch import launch, run_threads

A, B = ParallelConfig(tp=2), ParallelConfig(pp=2)


def again(ctx: ParallelContext, config: ParallelConfig) -> ParallelContext:
    return ParallelContext(config, identity=ctx.identity, store=ctx.store, hub=ctx.hub)


def total(ctx: ParallelContext, value: float) -> float:
    return ctx.world.all_reduce(torch.tensor(value)).item()


def settings() -> tuple[object, ...]:
    return torch.initial_seed(), torch.get_default_dtype(), torch.get_num_threads(), dict(os.environ)


def interleave(ctx: ParallelContext) -> None:
    before = settings()
    peer = 1 - ctx.rank
    with again(ctx, A) as a, again(ctx, A) as b:
        for number in range(50):
            steps = [(a, 1.0), (b, 10.0)]
            for context, value in steps if number % 2 else steps[::-1]:
                assert total(context, value) == 2 * value
            assert a.tp.broadcast_object({"round": number} if a.rank == 0 else None, src=0) == {"round": number}
            if b.rank == number % 2:
                b.tp.send(torch.tensor([float(number)]), dst=peer)
            else:
                assert b.tp.recv(src=peer).item() == float(number)
    for first, second in ((A, B), (B, A)):
        inner = again(ctx, second)
        with again(ctx, first) as stays:
            with inner:
                assert total(inner, 1.0) == 2.0
            assert total(stays, 10.0) == 20.0
        outer = again(ctx, first).__enter__()
        with again(ctx, second) as stays:
            outer.close()
            assert total(stays, 10.0) == 20.0
    assert settings() == before


@pytest.mark.processes
@pytest.mark.timeout(60)
def test_b025_two_contexts_in_processes() -> None:
    launch(interleave, A, timeout_s=45)


@pytest.mark.parametrize("backend", ["local", "gloo"])
def test_b025_two_contexts_in_threads(backend: str) -> None:
    run_threads(interleave, ParallelConfig.model_validate({"tp": 2, "backend": backend}), timeout_s=60)


def by_environment(ctx: ParallelContext) -> float:
    with ParallelContext(B) as other:
        return other.pp.all_reduce(torch.tensor(float(ctx.rank))).item()


@pytest.mark.processes
@pytest.mark.timeout(60)
def test_b025_a_launched_rank_opens_a_second_context_from_its_environment() -> None:
    assert launch(by_environment, A, timeout_s=30) == [1.0, 1.0]
