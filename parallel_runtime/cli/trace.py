"""``parallel-runtime trace``: run a model for a moment and write down what every rank did when."""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import msgspec

from parallel_runtime.cli.sizes import add_size_options, config_from_options
from parallel_runtime.cli.tables import show_tables
from parallel_runtime.cli.trace_picture import trace_picture
from parallel_runtime.cli.traced_run import TracedRun, run_traced
from parallel_runtime.config import ParallelConfig
from parallel_runtime.config.picture import write_png
from parallel_runtime.config.plan_text import Table
from parallel_runtime.errors import ConfigError
from parallel_runtime.launch import launch, run_threads
from parallel_runtime.serving import ServingConfig
from parallel_runtime.serving.controls import RankProfile

__all__ = ["add_trace"]

_EXAMPLES = """\
examples:
  parallel-runtime trace --pp 2 --microbatches 4 -o trace.json
  parallel-runtime trace --tp 2 -o trace.json --picture trace.svg
open the file in https://ui.perfetto.dev or chrome://tracing
"""


def add_trace(commands: "argparse._SubParsersAction[Any]") -> None:
    """Add the subcommand ``trace``.

    Args:
        commands: Where to add it.
    """
    parser = commands.add_parser(
        "trace",
        help="run a model for a moment and write a trace of all ranks",
        description="Serve some requests on the ranks of a layout, each a process of this machine, and write what every rank did "
        "when: forwards, sampling, scheduling and every operation of every group, with collectives joined by arrows.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.set_defaults(run=_run)
    parser.add_argument("--model", default="smollm2", help="smollm2 (default), a .gguf file or a directory with config.json")
    parser.add_argument("-o", "--output", default="trace.json", metavar="FILE", help="the trace (default trace.json)")
    parser.add_argument("--picture", type=Path, metavar="FILE", help="also draw the middle of the run: .svg, or .png")
    parser.add_argument("--requests", type=int, default=16, metavar="N", help="to each data-parallel rank, at once (default 16)")
    parser.add_argument("--max-new-tokens", type=int, default=24, metavar="N", help="of each request (default 24)")
    parser.add_argument("--microbatches", type=int, metavar="N", help="batches under way at a time (default: one per stage)")
    parser.add_argument("--json", action="store_true", help="write the shares as JSON instead of a table")
    add_size_options(parser)


def _run(options: argparse.Namespace) -> int:
    config = config_from_options(options)
    for name in ("requests", "max_new_tokens", "microbatches"):
        value: int | None = getattr(options, name)
        if value is not None and value < 1:
            raise ConfigError(f"--{name.replace('_', '-')} {value}: at least 1")
    if options.picture is not None and options.picture.suffix not in (".svg", ".png"):
        raise ConfigError(f"--picture {options.picture}: name a file that ends in .svg or .png")
    slots: int = options.microbatches or config.pp
    serving = ServingConfig(num_microbatches=slots, max_batch_requests=-(-options.requests // slots))
    run = TracedRun(
        model=options.model,
        serving=serving,
        num_requests=options.requests,
        max_new_tokens=options.max_new_tokens,
        path=str(Path(options.output).resolve()),
    )
    start = run_threads if config.backend == "local" else launch
    profiles = start(run_traced, config, run)
    if options.picture is not None:
        _draw(options.picture, profiles, config, slots)
    _tell(profiles, options)
    return 0


def _draw(path: Path, profiles: list[RankProfile], config: ParallelConfig, slots: int) -> None:
    picture = trace_picture(profiles, f"tp={config.tp} pp={config.pp}, {slots} micro-batches", window_s=0.5)
    if path.suffix == ".png":
        write_png(picture, path)
    else:
        path.write_text(picture.to_svg(), encoding="utf-8")


def _tell(profiles: list[RankProfile], options: argparse.Namespace) -> None:
    if options.json:
        told = [{name: value for name, value in msgspec.to_builtins(each).items() if name != "spans"} for each in profiles]
        sys.stdout.write(f"{json.dumps({'trace': options.output, 'ranks': told}, indent=2)}\n")
        return
    rows = tuple(
        (str(each.rank), str(each.stage), f"{each.seconds:.2f}", f"{each.busy:.1%}", f"{each.scheduling:.1%}")
        for each in profiles
    )
    table = Table(title="Shares of the time between a rank's first batch and its last", header=_HEADER, rows=rows)
    show_tables(f"{options.output}: {len(profiles)} ranks; open it in https://ui.perfetto.dev", [table])


_HEADER = ("rank", "stage", "seconds", "computes", "schedules")
