"""Where the ranks of an engine run: what every one of them executes, and ranks as threads behind the same face as processes."""

import threading
from collections.abc import Sequence
from contextlib import ExitStack
from itertools import chain
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from types import TracebackType
from typing import Protocol, Self, final

import torch

from parallel_runtime.config.parallel_config import ParallelConfig
from parallel_runtime.context import ParallelContext
from parallel_runtime.errors import LaunchError
from parallel_runtime.launch import LocalRanks, run_threads
from parallel_runtime.serving.scheduler import Scheduler
from parallel_runtime.serving.serving_config import ServingConfig
from parallel_runtime.serving.worker import TpModelWorker

__all__ = ["RankExecutor", "ThreadRanks", "serve_rank", "serve_rank_process", "start_world"]


class RankExecutor(Protocol):
    """Ranks that run for as long as a ``with`` block lasts; ``LocalRanks`` is one."""

    def __enter__(self) -> Self: ...

    def __exit__(
        self, error_type: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    def check(self) -> bool:
        """Whether every rank has returned; raises the failure of one that has failed. Never waits."""
        ...

    def wait(self, timeout_s: float | None = None) -> object:
        """Wait until every rank has returned and its process, where it has one, is gone."""
        ...


def serve_rank(ctx: ParallelContext, model: str, config: ServingConfig, links: Sequence[Connection]) -> None:
    """Serve a model from one rank until the front process ends it.

    Args:
        ctx: Open context of this rank.
        model: Name or path of the model.
        config: How to serve it.
        links: The leaders' ends of the links to the front process, one per data-parallel rank. This rank closes its own.

    Raises:
        CheckpointError: The model cannot be read.
        ConfigError: The model cannot be served like this.
        PeerError: Another rank of the replica failed.

    Collective: all ranks of the replica.
    """
    coordinate = ctx.coordinate
    leads = coordinate.tp == coordinate.cp == coordinate.pp == 0
    link = links[coordinate.dp] if leads else None
    if config.count_operations:
        ctx.start_stats()
    try:
        worker = TpModelWorker(ctx, model=model, config=config)
        Scheduler(ctx, worker, link=link).run()
    finally:
        if link is not None:
            link.close()


def serve_rank_process(
    ctx: ParallelContext, model: str, config: ServingConfig, links: Sequence[Connection], num_threads: int | None = None
) -> None:
    """``serve_rank`` in a process of its own, which got a copy of every link and keeps none that belongs to another rank.

    Args:
        ctx: Open context of this rank.
        model: Name or path of the model.
        config: How to serve it.
        links: As for ``serve_rank``.
        num_threads: Intra-op threads of this rank, where other replicas share the cores; ``None`` leaves the launcher's.

    Raises:
        ParallelRuntimeError: As for ``serve_rank``.
    """
    if num_threads is not None:
        torch.set_num_threads(num_threads)
    coordinate = ctx.coordinate
    leads = coordinate.tp == coordinate.cp == coordinate.pp == 0
    for dp_rank, link in enumerate(links):
        if not leads or dp_rank != coordinate.dp:
            link.close()
    serve_rank(ctx, model, config, links)


def start_world(
    parallel: ParallelConfig,
    model: str,
    config: ServingConfig,
    stack: ExitStack,
    *,
    as_threads: bool = False,
    num_threads: int | None = None,
) -> tuple[RankExecutor, list[Connection]]:
    """Start the ranks of one world.

    Args:
        parallel: Of the context that each rank enters.
        model: Name or path of the model.
        config: How to serve it.
        stack: Ends the ranks, and closes the links.
        as_threads: Whether ranks are threads of this process.
        num_threads: As for ``serve_rank_process``.

    Returns:
        The ranks, and the front's ends of the links to their leaders, one per data-parallel rank.

    Raises:
        LaunchError: The ranks could not be started.
        ParallelRuntimeError: As for ``LocalRanks``.
    """
    pipes = [Pipe(duplex=True) for _ in range(parallel.dp)]
    for link in chain.from_iterable(pipes):
        stack.callback(link.close)
    fronts, leaders = [front for front, _ in pipes], [leader for _, leader in pipes]
    ranks: RankExecutor
    if as_threads:
        ranks = stack.enter_context(ThreadRanks(parallel, args=(model, config, leaders)))
    else:
        args = (model, config, leaders, num_threads)
        ranks = stack.enter_context(LocalRanks(serve_rank_process, parallel, args=args))
        for link in leaders:
            link.close()
    return ranks, fronts


@final
class ThreadRanks:
    """Every rank of a world as a thread of this process, for as long as a ``with`` block lasts.

    Args:
        config: Of the context that each rank enters.
        args: Further arguments of ``serve_rank``.

    Raises:
        LaunchError: The ranks did not end within ``deadlines.exit_s`` after the block.
    """

    def __init__(self, config: ParallelConfig, *, args: tuple[str, ServingConfig, Sequence[Connection]]) -> None:
        self._config = config
        self._args = args
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="engine-ranks", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, error_type: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        exit_s = self._config.deadlines.exit_s
        self._thread.join(exit_s)
        if self._thread.is_alive() and error is None:
            raise LaunchError(
                f"ranks as threads cannot be ended by force, and these still run {exit_s:g} s after their last step"
            )

    def check(self) -> bool:
        """Look at the ranks without waiting.

        Returns:
            Whether every rank has returned.

        Raises:
            BaseException: What a rank raised.
        """
        if self._thread.is_alive():
            return False
        if self._failure is not None:
            raise self._failure
        return True

    def wait(self, timeout_s: float | None = None) -> None:
        """Wait until every rank has returned.

        Args:
            timeout_s: Longest wait in seconds.
        """
        self._thread.join(timeout_s)

    def _run(self) -> None:
        try:
            run_threads(serve_rank, self._config, *self._args)
        except BaseException as exc:
            self._failure = exc
