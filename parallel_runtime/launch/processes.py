"""Ranks as processes of this machine: start them, watch them, bring back what they return."""

import multiprocessing
import os
import pickle
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from types import TracebackType
from typing import Final, Generic, Self, TypeVar, final

from parallel_runtime.comm.c10d import HostedStore, listen_store, need_descriptors
from parallel_runtime.config.addresses import is_loopback
from parallel_runtime.config.environment import current_environ
from parallel_runtime.config.parallel_config import ParallelConfig
from parallel_runtime.context.obituaries import announce_supervisor, post_obituary
from parallel_runtime.errors import (
    ArgumentError,
    ConfigError,
    ContextStateError,
    LauncherEnvironmentError,
    LaunchError,
    RankFailedError,
)
from parallel_runtime.launch.fork_server import RANK_MODULES, preloading
from parallel_runtime.launch.guards import refuse_launched_rank, refuse_removed_directory, refuse_unguarded_main
from parallel_runtime.launch.output import RankOutput, close_all, fill_standard_descriptors, log_path
from parallel_runtime.launch.payload import name_of, pack_call
from parallel_runtime.launch.pinning import Pin, core_shares, numa_nodes
from parallel_runtime.launch.rank_process import Job, RankTask, run_rank
from parallel_runtime.launch.supervise import RankHandle, Supervisor, end_processes
from parallel_runtime.launch.wires import Descriptor, MessageReader, sealed
from parallel_runtime.terms import Rank
from parallel_runtime.values import seconds_problem, shown, type_problem

__all__ = ["LocalRanks", "check_startable", "check_timeout", "threads_per_rank"]

_T = TypeVar("_T")

_OWN_DESCRIPTORS: Final = 24
_RANK_DESCRIPTORS: Final = 4
_MOST_THREADS: Final = 1024


@final
class LocalRanks(Generic[_T]):
    """Every rank of a world as a process of this machine, for as long as a ``with`` block lasts.

    Args:
        fn: Runs as ``fn(ctx, *args)`` on every rank. A function that other processes can import by name.
        config: Of the context that each rank enters; ranks are numbered from 0.
        args: Further arguments; each rank gets a copy. Connections, queues and locks of ``multiprocessing`` may be among them.
        host: Loopback address on which the ranks meet, ``"127.0.0.1"`` or ``"::1"``.
        log_dir: Folder in which each rank's output goes to a file of its own, ``rank-<rank>.log``.
        prefix_output: Whether each line on the caller's streams begins with ``[rank N]``; then a thread passes output on.
        pin: ``"auto"`` keeps each rank to cores of its own, near to each other, where there are at least two for each rank.

    Leaving the block, in whatever way, ends every rank that still runs.

    Raises:
        ArgumentError: ``fn`` cannot be called, ``config`` is no config, ``host`` is not on loopback, or ``pin`` is unknown.
        ConfigError: The config is for threads, or does not number its ranks from 0.
    """

    def __init__(
        self,
        fn: Callable[..., _T],
        config: ParallelConfig,
        *,
        args: Sequence[object] = (),
        host: str = "127.0.0.1",
        log_dir: str | os.PathLike[str] | None = None,
        prefix_output: bool = False,
        pin: Pin = "none",
    ) -> None:
        check_startable(fn, config, backends=("auto", "gloo", "nccl"))
        if not isinstance(host, str) or not is_loopback(host):
            raise ArgumentError(
                f"host={shown(host)}: ranks started here meet on loopback only, where no other host reaches them; "
                f'use "127.0.0.1", "::1" or "localhost"'
            )
        if pin not in ("none", "auto"):
            raise ArgumentError(f'pin is "none" or "auto", got {pin!r}')
        self._log_dir = None if log_dir is None else Path(log_dir)
        self._prefix_output = prefix_output
        self._pin = pin
        self._fn = fn
        self._config = config
        self._args = args
        self._host = host
        self._handles: list[RankHandle] = []
        self._supervisor: Supervisor | None = None
        self._server: HostedStore | None = None
        self._is_entered = False
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        if self._is_entered:
            raise ContextStateError("LocalRanks is entered once; make a new one to start ranks again")
        self._is_entered = True
        refuse_unguarded_main()
        refuse_launched_rank()
        refuse_removed_directory()
        call, handles = pack_call(self._fn, self._args)
        with ExitStack() as stack:
            stack.callback(close_all, fill_standard_descriptors())
            world_size = self._config.world_size
            need_descriptors(_OWN_DESCRIPTORS + _RANK_DESCRIPTORS * world_size, f"to start {world_size} ranks")
            job = self._make_job(call, stack)
            self._start(job, handles, stack)
            self._stack = stack.pop_all()
        self._supervisor = Supervisor(
            self._handles, what=name_of(self._fn), start_s=self._config.deadlines.join_s, tell=self._tell_the_others
        )
        return self

    def __exit__(self, error_type: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._supervisor = None
        self._stack.close()

    @property
    def pids(self) -> tuple[int, ...]:
        """Process ids in rank order."""
        return tuple(handle.pid for handle in self._handles)

    @property
    def address(self) -> str | None:
        """Where the ranks meet, for ``parallel-runtime doctor --attach``; ``None`` for a single rank and outside the block."""
        if self._server is None:
            return None
        host = f"[{self._host}]" if ":" in self._host else self._host
        return f"{host}:{self._server.port}"

    def check(self) -> bool:
        """Look at the ranks without waiting.

        Returns:
            Whether every rank has returned.

        Raises:
            ContextStateError: Outside the ``with`` block.
            LaunchError: A rank did not start within ``deadlines.join_s``.
            RankFailedError: A rank failed.
        """
        with self._naming_the_log():
            return self._running().check()

    def wait(self, timeout_s: float | None = None, *, since: float | None = None) -> list[_T]:
        """Wait until every rank has returned.

        Args:
            timeout_s: Longest wait in seconds; ``None`` waits as long as they run.
            since: Where these seconds begin, on the monotonic clock; now by default.

        Returns:
            Each rank's result, in rank order.

        Raises:
            ContextStateError: Outside the ``with`` block.
            LaunchError: They did not return in time, or did not start.
            RankFailedError: A rank failed; the first cause comes first, what followed is marked as such.
        """
        supervisor = self._running()
        with self._naming_the_log():
            results = supervisor.wait(timeout_s, time.monotonic() if since is None else since)
        supervisor.wait_for_exit(self._config.deadlines.exit_s)
        return results

    @contextmanager
    def _naming_the_log(self) -> Iterator[None]:
        try:
            yield
        except RankFailedError as error:
            if self._log_dir is not None:
                error.add_note(f"output of rank {error.rank}: {log_path(self._log_dir, error.rank)}")
            raise

    def _running(self) -> Supervisor:
        if self._supervisor is None:
            raise ContextStateError("these ranks are not running; use LocalRanks inside its `with` block")
        return self._supervisor

    def _make_job(self, call: bytes, stack: ExitStack) -> bytes:
        world_size = self._config.world_size
        environ = dict(current_environ())
        num_threads = threads_per_rank(world_size, environ)
        store = None
        if world_size > 1:
            self._server = listen_store(self._host)
            announce_supervisor(self._server.store)
            stack.callback(self._drop_store)
            store = (self._host, self._server.port)
        return pickle.dumps(Job(config=self._config, call=call, environ=environ, num_threads=num_threads, store=store))

    def _tell_the_others(self, pid: int, text: str) -> None:
        if self._server is not None:
            post_obituary(self._server.store, pid, text)

    def _drop_store(self) -> None:
        self._server = None

    def _start(self, job: bytes, arguments: Sequence[object], stack: ExitStack) -> None:
        world_size = self._config.world_size
        output = stack.enter_context(RankOutput(world_size, log_dir=self._log_dir, prefix_output=self._prefix_output))
        shares = core_shares(sorted(os.sched_getaffinity(0)), numa_nodes(), world_size) if self._pin == "auto" else ()
        lifeline_read, lifeline_write = os.pipe()
        stack.callback(end_processes, self._handles, lifeline_write)
        with ExitStack() as handed_over, preloading(*RANK_MODULES):
            handed_over.callback(os.close, lifeline_read)
            job_fd = sealed(job)
            handed_over.callback(os.close, job_fd)
            for rank in range(world_size):
                messages, outcome = os.pipe()
                reader = MessageReader(messages)
                task = RankTask(
                    rank=Rank(rank),
                    job=Descriptor(job_fd),
                    outcome=Descriptor(outcome),
                    lifeline=Descriptor(lifeline_read),
                    output=tuple(map(Descriptor, output.of(rank))),
                    handles=arguments,
                    cores=shares[rank] if shares else (),
                )
                try:
                    self._handles.append(_start_process(task, reader))
                finally:
                    os.close(outcome)
        output.handed_over()


def check_startable(fn: Callable[..., object], config: ParallelConfig, *, backends: Sequence[str]) -> None:
    """Refuse what can never run on ranks started here.

    Args:
        fn: Must be callable.
        config: Must be resolved, number its ranks from 0, and use one of ``backends``.
        backends: What the caller can serve.

    Raises:
        ArgumentError: ``fn`` cannot be called, or ``config`` is something else.
        ConfigError: The config does not fit.
    """
    if not callable(fn):
        raise ArgumentError(f"fn must be a function that takes the context first, got a {type(fn).__name__}")
    if problem := type_problem("config", config, ParallelConfig, "use one such as ParallelConfig(tp=2)"):
        raise ArgumentError(problem)
    if not config.is_resolved:
        raise ConfigError("a size of -1 needs a number of ranks; use config.resolve(world_size=...) before starting ranks")
    if tuple(config.layout.ranks) != tuple(range(config.world_size)):
        raise ConfigError(
            f"ranks started here are numbered 0..{config.world_size - 1}, but the config numbers them "
            f"{list(config.layout.ranks)}; leave rank_offset and ranks out"
        )
    if config.backend not in backends:
        raise ConfigError(f"backend={config.backend!r} does not fit here; use one of {', '.join(backends)}")


def check_timeout(timeout_s: float | None) -> None:
    """Refuse what is no limit of a run.

    Args:
        timeout_s: Seconds, or ``None`` for no limit.

    Raises:
        ArgumentError: It is something else.
    """
    if timeout_s is not None and (problem := seconds_problem("timeout_s", timeout_s)):
        raise ArgumentError(f"{problem}; None sets no limit")


def threads_per_rank(world_size: int, environ: Mapping[str, str]) -> int:
    """Intra-op threads of one of the ranks on this machine.

    Args:
        world_size: Ranks that share the cores this process may use.
        environ: Where ``OMP_NUM_THREADS`` is looked up; it decides if set.

    Returns:
        The number, at least 1.

    Raises:
        LauncherEnvironmentError: ``OMP_NUM_THREADS`` is set to something else than 1 to 1024, or a list that begins so.
    """
    text = environ.get("OMP_NUM_THREADS", "")
    chosen = text.split(",")[0].strip()
    if chosen:
        if not re.fullmatch("0*[1-9][0-9]{0,3}", chosen) or int(chosen) > _MOST_THREADS:
            raise LauncherEnvironmentError(
                f"OMP_NUM_THREADS={shown(text)} is not a number of threads of one rank; use 1 to {_MOST_THREADS}, or unset it"
            )
        return int(chosen)
    return max(1, len(os.sched_getaffinity(0)) // world_size)


def _start_process(task: RankTask, reader: MessageReader) -> RankHandle:
    context = multiprocessing.get_context("forkserver")
    process: ForkServerProcess = context.Process(target=run_rank, args=(task,), name=f"rank-{task.rank}")
    try:
        process.start()
    except Exception as error:
        reader.close()
        raise LaunchError(f"the process of rank {task.rank} could not be started: {error}") from error
    return RankHandle(task.rank, process, reader)
