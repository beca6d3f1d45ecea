"""``parallel-runtime generate``: continue prompts with a model on several ranks, and show it as it happens."""

import argparse
import json
import signal
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from types import FrameType
from typing import Any, NoReturn, Protocol, Self, TextIO, final

import msgspec
from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.text import Text

from parallel_runtime.cli.engine_options import add_engine_options, engine_config_from_options, show_dry_run
from parallel_runtime.errors import RequestError
from parallel_runtime.serving import Engine, EngineConfig, Prompt, SamplingParams, StreamEvent

__all__ = ["add_generate", "run_generate"]

_SHORT = 48

_SAMPLING_FLAGS = (
    ("--max-new-tokens", int, "N", "tokens to make at most (default 48)"),
    ("--min-new-tokens", int, "N", "tokens to make at least"),
    ("--temperature", float, "T", "0 (default) takes the most likely token"),
    ("--top-k", int, "K", "draw among the K most likely tokens"),
    ("--top-p", float, "P", "draw among the likeliest that reach P"),
    ("--min-p", float, "P", "draw among tokens at least P times as likely as the likeliest"),
    ("--repetition-penalty", float, "X", "divide the logits of tokens seen by X; 1 (default) changes nothing"),
    ("--presence-penalty", float, "X", "take X off the logits of tokens made"),
    ("--frequency-penalty", float, "X", "take X off the logits of tokens made, as often as they were"),
    ("--seed", int, "N", "makes draws repeatable"),
    ("--n", int, "N", "answers to each prompt"),
    ("--logprobs", int, "N", "with --json: log-probabilities of each token and of the N likeliest"),
)
"""Flag, type, placeholder and help; each is the setting of ``SamplingParams`` with that name."""


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
    for flag, kind, metavar, what in _SAMPLING_FLAGS:
        parser.add_argument(flag, type=kind, metavar=metavar, help=what)
    parser.add_argument("--stop", action="append", default=[], metavar="TEXT", help="end before TEXT; may be given again")
    parser.add_argument("--ignore-eos", action="store_true", help="go on after the model's end of text")
    parser.add_argument("--json", action="store_true", help="write one JSON object per answer instead of text")
    parser.add_argument("--chat", action="store_true", help="hand each prompt over as a user's turn of a chat")
    parser.add_argument("--verbose", action="store_true", help="show every rank: who it is, its shard, its communicators")
    add_engine_options(parser)


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
    if arguments.logprobs is not None and not arguments.json:
        raise RequestError("--logprobs is told in JSON only; add --json")
    config = engine_config_from_options(arguments)
    if arguments.dry_run:
        return show_dry_run(config, as_json=arguments.json)
    sampling = _sampling(config, arguments)
    notes = Console(stderr=True, highlight=False, soft_wrap=True)
    with ExitStack() as stack:
        stack.enter_context(_ended_by_sigterm())
        started = time.perf_counter()
        with notes.status(f"starting {config.replicas * config.parallel.world_size} rank(s) with {config.model}"):
            engine = stack.enter_context(Engine(config))
        _say_layout(notes, engine, arguments, time.perf_counter() - started)
        _show(engine, arguments, sampling, notes)
    return 0


def _sampling(config: EngineConfig, arguments: argparse.Namespace) -> SamplingParams:
    """The engine's own settings, or else a short answer, with what the flags say."""
    names = (flag.removeprefix("--").replace("-", "_") for flag, *_ in _SAMPLING_FLAGS)
    given = {name: value for name in names if (value := getattr(arguments, name)) is not None}
    given |= {"stop": tuple(arguments.stop)} if arguments.stop else {}
    given |= {"ignore_eos": True} if arguments.ignore_eos else {}
    is_own = config.sampling != SamplingParams()
    return msgspec.structs.replace(config.sampling if is_own else SamplingParams(max_new_tokens=_SHORT), **given)


@contextmanager
def _ended_by_sigterm() -> Iterator[None]:
    """SIGTERM ends the block as an exception does, so that no rank is left behind."""

    def end(number: int, _: FrameType | None) -> NoReturn:
        raise SystemExit(128 + number)

    if threading.current_thread() is not threading.main_thread():  # which alone may say so
        yield
        return
    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _say_layout(notes: Console, engine: Engine, arguments: argparse.Namespace, start_s: float) -> None:
    config, parallel = engine.config, engine.parallel
    sizes = f"tp={parallel.tp} pp={parallel.pp} dp={parallel.dp}" + (f" x {config.replicas}" if config.replicas > 1 else "")
    ranks = f"{config.replicas * parallel.world_size} rank(s) as {config.executor}"
    notes.print(f"{config.model} on {sizes}: {ranks}, ready in {start_s:.1f} s", markup=False)
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
        prompts = [[{"role": "user", "content": text}] for text in texts]
    engine.read_prompts(prompts, sampling)  # refuses before anything is shown
    heads = [f"> {text}\n" if arguments.chat else text for text in texts for _ in range(sampling.n)]
    started, num_tokens = time.perf_counter(), 0
    with _display(heads, arguments, sampling) as display:
        for event in engine.stream(prompts, sampling):
            num_tokens += len(event.token_ids)
            display.update(event.index * sampling.n + event.sample, event)
    seconds = time.perf_counter() - started
    notes.print(f"{num_tokens} tokens in {seconds:.1f} s: {num_tokens / seconds:.1f} tokens/s", markup=False)


def _display(heads: Sequence[str], arguments: argparse.Namespace, sampling: SamplingParams) -> "_Display":
    console = Console(highlight=False)
    if arguments.json:
        return _JsonDisplay(arguments.prompts, sys.stdout, num_samples=sampling.n)
    return _LiveDisplay(heads, console, sampling.max_new_tokens) if console.is_terminal else _PlainDisplay(heads, sys.stdout)


class _Display(Protocol):
    """Shows events of several answers for as long as a ``with`` block lasts."""

    def __enter__(self) -> Self: ...

    def __exit__(self, *exc: object) -> None: ...

    def update(self, answer: int, event: StreamEvent) -> None: ...


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

    def update(self, answer: int, event: StreamEvent) -> None:
        self._waiting[answer] += event.text
        self._is_ended[answer] = event.finish_reason is not None
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
    """For terminals: all answers grow at once above a bar per answer that counts its tokens."""

    def __init__(self, heads: Sequence[str], console: Console, max_new_tokens: int) -> None:
        self._texts = [Text(head, style="bold") for head in heads]
        bar = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("tokens"), TimeElapsedColumn())
        self._progress = Progress(*bar, console=console)
        self._bars = [self._progress.add_task(f"answer {index + 1}", total=max_new_tokens) for index in range(len(heads))]
        body = Group(*self._texts, self._progress)
        self._live = Live(body, console=console, refresh_per_second=10, vertical_overflow="visible")

    def __enter__(self) -> Self:
        self._live.__enter__()
        return self

    def __exit__(self, *exc: object) -> None:
        self._live.__exit__(None, None, None)

    def update(self, answer: int, event: StreamEvent) -> None:
        self._texts[answer].append(event.text, style="default not bold")
        self._progress.advance(self._bars[answer], len(event.token_ids))
        if event.finish_reason is not None:
            self._progress.update(self._bars[answer], description=f"answer {answer + 1} ({event.finish_reason})")
            self._progress.stop_task(self._bars[answer])


@final
class _JsonDisplay:
    """For programs: a line per answer, in the order in which they end."""

    def __init__(self, prompts: Sequence[str], out: TextIO, *, num_samples: int) -> None:
        self._prompts = prompts
        self._events: list[list[StreamEvent]] = [[] for _ in range(len(prompts) * num_samples)]
        self._out = out

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self._out.flush()

    def update(self, answer: int, event: StreamEvent) -> None:
        self._events[answer].append(event)
        if event.finish_reason is not None:
            self._out.write(json.dumps(self._told(self._events[answer]), ensure_ascii=False) + "\n")
            self._out.flush()

    def _told(self, events: Sequence[StreamEvent]) -> dict[str, object]:
        last = events[-1]
        told: dict[str, object] = {
            "index": last.index,
            "sample": last.sample,
            "prompt": self._prompts[last.index],
            "text": "".join(event.text for event in events),
            "token_ids": [token for event in events for token in event.token_ids],
            "finish_reason": last.finish_reason,
            "stopped_by": last.stopped_by,
            "usage": {"prompt_tokens": last.usage.num_prompt_tokens, "new_tokens": last.usage.num_new_tokens},
        }
        if logprobs := [entry for event in events for entry in event.logprobs]:
            told["logprobs"] = [{"logprob": entry.logprob, "top": entry.top} for entry in logprobs]
        return told
