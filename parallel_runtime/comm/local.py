"""Ranks as threads of one process: the same protocol in memory, with an error at once where it could only hang.

All state is under one lock of the hub. Whenever something changed, a waiting rank looks whether it can go on, whether a member
it waits for has left, and whether every rank of the hub waits.
"""

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from time import monotonic
from typing import Final, final

import torch
from torch import Tensor

from parallel_runtime.comm.communicator import Communicator, Operation, ReduceOp, Work
from parallel_runtime.comm.diagnosis import different_operations, last_in_line, odd_members
from parallel_runtime.comm.tensors import fold
from parallel_runtime.comm.traffic import CONFIRMATIONS, LANES, MAIL_LANE
from parallel_runtime.errors import ArgumentError, CollectiveMismatchError, PeerError, PeerLostError, PeerTimeoutError

__all__ = ["LocalCommunicator", "LocalHub"]

_SLICE_S: Final = 0.25
"""How long a rank waits between two looks at what has happened outside its groups."""
_SUSPICIOUS_S: Final = 1.5
"""A wait that takes so long tells that this process did not run."""
_SETTLE_S: Final = 0.05
"""How long every rank has to be seen waiting before it is called a deadlock: a thread that has not spoken yet may help."""


@final
class _Slot:
    """One collective of one group: who has entered it, with what, and why it failed."""

    __slots__ = ("entries", "error", "finished")

    def __init__(self) -> None:
        self.entries: dict[int, tuple[str, list[Tensor]]] = {}
        self.error: PeerError | None = None
        self.finished = 0


@final
class _Group:
    """What the members of one group share."""

    __slots__ = ("closed", "mail", "ranks", "slots")

    def __init__(self, ranks: tuple[int, ...]) -> None:
        self.ranks = ranks
        self.slots: dict[int, _Slot] = {}
        self.mail: dict[tuple[int, int, int, int], Tensor] = {}
        self.closed: set[int] = set()


@final
@dataclass(slots=True, eq=False)
class _Wait:
    """One thread that waits: for what, and for which world ranks at this moment."""

    rank: int
    what: str
    group: _Group
    ready: Callable[[], bool]
    absent: Callable[[], list[int]]
    alarm: Callable[[], PeerError | None]
    thread: int = field(default_factory=threading.get_ident)
    verdict: str = ""
    culprits: Sequence[int] = ()


@final
class LocalHub:
    """Where the threads of one process meet; one for all groups of all their contexts.

    Attributes:
        monitors: What answers for each (context, rank), where whoever opened the context put it.

    Args:
        world_size: How many ranks take part.

    Raises:
        ArgumentError: ``world_size`` is not positive.
    """

    def __init__(self, world_size: int) -> None:
        if world_size < 1:
            raise ArgumentError(f"a LocalHub needs at least one rank, got world_size={world_size}")
        self.world_size = world_size
        self._changed = threading.Condition()
        self._groups: dict[str, _Group] = {}
        self._waits: list[_Wait] = []
        self._threads: dict[int, set[int]] = {rank: set() for rank in range(world_size)}
        self._left: dict[int, str] = {}
        self._progress = 0
        self.monitors: dict[tuple[str, int], object] = {}

    def leave(self, rank: int, reason: str = "it has left") -> None:
        """Note that ``rank`` will do nothing more, and wake whoever waits for it.

        Args:
            rank: World rank.
            reason: For the errors of its peers, like ``"it raised ValueError: ..."``.
        """
        with self._changed:
            self._left.setdefault(rank, reason)
            self._moved()

    def _moved(self) -> None:
        self._progress += 1
        self._changed.notify_all()

    def _wait(self, wait: _Wait, timeout_s: float) -> None:
        """Block until ``wait.ready()``; the caller holds the lock.

        Raises:
            PeerLostError: Someone it waits for has left.
            PeerTimeoutError: The deadline passed.
            CollectiveMismatchError: Every rank waits, so that none can go on.
            PeerError: As the diagnostician says.
        """
        if wait.ready():
            return
        self._know(wait)
        self._waits.append(wait)
        until = monotonic() + timeout_s
        suspected = -1
        try:
            while not wait.ready():
                stuck = self._all_stuck()
                if stuck and suspected == self._progress:
                    self._condemn()
                if wait.verdict:
                    deadlock = CollectiveMismatchError(wait.verdict)
                    deadlock.ranks = tuple(wait.culprits)
                    raise deadlock
                self._raise_lost(wait)
                suspected = self._progress if stuck else -1
                left_s = until - monotonic()
                if left_s <= 0:
                    raise PeerTimeoutError(f"waited {timeout_s:.3g} s for rank {_names(wait.absent())}; {self._table()}")
                if error := wait.alarm():
                    raise error
                asleep_at = monotonic()
                self._changed.wait(min(left_s, _SETTLE_S if stuck else _SLICE_S))
                if (still_s := monotonic() - asleep_at) > _SUSPICIOUS_S:
                    until += still_s  # stopped itself, so nobody else is late
        finally:
            self._waits.remove(wait)

    def _know(self, wait: _Wait) -> None:
        for threads in self._threads.values():
            threads.discard(wait.thread)
        self._threads.setdefault(wait.rank, set()).add(wait.thread)

    def _raise_lost(self, wait: _Wait) -> None:
        for rank in wait.absent():
            if rank in self._left:
                raise PeerLostError(f"waited for rank {rank}, but {self._left[rank]}")
            if rank in wait.group.closed:
                raise PeerLostError(f"waited for rank {rank}, but it has closed this group")

    def _all_stuck(self) -> bool:
        waiting = {wait.thread for wait in self._waits if not wait.ready() and not wait.verdict}
        alive = {thread.ident for thread in threading.enumerate()}
        for rank, threads in self._threads.items():
            known = threads & alive
            if rank not in self._left and (not known or not known <= waiting):
                return False
        return True

    def _condemn(self) -> None:
        """Give every waiting thread the same verdict."""
        table = self._table()
        waits = {wait.rank: wait.absent() for wait in self._waits}
        for wait in self._waits:
            wait.verdict = f"every rank waits and none can go on: {table}"
            wait.culprits = last_in_line(waits, wait.absent())
        self._moved()

    def _table(self) -> str:
        rows = [f"rank {wait.rank} in {wait.what} waits for rank {_names(wait.absent())}" for wait in self._waits]
        rows += [f"rank {rank} is gone: {reason}" for rank, reason in self._left.items()]
        return "; ".join(sorted(rows))


@final
class LocalCommunicator(Communicator):
    """One member of a group whose ranks are threads.

    Args:
        hub: Shared by all ranks.
        key: The group; equal on its members, never reused.
        rank_in_group: This member.
        world_size: Members of the group.
        ranks: Their world ranks in group order, for errors and for finding deadlocks; 0 to ``world_size - 1`` by default.

    Raises:
        ArgumentError: ``rank_in_group`` or ``ranks`` do not fit ``world_size``.
    """

    def __init__(
        self, hub: LocalHub, key: str, rank_in_group: int, world_size: int, *, ranks: Sequence[int] | None = None
    ) -> None:
        table = tuple(range(world_size)) if ranks is None else tuple(int(rank) for rank in ranks)
        if len(table) != world_size or not 0 <= rank_in_group < world_size:
            raise ArgumentError(f"group {key}: member {rank_in_group} of {world_size} with ranks {table}")
        self.kind = "local"
        self.rank_in_group = rank_in_group
        self.world_size = world_size
        self._hub = hub
        self._key = key
        self._rank = table[rank_in_group]
        with hub._changed:
            self._group = hub._groups.setdefault(key, _Group(table))
        self._entered = 0
        self._tickets: dict[tuple[int, int, int], int] = {}

    def supports(self, operation: Operation, dtype: torch.dtype, nbytes: int) -> bool:
        """Everything."""
        del operation, dtype, nbytes
        return True

    def all_reduce_(self, tensor: Tensor, op: ReduceOp, timeout_s: float) -> None:
        """Folded in member order, on every member alike."""
        rows = self._exchange(f"all_reduce {op} {_text(tensor)}", [tensor], timeout_s)
        tensor.copy_(fold(torch.stack([row[0] for row in rows]), op))

    def all_gather(self, output: Tensor, tensor: Tensor, timeout_s: float) -> None:
        """Copies every member's tensor."""
        rows = self._exchange(f"all_gather {_text(tensor)}", [tensor], timeout_s)
        for target, row in zip(output, rows, strict=True):
            target.copy_(row[0])

    def all_gatherv(self, outputs: Sequence[Tensor], tensor: Tensor, timeout_s: float) -> None:
        """Copies every member's tensor, whatever its size."""
        rows = self._exchange(f"all_gatherv {tensor.dtype}", [tensor], timeout_s)
        for target, row in zip(outputs, rows, strict=True):
            self._fill(target, row[0], "all_gatherv")

    def reduce_scatter(self, output: Tensor, tensor: Tensor, op: ReduceOp, timeout_s: float) -> None:
        """Folds this member's row in member order."""
        rows = self._exchange(f"reduce_scatter {op} {_text(tensor)}", [tensor], timeout_s)
        output.copy_(fold(torch.stack([row[0][self.rank_in_group] for row in rows]), op))

    def all_to_allv(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], timeout_s: float) -> None:
        """Copies what each member has for this one."""
        rows = self._exchange(f"all_to_allv {inputs[0].dtype}", list(inputs), timeout_s)
        for target, row in zip(outputs, rows, strict=True):
            self._fill(target, row[self.rank_in_group], "all_to_allv")

    def broadcast_(self, tensor: Tensor, src: int, timeout_s: float) -> None:
        """Copies the tensor of ``src``."""
        mine = [tensor] if src == self.rank_in_group else []
        rows = self._exchange(f"broadcast from member {src} {_text(tensor)}", mine, timeout_s)
        if src != self.rank_in_group:
            tensor.copy_(rows[src][0])

    def reduce(self, output: Tensor | None, tensor: Tensor, dst: int, op: ReduceOp, timeout_s: float) -> None:
        """Folds in member order on ``dst``."""
        rows = self._exchange(f"reduce to member {dst} {op} {_text(tensor)}", [tensor], timeout_s)
        if output is not None:
            output.copy_(fold(torch.stack([row[0] for row in rows]), op))

    def gather(self, outputs: Sequence[Tensor] | None, tensor: Tensor, dst: int, timeout_s: float) -> None:
        """Copies every member's tensor on ``dst``."""
        rows = self._exchange(f"gather to member {dst} {_text(tensor)}", [tensor], timeout_s)
        for target, row in zip(outputs or (), rows, strict=outputs is not None):
            target.copy_(row[0])

    def scatter(self, output: Tensor, inputs: Sequence[Tensor] | None, src: int, timeout_s: float) -> None:
        """Copies this member's tensor from ``src``."""
        rows = self._exchange(f"scatter from member {src} {_text(output)}", list(inputs or ()), timeout_s)
        output.copy_(rows[src][self.rank_in_group])

    def barrier(self, timeout_s: float) -> None:
        """Waits for every member."""
        self._exchange("barrier", [], timeout_s)

    def isend(self, tensor: Tensor, dst: int, tag: int) -> Work:
        """Copies the tensor into the mailbox of ``dst``; done at once.

        Raises:
            PeerLostError: ``dst`` has left.
        """
        with self._hub._changed:
            rank = self._group.ranks[dst]
            if rank in self._hub._left:
                raise PeerLostError(f"cannot send to rank {rank}: {self._hub._left[rank]}")
            self._group.mail[self.rank_in_group, dst, tag, self._ticket(self.rank_in_group, dst, tag)] = tensor.clone()
            self._hub._moved()
        return _Sent()

    def irecv(self, tensor: Tensor, src: int, tag: int) -> Work:
        """Takes the next message of ``src`` with this tag when it is waited for."""
        ticket = self._ticket(src, self.rank_in_group, tag)
        return _Receiving(self, tensor, (src, self.rank_in_group, tag, ticket))

    def close(self) -> None:
        """Tell the waiting members that this one has left the group."""
        with self._hub._changed:
            self._group.closed.add(self._rank)
            if len(self._group.closed) == self.world_size:
                self._hub._groups.pop(self._key, None)
            self._hub._moved()

    def _alarm(self) -> PeerError | None:
        diagnostician = self.traffic.diagnostician
        return None if diagnostician is None else diagnostician.interruption((), "", 0)

    def _ticket(self, src: int, dst: int, tag: int) -> int:
        ticket = self._tickets.get((src, dst, tag), 0)
        self._tickets[src, dst, tag] = ticket + 1
        return ticket

    def _exchange(self, what: str, tensors: list[Tensor], timeout_s: float) -> list[list[Tensor]]:
        """Enter the next collective of the group and return what every member brought.

        Raises:
            PeerError: It cannot take place; the same kind on every member that enters it.
        """
        hub, group = self._hub, self._group
        brought = [tensor.clone() for tensor in tensors]
        with hub._changed:
            index = self._entered
            self._entered += 1
            slot = group.slots.setdefault(index, _Slot())
            slot.entries[self.rank_in_group] = (what, brought)
            if slot.error is None and any(other != what for other, _ in slot.entries.values()):
                said = {member: text for member, (text, _) in slot.entries.items()}
                slot.error = CollectiveMismatchError(different_operations(said, group.ranks))
            hub._moved()
            wait = _Wait(
                self._rank,
                what + self._of_group(),
                group,
                lambda: slot.error is not None or len(slot.entries) == self.world_size,
                lambda: [rank for member, rank in enumerate(group.ranks) if member not in slot.entries],
                self._alarm,
            )
            try:
                hub._wait(wait, timeout_s)
            except PeerError as exc:
                slot.error = slot.error or exc
                hub._moved()
                raise
            finally:
                slot.finished += 1
                if slot.finished == self.world_size:
                    del group.slots[index]
            if slot.error is not None:
                error = type(slot.error)(str(slot.error))
                error.ranks = slot.error.ranks
                error.members = odd_members({member: entry[0] for member, entry in slot.entries.items()}, self.rank_in_group)
                raise error
            return [slot.entries[member][1] for member in range(self.world_size)]

    def _take(self, tensor: Tensor, letter: tuple[int, int, int, int], timeout_s: float) -> None:
        hub, group = self._hub, self._group
        src, _, tag, _ = letter
        with hub._changed:
            what = self._line(src, tag) + self._of_group()
            wait = _Wait(self._rank, what, group, lambda: letter in group.mail, lambda: [group.ranks[src]], self._alarm)
            hub._wait(wait, timeout_s)
            message = group.mail.pop(letter)
        self._fill(tensor, message, "recv")

    def _of_group(self) -> str:
        """The name that people know the group by, where it has one."""
        current = self.traffic.recorder.current
        return "" if current is None else f" of {current.group}"

    def _line(self, src: int, wire_tag: int) -> str:
        """What a member that waits for one wire tag was asked to do; the third one of each kind of message confirms a send."""
        tag, lane = divmod(wire_tag, LANES)
        verb = "send to" if lane in CONFIRMATIONS else "recv from"
        channel = self.traffic.streams.channels.get((src, tag * LANES + MAIL_LANE))
        line = f"with tag {tag}" if channel is None else f"on channel {channel!r}"
        return f"{verb} member {src} {line}"

    def _fill(self, target: Tensor, message: Tensor, operation: str) -> None:
        if target.shape != message.shape or target.dtype is not message.dtype:
            raise CollectiveMismatchError(f"{operation} into {_text(target)} got {_text(message)}")
        target.copy_(message)


@final
class _Sent(Work):
    def is_done(self) -> bool:
        return True

    def wait(self, timeout_s: float) -> None:
        del timeout_s


@final
class _Receiving(Work):
    def __init__(self, communicator: LocalCommunicator, tensor: Tensor, letter: tuple[int, int, int, int]) -> None:
        self._communicator = communicator
        self._tensor = tensor
        self._letter = letter
        self._done = False

    def is_done(self) -> bool:
        return self._done or self._letter in self._communicator._group.mail

    def wait(self, timeout_s: float) -> None:
        if not self._done:
            self._communicator._take(self._tensor, self._letter, timeout_s)
            self._done = True


def _text(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"


def _names(ranks: list[int]) -> str:
    return ", ".join(map(str, ranks))
