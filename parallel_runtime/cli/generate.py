"""``parallel-runtime generate``: continue prompts with a model on several ranks, and show it as it happens."""

import argparse
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any, Protocol, Self, TextIO, final

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.text import Text

from parallel_runtime.config.parallel_config import ParallelConfig
from parallel_runtime.errors import RequestError
from parallel_runtime.serving import Engine, Prompt, SamplingParams, ServingConfig, StreamEvent

__all__ = ["add_generate", "run_generate"]


def add_generate(commands: "argparse._SubParsersAction[Any]") -> None:
    """Add the subcommand ``generate``.

    Args:
        commands: Where to add it.
    """
    parser = commands.add_parser(
        "generate",
        help="continue prompts with a model on several ranks of this machine",
        description="Continue prompts with a model on tp*pp*dp ranks, each a process of this machine; show the text as it comes.",
        allow_abbrev=False,
    )
    parser.set_defaults(run=run_generate)
    parser.add_argument("prompts", nargs="+", metavar="PROMPT", help="text to continue; each is a request of its own")
    parser.add_argument("--model", default="smollm2", help="smollm2 (default), a .gguf file or a directory with config.json")
    for axis, what in (("tp", "tensor"), ("pp", "pipeline"), ("dp", "data")):
        parser.add_argument(f"--{axis}", type=int, default=1, metavar="N", help=f"{what}-parallel size")
    parser.add_argument("--max-new-tokens", type=int, default=48, metavar="N", help="tokens to make at most (default 48)")
    parser.add_argument("--temperature", type=float, default=0.0, metavar="T", help="0 (default) takes the most likely token")
    parser.add_argument("--top-k", type=int, default=None, metavar="K", help="draw among the K most likely tokens")
    parser.add_argument("--top-p", type=float, default=1.0, metavar="P", help="draw among the likeliest that reach P")
    parser.add_argument("--seed", type=int, default=None, metavar="N", help="makes draws repeatable")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help="of weights and KV cache")
    parser.add_argument("--chat", action="store_true", help="hand each prompt over as a user's turn of a chat")
    parser.add_argument(
        "--executor", choices=("processes", "threads"), default="processes", help="what ranks are; threads share this process"
    )
    parser.add_argument("--verbose", action="store_true", help="show every rank: who it is, its shard, its communicators")


def run_generate(arguments: argparse.Namespace) -> int:
    """Run ``generate``. Text goes to stdout, everything about the run to stderr.

    Args:
        arguments: As parsed.

    Returns:
        The exit status: 0.

    Raises:
        RequestError: A prompt is empty, or asks for more than can be served.
        ParallelRuntimeError: The model or the sizes are wrong, or a rank failed.
    """
    for number, prompt in enumerate(arguments.prompts, 1):
        if not prompt:
            raise RequestError(f"prompt {number} is empty; give at least one character")
    sampling = SamplingParams(
        max_new_tokens=arguments.max_new_tokens,
        temperature=arguments.temperature,
        top_k=arguments.top_k,
        top_p=arguments.top_p,
        seed=arguments.seed,
    )
    serving = ServingConfig(dtype=arguments.dtype)
    parallel = ParallelConfig(tp=arguments.tp, pp=arguments.pp, dp=arguments.dp)
    notes = Console(stderr=True, highlight=False, soft_wrap=True)
    with ExitStack() as stack:
        started = time.perf_counter()
        with notes.status(f"starting {parallel.world_size} rank(s) with {arguments.model}"):
            engine = stack.enter_context(Engine(arguments.model, parallel=parallel, serving=serving, executor=arguments.executor))
        _say_layout(notes, engine, arguments, time.perf_counter() - started)
        _show(engine, arguments, sampling, notes)
    return 0


def _say_layout(notes: Console, engine: Engine, arguments: argparse.Namespace, start_s: float) -> None:
    world_size = engine.parallel.world_size
    sizes = f"tp={arguments.tp} pp={arguments.pp} dp={arguments.dp}"
    notes.print(
        f"{arguments.model} on {sizes}: {world_size} rank(s) as {arguments.executor}, ready in {start_s:.1f} s", markup=False
    )
    if arguments.verbose:
        for replica in engine.replicas:
            blocks = f"{replica.num_blocks} blocks of {replica.page_size} tokens of KV cache"
            notes.print(
                f"  replica dp={replica.dp_rank}: {blocks}, up to {replica.max_request_tokens} tokens a request", markup=False
            )
            for line in replica.ranks:
                notes.print(f"    {line}", markup=False)


def _show(engine: Engine, arguments: argparse.Namespace, sampling: SamplingParams, notes: Console) -> None:
    texts: Sequence[str] = arguments.prompts
    prompts: Sequence[Prompt] = texts
    if arguments.chat:
        prompts = [engine.tokenizer.chat([{"role": "user", "content": text}]) for text in texts]
    heads = [f"> {text}\n" if arguments.chat else text for text in texts]
    console = Console(highlight=False)
    display: _Display = (
        _LiveDisplay(heads, console, sampling.max_new_tokens) if console.is_terminal else _PlainDisplay(heads, sys.stdout)
    )
    started, num_tokens = time.perf_counter(), 0
    with display:
        for event in engine.stream(prompts, sampling):
            num_tokens += len(event.token_ids)
            display.update(event)
    seconds = time.perf_counter() - started
    notes.print(f"{num_tokens} tokens in {seconds:.1f} s: {num_tokens / seconds:.1f} tokens/s", markup=False)


class _Display(Protocol):
    """Shows events of several prompts for as long as a ``with`` block lasts."""

    def __enter__(self) -> Self: ...

    def __exit__(self, *exc: object) -> None: ...

    def update(self, event: StreamEvent) -> None: ...


@final
class _PlainDisplay:
    """For files and pipes: one prompt after another; what comes early waits for its turn."""

    def __init__(self, heads: Sequence[str], out: TextIO) -> None:
        self._waiting = list(heads)
        self._is_ended = [False] * len(heads)
        self._current = 0
        self._out = out

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self._out.flush()

    def update(self, event: StreamEvent) -> None:
        self._waiting[event.index] += event.text
        self._is_ended[event.index] = event.finish_reason is not None
        self._flush()

    def _flush(self) -> None:
        while self._current < len(self._waiting):
            self._out.write(self._waiting[self._current])
            self._waiting[self._current] = ""
            if not self._is_ended[self._current]:
                break
            self._out.write("\n")
            self._current += 1
        self._out.flush()


@final
class _LiveDisplay:
    """For terminals: all prompts grow at once above a bar per prompt that counts its tokens."""

    def __init__(self, heads: Sequence[str], console: Console, max_new_tokens: int) -> None:
        self._texts = [Text(head, style="bold") for head in heads]
        bar = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("tokens"), TimeElapsedColumn())
        self._progress = Progress(*bar, console=console)
        self._bars = [self._progress.add_task(f"prompt {index + 1}", total=max_new_tokens) for index in range(len(heads))]
        body = Group(*self._texts, self._progress)
        self._live = Live(body, console=console, refresh_per_second=10, vertical_overflow="visible")

    def __enter__(self) -> Self:
        self._live.__enter__()
        return self

    def __exit__(self, *exc: object) -> None:
        self._live.__exit__(None, None, None)

    def update(self, event: StreamEvent) -> None:
        self._texts[event.index].append(event.text, style="default not bold")
        self._progress.advance(self._bars[event.index], len(event.token_ids))
        if event.finish_reason is not None:
            self._progress.update(self._bars[event.index], description=f"prompt {event.index + 1} ({event.finish_reason})")
            self._progress.stop_task(self._bars[event.index])
