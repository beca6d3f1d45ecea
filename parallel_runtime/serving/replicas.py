"""Every replica of an engine, each kept by a thread of its own: started, watched, and started again when it is lost."""

import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from multiprocessing.connection import Connection
from traceback import clear_frames
from typing import TypeAlias, final

from parallel_runtime.errors import (
    ContextStateError,
    LaunchError,
    ParallelRuntimeError,
    PeerLostError,
    PeerTimeoutError,
    RankFailedError,
)
from parallel_runtime.serving.controller import DataParallelController
from parallel_runtime.serving.executors import RankExecutor
from parallel_runtime.serving.messages import Ping
from parallel_runtime.serving.supervision import ReplicaLife, ReplicaState, Supervision

__all__ = ["Replicas", "StartWorld"]

StartWorld: TypeAlias = Callable[[ExitStack], tuple[RankExecutor, Sequence[Connection]]]
"""Starts the ranks of one world, which the stack ends. Returns them and the front's ends of the links to its leaders."""

_POLL_S = 0.1


@final
class Replicas:
    """All replicas of an engine, for as long as a stack lasts.

    A replica whose rank has failed, whose leader has hung up or does not answer is lost: its processes are ended, what it held
    goes on elsewhere, and it is started again, after a pause that doubles with every failure in a row. When none is left the
    engine fails.

    Args:
        controller: Gets the worlds, their messages and their failures. Borrowed.
        start_world: Starts one world; called for every replica and every restart, never twice at a time.
        count: Number of replicas.
        rules: When a replica counts as lost, and how often it is started again.
        exit_s: Seconds that ranks have to leave by themselves once they were told to.
        verdict_s: Seconds from a leader hanging up until the executor says which rank failed.
    """

    def __init__(
        self,
        controller: DataParallelController,
        start_world: StartWorld,
        *,
        count: int,
        rules: Supervision,
        exit_s: float,
        verdict_s: float = 5.0,
    ) -> None:
        self._controller = controller
        self._exit_s = exit_s
        self._lock = threading.Lock()
        self._keepers = [
            _Keeper(
                number,
                controller,
                start_world,
                life=ReplicaLife(rules, max_restarts=rules.restarts_of(count), num_leaders=controller.dp),
                exit_s=exit_s,
                verdict_s=verdict_s,
                start_lock=self._lock,
                on_lost=self._on_lost,
            )
            for number in range(count)
        ]

    @property
    def states(self) -> tuple[ReplicaState, ...]:
        """Where each replica is."""
        return tuple(keeper.life.state for keeper in self._keepers)

    def start(self, stack: ExitStack) -> None:
        """Start all replicas; they load side by side.

        Args:
            stack: Ends them.

        Raises:
            LaunchError: Ranks could not be started.
            ParallelRuntimeError: As whatever starts a world raises.
        """
        stack.callback(self._stop)
        for keeper in self._keepers:
            keeper.start()

    def drain(self, replica: int, timeout_s: float | None = None) -> bool:
        """Give a replica no more requests, and wait until it has ended those it has. ``resume`` and ``restart`` end this.

        Args:
            replica: Its number.
            timeout_s: Longest wait in seconds; ``None`` waits for as long as it takes.

        Returns:
            Whether it has none left.

        Raises:
            ParallelRuntimeError: No replica is left.
        """
        return self._controller.drain(replica, timeout_s)

    def resume(self, replica: int) -> None:
        """Give a replica that was drained requests again.

        Args:
            replica: Its number.

        Raises:
            ContextStateError: It does not serve.
        """
        self._controller.resume(replica)

    def restart(self, replica: int) -> None:
        """End a replica and start it again. What it holds goes on elsewhere, so drain it first where that costs too much.

        Args:
            replica: Its number.
        """
        self._keepers[replica].ask_to_restart()

    def _on_lost(self, error: ParallelRuntimeError) -> None:
        """A replica will not come back. The engine fails with the last one, and where one never served."""
        if all(state is ReplicaState.LOST for state in self.states):
            self._controller.fail(error if len(self._keepers) == 1 else _none_left(len(self._keepers), error))
        elif not self._controller.was_ready:
            self._controller.fail(error)

    def _stop(self) -> None:
        """Let the ranks leave by themselves; their executors end those that do not."""
        for keeper in self._keepers:
            keeper.ask_to_stop()
        self._controller.shutdown()
        deadline = time.monotonic() + self._exit_s
        for keeper in self._keepers:
            keeper.join_politely(deadline)
        errors = [error for keeper in self._keepers if (error := keeper.join()) is not None]
        self._controller.fail(ContextStateError("the engine was closed"))
        if errors:
            raise errors[0]


class _RestartWantedError(PeerLostError):
    """Somebody has asked for another start."""


@final
class _Keeper:
    """One replica and its thread."""

    def __init__(
        self,
        number: int,
        controller: DataParallelController,
        start_world: StartWorld,
        *,
        life: ReplicaLife,
        exit_s: float,
        verdict_s: float,
        start_lock: threading.Lock,
        on_lost: Callable[[ParallelRuntimeError], None],
    ) -> None:
        self.life = life
        self._number = number
        self._controller = controller
        self._start_world = start_world
        self._exit_s = exit_s
        self._verdict_s = verdict_s
        self._start_lock = start_lock
        self._on_lost = on_lost
        self._has_served = False
        self._is_closing = threading.Event()
        self._is_over = threading.Event()
        self._wants_restart = threading.Event()
        self._exit_error: Exception | None = None
        self._world = ExitStack()
        self._ranks: RankExecutor | None = None
        self._thread = threading.Thread(target=self._keep, name=f"engine-replica-{number}", daemon=True)

    def start(self) -> None:
        """Start the first world in the caller's thread, and then the thread."""
        self._begin()
        self._thread.start()

    def ask_to_restart(self) -> None:
        self._wants_restart.set()

    def ask_to_stop(self) -> None:
        self._is_closing.set()

    def join_politely(self, deadline: float) -> None:
        """Wait for ranks that can hear that it is over."""
        if self._thread.ident is not None and self._controller.serves(self._number):
            self._thread.join(max(0.0, deadline - time.monotonic()))
        self._is_over.set()

    def join(self) -> Exception | None:
        """Wait for the end, which is bounded; what went wrong in it."""
        if self._thread.ident is not None:
            self._thread.join()
        return self._exit_error

    def _begin(self) -> None:
        self.life.start(time.monotonic())
        with self._start_lock, ExitStack() as stack:
            self._ranks, links = self._start_world(stack)
            self._controller.connect(self._number, links)
            self._world = stack.pop_all()

    def _keep(self) -> None:
        error = self._attend()
        while error is not None:
            pause = self._rest(error)
            self._controller.lose(self._number, error)  # before the ranks are ended, which takes seconds where one hangs
            if pause is None:
                self._on_lost(error)
            self._end_world(error)
            if pause is None or self._is_closing.wait(pause):
                return
            error = self._attend_again()
        self._end_world(None)

    def _rest(self, error: ParallelRuntimeError) -> float | None:
        """Seconds until the next start, or ``None`` where there is none."""
        now = time.monotonic()
        if isinstance(error, _RestartWantedError):
            self.life.rest(now)
            return 0.0
        is_final = not self._has_served and isinstance(error, RankFailedError) and error.exitcode is None
        return self.life.fail(now, is_final=is_final)  # one that raised before it ever served would raise again

    def _attend_again(self) -> ParallelRuntimeError | None:
        self._wants_restart.clear()
        try:
            self._begin()
        except Exception as exc:
            return _as_ours(exc)
        return self._attend()

    def _end_world(self, error: ParallelRuntimeError | None) -> None:
        try:
            self._world.__exit__(type(error) if error else None, error, None)
        except Exception as exc:
            self._exit_error = self._exit_error if error else exc
        finally:
            self._ranks, self._world = None, ExitStack()

    def _attend(self) -> ParallelRuntimeError | None:
        """Keep the controller supplied until the world has failed, or has left as it was told to."""
        try:
            self._serve()
        except Exception as exc:  # a rank's own error where ranks are threads, or a bug: those who wait have to hear of it
            clear_frames(exc.__traceback__)  # whoever keeps the error would keep the ranks' descriptors with it
            return _as_ours(exc)
        return None

    def _serve(self) -> None:
        ranks, number = self._ranks, self._number
        assert ranks is not None
        hung_up_at: float | None = None
        while not self._is_over.is_set():
            if ranks.check():
                self._say_farewell(ranks)
                return
            open_links = self._controller.num_open_links(number)
            if open_links:
                self._watch(heard=self._controller.pump(self.life.look_again_s, replica=number))
            else:
                self._is_over.wait(_POLL_S)
            if open_links < self._controller.dp and not self._is_closing.is_set():
                hung_up_at = hung_up_at or time.monotonic()
                if time.monotonic() - hung_up_at > self._verdict_s:
                    raise PeerLostError("the leader of a replica hung up without a word, though no rank is known to have failed")

    def _watch(self, *, heard: frozenset[int]) -> None:
        life, now = self.life, time.monotonic()
        for leader in heard:
            life.hear(leader)
        controls, number = self._controller.controls, self._number
        if life.state is ReplicaState.STARTING and self._controller.serves(number) and not controls.is_behind(number):
            life.serve(now)
            self._has_served = True
        if self._is_closing.is_set():
            return
        if self._wants_restart.is_set():
            raise _RestartWantedError(f"replica {number} is started again, as was asked")
        if problem := life.problem(now, is_busy=controls.is_busy(number)):
            raise PeerTimeoutError(f"replica {number}: {problem}")
        if life.asks(now):
            self._controller.tell(number, Ping())

    def _say_farewell(self, ranks: RankExecutor) -> None:
        """Every rank has returned: hand out their last words."""
        while self._controller.num_open_links(self._number) and not self._is_over.is_set():
            self._controller.pump(_POLL_S, replica=self._number)
        if not self._is_closing.is_set():
            raise PeerLostError("every rank has ended its loop, though the engine is open")
        ranks.wait(self._exit_s)


def _as_ours(error: Exception) -> ParallelRuntimeError:
    if isinstance(error, ParallelRuntimeError):
        return error
    ours = PeerLostError(f"serving ended by {type(error).__name__}: {error}")
    ours.__cause__ = error
    return ours


def _none_left(count: int, error: ParallelRuntimeError) -> LaunchError:
    failed = LaunchError(f"none of the {count} replicas is left; the last was lost by: {error}")
    failed.__cause__ = error
    return failed
