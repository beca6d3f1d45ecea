"""What a coordinator adds to the call of its communicator, with the recorder on.

The communicator moves nothing: the difference between a pair of lines is the coordinator's own cost, whatever it stands on.
Every round runs all candidates in turn; a figure is the fastest round's mean, since everything that disturbs only adds.

The last lines compare a coordinator over the c10d communicator with the bare call on the same backend, waiting included. The
backend is torch's ``FakeProcessGroup``, which moves nothing: gloo's own 300 us spread by more than what is looked for.

Run ``python -m benchmarks.bench_overhead [--rounds N] [--write PAGE]``.
"""

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from torch._C import _distributed_c10d as c10d

from benchmarks.measuring import machine, write_page
from parallel_runtime.comm import C10dCommunicator, FakeCommunicator, GroupSpec, open_coordinator
from parallel_runtime.comm.communicator import ReduceOp
from parallel_runtime.comm.recorder import Recorder
from parallel_runtime.terms import Rank

__all__ = ["main"]

CALLS = 2000


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
    if chosen.write is not None:
        write_page(chosen.write, "What the coordinator adds to its communicator", _page(best))


def _page(best: dict[str, float]) -> str:
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
        )
    )


if __name__ == "__main__":
    main()
