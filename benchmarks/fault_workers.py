"""Runs the trials of the fault campaign: ranks as processes that are used again until a trial ends them, or as threads."""

import gc
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from multiprocessing.connection import Connection
from multiprocessing.connection import wait as wait_for_any
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import final

from benchmarks.fault_trials import GRACE_S, PATIENT, Outcome, Trial, blamed
from parallel_runtime.comm.c10d import Store, connect_store, hash_store, listen_store
from parallel_runtime.comm.local import LocalHub
from parallel_runtime.config.environment import Identity
from parallel_runtime.context import ParallelContext
from parallel_runtime.errors import ParallelRuntimeError
from parallel_runtime.terms import Rank
from parallel_runtime.testing.faults import FaultKind, FaultProbe, run_steps, spoil

__all__ = ["WorkerPool", "run_in_threads"]

_HANG_S = PATIENT.join_s + PATIENT.collective_s + PATIENT.exit_s + 2 * GRACE_S
_SETTLE_S = 3.0
_ENDS_ITS_PROCESS = frozenset({FaultKind.EXIT, FaultKind.OS_EXIT, FaultKind.SIGKILL, FaultKind.SIGSTOP, FaultKind.STALL})


def play(trial: Trial, rank: int, *, store: Store, hub: LocalHub | None, opened_at: list[float]) -> None:
    """One rank's part of a trial: open the context with the fault in it, note when that was done, play the steps, leave."""
    size = trial.config.world_size
    identity = Identity(rank=Rank(rank), world_size=size, local_rank=rank, local_world_size=size, num_hosts=1, host_rank=0)
    probe = FaultProbe(trial.fault, trial.config.layout, rank)
    with ParallelContext(trial.config, identity=identity, store=store, hub=hub, probe=probe) as ctx:
        opened_at.append(time.monotonic())
        run_steps(ctx, spoil(trial.steps, trial.fault) if rank == trial.fault.rank else trial.steps)


def outcome_of(rank: int, error: BaseException | None, start: float, opened_at: list[float]) -> Outcome:
    """What a rank reports."""
    now = time.monotonic()
    seconds, open_s = now - start, now - opened_at[0] if opened_at else 0.0
    if error is None:
        return Outcome(rank=rank, seconds=seconds, open_s=open_s)
    return Outcome(
        rank=rank,
        error=type(error).__name__,
        is_ours=isinstance(error, ParallelRuntimeError),
        ranks=blamed(error),
        text=str(error),
        seconds=seconds,
        open_s=open_s,
    )


def usage() -> dict[str, int]:
    """What this process holds: descriptors and threads."""
    return {"descriptors": len(os.listdir("/proc/self/fd")), "threads": len(os.listdir("/proc/self/task"))}


def growth(before: dict[str, int], slack: int = 0) -> tuple[str, ...]:
    """What there is more of than before, once what is ending has had time to end."""
    until = time.monotonic() + _SETTLE_S
    while True:
        gc.collect()
        after = usage()
        more = tuple(f"{name} {before[name]} -> {after[name]}" for name in before if after[name] > before[name] + slack)
        if not more or time.monotonic() > until:
            return more
        time.sleep(0.02)


@contextmanager
def shared_files(leaks: list[str]) -> Iterator[None]:
    """Note what a trial leaves in shared memory."""
    before = set(os.listdir("/dev/shm"))
    yield
    until = time.monotonic() + _SETTLE_S
    while (left := {name for name in set(os.listdir("/dev/shm")) - before if _is_mine(name)}) and time.monotonic() < until:
        time.sleep(0.05)
    leaks += [f"/dev/shm/{name}" for name in sorted(left)]


def _is_mine(name: str) -> bool:
    with suppress(OSError):
        return Path("/dev/shm", name).stat().st_uid == os.getuid() and "parallel" in name
    return False


def run_in_threads(trial: Trial) -> tuple[dict[int, Outcome], list[str]]:
    """Run a trial whose ranks are threads of this process.

    Returns:
        The outcomes, and what was left behind.
    """
    before = usage()
    store, outcomes = hash_store(), dict[int, Outcome]()
    hub = LocalHub(trial.config.world_size) if trial.backend == "local" else None
    start = time.monotonic()

    def run(rank: int) -> None:
        error: BaseException | None = None
        opened_at: list[float] = []
        try:
            play(trial, rank, store=store, hub=hub, opened_at=opened_at)
        except BaseException as exc:
            error = exc.with_traceback(None)
        outcomes[rank] = outcome_of(rank, error, start, opened_at)
        if hub is not None:
            hub.leave(rank, "it has returned" if error is None else f"it raised {type(error).__name__}: {error}")

    threads = [
        threading.Thread(target=run, args=(rank,), name=f"rank-{rank}", daemon=True) for rank in range(trial.config.world_size)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(max(0.0, start + _HANG_S - time.monotonic()))
    return outcomes, list(growth(before))


def serve(orders: Connection, rank: int) -> None:
    """A worker process: plays its rank of one trial after another."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    before: dict[str, int] = {}
    orders.send("ready")
    while True:
        try:
            trial, port = orders.recv()
        except EOFError:
            return
        start = time.monotonic()
        opened_at: list[float] = []
        error: BaseException | None = None
        try:
            play(trial, rank, store=connect_store("127.0.0.1", port, timeout_s=10), hub=None, opened_at=opened_at)
        except BaseException as exc:
            error = exc.with_traceback(None)
            error.__cause__ = error.__context__ = None
        outcome = outcome_of(rank, error, start, opened_at)
        if isinstance(error, SystemExit):
            orders.send(outcome)
            raise error
        del error
        leaks = growth(before) if before else ()
        before = before or _baseline()
        orders.send(replace(outcome, leaks=tuple(leaks)))


def _baseline() -> dict[str, int]:
    """Usage once the first trial is over, with what torch keeps for ever."""
    time.sleep(0.5)
    gc.collect()
    return usage()


@final
class Worker:
    """One process that plays a rank."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.orders, theirs = multiprocessing.Pipe()
        context = multiprocessing.get_context("forkserver")
        self.process: ForkServerProcess = context.Process(target=serve, args=(theirs, rank), daemon=True)
        self.process.start()
        theirs.close()
        self.orders.recv()  # it has imported everything; from here on, deadlines mean something

    def end(self) -> None:
        """Kill it, whatever it does."""
        self.orders.close()
        self.process.kill()
        self.process.join()
        self.process.close()


@final
class WorkerPool:
    """Processes for trials of up to four ranks; one that a trial ends is replaced."""

    def __init__(self) -> None:
        self._workers: dict[int, Worker] = {}

    def run(self, trial: Trial) -> tuple[dict[int, Outcome], list[str]]:
        """Run a trial whose ranks are processes.

        Returns:
            The outcomes of those that came back, and what was left behind.
        """
        leaks: list[str] = []
        outcomes: dict[int, Outcome] = {}
        ranks = range(trial.config.world_size)
        with shared_files(leaks):
            server = listen_store()
            for rank in ranks:
                if rank not in self._workers:
                    self._workers[rank] = Worker(rank)
            for rank in ranks:
                self._workers[rank].orders.send((trial, server.port))
            victim = trial.fault.rank
            others = {rank for rank in ranks if rank != victim}
            self._collect(outcomes, others)
            if trial.fault.kind not in _ENDS_ITS_PROCESS or trial.fault.kind is FaultKind.EXIT:
                self._collect(outcomes, {victim})
            if trial.fault.kind in _ENDS_ITS_PROCESS or victim not in outcomes:
                self._workers.pop(victim).end()
            for rank in others - outcomes.keys():
                self._workers.pop(rank).end()
            del server
        return outcomes, leaks

    def close(self) -> None:
        """End every worker."""
        for worker in self._workers.values():
            worker.end()
        self._workers.clear()

    def _collect(self, outcomes: dict[int, Outcome], ranks: set[int]) -> None:
        until = time.monotonic() + _HANG_S
        waiting = {self._workers[rank].orders: rank for rank in ranks}
        while waiting and (left_s := until - time.monotonic()) > 0:
            for ready in wait_for_any(list(waiting), left_s):
                assert isinstance(ready, Connection)
                rank = waiting.pop(ready)
                with suppress(EOFError, ConnectionResetError):
                    outcomes[rank] = ready.recv()
