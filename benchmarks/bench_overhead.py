"""What a coordinator adds to the call of its communicator, with the recorder on.

The communicator moves nothing: the difference between a pair of lines is the coordinator's own cost, whatever it stands on.
Every round runs all candidates in turn; a figure is the fastest round's mean, since everything that disturbs only adds.

The last lines compare a coordinator over the c10d communicator with the bare call on the same backend, waiting included. The
backend is torch's ``FakeProcessGroup``, which moves nothing: gloo's own 300 us spread by more than what is looked for.

The second table is gloo itself, between two processes: with the roll call that compares what its members enter, and without.

Run ``python -m benchmarks.bench_overhead [--rounds N] [--write PAGE]``.
"""

import argparse
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from torch._C import _distributed_c10d as c10d

from benchmarks.measuring import machine, write_page
from parallel_runtime import ParallelConfig, ParallelContext, launch
from parallel_runtime.comm import C10dCommunicator, FakeCommunicator, GroupCoordinator, GroupSpec, open_coordinator
from parallel_runtime.comm.communicator import ReduceOp
from parallel_runtime.comm.recorder import Recorder
from parallel_runtime.terms import Rank

__all__ = ["main"]

CALLS = 2000
GLOO_CALLS = 50
SIZES = (8, 4096, 65536, 1 << 20)
"""Bytes of the tensors over gloo: what travels in the roll call, and what does not."""


def candidates() -> dict[str, Callable[[], object]]:
    """What is timed, by name; each next to what it stands on."""
    spec = GroupSpec(name="bench#0", key="bench", ranks=(Rank(0), Rank(1)), rank=Rank(0))
    below = _Nothing(0, 2)
    group = open_coordinator(spec, below)
    x, out = torch.ones(64), torch.empty(128)
    recorder, entry = Recorder(), ("bench#0", 1, "all_reduce_", torch.float32, x.shape, 0.0)

    def record() -> None:
        recorder.under_way = entry
        recorder.finish(entry, 0.0)

    torchs: Any = c10d  # torch's stubs leave it out
    bare = torchs.FakeProcessGroup._create_internal(0, 2)
    routed = open_coordinator(spec, _over(bare))
    options, root = c10d.AllreduceOptions(), c10d.BroadcastOptions()

    return {
        "communicator.all_reduce_": lambda: below.all_reduce_(x, ReduceOp.SUM, 1.0),
        "group.all_reduce_": lambda: group.all_reduce_(x),
        "communicator.all_gather": lambda: below.all_gather(out.view(2, 64), x, 1.0),
        "group.all_gather": lambda: group.all_gather(x),
        "group.all_gather(out=)": lambda: group.all_gather(x, out=out),
        "communicator.broadcast_": lambda: below.broadcast_(x, 0, 1.0),
        "group.broadcast_": lambda: group.broadcast_(x),
        "recorder": record,
        "c10d allreduce().wait()": lambda: bare.allreduce([x], options).wait(),
        "group.all_reduce_ on it": lambda: routed.all_reduce_(x),
        "c10d broadcast().wait()": lambda: bare.broadcast([x], root).wait(),
        "group.broadcast_ on it": lambda: routed.broadcast_(x),
    }


def _over(backend: Any) -> C10dCommunicator:
    """The communicator of ``backend``, which has not met anybody in a store."""
    made = C10dCommunicator.__new__(C10dCommunicator)
    values = {
        "kind": "c10d",
        "backend": "gloo",
        "_is_gloo": True,
        "key": "bench",
        "rank_in_group": 0,
        "world_size": 2,
        "_group": backend,
    }
    for name, value in {**values, "_broken": "", "_kept": {}, "_ranks": [0, 1], "_roll": None, "_deadline": 0.0}.items():
        setattr(made, name, value)
    return made


def over_gloo(ctx: ParallelContext, rounds: int) -> dict[str, tuple[float, float]]:
    """Time operations in two contexts of the same ranks in turn; for ``launch``.

    Args:
        ctx: Over gloo, whose members compare what they enter.
        rounds: How often.

    Returns:
        By operation: microseconds of the fastest round, without and with the roll call.
    """
    unchecked = ctx.config.replace(checked=False)
    with ParallelContext(unchecked, identity=ctx.identity, store=ctx.store, hub=ctx.hub) as plain:
        calls = [_gloo_calls(group) for group in (plain.tp, ctx.tp)]
        best = {name: [float("inf")] * 2 for name in calls[0]}
        for _ in range(rounds):
            for name in best:
                for place, found in enumerate(calls):
                    plain.tp.barrier()
                    start = perf_counter()
                    for _ in range(GLOO_CALLS):
                        found[name]()
                    plain.tp.barrier()  # a broadcast is over sooner where it starts
                    best[name][place] = min(best[name][place], (perf_counter() - start) / GLOO_CALLS * 1e6)
    return {name: (without, with_it) for name, (without, with_it) in best.items()}


def _gloo_calls(group: GroupCoordinator) -> dict[str, Callable[[], object]]:
    calls: dict[str, Callable[[], object]] = {"barrier": group.barrier}
    calls["broadcast_object"] = lambda: group.broadcast_object("x" if group.is_first_rank else None)
    for size in SIZES:
        tensor = torch.ones(size // 4)
        calls[f"all_reduce_ {size} B"] = partial(group.all_reduce_, tensor)
        calls[f"all_gather {size} B"] = partial(group.all_gather, tensor)
        calls[f"broadcast_ {size} B"] = partial(group.broadcast_, tensor)
    return calls


class _Nothing(FakeCommunicator):  # type: ignore[misc]  # final for users
    """Moves nothing, so that only the coordinator is left."""

    def all_reduce_(self, tensor: torch.Tensor, op: ReduceOp, timeout_s: float) -> None:
        """Nothing."""

    def all_gather(self, output: torch.Tensor, tensor: torch.Tensor, timeout_s: float) -> None:
        """Nothing."""

    def broadcast_(self, tensor: torch.Tensor, src: int, timeout_s: float) -> None:
        """Nothing."""


def main(arguments: list[str] | None = None) -> None:
    """Time all candidates and print a table.

    Args:
        arguments: Of the command line.
    """
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--write", type=Path, metavar="PAGE")
    chosen = parser.parse_args(arguments)
    rounds = chosen.rounds
    torch.set_num_threads(1)
    found = candidates()
    best = dict.fromkeys(found, float("inf"))
    for _ in range(rounds):
        for name, call in found.items():
            start = perf_counter()
            for _ in range(CALLS):
                call()
            best[name] = min(best[name], (perf_counter() - start) / CALLS * 1e6)
    for name, us in best.items():
        sys.stdout.write(f"{name:28} {us:7.2f} us\n")
    config = ParallelConfig(tp=2, backend="gloo", shm="off")
    gloo = launch(over_gloo, config, max(2, rounds // 3))[0]
    for name, (without, with_it) in gloo.items():
        sys.stdout.write(f"gloo {name:24} {without:7.0f} us, compared first {with_it:7.0f} us: {with_it / without:.2f}\n")
    if chosen.write is not None:
        write_page(chosen.write, "What the coordinator adds to its communicator", _page(best, gloo))


def _page(best: dict[str, float], gloo: dict[str, tuple[float, float]]) -> str:
    added = {
        call: best[f"group.{call} on it"] - best[f"c10d {bare}().wait()"]
        for call, bare in (("all_reduce_", "allreduce"), ("broadcast_", "broadcast"))
    }
    return "\n".join(
        (
            f"Written by `python -m benchmarks.bench_overhead --write`. {machine()}.\n",
            "| call | us |",
            "|---|---|",
            *(f"| `{name}` | {us:.2f} |" for name, us in best.items()),
            "\nCoordinator and c10d communicator over the bare c10d call, goal 2 us: "
            + ", ".join(f"{call} {us:.1f} us" for call, us in added.items())
            + ".",
            '\nOver gloo, two processes: the members compare what they enter (`checked="auto"`) or do not (`checked=False`). '
            "Tensors up to 4 KiB travel in the exchange that compares. Only the ratios count.\n",
            "| call | without, us | with, us | ratio |",
            "|---|---|---|---|",
            *(
                f"| `{name}` | {without:.0f} | {with_it:.0f} | {with_it / without:.2f} |"
                for name, (without, with_it) in gloo.items()
            ),
        )
    )


if __name__ == "__main__":
    main()
