"""Ranks as threads of this process: the same contexts and groups, started in a millisecond."""

import os
import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Generic, TypeVar, final

from parallel_runtime.comm.c10d import Store, hash_store
from parallel_runtime.comm.local import LocalHub
from parallel_runtime.config.environment import Identity
from parallel_runtime.config.parallel_config import ParallelConfig
from parallel_runtime.context.parallel_context import ParallelContext
from parallel_runtime.context.threads import start_thread
from parallel_runtime.errors import ConfigError, LaunchError, PeerError
from parallel_runtime.launch.guards import end_forked_copy
from parallel_runtime.launch.outcome import failure_of, rank_failed_error
from parallel_runtime.launch.payload import name_of
from parallel_runtime.launch.processes import check_startable, check_timeout
from parallel_runtime.terms import Rank
from parallel_runtime.values import error_text

__all__ = ["run_threads"]

_T = TypeVar("_T")

_BLAME_GRACE_S = 2.0
"""How long a failure that blames a peer waits for that peer's own word."""
_RELEASE_GRACE_S = 5.0
"""How long the other ranks get to end once one has failed."""


def run_threads(
    fn: Callable[..., _T], config: ParallelConfig, *args: object, timeout_s: float | None = None, seed: int | None = None
) -> list[_T]:
    """Run ``fn(ctx, *args)`` on every rank of a world of threads of this process.

    Ranks talk through memory (``backend="auto"`` or ``"local"``), where a deadlock is an error at once, or through gloo
    (``backend="gloo"``). Arguments are shared, not copied. When a rank fails, those that wait for it fail too and do not wait on.

    Args:
        fn: Any function.
        config: Of the context that each rank enters; decides the number of ranks.
        *args: Further arguments, the same objects on every rank.
        timeout_s: Longest run in seconds; ``None`` sets no limit.
        seed: Lets one rank run at a time, from one communication to the next, in an order that this number decides, so that a
            run can be repeated. Not over gloo.

    Returns:
        What each rank returned, in rank order.

    Raises:
        ArgumentError: ``fn`` cannot be called, ``config`` is no config, ``timeout_s`` is not a number of seconds, or ``seed`` is
            no int.
        ConfigError: The backend connects processes only, or cannot keep an order, the config does not number its ranks from 0, or
            this process may not have so many threads.
        LaunchError: The ranks did not finish in time.
        RankFailedError: A rank raised; the exception itself is the cause (``__cause__``).
    """
    check_startable(fn, config, backends=("auto", "local", "gloo", "fake"))
    check_timeout(timeout_s)
    if seed is not None and config.backend == "gloo":
        raise ConfigError(f'seed={seed} orders ranks that talk through memory; backend="gloo" cannot be ordered, use "local"')
    return _ThreadRanks(fn, config, args, seed).run(timeout_s)


@final
class _ThreadRanks(Generic[_T]):
    def __init__(self, fn: Callable[..., _T], config: ParallelConfig, args: Sequence[object], seed: int | None) -> None:
        self._fn = fn
        self._config = config
        self._args = args
        self._pid = os.getpid()
        self._store: Store = hash_store()
        self._hub = None if config.backend == "gloo" else LocalHub(config.world_size, seed=seed)
        self._news: queue.SimpleQueue[tuple[int, BaseException | None]] = queue.SimpleQueue()
        self._results: dict[int, _T] = {}
        self._errors: dict[int, BaseException] = {}
        self._threads = [
            threading.Thread(target=self._run_rank, args=(rank,), name=f"rank-{rank}", daemon=True)
            for rank in range(config.world_size)
        ]

    def run(self, timeout_s: float | None) -> list[_T]:
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        try:
            for thread in self._threads:
                start_thread(thread, f"to run {self._config.world_size} ranks as threads")
            while len(self._results) < self._config.world_size:
                if not self._take_news(deadline):
                    raise self._late_error(timeout_s)
                if self._errors and self._is_settled():
                    raise self._failure()
        except BaseException:
            self._release("the run was ended")
            raise
        for thread in self._threads:
            thread.join(_RELEASE_GRACE_S)
        return [self._results[rank] for rank in range(self._config.world_size)]

    def _run_rank(self, rank: int) -> None:
        size = self._config.world_size
        identity = Identity(rank=Rank(rank), world_size=size, local_rank=rank, local_world_size=size, num_hosts=1, host_rank=0)
        reason = "it has returned"
        try:
            with ParallelContext(self._config, identity=identity, store=self._store, hub=self._hub) as ctx:
                try:
                    result = self._fn(ctx, *self._args)
                except BaseException as error:
                    self._news.put((rank, error))  # before the context closes, so before any peer can notice and complain
                    raise
                finally:
                    end_forked_copy(self._pid)
            self._results[rank] = result
            self._news.put((rank, None))
        except BaseException as error:
            reason = f"it raised {error_text(error)}"
            self._news.put((rank, error))
        finally:
            if self._hub is not None:
                self._hub.leave(rank, reason)

    def _take_news(self, deadline: float | None) -> bool:
        try:
            rank, error = self._news.get(timeout=None if deadline is None else max(0.0, deadline - time.monotonic()))
        except queue.Empty:
            return False
        if error is not None:
            self._errors.setdefault(rank, error)
        return True

    def _is_settled(self) -> bool:
        """Whether the cause is known; a failure that blames a peer waits a moment for the peer's own."""
        until = time.monotonic() + _BLAME_GRACE_S
        while all(isinstance(error, PeerError) for error in self._errors.values()):
            if len(self._errors) + len(self._results) == self._config.world_size or not self._take_news(until):
                break
        return True

    def _failure(self) -> LaunchError:
        self._release("another rank failed")
        failures = [replace(failure_of(rank, error), traceback="") for rank, error in self._errors.items()]
        failed = rank_failed_error(failures, world_size=self._config.world_size, what=name_of(self._fn))
        failed.__cause__ = self._errors[failed.rank]
        return failed

    def _late_error(self, timeout_s: float | None) -> LaunchError:
        late = [rank for rank in range(self._config.world_size) if rank not in self._results]
        return LaunchError(
            f"{len(late)} of {self._config.world_size} ranks had not finished {name_of(self._fn)} within {timeout_s} s: "
            f"rank {', '.join(map(str, late))}"
        )

    def _release(self, reason: str) -> None:
        """Let go every rank that waits for another, and give the threads a bounded time to end."""
        if self._hub is not None:
            for rank in range(self._config.world_size):
                self._hub.leave(rank, reason)
        until = time.monotonic() + _RELEASE_GRACE_S
        for thread in self._threads:
            if thread.ident is not None:
                thread.join(max(0.0, until - time.monotonic()))
