"""What runs inside a launched process, from its first line to its last word to the parent."""

import faulthandler
import logging
import multiprocessing
import os
import pickle
import signal
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from threading import Thread
from typing import final

import torch

from parallel_runtime.comm.c10d import connect_store
from parallel_runtime.config.environment import Identity, adopt_environ, variables_of
from parallel_runtime.config.parallel_config import ParallelConfig
from parallel_runtime.context.parallel_context import ParallelContext
from parallel_runtime.context.threads import start_thread
from parallel_runtime.errors import SerializationError
from parallel_runtime.launch.guards import end_forked_copy
from parallel_runtime.launch.outcome import RankFailure, failure_of
from parallel_runtime.launch.payload import unpack_call
from parallel_runtime.launch.wires import Descriptor, read_all, send_message
from parallel_runtime.terms import Rank

__all__ = ["Job", "RankTask", "Result", "Stage", "run_rank"]

_PARENT_GONE_STATUS = 79


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What every rank of a launch is told, once for all of them.

    Attributes:
        config: Of the context that each rank enters.
        call: Function and arguments, from ``pack_call``.
        environ: Variables of the caller.
        num_threads: Intra-op threads of one rank.
        store: Host and port of the parent's store; ``None`` for a world of one.
    """

    config: ParallelConfig
    call: bytes
    environ: Mapping[str, str]
    num_threads: int
    store: tuple[str, int] | None


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class RankTask:
    """What one process is started with; everything big is behind ``job``.

    Attributes:
        rank: Which rank it becomes.
        job: Sealed memory that holds the pickled ``Job``.
        outcome: Write end of the rank's pipe to the parent.
        lifeline: Read end of a pipe that ends when the parent does.
        output: The caller's stdout and stderr.
        handles: Connections, queues and locks among the arguments.
        cores: That the process keeps to; ``()`` for any.
    """

    rank: Rank
    job: Descriptor
    outcome: Descriptor
    lifeline: Descriptor
    output: tuple[Descriptor, ...]
    handles: Sequence[object]
    cores: tuple[int, ...] = ()


@final
@dataclass(frozen=True, slots=True)
class Stage:
    """Message: how far the rank has come, as a clause that follows "rank N is"."""

    text: str


@final
@dataclass(frozen=True, slots=True)
class Result:
    """Message: the function returned; ``data`` is its pickled value."""

    data: bytes


@final
class _Reporter:
    """Sends stages and exactly one last word. A process forked from the rank's says nothing."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._pid = os.getpid()
        self._is_final = False

    def stage(self, text: str) -> None:
        if os.getpid() == self._pid:
            send_message(self._fd, Stage(text))

    def finish(self, outcome: Result | RankFailure) -> None:
        if os.getpid() == self._pid and not self._is_final:
            self._is_final = True
            send_message(self._fd, outcome)


def run_rank(task: RankTask) -> None:
    """Become one rank: enter its context, run the function, report how it went.

    Args:
        task: From the parent.
    """
    pid = os.getpid()
    reporter = _Reporter(task.outcome.fd)
    try:
        _end_with_parent(task.lifeline.fd)
        job: Job = pickle.loads(read_all(task.job.fd))
        _prepare_process(task, job)
        reporter.stage("importing the function and its arguments")
        fn, args = unpack_call(job.call, task.handles)
        reporter.stage("opening its context")
        with ExitStack() as stack:
            ctx = stack.enter_context(_open_context(task.rank, job))
            reporter.stage("running the function")
            try:
                result = _call(fn, ctx, args, task.rank, reporter)
            finally:
                end_forked_copy(pid)
            reporter.stage("closing its context")
        reporter.finish(result)
    except BaseException as error:
        end_forked_copy(pid)
        reporter.finish(failure_of(task.rank, error))


def _call(fn: Callable[..., object], ctx: ParallelContext, args: Sequence[object], rank: Rank, reporter: _Reporter) -> Result:
    """Run the function. Its failure is reported before the context closes, so before any peer can notice and complain."""
    try:
        return _pack_result(fn(ctx, *args))
    except SystemExit as error:
        if error.code in (None, 0):
            return _pack_result(None)
        reporter.finish(failure_of(rank, error, skip_frames=1))
        raise
    except BaseException as error:
        reporter.finish(failure_of(rank, error, skip_frames=1))
        raise


def _pack_result(value: object) -> Result:
    try:
        return Result(pickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL))
    except Exception as error:
        what = f"the result, a {type(value).__qualname__},"
        raise SerializationError(f"{what} cannot be sent back to the parent: {error}") from error


def _open_context(rank: Rank, job: Job) -> ParallelContext:
    host, port = job.store or (None, None)
    store = connect_store(host, port, timeout_s=job.config.deadlines.join_s) if host and port else None
    return ParallelContext(job.config, identity=_identity(rank, job), store=store)


def _identity(rank: Rank, job: Job) -> Identity:
    world_size = job.config.world_size
    host, port = job.store or (None, None)
    return Identity(
        rank=rank,
        world_size=world_size,
        local_rank=rank,
        local_world_size=world_size,
        host_rank=0,
        num_hosts=1,
        master_host=host,
        master_port=port,
    )


def _prepare_process(task: RankTask, job: Job) -> None:
    for descriptor, fd in zip(task.output, (1, 2), strict=True):
        os.dup2(descriptor.fd, fd)
        os.close(descriptor.fd)
    adopt_environ({**job.environ, **variables_of(_identity(task.rank, job)), "OMP_NUM_THREADS": str(job.num_threads)})
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole terminal group; the parent decides what it means
    faulthandler.enable(2)
    multiprocessing.set_start_method("forkserver", force=True)
    if task.cores:
        os.sched_setaffinity(0, task.cores)
    torch.set_num_threads(job.num_threads)
    logging.getLogger(__name__).debug("rank %d runs as pid %d", task.rank, os.getpid())


def _end_with_parent(lifeline: int) -> None:
    def watch() -> None:
        os.read(lifeline, 1)
        os._exit(_PARENT_GONE_STATUS)

    start_thread(Thread(target=watch, name="lifeline", daemon=True), "to end with its parent")
