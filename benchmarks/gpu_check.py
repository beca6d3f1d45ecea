"""Everything of this library that only a GPU can show, in one short command. It has not run on a GPU yet.

Run ``python -m benchmarks.gpu_check``. Each check says ``ok``, ``skipped`` with what it needs, or ``FAILED`` with its error; the
exit status is 1 if one failed. Nothing is timed.
"""

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final, final

import torch

from parallel_runtime.config import ParallelConfig
from parallel_runtime.context import ParallelContext
from parallel_runtime.errors import ContextStateError
from parallel_runtime.launch import launch
from parallel_runtime.serving import Engine, SamplingParams, ServingConfig
from parallel_runtime.testing.checkpoints import tiny_llama_config, write_safetensors_checkpoint

__all__ = ["CHECKS", "Check", "main"]

_TIMEOUT_S: Final = 100.0


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One thing to look at.

    Attributes:
        name: For people.
        num_gpus: How many it needs.
        run: Does it, and returns what to tell.
    """

    name: str
    num_gpus: int
    run: Callable[[], str]


def expect(is_so: bool, what: str) -> None:
    """Go on only if something is so.

    Raises:
        RuntimeError: It is not.
    """
    if not is_so:
        raise RuntimeError(f"{what} does not hold")


def collectives(ctx: ParallelContext) -> str:
    """Each collective that layers use, on nccl, against what it has to give."""
    group, size, rank = ctx.tp, ctx.tp.world_size, ctx.tp.rank_in_group
    x = torch.full((4, 3), float(rank + 1), device=ctx.device)
    total = size * (size + 1) / 2
    expect(bool((group.all_reduce(x) == total).all()), "all_reduce sums")
    gathered = group.all_gather(x, dim=1)
    expect(gathered.shape == (4, 3 * size) and gathered[0, ::3].tolist() == [1.0 + r for r in range(size)], "all_gather joins")
    rows = torch.ones(size * 2, 3, device=ctx.device)
    expect(bool((group.reduce_scatter(rows) == size).all()), "reduce_scatter sums")
    uneven = group.all_gatherv(torch.full((rank + 1,), rank, device=ctx.device), sizes=range(1, size + 1))
    expect(uneven.tolist() == [r for r in range(size) for _ in range(r + 1)], "all_gatherv joins")
    expect(group.broadcast(x, src=size - 1)[0, 0].item() == size, "broadcast copies")
    if rank == 0:
        group.send(x, 1)
    elif rank == 1:
        expect(group.recv(0)[0, 0].item() == 1.0, "recv receives")
    return group.describe(paths=True)


def graphs(ctx: ParallelContext) -> str:
    """Graphs of several sizes, largest first: a replay equals eager, for inputs that change, and none outlives its context."""
    weight = torch.randn(64, 64, generator=torch.Generator().manual_seed(1)).to(ctx.device)
    kept = []
    with ctx.duplicate("captured") as inner:
        inputs = {count: torch.zeros(count, 64, device=ctx.device) for count in (32, 8, 1)}

        def layer(count: int) -> torch.Tensor:
            return inner.tp.all_gather(inner.tp.all_reduce(inputs[count] @ weight).relu(), dim=1)

        with inner.graph_capture() as capture:
            for count in inputs:
                kept.append((count, capture.graph(lambda count=count: layer(count))))  # type: ignore[misc]  # mypy cannot infer it
        for round_ in range(3):
            for count, graph in reversed(kept):
                inputs[count].copy_(torch.randn(count, 64, generator=torch.Generator().manual_seed(round_)) + ctx.rank)
                replayed = graph.replay().clone()
                expect(torch.equal(replayed, layer(count)), f"a replay of {count} rows equals eager")
        if ctx.tp.world_size > 1:
            refused = False
            try:
                with inner.graph_capture() as capture:
                    capture.graph(inner.tp.barrier, num_warmups=0)
            except ContextStateError as error:
                refused = "cannot become part of a graph" in str(error)
            expect(refused, "a barrier is refused in a graph")
    stale = ""
    try:
        kept[0][1].replay()
    except ContextStateError as error:
        stale = type(error).__name__
    expect(stale == "StaleContextError", "a graph that outlives its context is refused")
    return f"{len(kept)} graphs, replays equal eager bit for bit"


def on_ranks(work: Callable[[ParallelContext], str], tp: int) -> Callable[[], str]:
    """``work`` on every rank of a world on CUDA; what the first one tells."""
    return lambda: launch(work, ParallelConfig(tp=tp, device="cuda"), timeout_s=_TIMEOUT_S)[0]


def engine(tp: int) -> Callable[[], str]:
    """A tiny model's greedy tokens: with decode graphs, without, and on the CPU."""

    def run() -> str:
        prompts = [[5 + index, *range(9, 9 + 3 * index)] for index in range(5)]
        with TemporaryDirectory() as folder:
            model = write_safetensors_checkpoint(Path(folder), tiny_llama_config(num_layers=4, eos_ids=()))

            def tokens(device: str, *, decode_graphs: bool) -> list[tuple[int, ...]]:
                parallel = ParallelConfig.model_validate({"tp": tp, "device": device})
                serving = ServingConfig(page_size=4, decode_graphs=decode_graphs, max_batch_requests=8)
                with Engine(str(model), parallel=parallel, serving=serving) as started:
                    done = started.generate(prompts, SamplingParams(max_new_tokens=24))
                return [completion.token_ids for completion in done]

            replayed, eager = tokens("cuda", decode_graphs=True), tokens("cuda", decode_graphs=False)
            expect(replayed == eager, "greedy tokens with decode graphs equal those without")
            return f"graphs equal eager; {'as' if eager == tokens('cpu', decode_graphs=False) else 'other tokens than'} on CPU"

    return run


CHECKS: Final = (
    Check(name="graphs on one GPU", num_gpus=1, run=on_ranks(graphs, 1)),
    Check(name="tiny engine on one GPU", num_gpus=1, run=engine(1)),
    Check(name="nccl groups, symmetric memory", num_gpus=2, run=on_ranks(collectives, 2)),
    Check(name="graphs with collectives", num_gpus=2, run=on_ranks(graphs, 2)),
    Check(name="tiny engine, tp=2", num_gpus=2, run=engine(2)),
)


def main() -> int:
    """Run every check that this machine's GPUs are enough for.

    Returns:
        The exit status.
    """
    count, status = torch.cuda.device_count(), 0
    names = ", ".join(sorted({torch.cuda.get_device_name(index) for index in range(count)})) or "none"
    sys.stdout.write(f"torch {torch.__version__}, GPUs: {count} ({names})\n")
    for check in CHECKS:
        if count < check.num_gpus:
            told = f"skipped, needs {check.num_gpus} GPU{'s' if check.num_gpus > 1 else ''}"
        else:
            try:
                told = f"ok: {check.run()}"
            except Exception as error:
                told, status = f"FAILED: {type(error).__name__}: {error}", 1
        sys.stdout.write(f"{check.name:32} {told}\n")
    return status


if __name__ == "__main__":
    sys.exit(main())
