"""One member of a group whose ranks are threads."""

import sys
from collections.abc import Callable, Sequence
from time import perf_counter
from typing import final

import torch
from torch import Tensor

from parallel_runtime.comm.communicator import Communicator, Operation, ReduceOp, Work
from parallel_runtime.comm.diagnosis import different_operations, odd_members
from parallel_runtime.comm.local.hub import LocalHub, Slot
from parallel_runtime.comm.local.waits import Wait
from parallel_runtime.comm.tensors import fold
from parallel_runtime.comm.traffic import CONFIRMATIONS, LANES, MAIL_LANE
from parallel_runtime.errors import ArgumentError, CollectiveMismatchError, PeerError, PeerLostError

__all__ = ["LocalCommunicator"]


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
        self._meeting = hub.join(key, table)
        self._entered = 0
        self._tickets: dict[tuple[int, int, int], int] = {}
        self._symmetric: list[tuple[Tensor, ...]] = []

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
        sizes = [list(output.shape) for output in outputs]
        rows = self._exchange(f"all_gatherv {_dtype(tensor)} of shapes {sizes}", [tensor], timeout_s)
        for target, row in zip(outputs, rows, strict=True):
            target.copy_(row[0])

    def reduce_scatter(self, output: Tensor, tensor: Tensor, op: ReduceOp, timeout_s: float) -> None:
        """Folds this member's row in member order."""
        rows = self._exchange(f"reduce_scatter {op} {_text(tensor)}", [tensor], timeout_s)
        output.copy_(fold(torch.stack([row[0][self.rank_in_group] for row in rows]), op))

    def all_to_allv(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], timeout_s: float) -> None:
        """Copies what each member has for this one."""
        rows = self._exchange(f"all_to_allv {_dtype(inputs[0])}", list(inputs), timeout_s, outputs)
        for target, row in zip(outputs, rows, strict=True):
            target.copy_(row[self.rank_in_group])

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
        hub, meeting = self._hub, self._meeting
        with hub.changed:
            hub.point(self._rank, f"isend to member {dst}")
            rank = meeting.ranks[dst]
            if why := hub.why_left(rank):
                raise PeerLostError(f"cannot send to rank {rank}: {why}")
            meeting.mail[self.rank_in_group, dst, tag, self._ticket(self.rank_in_group, dst, tag)] = tensor.clone()
            hub.changed.notify_all()
        return _Sent()

    def irecv(self, tensor: Tensor, src: int, tag: int) -> Work:
        """Takes the next message of ``src`` with this tag when it is waited for."""
        ticket = self._ticket(src, self.rank_in_group, tag)
        return _Receiving(self, tensor, (src, self.rank_in_group, tag, ticket))

    def symmetric_empty(self, shape: Sequence[int], dtype: torch.dtype, timeout_s: float) -> Tensor:
        """Any tensor, made known to all members."""
        mine = torch.empty(tuple(shape), dtype=dtype)
        rows = self._exchange(f"symmetric_empty {_text(mine)}", [mine], timeout_s, copies=False)
        self._symmetric.append(tuple(row[0] for row in rows))
        return mine

    def symmetric_views(self, tensor: Tensor) -> tuple[Tensor, ...] | None:
        """The same elements of every member's tensor."""
        for whole in self._symmetric:
            mine = whole[self.rank_in_group]
            first = (tensor.data_ptr() - mine.data_ptr()) // mine.itemsize
            if 0 <= first <= mine.numel() - tensor.numel():
                return tuple(part.flatten()[first : first + tensor.numel()].view(tensor.shape) for part in whole)
        return None

    def publish(self, tensor: Tensor, timeout_s: float) -> None:
        """Waits for every member."""
        self._exchange(f"publish {_text(tensor)}", [], timeout_s)

    def close(self) -> None:
        """Tell the waiting members that this one has left the group."""
        self._hub.part(self._key, self._rank)

    def _alarm(self, missing: Sequence[int]) -> PeerError | None:
        diagnostician = self.traffic.diagnostician
        return None if diagnostician is None else diagnostician.interruption(missing, "", sys.maxsize)

    def _ticket(self, src: int, dst: int, tag: int) -> int:
        ticket = self._tickets.get((src, dst, tag), 0)
        self._tickets[src, dst, tag] = ticket + 1
        return ticket

    def _exchange(
        self, what: str, tensors: list[Tensor], timeout_s: float, room: Sequence[Tensor] | None = None, *, copies: bool = True
    ) -> list[list[Tensor]]:
        """Enter the next collective of the group and return what every member brought.

        Args:
            what: Equal on every member.
            tensors: What this one brings.
            timeout_s: Deadline in seconds.
            room: Where the members bring one tensor for each, what this one takes from each.
            copies: Hand over copies of the tensors, and not these themselves.

        Raises:
            PeerError: It cannot take place; the same kind on every member that enters it.
        """
        hub, meeting = self._hub, self._meeting
        brought = [tensor.clone() for tensor in tensors] if copies else tensors
        with hub.changed:
            hub.point(self._rank, f"{what}{self._of_group()}")
            index = self._entered
            self._entered += 1
            slot = meeting.slots.setdefault(index, Slot())
            slot.enter(self.rank_in_group, what, brought, room)
            slot.error = slot.error or self._difference(slot)
            hub.changed.notify_all()
            try:
                self._wait(
                    what,
                    lambda: slot.error is not None or len(slot.entries) == self.world_size,
                    lambda: [rank for member, rank in enumerate(meeting.ranks) if member not in slot.entries],
                    timeout_s,
                )
            except PeerError as exc:
                slot.error = slot.error or exc
                hub.changed.notify_all()
                raise
            finally:
                slot.finished += 1
                if slot.finished == self.world_size:
                    del meeting.slots[index]
            if slot.error is not None:
                error = type(slot.error)(str(slot.error))
                error.ranks = slot.error.ranks
                error.members = odd_members(slot.said(), self.rank_in_group)
                raise error
            return [slot.entries[member][1] for member in range(self.world_size)]

    def _difference(self, slot: Slot) -> CollectiveMismatchError | None:
        """The error where what the members have entered does not go together."""
        said, ranks = slot.said(), self._meeting.ranks
        if len(set(said.values())) > 1:
            return CollectiveMismatchError(different_operations(said, ranks))
        for (taker, giver), (room, given) in slot.handed().items():
            if room.shape != given.shape:
                return CollectiveMismatchError(
                    f"{said[taker]}: rank {ranks[taker]} takes {list(room.shape)} from rank {ranks[giver]}, "
                    f"which sends {list(given.shape)}"
                )
        return None

    def _take(self, tensor: Tensor, letter: tuple[int, int, int, int], timeout_s: float) -> None:
        hub, meeting = self._hub, self._meeting
        src, _, tag, _ = letter
        with hub.changed:
            self._wait(self._line(src, tag), lambda: letter in meeting.mail, lambda: [meeting.ranks[src]], timeout_s)
            message = meeting.mail.pop(letter)
        if tensor.shape != message.shape or tensor.dtype is not message.dtype:
            raise CollectiveMismatchError(f"recv into {_text(tensor)} got {_text(message)}")
        tensor.copy_(message)

    def _has_come(self, letter: tuple[int, int, int, int]) -> bool:
        with self._hub.changed:
            self._hub.point(self._rank, f"a look at {self._line(letter[0], letter[2])}{self._of_group()}")
            return letter in self._meeting.mail

    def _wait(self, what: str, ready: Callable[[], bool], absent: Callable[[], Sequence[int]], timeout_s: float) -> None:
        hub, meeting = self._hub, self._meeting
        wait = Wait(self._rank, what + self._of_group(), ready, absent, lambda: hub.lost(absent(), meeting))
        start = perf_counter()
        try:
            hub.wait(wait, timeout_s, lambda: self._alarm(absent()))
        finally:
            if self.traffic.recorder.observers:
                self.traffic.recorder.add_wait(perf_counter() - start)

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
        return self._done or self._communicator._has_come(self._letter)

    def wait(self, timeout_s: float) -> None:
        if not self._done:
            self._communicator._take(self._tensor, self._letter, timeout_s)
            self._done = True


def _dtype(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _text(tensor: Tensor) -> str:
    return f"{_dtype(tensor)}{list(tensor.shape)}"
