"""What the owner of an engine can ask of all its replicas at once, beside requests."""

import itertools
import logging
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from os import PathLike, fspath
from time import perf_counter
from typing import TypeAlias, final

from torch import Tensor

from parallel_runtime.context.trace_document import write_trace
from parallel_runtime.errors import ParallelRuntimeError, PeerFailedError, PeerLostError, PeerTimeoutError
from parallel_runtime.serving.controls import (
    Answer,
    Control,
    ControlAction,
    FlushCache,
    Health,
    LoadWeights,
    Pause,
    Profile,
    RankProfile,
    ReceiveWeights,
    Resume,
    Sleep,
    Status,
    SwapWeights,
    WakeUp,
)
from parallel_runtime.serving.links import LeaderLines
from parallel_runtime.serving.tracing import engine_trace
from parallel_runtime.serving.weight_sources import TENSORS, WeightSources

__all__ = ["EngineControls"]

_log = logging.getLogger(__name__)
_Leaders: TypeAlias = tuple[tuple[int, int], ...]


@final
class EngineControls:
    """Questions to every leader, one after the other, and their answers.

    Any thread may ask; it waits until all have answered. Requests wait while a control is done; none fails. A control that fails
    somewhere changes nothing there. A replica that is started again gets the weights of the others, and is paused or asleep as
    they are, before it gets requests or tells its health; where those weights came from a trainer it cannot, and waits for the
    next whole update.

    Args:
        lines: Ways to the leaders. Borrowed.

    Attributes:
        version: Of the weights that serve; 0 are those the engine began with.
    """

    def __init__(self, lines: LeaderLines) -> None:
        self._lines = lines
        self._numbers = itertools.count()
        self._one_at_a_time = threading.Lock()
        self._news = threading.Condition()
        self._number = -1
        self._owed: set[tuple[int, int, int]] = set()
        self._is_asking = False
        self._late: set[int] = set()
        self._absent: set[int] = set()
        self._catching_up: dict[int, int] = {}
        self._in_force: list[ControlAction] = []
        self._missing: set[tuple[int, int]] = set()
        self._answers: dict[tuple[int, int], Answer] = {}
        self._lost: ParallelRuntimeError | None = None
        self._sources = WeightSources()
        self._holders: set[int] | None = None
        self.version = 0

    def pause(self) -> None:
        """Compute nothing until ``resume``, once the batches under way are through. Requests are still taken, and wait.

        Raises:
            PeerError: A replica could not, or is lost.
        """
        self._order(Pause())

    def resume(self) -> None:
        """Go on after ``pause``.

        Raises:
            PeerError: A replica could not, or is lost.
        """
        self._order(Resume(), ends=Pause())

    def flush_cache(self) -> None:
        """Forget the beginnings of earlier prompts; what runs goes on.

        Raises:
            PeerError: A replica could not, or is lost.
        """
        self._order(FlushCache())

    def sleep(self) -> None:
        """Give back the memory of weights and KV cache. Requests wait until ``wake``.

        Raises:
            PeerError: A replica could not, or is lost.
        """
        self._order(Sleep())

    def wake(self) -> None:
        """Take the memory again, with the weights of before.

        Raises:
            PeerError: A replica could not, or is lost.
        """
        self._order(WakeUp(), ends=Sleep())

    def health(self, timeout_s: float | None = None) -> tuple[Status, ...]:
        """How every data-parallel rank of every replica is doing.

        Args:
            timeout_s: Longest wait for all of them; a leader answers once in each turn of its loop.

        Returns:
            One status each, in their order; none of a replica that is still brought to where the others are.

        Raises:
            PeerTimeoutError: One has not answered in time.
            PeerError: A replica is lost.
        """
        with self._turn() as asked:
            asked = tuple(leader for leader in asked if not self.is_behind(leader[0]))
            return tuple(answer.status for answer in self._ask(asked, Health(), timeout_s=timeout_s))

    def start_profile(self) -> None:
        """Begin to write down what every rank does when.

        Raises:
            PeerError: A replica could not, or is lost.
        """
        self._order(Profile(is_on=True))

    def stop_profile(self) -> tuple[RankProfile, ...]:
        """End the profile.

        Returns:
            What each rank did since ``start_profile``, replica by replica.

        Raises:
            PeerError: A replica could not, or is lost.
        """
        return tuple(rank for answer in self._order(Profile(is_on=False)) for rank in answer.profile)

    def start_trace(self) -> None:
        """Begin to record every operation of every group, and what every rank does when.

        Raises:
            PeerError: A replica could not, or is lost.
        """
        self._order(Profile(is_on=True, records=True))

    def stop_trace(self, path: str | PathLike[str]) -> tuple[RankProfile, ...]:
        """End the trace, and write it as one file for Perfetto or ``chrome://tracing``: all ranks of all replicas on one clock.

        Args:
            path: Of the file, which this process writes.

        Returns:
            As ``stop_profile``.

        Raises:
            OSError: The file cannot be written.
            PeerError: A replica could not, or is lost.
        """
        with self._turn() as asked:
            asked_s = perf_counter()
            self._ask(asked, Profile(is_on=False))
            heard_s, answers = perf_counter(), dict(sorted(self._answers.items()))
            told = [(replica, answer.trace) for (replica, _), answer in answers.items() if answer.trace is not None]
            ranks = max((self._lines.num_ranks(replica) for replica, _ in asked), default=1)
        write_trace(path, engine_trace(told, ranks_per_replica=ranks, asked_s=asked_s, heard_s=heard_s))
        return tuple(rank for answer in answers.values() for rank in answer.profile)

    def update_weights(self, source: str | PathLike[str] | Mapping[str, Tensor], *, version: int | None = None) -> int:
        """Serve with other weights, on all replicas or on none.

        Requests that run are computed again from their first token with the new weights, and keep the tokens they have made.

        Args:
            source: A model of the same config on disk; or full tensors under the names of ``transformers``, all or some of them,
                handed over or in a file of ``torch.save`` (``.pt``). Every rank reads its shard.
            version: Of the new weights; one more than before by default.

        Returns:
            Their version, which outputs are marked with.

        Raises:
            PeerError: A replica could not, or is lost before all have read theirs. The weights that serve are as before.
        """
        with self._turn() as asked:
            path = self._sources.write(source) if isinstance(source, Mapping) else fspath(source)
            version = self._exchange(asked, lambda replica: LoadWeights(path=path), version)
            if not path.endswith(TENSORS):
                self._begin_anew(None)
            self._sources.paths.append(path)
            return version

    def receive_weights(self, host: str, port: int, *, num_senders: int = 1, version: int | None = None) -> int:
        """Serve with weights that a trainer's ranks send meanwhile: ``weight_context`` and ``send_weights`` on each of them.

        Args:
            host: Where the trainer's first rank listens.
            port: Its TCP port.
            num_senders: The trainer's ranks, numbers 0 and up of the common context; the engine's ranks follow.
            version: Of the new weights; one more than before by default.

        Returns:
            Their version.

        Raises:
            PeerError: A replica could not, or is lost before all have theirs, or a sender failed. All serve as before.
        """
        with self._turn() as asked:
            ranks = {replica: self._lines.num_ranks(replica) for replica, _ in asked}

            def action(replica: int) -> ControlAction:
                return ReceiveWeights(
                    host=host,
                    port=port,
                    num_senders=num_senders,
                    num_receivers=sum(ranks.values()),
                    first_receiver=sum(count for other, count in ranks.items() if other < replica),
                )

            version = self._exchange(asked, action, version)
            self._begin_anew(set(ranks))
            return version

    def is_busy(self, replica: int) -> bool:
        """Whether a replica was asked for something that may take long and has not answered; its loop turns no further meanwhile.

        Args:
            replica: Its number.
        """
        with self._news:
            return any(owed[1] == replica for owed in self._owed)

    def is_stale(self, replica: int) -> bool:
        """Whether a replica waits for a whole update, because it has other weights than the others.

        Args:
            replica: Its number.
        """
        with self._news:
            return self._holders is not None and replica not in self._holders

    def is_behind(self, replica: int) -> bool:
        """Whether a replica that was lost is not where the others are yet, so that it gets no requests.

        Args:
            replica: Its number.
        """
        with self._news:
            return replica in self._absent or replica in self._catching_up

    def join(self, replica: int) -> None:
        """Bring a replica that has started to where the others are; once it is there, it gets requests.

        While something is asked of the others it waits for the end of that; nobody waits here.

        Args:
            replica: Its number.
        """
        with self._news:  # nothing is asked of the others between these messages, nor is the replica started once more
            if self._is_asking:
                self._late.add(replica)
                self._absent.add(replica)
                return
            self._absent.discard(replica)
            if self.is_stale(replica):
                _log.warning(
                    "replica %d was started again without weights version %d of a trainer; it serves after the next whole update",
                    replica,
                    self.version,
                )
                return
            swap = SwapWeights(version=self.version)
            actions = [action for path in self._sources.paths for action in (LoadWeights(path=path), swap)] + self._in_force
            self._catching_up[replica] = max((self._tell(replica, action) for action in actions), default=-1)  # the last one
            self._admit_if_there(replica)

    def take(self, replica: int, dp_rank: int, answer: Answer) -> None:
        """Note an answer.

        Args:
            replica: Whose.
            dp_rank: Which of its leaders'.
            answer: What it says.

        Raises:
            PeerFailedError: It could not do what it was told when it joined.
        """
        with self._news:
            self._owed.discard((answer.number, replica, dp_rank))
            if answer.number == self._number:
                self._answers[replica, dp_rank] = answer
                self._missing.discard((replica, dp_rank))
                self._news.notify_all()
            elif answer.error is not None:
                raise PeerFailedError(f"replica {replica} does not get where the others are: {answer.error}")
            self._admit_if_there(replica)

    def lose(self, replica: int | None, error: ParallelRuntimeError) -> None:
        """Wait for no answer of a replica any more.

        Args:
            replica: Its number; ``None`` for all of them, for good.
            error: What happened.
        """
        if replica is None:
            self._sources.forget()
        with self._news:
            if replica is not None:
                self._absent.add(replica)
                self._late.discard(replica)
                self._catching_up.pop(replica, None)
                if self._holders is not None:
                    self._holders.discard(replica)
            self._expect_nothing(replica, error)

    def _expect_nothing(self, replica: int | None, error: ParallelRuntimeError) -> None:
        with self._news:
            self._owed = {owed for owed in self._owed if replica is not None and owed[1] != replica}
            gone = {leader for leader in self._missing if replica is None or leader[0] == replica}
            if gone:
                self._lost = error
                self._missing -= gone
                self._news.notify_all()

    def _admit_if_there(self, replica: int) -> None:
        """Under the lock: give a replica requests that has done all it was told as it joined."""
        last = self._catching_up.get(replica)
        if last is not None and not any(owed[:2] == (last, replica) for owed in self._owed):
            del self._catching_up[replica]
            self._lines.admit(replica)

    @contextmanager
    def _turn(self) -> Iterator[_Leaders]:
        """Nothing else is asked meanwhile. Those that come up later are not asked, and join at the end."""
        with self._one_at_a_time:
            with self._news:
                self._is_asking = True
                asked = tuple(leader for leader in self._lines.leaders if leader[0] not in self._absent)
            try:
                yield asked
            finally:
                with self._news:
                    self._is_asking = False
                    late, self._late = self._late, set()
                    for replica in sorted(late):
                        self.join(replica)

    def _order(self, action: ControlAction, *, ends: ControlAction | None = None) -> tuple[Answer, ...]:
        """Ask everybody, and remember what is in force from now on."""
        with self._turn() as asked:
            answers = self._ask(asked, action)
            if isinstance(action, Pause | Sleep) and action not in self._in_force:
                self._in_force.append(action)
            if ends in self._in_force:
                self._in_force.remove(ends)
            return answers

    def _exchange(self, asked: _Leaders, action: Callable[[int], ControlAction], version: int | None) -> int:
        version = self.version + 1 if version is None else version
        try:
            self._ask(asked, action)
        except ParallelRuntimeError:
            self._ask(asked, SwapWeights(version=None))
            raise
        try:
            self._ask(asked, SwapWeights(version=version))
        except PeerLostError:
            if not self._answers:
                raise
            _log.warning("a replica was lost as it took weights version %d; the others serve with them", version)
        self.version = version
        return version

    def _ask(
        self, asked: _Leaders, action: ControlAction | Callable[[int], ControlAction], *, timeout_s: float | None = None
    ) -> tuple[Answer, ...]:
        still_there = set(self._lines.leaders)
        with self._news:
            asked = tuple(leader for leader in asked if leader in still_there and leader[0] not in self._absent)
            self._number, self._missing = next(self._numbers), set(asked)
            self._answers, self._lost = {}, None
        for replica in sorted({replica for replica, _ in asked}):
            what = action(replica) if callable(action) else action
            self._tell(replica, what, number=self._number)
        for replica in {replica for replica, _ in still_there.difference(self._lines.leaders)}:
            self._expect_nothing(replica, PeerLostError(f"replica {replica} was lost as it was asked"))
        return self._wait(asked, timeout_s)

    def _tell(self, replica: int, action: ControlAction, *, number: int | None = None) -> int:
        number = next(self._numbers) if number is None else number
        if not isinstance(action, Health):
            with self._news:
                self._owed |= {(number, *leader) for leader in self._lines.leaders if leader[0] == replica}
        self._lines.tell(replica, Control(number=number, action=action))
        return number

    def _wait(self, asked: _Leaders, timeout_s: float | None) -> tuple[Answer, ...]:
        with self._news:
            if not self._news.wait_for(lambda: not self._missing, timeout_s):
                late = ", ".join(f"replica {replica} dp {dp_rank}" for replica, dp_rank in sorted(self._missing))
                raise PeerTimeoutError(f"no answer within {timeout_s:g} s from {late}")
            if self._lost is not None:
                raise PeerLostError(f"a replica was lost before it answered: {self._lost}") from self._lost
            answers = tuple(self._answers[leader] for leader in asked)
        errors = {leader: answer.error for leader, answer in zip(asked, answers, strict=True) if answer.error is not None}
        if errors:
            told = "; ".join(f"replica {replica} dp {dp_rank}: {error}" for (replica, dp_rank), error in errors.items())
            raise PeerFailedError(told)
        return answers

    def _begin_anew(self, holders: set[int] | None) -> None:
        """All weights are others now: in files, or just in these replicas. Those that had waited for that may serve."""
        self._sources.forget()
        with self._news:
            before, self._holders = self._holders, None if holders is None else holders - self._absent
            waited = set() if before is None else {replica for replica, _ in self._lines.leaders} - before - self._absent
            for replica in sorted(waited):
                self._lines.admit(replica)
