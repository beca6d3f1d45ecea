"""``parallel-runtime bench``: how fast the groups of a layout are, in the manner of nccl-tests."""

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from time import perf_counter
from types import MappingProxyType
from typing import Any, Final, TypeAlias, final

import torch
from torch import Tensor

from parallel_runtime.cli.sizes import add_size_options, config_from_options
from parallel_runtime.cli.tables import show_tables
from parallel_runtime.comm import GroupCoordinator
from parallel_runtime.config import ParallelConfig
from parallel_runtime.config.plan_text import Table
from parallel_runtime.context import ParallelContext
from parallel_runtime.errors import ConfigError
from parallel_runtime.launch import launch, run_threads
from parallel_runtime.terms import GROUP_NAMES

__all__ = ["OPERATIONS", "BenchJob", "BenchRow", "add_bench", "bench_rank"]

_EXAMPLES = """\
examples:
  parallel-runtime bench --tp 2
  parallel-runtime bench --tp 2 --pp 2 --group tp --op all_reduce --begin 8 --end 1M --factor 4 -c
  parallel-runtime bench --tp 2 --shm off            (gloo)
  parallel-runtime bench --tp 2 --backend local      (ranks as threads)
"""

_UNITS: Final = MappingProxyType({"K": 1 << 10, "M": 1 << 20, "G": 1 << 30})
_Call: TypeAlias = Callable[[], Tensor | None]


def _one(world_size: int) -> float:
    return 1.0


def _others(world_size: int) -> float:
    return (world_size - 1) / world_size


def _twice(world_size: int) -> float:
    return 2 * (world_size - 1) / world_size


OPERATIONS: Final = MappingProxyType(
    {
        "all_reduce": _twice,
        "all_gather": _others,
        "reduce_scatter": _others,
        "all_to_all": _others,
        "broadcast": _one,
        "reduce": _one,
        "gather": _others,
        "scatter": _others,
        "sendrecv": _one,
        "barrier": _one,
    }
)
"""Bus bandwidth over algorithm bandwidth, by the number of members."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class BenchJob:
    """What is measured.

    Attributes:
        group: Name of the group; all groups of that name run at once.
        operations: Names in ``OPERATIONS``.
        sizes: Bytes.
        iterations: Calls that are timed together.
        warmup: Calls before them.
        checks: Whether results are compared with what they must be.
    """

    group: str
    operations: tuple[str, ...]
    sizes: tuple[int, ...]
    iterations: int
    warmup: int
    checks: bool


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class BenchRow:
    """One measured operation.

    Attributes:
        operation: Its name.
        nbytes: Size as nccl-tests counts it: what a member holds in all, so for those that join or part (all_gather,
            reduce_scatter, all_to_all, gather, scatter) the joined tensor.
        microseconds: Mean of the calls, on the slowest rank.
        algorithm_gb_s: ``nbytes`` over the time, in 1e9 bytes a second.
        bus_gb_s: Times the factor of the operation: what a link carries at least.
        num_wrong: Elements that are not what they must be, on all ranks; ``None`` where nothing was compared.
    """

    operation: str
    nbytes: int
    microseconds: float
    algorithm_gb_s: float
    bus_gb_s: float
    num_wrong: int | None


def add_bench(commands: "argparse._SubParsersAction[Any]") -> None:
    """Add the subcommand ``bench``.

    Args:
        commands: Where to add it.
    """
    parser = commands.add_parser(
        "bench",
        help="measure the collectives of a layout's groups on this machine",
        description="Start the ranks of a layout here and time the operations of one of its groups, size by size. "
        "All groups of that name run at once.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.set_defaults(run=_run)
    parser.add_argument("--group", default="world", choices=GROUP_NAMES, help="which group (default world)")
    parser.add_argument(
        "--op",
        action="append",
        choices=(*OPERATIONS, "all"),
        help="operation to time, by default the all-reduce; may be given again",
    )
    parser.add_argument("-b", "--begin", type=_bytes, default=8, metavar="BYTES", help="smallest size (default 8; 64K, 1M)")
    parser.add_argument("-e", "--end", type=_bytes, default=1 << 20, metavar="BYTES", help="largest size (default 1M)")
    parser.add_argument("-f", "--factor", type=int, default=4, metavar="N", help="from one size to the next (default 4)")
    parser.add_argument("-n", "--iters", type=int, default=20, metavar="N", help="timed calls of each size (default 20)")
    parser.add_argument("-w", "--warmup", type=int, default=5, metavar="N", help="calls before them (default 5)")
    parser.add_argument(
        "-c", "--check", action="store_true", help="compare results with what they must be; exit 1 if one is wrong"
    )
    parser.add_argument("--json", action="store_true", help="write JSON instead of a table")
    add_size_options(parser)


def _run(options: argparse.Namespace) -> int:
    config = config_from_options(options)
    job = _job(options, config)
    start = run_threads if config.backend == "local" else launch
    results = start(bench_rank, config, job)
    rows, described = results[0]
    if options.json:
        told = {"group": options.group, "over": described, "rows": [asdict(row) for row in rows]}
        sys.stdout.write(f"{json.dumps(told, indent=2)}\n")
    else:
        show_tables(described, [_table(rows, job, config)])
    return 1 if any(row.num_wrong for row in rows) else 0


def _job(options: argparse.Namespace, config: ParallelConfig) -> BenchJob:
    size = len(config.layout.groups(options.group)[0])
    if size < 2:
        raise ConfigError(f"--group {options.group}: its groups have one member, so there is nothing to measure; give it a size")
    for name, least in (("begin", 1), ("factor", 2), ("iters", 1), ("warmup", 0)):
        if getattr(options, name) < least:
            raise ConfigError(f"--{name} {getattr(options, name)}: at least {least}")
    if options.end < options.begin:
        raise ConfigError(f"--end {options.end} is less than --begin {options.begin}")
    names = tuple(dict.fromkeys(options.op or ["all_reduce"]))
    return BenchJob(
        group=options.group,
        operations=tuple(OPERATIONS) if "all" in names else names,
        sizes=tuple(_sizes(options.begin, options.end, options.factor)),
        iterations=options.iters,
        warmup=options.warmup,
        checks=options.check,
    )


def _sizes(begin: int, end: int, factor: int) -> Iterator[int]:
    while begin <= end:
        yield begin
        begin *= factor


def bench_rank(ctx: ParallelContext, job: BenchJob) -> tuple[list[BenchRow], str]:
    """Measure on one rank.

    Args:
        ctx: Open context.
        job: What.

    Returns:
        The rows, equal on all ranks, and which way the group's tensors take.

    Collective: all ranks.
    """
    group = ctx.group(job.group)
    rows = []
    for operation in job.operations:
        for nbytes in job.sizes if operation != "barrier" else (0,):
            rows.append(_measure(ctx, group, operation, nbytes, job))
    return rows, group.describe()


def _measure(ctx: ParallelContext, group: GroupCoordinator, operation: str, nbytes: int, job: BenchJob) -> BenchRow:
    n = group.world_size
    rows = max(1, -(-nbytes // (4 * n)))
    call, want = _prepare(group, operation, rows)
    num_wrong = None
    if job.checks and want is not None:
        got = call()
        num_wrong = sum(ctx.world.all_gather_object(0 if got is None else int((got.flatten() != want.flatten()).sum())))
    for _ in range(job.warmup):
        call()
    ctx.world.barrier()
    start = perf_counter()
    for _ in range(job.iterations):
        call()
    if ctx.device.type == "cuda":
        torch.cuda.synchronize(ctx.device)
    seconds = max(ctx.world.all_gather_object((perf_counter() - start) / job.iterations))
    moved = 0 if operation == "barrier" else rows * 4 * n
    algorithm = moved / seconds / 1e9
    return BenchRow(
        operation=operation,
        nbytes=moved,
        microseconds=seconds * 1e6,
        algorithm_gb_s=algorithm,
        bus_gb_s=algorithm * OPERATIONS[operation](n),
        num_wrong=num_wrong,
    )


def _prepare(group: GroupCoordinator, operation: str, rows: int) -> tuple[_Call, Tensor | None]:
    """The call on ``n * rows`` elements in all, and what it must give here; ``None`` where this member gets nothing.

    Member ``i`` holds ``i + 1`` everywhere, so that every result is a small whole number.
    """
    n, me = group.world_size, group.rank_in_group
    full = torch.full((n, rows), float(me + 1), device=group.device)
    part = full[0].clone()
    ramp = torch.arange(1.0, n + 1, device=group.device).unsqueeze(1).expand(n, rows)
    total = torch.full_like(full, n * (n + 1) / 2)
    landing, parts = torch.empty_like(full), ramp.contiguous()
    calls: dict[str, tuple[_Call, Tensor | None]] = {
        "all_reduce": (lambda: group.all_reduce(full, out=landing), total),
        "all_gather": (lambda: group.all_gather(part, out=landing.view(-1)), ramp),
        "reduce_scatter": (lambda: group.reduce_scatter(full, out=landing[:1]), total[0]),
        "all_to_all": (lambda: group.all_to_all(full, out=landing), ramp),
        "broadcast": (lambda: group.broadcast(full, src=0), torch.ones_like(full)),
        "reduce": (lambda: group.reduce(full, dst=0), total),
        "gather": (lambda: group.gather(part, dst=0), ramp),
        "scatter": (lambda: group.scatter(parts if me == 0 else None, src=0), part),
        "sendrecv": (
            lambda: group.exchange(full, dst=(me + 1) % n, src=(me - 1) % n, out=landing),
            torch.full_like(full, float((me - 1) % n + 1)),
        ),
        "barrier": (group.barrier, None),
    }
    return calls[operation]


def _table(rows: list[BenchRow], job: BenchJob, config: ParallelConfig) -> Table:
    header = ("operation", "bytes", "us", "algbw GB/s", "busbw GB/s", "wrong")
    groups = config.layout.groups(job.group)
    title = f"{job.group}: {len(groups)} x {len(groups[0])} ranks, "
    return Table(
        title=f"{title}{job.iterations} calls after {job.warmup}",
        header=header,
        rows=tuple(
            (
                row.operation,
                f"{row.nbytes:,}",
                f"{row.microseconds:.1f}",
                f"{row.algorithm_gb_s:.3f}",
                f"{row.bus_gb_s:.3f}",
                "-" if row.num_wrong is None else str(row.num_wrong),
            )
            for row in rows
        ),
    )


def _bytes(text: str) -> int:
    number, unit = (text[:-1], _UNITS[text[-1].upper()]) if text[-1:].upper() in _UNITS else (text, 1)
    if not number.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is no number of bytes such as 8, 64K or 1M")
    return int(number) * unit
