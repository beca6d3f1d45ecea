"""``parallel-runtime trace``: run a model for a moment and write down what every rank did when."""

import argparse
import json
import sys
from pathlib import Path
from typing import Any, Final

import msgspec

from parallel_runtime.cli.engine_options import add_engine_options, engine_config_from_options, show_dry_run
from parallel_runtime.cli.tables import show_tables
from parallel_runtime.cli.trace_picture import trace_picture
from parallel_runtime.config.picture import write_png
from parallel_runtime.config.plan_text import Table
from parallel_runtime.errors import ConfigError
from parallel_runtime.serving import Engine, EngineConfig, SamplingParams
from parallel_runtime.serving.controls import RankProfile

__all__ = ["add_trace"]

_PROMPT: Final = "The parallel runtime under a large model has to"
_EXAMPLES = """\
examples:
  parallel-runtime trace --pp 2 --num-microbatches 4 -o trace.json
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
        description="Serve some requests on an engine, and write what every rank did when: forwards, sampling, scheduling and "
        "every operation of every group, with arrows between the members of a collective and along every message.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.set_defaults(run=_run)
    parser.add_argument("-o", "--output", default="trace.json", metavar="FILE", help="the trace (default trace.json)")
    parser.add_argument("--picture", type=Path, metavar="FILE", help="also draw the middle of the run: .svg, or .png")
    parser.add_argument("--requests", type=int, default=16, metavar="N", help="to each data-parallel rank, at once (default 16)")
    parser.add_argument("--max-new-tokens", type=int, default=24, metavar="N", help="of each request (default 24)")
    parser.add_argument("--json", action="store_true", help="write the shares as JSON instead of a table")
    add_engine_options(parser)


def _run(options: argparse.Namespace) -> int:
    for name in ("requests", "max_new_tokens"):
        if getattr(options, name) < 1:
            raise ConfigError(f"--{name.replace('_', '-')} {getattr(options, name)}: at least 1")
    if options.picture is not None and options.picture.suffix not in (".svg", ".png"):
        raise ConfigError(f"--picture {options.picture}: name a file that ends in .svg or .png")
    config = engine_config_from_options(options)
    if options.dry_run:
        return show_dry_run(config, as_json=options.json)
    profiles = _trace(config, options)
    if options.picture is not None:
        _draw(options.picture, profiles, config)
    _tell(profiles, options)
    return 0


def _trace(config: EngineConfig, options: argparse.Namespace) -> tuple[RankProfile, ...]:
    sampling = SamplingParams(max_new_tokens=options.max_new_tokens, ignore_eos=True)
    count = options.requests * config.parallel.dp * config.replicas
    if options.serving_max_batch_requests is None:  # as many in each of the batches that are under way
        slots = config.serving.num_microbatches or config.parallel.pp
        config = config.replace(serving=config.serving.replace(max_batch_requests=-(-options.requests // slots)))
    with Engine(config) as engine:
        prompt = engine.tokenizer.encode(_PROMPT)
        prompts = [(*prompt, *prompt[1 : 2 + number % len(prompt)]) for number in range(count)]  # that differ
        engine.controls.start_trace()
        engine.generate(prompts, sampling)
        return engine.controls.stop_trace(options.output)


def _draw(path: Path, profiles: tuple[RankProfile, ...], config: EngineConfig) -> None:
    slots = config.serving.num_microbatches or config.parallel.pp
    title = f"tp={config.parallel.tp} pp={config.parallel.pp}, {slots} micro-batches"
    picture = trace_picture(profiles, title, window_s=0.5)
    if path.suffix == ".png":
        write_png(picture, path)
    else:
        path.write_text(picture.to_svg(), encoding="utf-8")


def _tell(profiles: tuple[RankProfile, ...], options: argparse.Namespace) -> None:
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
