"""``parallel-runtime plan``: look at a world, or at what changes between two, before anything starts."""

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

from parallel_runtime.cli.sizes import add_size_options, config_from_options, parse_hosts, plan_from_text
from parallel_runtime.cli.tables import show_tables
from parallel_runtime.config.plan import Plan
from parallel_runtime.config.plan_diff import Difference
from parallel_runtime.config.plan_text import Table
from parallel_runtime.errors import ConfigError

__all__ = ["add_plan"]

_MOST_RANKS: Final = 1 << 20
"""Of a world that is shown whole; it takes some seconds."""
_EXAMPLES = """\
examples:
  parallel-runtime plan --tp 2 --pp 2 --dp 2 --hosts 2
  parallel-runtime plan --tp 2 --pp 2 --dp 2 --hosts 2 --svg plan.svg
  parallel-runtime plan --tp 8 --dp -1 --world-size 64 --hosts 8 --rank 9
  parallel-runtime plan --from sglang --tp 8 --dp 4 --enable-dp-attention --ep 8
  parallel-runtime plan --from vllm -tp 8 -pp 2 -ep
  parallel-runtime plan tp=2,pp=2 diff tp=4
  parallel-runtime plan before.json diff after.json
"""


def add_plan(commands: "argparse._SubParsersAction[Any]") -> None:
    """Add the subcommand ``plan``.

    Args:
        commands: Where to add it.
    """
    parser = commands.add_parser(
        "plan",
        usage="%(prog)s [sizes] [--hosts HOSTS] [--rank R | --json] [--svg FILE] [--png FILE]\n"
        "       %(prog)s PLAN [--hosts HOSTS] ...\n"
        "       %(prog)s PLAN diff PLAN",
        help="show the groups, hosts and costs of a layout before anything starts",
        description="Show who sits where, which groups there are, what they open and cost, and which cross hosts.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "operands", nargs="*", metavar="PLAN", help="PLAN, or PLAN diff PLAN: a JSON file, or text such as tp=2,pp=2"
    )
    parser.add_argument("--hosts", metavar="HOSTS", help="number of hosts of equal size, or a host name for each rank: a,a,b,b")
    parser.add_argument("--rank", type=int, metavar="R", help="show one rank instead of the world")
    parser.add_argument("--json", action="store_true", help="print the plan, or the differences, as JSON")
    parser.add_argument("--svg", type=Path, metavar="FILE", help="also draw the plan into FILE")
    parser.add_argument("--png", type=Path, metavar="FILE", help="the same as PNG; needs matplotlib")
    add_size_options(parser)
    parser.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> int:
    _check_files(options)
    if options.operands and (options.sizes or options.peer):
        extra = options.sizes[0][0] if options.sizes else "--from"
        raise ConfigError(f"a PLAN says its own sizes; leave out `{extra}`, or leave out {options.operands[0]!r}")
    match options.operands:
        case []:
            plan = config_from_options(options).plan(hosts=parse_hosts(options.hosts))
        case [text]:
            plan = plan_from_text(text, hosts=parse_hosts(options.hosts))
        case [before, "diff", after]:
            hosts = parse_hosts(options.hosts)
            old, new = (_check_size(plan_from_text(text, hosts=hosts)) for text in (before, after))
            _show_differences(old.diff(new), as_json=options.json)
            return 0
        case _:
            raise ConfigError(f"cannot read {' '.join(options.operands)!r}; write PLAN, or PLAN diff PLAN")
    if options.rank is None or options.json or options.svg or options.png:
        _check_size(plan)
    if options.svg is not None:
        options.svg.write_text(plan.to_svg(), encoding="utf-8")
    if options.png is not None:
        plan.to_png(options.png)
    if options.json:
        sys.stdout.write(f"{plan.to_json()}\n")
    elif options.rank is not None:
        show_tables(_rank_headline(plan, options.rank), [_rank_table(plan, options.rank)])
    else:
        show_tables(plan.headline, plan.tables())
    return 0


def _check_size(plan: Plan) -> Plan:
    if plan.world_size > _MOST_RANKS:
        raise ConfigError(
            f"this world has {plan.world_size:,} ranks; worlds of up to {_MOST_RANKS:,} are shown whole. "
            "`plan --rank R` shows one rank of a world of any size"
        )
    return plan


def _check_files(options: argparse.Namespace) -> None:
    for kind in ("svg", "png"):
        path: Path | None = getattr(options, kind)
        if path is not None and path.suffix.lower() not in ("", f".{kind}"):
            raise ConfigError(f"--{kind} {path}: this option writes {kind.upper()}; name the file {path.with_suffix(f'.{kind}')}")


def _show_differences(differences: tuple[Difference, ...], *, as_json: bool) -> None:
    if as_json:
        sys.stdout.write(f"{json.dumps([asdict(difference) for difference in differences], indent=2)}\n")
        return
    if not differences:
        sys.stdout.write("The plans are equal.\n")
        return
    rows = tuple((difference.what, difference.before, difference.after) for difference in differences)
    show_tables(
        f"{len(rows)} difference{'' if len(rows) == 1 else 's'}",
        [Table(title="Differences", header=("what", "before", "after"), rows=rows)],
    )


def _rank_headline(plan: Plan, rank: int) -> str:
    if rank not in plan.layout.ranks:
        raise ConfigError(
            f"--rank {rank}: the world has {plan.world_size} ranks, {min(plan.layout.ranks)} to {max(plan.layout.ranks)}"
        )
    view = plan.for_rank(rank)
    return f"rank {rank}: {view.coordinate}; local rank {view.local_rank} on {view.host}; {view.budget}"


def _rank_table(plan: Plan, rank: int) -> Table:
    rows = tuple(
        (
            group.label,
            f"{group.world_size:,}",
            "yes" if group.crosses_hosts else "no",
            " + ".join(map(str, group.opens)) or "-",
            group.reason,
        )
        for group in plan.for_rank(rank).groups
    )
    return Table(title="Groups", header=("group", "ranks", "crosses hosts", "opens", "why"), rows=rows)
