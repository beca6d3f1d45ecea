"""How long a layout's answers take, beside Megatron-core's RankGenerator and torch's init_device_mesh.

For worlds of 512 to 16,384 ranks (tp=8, cp=2, pp=4, ep=16, the rest dp), in one run, median of several:

- *one rank*: the layout is made, and one rank's coordinate and its groups on tp, cp, dp, pp, ep, etp, edp are asked for;
- *its plan*: the config is made, and the whole plan of that rank (groups, aliases, communicators, costs, hosts of 8 ranks);
- *whole table*: all groups on the same seven axes;
- Megatron: the same seven tables (its generator has no question about one rank: a rank looks itself up in the table);
- torch: ``init_device_mesh`` with dims pp, dp, cp, tp on a fake world. It also makes its (fake) process groups and has no expert
  view, so it shows what start-up pays for such a mesh rather than the arithmetic alone.

Run ``python -m benchmarks.bench_layout [--repeat N] [--write FILE]``. Peers that are not installed are left out of the table.
"""

import argparse
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path

from parallel_runtime.config import ParallelConfig
from parallel_runtime.topology import Layout

__all__ = ["main"]

WORLDS = (512, 1024, 2048, 4096, 8192, 16384)
AXES = ("tp", "cp", "dp", "pp", "ep", "etp", "edp")
TP, CP, PP, EP = 8, 2, 4, 16


def milliseconds(work: Callable[[], object], repeat: int) -> float:
    """Time a call.

    Args:
        work: What to call.
        repeat: How often.

    Returns:
        The median, in milliseconds.
    """
    seconds = []
    for _ in range(repeat):
        start = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds) * 1e3


def make_layout(world_size: int) -> Layout:
    """Make the layout that all columns describe.

    Args:
        world_size: Ranks.

    Returns:
        The layout.
    """
    return Layout.of(tp=TP, cp=CP, pp=PP, dp=world_size // (TP * CP * PP), ep=EP)


def ask_one_rank(layout: Layout) -> object:
    """Ask for one rank's coordinate and groups.

    Args:
        layout: The layout.

    Returns:
        The answers.
    """
    rank = layout.world_size // 2 + 3
    return layout.coordinate(rank), [layout.group_of(rank, axis) for axis in AXES]


def plan_one_rank(world_size: int, *, tp: int, cp: int, pp: int, ep: int) -> object:
    """Make a config and one rank's whole plan.

    Args:
        world_size: Ranks, a multiple of 8; 8 on each host.
        tp: Tensor-parallel size.
        cp: Context-parallel size.
        pp: Pipeline-parallel size.
        ep: Expert-parallel size.

    Returns:
        The plan.
    """
    config = ParallelConfig(tp=tp, cp=cp, pp=pp, dp=world_size // (tp * cp * pp), ep=ep)
    return config.plan(hosts=world_size // 8).for_rank(world_size // 2 + 3)


def megatron_table() -> Callable[[int], object] | None:
    """Find Megatron-core's generator.

    Returns:
        A function that makes the same seven tables for a world size, or ``None`` where it is not installed.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            from megatron.core.parallel_state import RankGenerator
        except ImportError:
            return None

    def table(world_size: int) -> object:
        stage = world_size // PP
        order = "tp-cp-ep-dp-pp"
        dense = RankGenerator(tp=TP, ep=1, dp=stage // (TP * CP), pp=PP, cp=CP, order=order)
        etp = make_layout(world_size).etp
        expert = RankGenerator(tp=etp, ep=EP, dp=stage // (etp * EP), pp=PP, cp=1, order=order)
        return [dense.get_ranks(axis) for axis in ("tp", "cp", "dp", "pp")] + [
            expert.get_ranks(axis) for axis in ("ep", "tp", "dp")
        ]

    return table


def torch_mesh_ms(world_size: int, repeat: int) -> float | None:
    """Time torch's mesh on a fake world.

    Args:
        world_size: Ranks.
        repeat: How often.

    Returns:
        The median in milliseconds, or ``None`` where torch has no fake world.
    """
    try:
        import torch.distributed as dist
        from torch.distributed.device_mesh import init_device_mesh
        from torch.testing._internal.distributed.fake_pg import FakeStore
    except ImportError:
        return None
    shape = (PP, world_size // (TP * CP * PP), CP, TP)
    seconds = []
    for _ in range(repeat):
        dist.init_process_group("fake", rank=0, world_size=world_size, store=FakeStore())
        start = time.perf_counter()
        init_device_mesh("cpu", shape, mesh_dim_names=("pp", "dp", "cp", "tp"))
        seconds.append(time.perf_counter() - start)
        dist.destroy_process_group()
    return statistics.median(seconds) * 1e3


def cell(value: float | None, against: float) -> str:
    """Write a time and its ratio.

    Args:
        value: Milliseconds, or ``None``.
        against: Milliseconds of the same thing done here.

    Returns:
        Text for the table.
    """
    return "not installed" if value is None else f"{value:.2f} ({value / against:.1f}x)"


def measure(repeat: int) -> str:
    """Measure everything.

    Args:
        repeat: Runs of each; the median counts.

    Returns:
        A markdown table, and a line about a million ranks.
    """
    titles = ("ranks", "one rank, ms", "its plan, ms", "whole table, ms", "Megatron table, ms", "init_device_mesh, ms")
    rows = [f"| {' | '.join(titles)} |", "|---" * len(titles) + "|"]
    megatron = megatron_table()
    for world_size in WORLDS:
        layout = make_layout(world_size)
        one = milliseconds(lambda size=world_size: ask_one_rank(make_layout(size)), repeat)  # type: ignore[misc]  # bound default
        plan = milliseconds(lambda size=world_size: plan_one_rank(size, tp=TP, cp=CP, pp=PP, ep=EP), repeat)  # type: ignore[misc]  # same
        table = milliseconds(lambda layout=layout: [layout.groups(axis) for axis in AXES], repeat)  # type: ignore[misc]  # same
        theirs = milliseconds(lambda size=world_size: megatron(size), repeat) if megatron else None  # type: ignore[misc]  # same
        mesh = torch_mesh_ms(world_size, repeat)
        rows.append(f"| {world_size} | {one:.3f} | {plan:.2f} | {table:.2f} | {cell(theirs, table)} | {cell(mesh, one)} |")
    million = milliseconds(lambda: ask_one_rank(Layout.of(tp=8, pp=16, dp=8192, ep=64)), repeat)
    plan = milliseconds(lambda: plan_one_rank(1 << 20, tp=8, cp=1, pp=16, ep=64), repeat)
    rows += [
        "",
        f"1,048,576 ranks (tp=8, pp=16, dp=8192, ep=64): one rank {million:.3f} ms, its plan {plan:.2f} ms.",
        f"Median of {repeat} runs; in brackets Megatron's time over our table's, the mesh's over our one rank's.",
    ]
    return "\n".join(rows) + "\n"


def main() -> None:
    """Measure, show, and write where asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeat", type=int, default=5, help="runs of each measurement; the median counts")
    parser.add_argument("--write", type=Path, help="also write the table to this markdown file")
    arguments = parser.parse_args()
    text = measure(arguments.repeat)
    sys.stdout.write(text)
    if arguments.write:
        arguments.write.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
