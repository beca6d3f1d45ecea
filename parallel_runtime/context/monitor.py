"""The monitor of one rank of a context: answers for it, and finds out about the others. It never uses a group."""

import json
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from typing import Final, final

import msgspec

from parallel_runtime.comm.c10d import Store
from parallel_runtime.comm.communicator import Communicator
from parallel_runtime.comm.diagnosis import Diagnostician, Failure, last_in_line
from parallel_runtime.comm.local import LocalHub
from parallel_runtime.comm.traffic import Traffic
from parallel_runtime.context.control import Address, Answering, ask_all
from parallel_runtime.context.meeting import Meeting
from parallel_runtime.context.obituaries import obituary
from parallel_runtime.context.reports import Report, awaited, make_report
from parallel_runtime.context.statistics import Statistics
from parallel_runtime.context.story import Departure, Evidence, tell
from parallel_runtime.errors import CollectiveMismatchError, EarlierFailureError, PeerError, PeerLostError, PeerTimeoutError

__all__ = ["Monitor"]

_ASK_S: Final = 2.0
"""How long the other ranks may take to answer for themselves."""
_LAST_WORD_S: Final = 1.0
"""How long a rank whose connection broke may take to say why it leaves, or to be seen dead."""
_FRESH_S: Final = 5.0
"""How long a failure explains why a rank is in no operation: it is about to leave, or to act on it."""
_MOST_ASKED: Final = 16
_ROUNDS: Final = 4
"""Of asking those that others wait for, to find the one that keeps them all."""
_OBITUARY_S: Final = 0.5
"""How long a launcher may take to say how a rank of it ended."""
_PAUSE_S: Final = 0.02
_KEPT_FAILURES: Final = 8
_NORMAL: Final = "closed"


@final
class Monitor(Diagnostician):
    """Answers for this rank from a thread at its side, and explains what other ranks did.

    Args:
        meeting: Where the ranks of the context met.
        host: Name of this rank's host.
        address: Of this host, on which to answer.
        hub: Connects ranks that are threads: they are asked directly, without a socket and a thread.
        parent: Of the context that this one is a child of: its thread and its socket answer for both.
        obituaries: Store in which whoever started the ranks tells how one ended; that of the parent's by default.
    """

    def __init__(
        self,
        meeting: Meeting,
        *,
        host: str,
        address: str,
        hub: LocalHub | None,
        parent: "Monitor | None" = None,
        obituaries: Store | None = None,
    ) -> None:
        self._meeting = meeting
        self._host = host
        self._hub = hub
        self._thread = threading.get_ident()
        self._traffics: dict[tuple[int, ...], Traffic] = {}
        self._communicators: dict[str, Communicator] = {}
        self._addresses: dict[int, Address] = {}
        self._failures: deque[str] = deque(maxlen=_KEPT_FAILURES)
        self._blamed: tuple[int, ...] = ()
        self._blamed_at = 0.0
        self.alarm: Callable[[], PeerError | None] | None = None
        self.counted: Callable[[], Statistics] | None = None
        self._parent = parent
        self._obituaries: Store | None = parent._obituaries if parent is not None else obituaries
        self._ends: dict[int, str] = {}
        self._answering: Answering | None = None
        self._address: Address | None = None
        if hub is not None:
            hub.monitors[meeting.uid, meeting.rank] = self
            return
        self._answering = (parent and parent._answering) or Answering(address, host)
        self._address = self._answering.add(lambda: msgspec.json.encode(self.report()), self._look_at_waits)
        meeting.room.set(f"monitor/{meeting.rank}", self._address.to_json())

    @property
    def address(self) -> Address:
        """Where this rank answers, also while its own thread is blocked. A thread of a hub begins to with the first question."""
        if self._address is None:
            self._answering = Answering("127.0.0.1", self._host)
            self._address = self._answering.add(lambda: msgspec.json.encode(self.report()), lambda: None)
        return self._address

    def watch(self, ranks: tuple[int, ...], data: Communicator, control: Communicator) -> None:
        """Take a connection into the reports, and end waits on it that are in vain.

        Args:
            ranks: World ranks of its members, in group order.
            data: Moves its tensors.
            control: Moves its messages.
        """
        self._traffics[ranks] = data.traffic
        for communicator in (data, control):
            self._communicators[communicator.key] = communicator

    def last_words(self) -> None:
        """Note how far this rank came, before it says that it leaves: a peer must not miss it where it did its part."""
        room, rank = self._meeting.room, self._meeting.rank
        steps = {key: communicator.traffic.steps for key, communicator in self._communicators.items() if key}
        with suppress(RuntimeError):
            room.set(f"steps/{rank}", json.dumps(steps))
            if self._failures:
                room.set(f"report/{rank}", msgspec.json.encode(self.report()).decode())
            if self._blamed:
                room.set(f"blamed/{rank}", json.dumps(self._blamed))
            room.set("departed", "somebody")

    def close(self) -> None:
        """Stop answering. Twice is nothing."""
        for communicator in self._communicators.values():
            if communicator.traffic.diagnostician is self:
                communicator.traffic.diagnostician = None
        self._communicators, self._traffics = {}, {}
        answering, self._answering = self._answering, None  # it refers back here, and whoever keeps the meeting keeps a socket
        if answering is not None and self._address is not None:
            answering.drop(self._address)
            if self._parent is None:
                answering.close()
        if self._hub is not None:
            self._hub.monitors.pop((self._meeting.uid, self._meeting.rank), None)

    def report(self) -> Report:
        """What this rank says of itself; from any thread, also while its own is blocked."""
        return make_report(
            rank=self._meeting.rank,
            host=self._host,
            thread=self._thread,
            connections=dict(self._traffics),
            failures=tuple(self._failures),
            blamed=self._blamed if time.monotonic() - self._blamed_at < _FRESH_S else (),
            counted=None if self.counted is None else self.counted(),
        )

    def reports(self, ranks: Sequence[int], timeout_s: float = _ASK_S) -> dict[int, Report]:
        """Ask other ranks of the context.

        Args:
            ranks: Whom.
            timeout_s: Longest wait for all of them together, in seconds.

        Returns:
            What those that answered say of themselves.
        """
        if self._hub is not None:
            monitors = ((rank, self._hub.monitors.get((self._meeting.uid, rank))) for rank in ranks)
            return {rank: monitor.report() for rank, monitor in monitors if isinstance(monitor, Monitor)}
        with suppress(RuntimeError):
            self._look_up(ranks)
        return ask_all({rank: self._addresses[rank] for rank in ranks if rank in self._addresses}, timeout_s)

    def is_gone(self, ranks: Sequence[int]) -> bool:
        """Whether one of these ranks has left the context or ended.

        Args:
            ranks: World ranks.

        Returns:
            ``False`` where nobody knows.
        """
        with suppress(RuntimeError):
            return bool(self._departures(ranks))
        return False

    def interruption(self, ranks: Sequence[int], key: str, step: int) -> PeerError | None:
        if error := self._alarm():
            return error
        if not ranks:
            return None
        others = [rank for rank in ranks if rank != self._meeting.rank]
        with suppress(RuntimeError):
            gone = self._departures(others)
            missed = [rank for rank in gone if self._steps_of(rank).get(key, 0) < step]
            if missed:
                return PeerLostError(f"waited for rank {missed[0]}, which {gone[missed[0]].text}")
        return None

    def explain(self, failure: Failure) -> PeerError:
        head = f"{failure.group} seq {failure.sequence} {failure.what}"
        if error := self._alarm():
            error.args = (f"{head}: {error}",)
            return error
        has_story = isinstance(failure.error, PeerTimeoutError | PeerLostError) or type(failure.error) is PeerError
        if not has_story or isinstance(failure.error, EarlierFailureError):
            group = f"[members of {failure.group}: ranks {failure.ranks}]"
            error = type(failure.error)(f"{head}: {failure.error} {group}")
            blamed = failure.error.ranks or tuple(failure.ranks[member] for member in failure.error.members)
            error.ranks = tuple(rank for rank in blamed if rank != failure.rank) or blamed
            self._blame((*error.ranks, self._meeting.rank) if isinstance(error, CollectiveMismatchError) else error.ranks)
            return error
        members = failure.error.members or range(len(failure.ranks))
        suspects = [rank for rank in (failure.ranks[member] for member in members) if rank != failure.rank]
        evidence = self._evidence(suspects, has_broken=not isinstance(failure.error, PeerTimeoutError))
        error = tell(failure, suspects, evidence)
        self._failures.append(str(error).partition("\n")[0])
        culprits = self._culprits(error.ranks or suspects)
        if not error.ranks:  # all that it waited for took part and gave up: whoever they gave up for is at fault, not they
            culprits = tuple(rank for rank in culprits if rank not in evidence.reports)
        self._blame(culprits)
        if others := tuple(rank for rank in culprits if rank not in (*error.ranks, failure.rank)):
            error.args = (f"{error}\n  they wait in turn for rank {', '.join(map(str, others))}",)
        error.ranks = tuple(rank for rank in culprits if rank != failure.rank) or error.ranks
        return error

    def _alarm(self) -> PeerError | None:
        """Why a guarded block of this context, or of one around it, has failed."""
        if self.alarm is not None and (error := self.alarm()):
            return error
        return None if self._parent is None else self._parent._alarm()

    def _look_at_waits(self) -> None:
        for communicator in tuple(self._communicators.values()):
            communicator.end_vain_wait()

    def _evidence(self, ranks: Sequence[int], *, has_broken: bool) -> Evidence:
        notes: list[str] = []
        departures: dict[int, Departure] = {}
        reports: dict[int, Report] = {}
        try:
            departures = self._departures(ranks)
            reports = self.reports([rank for rank in ranks if rank not in departures and not self._is_stopped(rank)])
            until = time.monotonic() + _LAST_WORD_S
            departures = self._departures(ranks)
            while has_broken and not departures and len(reports) < len(ranks) and time.monotonic() < until:
                time.sleep(_PAUSE_S)
                departures = self._departures(ranks)
            reports |= self._left_reports(departures)
        except RuntimeError:
            server = self._meeting.ranks[0]
            notes.append(f"the store in which the ranks met is gone; unless the launcher served it, rank {server} has ended")
            if has_broken and server in ranks and server not in reports:
                departures[server] = Departure(text="has ended, and the store it served is gone")
        silent = {rank: self._silence(rank) for rank in ranks if rank not in reports and rank not in departures}
        return Evidence(departures=departures, reports=reports, silent=silent, notes=notes)

    def _culprits(self, ranks: Sequence[int]) -> tuple[int, ...]:
        """Those that these ranks wait for in the end, as far as can be found out within a few questions."""
        waits: dict[int, Collection[int]] = {}
        reports: dict[int, Report] = {self._meeting.rank: self.report()}
        new = list(ranks)[:_MOST_ASKED]
        with suppress(RuntimeError):
            for _ in range(_ROUNDS):
                departures = self._departures(new)
                self._ask(reports, [rank for rank in new if rank not in departures])
                departures |= self._departures([rank for rank in new if rank not in reports])  # it went while it was asked
                self._ask(reports, [peer for rank in new if rank in reports for peer in reports[rank].peers()])
                for rank in new:
                    waits[rank] = departures[rank].blamed if rank in departures else awaited(rank, reports)
                new = [rank for rank in {each for found in waits.values() for each in found} if rank not in waits][:_MOST_ASKED]
                if not new:
                    break
        return last_in_line(waits, ranks)

    def _blame(self, ranks: tuple[int, ...]) -> None:
        self._blamed, self._blamed_at = ranks, time.monotonic()

    def _ask(self, reports: dict[int, Report], ranks: Sequence[int]) -> None:
        new = [rank for rank in set(ranks) if rank not in reports and not self._is_stopped(rank)]
        reports |= self.reports(new[:_MOST_ASKED])

    def _departures(self, ranks: Sequence[int]) -> dict[int, Departure]:
        """Of those of the ranks that are gone.

        Raises:
            RuntimeError: The store is gone.
        """
        room = self._meeting.room
        has_news = room.check(["departed"])
        self._look_up(ranks)
        found = {}
        for rank in ranks:
            if has_news and room.check([f"left/{rank}"]):
                blamed = json.loads(room.get(f"blamed/{rank}")) if room.check([f"blamed/{rank}"]) else ()
                found[rank] = _departure(room.get(f"left/{rank}").decode(), tuple(blamed))
            elif rank in self._addresses and self._addresses[rank].is_ended:
                where = self._addresses[rank]
                found[rank] = Departure(text=f"(pid {where.pid} on {where.host}) {self._how_it_ended(where.pid)}")
        return found

    def _how_it_ended(self, pid: int) -> str:
        if pid not in self._ends:
            told = "" if self._obituaries is None else obituary(self._obituaries, pid, _OBITUARY_S)
            self._ends[pid] = told or "has ended without a word: killed, or crashed"
        return self._ends[pid]

    def _left_reports(self, departures: Mapping[int, Departure]) -> dict[int, Report]:
        """What ranks that are gone said of themselves, where an operation of theirs had failed."""
        room = self._meeting.room
        noted = [rank for rank in departures if room.check([f"report/{rank}"])]
        return {rank: msgspec.json.decode(room.get(f"report/{rank}"), type=Report) for rank in noted}

    def _steps_of(self, rank: int) -> Mapping[str, int]:
        room = self._meeting.room
        if not room.check([f"steps/{rank}"]):
            return {}
        steps: dict[str, int] = json.loads(room.get(f"steps/{rank}"))
        return steps

    def _look_up(self, ranks: Sequence[int]) -> None:
        if self._hub is not None:
            return
        for rank in ranks:
            if rank not in self._addresses and self._meeting.room.check([f"monitor/{rank}"]):
                self._addresses[rank] = Address.from_json(self._meeting.room.get(f"monitor/{rank}"))

    def _is_stopped(self, rank: int) -> bool:
        return rank in self._addresses and self._addresses[rank].is_stopped

    def _silence(self, rank: int) -> str:
        where = self._addresses.get(rank)
        if where is None:
            return "is alive or gone; it cannot be asked"
        state = "is stopped (SIGSTOP, or a debugger)" if self._is_stopped(rank) else f"did not answer within {_ASK_S:g} s"
        return f"(pid {where.pid} on {where.host}) {state}"


def _departure(reason: str, blamed: tuple[int, ...]) -> Departure:
    if reason == _NORMAL:
        return Departure(text="has left the context normally", is_normal=True)
    name = reason.partition(":")[0]
    follows = name in {kind.__name__ for kind in _kinds(PeerError)}
    return Departure(text=f"left the context by an exception: {reason}", follows=follows, blamed=blamed if follows else ())


def _kinds(kind: type[PeerError]) -> list[type[PeerError]]:
    return [kind, *(each for child in kind.__subclasses__() for each in _kinds(child))]
