"""The heart of a coordinator: every operation passes through ``GroupCore.run``."""

import os
from collections.abc import Callable
from hashlib import blake2b
from time import perf_counter
from typing import Final, TypeVar, final

import torch
from torch import Tensor
from torch.autograd import profiler

from parallel_runtime.comm.communicator import Communicator, Operation, Work
from parallel_runtime.comm.diagnosis import Diagnostician, Failure, different_operations, odd_members
from parallel_runtime.comm.groups import GroupSpec, check_seconds
from parallel_runtime.comm.recorder import Entry, describe
from parallel_runtime.comm.tensors import movable
from parallel_runtime.errors import ArgumentError, CollectiveMismatchError, ContextStateError, GroupBusyError, PeerError

__all__ = ["GroupCore"]

_T = TypeVar("_T")
_FINGERPRINT_BYTES: Final = 256


@final
class GroupCore:
    """One open group: its communicators, and the rules that hold for every operation on it.

    Attributes:
        spec: What it was opened from.
        communicator: Moves tensors.
        control: Moves messages between CPUs; the same object where the group lives on CPU.
        traffic: Lock, sequence and recorder, shared by the aliases of the group.
        sends_tensors: Whether ``communicator`` keeps sends of different tags apart; otherwise they go through the CPUs.
        diagnostician: Knows why the members of this alias do not come; ``None`` where nobody does.
    """

    __slots__ = (
        "checked",
        "collective_s",
        "communicator",
        "control",
        "diagnostician",
        "is_cpu",
        "is_open",
        "name",
        "p2p_s",
        "sends_tensors",
        "spec",
        "traffic",
    )

    def __init__(
        self,
        spec: GroupSpec,
        communicator: Communicator,
        control: Communicator,
        diagnostician: Diagnostician | None = None,
    ) -> None:
        self.spec = spec
        self.diagnostician = diagnostician
        self.name = spec.name
        self.communicator = communicator
        self.control = control
        self.traffic = communicator.traffic
        self.traffic.ranks = spec.ranks
        if control is not communicator:
            control.join_traffic(self.traffic)
        self.collective_s = spec.timeouts.collective_s
        self.p2p_s = spec.timeouts.p2p_s
        self.is_cpu = spec.device.type == "cpu"
        self.checked = spec.checked and control.world_size > 1
        self.sends_tensors = communicator.supports(Operation.SEND, torch.uint8, 0)
        self.is_open = True
        self.traffic.users += 1

    def run(self, operation: str, tensor: Tensor | None, call: Callable[..., _T], *args: object) -> _T:
        """Run ``call(*args)`` as one numbered, recorded operation of this group.

        Args:
            operation: Name for errors and records.
            tensor: What it moves, for errors and records; ``None`` for messages.
            call: Does the work.
            args: Handed to ``call``.

        Returns:
            What ``call`` returned.

        Raises:
            ContextStateError: The group is closed, belongs to another process, or cannot do this while a graph is recorded.
            GroupBusyError: Another thread is inside an operation of this group.
            PeerError: As raised by ``call``, with the group, the sequence and the operation in front.
        """
        traffic = self.traffic
        if not self.is_open or traffic.pid != os.getpid():
            raise ContextStateError(self._why_unusable(operation))
        if traffic.is_recording is not None and traffic.is_recording():
            self._check_capturable(operation, tensor, call)
        if not traffic.lock.acquire(False):
            raise GroupBusyError(self._who_is_inside(operation))
        traffic.diagnostician = self.diagnostician
        sequence = traffic.sequence = traffic.sequence + 1
        start = perf_counter()
        entry: Entry
        if tensor is None:
            entry = (self.name, sequence, operation, None, (), start)
        else:
            entry = (self.name, sequence, operation, tensor.dtype, tensor.shape, start)
        recorder = traffic.recorder
        recorder.under_way = entry
        try:
            if profiler._is_profiler_enabled:
                with profiler.record_function(f"{self.name} {_described(operation, tensor)}"):
                    return call(*args)
            return call(*args)
        except PeerError as exc:
            raise self.named(exc, operation, tensor, sequence, perf_counter() - start) from exc
        finally:
            recorder.finish(entry, perf_counter() - start)
            traffic.lock.release()

    def start_sending(self, tensor: Tensor, peer: int, wire_tag: int) -> tuple[Work, Tensor]:
        """Start to move a contiguous tensor to one member.

        Args:
            tensor: Left alone until done.
            peer: Group-local.
            wire_tag: As in ``Communicator.isend``.

        Returns:
            What is under way, and the memory that it reads from.
        """
        goes_straight = self._goes_straight(tensor)
        moved = movable(tensor if goes_straight else tensor.cpu())
        return (self.communicator if goes_straight else self.control).isend(moved, peer, wire_tag), moved

    def fill(self, tensor: Tensor, peer: int, wire_tag: int, limit_s: float) -> None:
        """Receive what the other member hands to ``start_sending``.

        Args:
            tensor: Contiguous, exactly what is sent.
            peer: Group-local.
            wire_tag: As in ``Communicator.irecv``.
            limit_s: Deadline in seconds.
        """
        goes_straight = self._goes_straight(tensor)
        landing = tensor if goes_straight or tensor.is_cpu else torch.empty_like(tensor, device="cpu")
        (self.communicator if goes_straight else self.control).irecv(movable(landing), peer, wire_tag).wait(limit_s)
        if landing is not tensor:
            tensor.copy_(landing)

    def _goes_straight(self, tensor: Tensor) -> bool:
        return self.sends_tensors and tensor.device.type == self.spec.device.type

    def check_usable(self, operation: str) -> None:
        """Check that the group may be used here and now.

        Raises:
            ContextStateError: The group is closed, or belongs to another process.
        """
        if not self.is_open or self.is_foreign:
            raise ContextStateError(self._why_unusable(operation))

    def run_agreed(
        self, operation: str, tensor: Tensor | None, agreed: tuple[object, ...], call: Callable[..., _T], *args: object
    ) -> _T:
        """``run``, after comparing ``agreed`` between all members where the group is checked.

        Args:
            operation: Name for errors and records.
            tensor: What it moves, or ``None``.
            agreed: What has to be equal on every member: dtype, shape, dim, op, src.
            call: Does the work.
            args: Handed to ``call``.

        Returns:
            What ``call`` returned.

        Raises:
            CollectiveMismatchError: The members entered different operations; raised on all of them, before anything ran.
        """
        if not self.checked:
            return self.run(operation, tensor, call, *args)
        result: _T = self.run(operation, tensor, self._checked, _fingerprint(operation, agreed), call, args)
        return result

    def _checked(self, fingerprint: str, call: Callable[..., _T], args: tuple[object, ...]) -> _T:
        mine = torch.zeros(_FINGERPRINT_BYTES, dtype=torch.uint8)
        text = fingerprint.encode()
        if len(text) > _FINGERPRINT_BYTES:
            ending = f"... #{blake2b(text, digest_size=8).hexdigest()}".encode()
            text = text[: _FINGERPRINT_BYTES - len(ending)] + ending
        mine[: len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        rows = mine.new_empty((self.control.world_size, _FINGERPRINT_BYTES))
        self.control.all_gather(rows, mine, self.spec.timeouts.control_s)
        if not bool((rows == mine).all()):
            entered = [bytes(row.tolist()).rstrip(b"\0").decode(errors="replace") for row in rows]
            said = dict(enumerate(entered))
            error = CollectiveMismatchError(different_operations(said, self.spec.ranks))
            error.members = odd_members(said, self.control.rank_in_group)
            raise error
        return call(*args)

    def _check_capturable(self, operation: str, tensor: Tensor | None, call: Callable[..., object]) -> None:
        """Only what the communicator itself does on tensors can be recorded; the rest needs the CPU at every replay."""
        mover = getattr(call, "__self__", None)
        if tensor is not None and (mover is None or mover is self.communicator) and self.communicator.is_capturable:
            return
        if self.communicator.is_capturable:
            why = "is checked over the CPU first" if mover is self else "goes through the CPU"
        else:
            why = f"goes over {self.communicator.kind}, which works on the CPU"
        raise ContextStateError(
            f"{operation} on group {self.name} cannot become part of a graph: it {why}, so a replay would leave it out; "
            "do it before or after the recording"
        )

    def named(self, exc: PeerError, operation: str, tensor: Tensor | None, sequence: int, seconds: float) -> PeerError:
        """The error with the group, the sequence number and the operation in its text, and the story where somebody knows it."""
        what = _described(operation, tensor)
        spec, diagnostician = self.spec, self.diagnostician
        if diagnostician is None:
            return type(exc)(f"{self.name} seq {sequence} {what}: {exc} [members of {self.name}: ranks {spec.ranks}]")
        return diagnostician.explain(
            Failure(
                group=self.name,
                ranks=spec.ranks,
                rank=spec.rank,
                sequence=sequence,
                operation=operation,
                what=what,
                seconds=seconds,
                error=exc,
            )
        )

    def member(self, value: int, word: str) -> int:
        """Check a group-local peer.

        Raises:
            ArgumentError: ``value`` is not a position in the group.
        """
        world_size = self.communicator.world_size
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < world_size:
            raise ArgumentError(
                f"{word}={value!r} is not a member of {self.name}: peers are group-local, 0 to {world_size - 1} "
                f"(world ranks {self.spec.ranks})"
            )
        return value

    def on_device(self, tensor: Tensor) -> Tensor:
        """Check that the group moves ``tensor``.

        Args:
            tensor: What a caller handed over.

        Returns:
            The same tensor.

        Raises:
            ArgumentError: It is no tensor, or on another kind of device than the group.
        """
        if not isinstance(tensor, Tensor):
            raise ArgumentError(f"{self.name}: expected a tensor, got {type(tensor).__name__}")
        if tensor.device.type != self.spec.device.type:
            raise ArgumentError(f"{self.name} moves tensors on {self.spec.device}, this one is on {tensor.device}; move it first")
        return tensor

    def deadline(self, timeout_s: float | None, default_s: float) -> float:
        """``timeout_s``, or the group's own deadline where it is ``None``.

        Raises:
            ArgumentError: ``timeout_s`` is no positive number, or longer than thirty years.
        """
        if timeout_s is None:
            return default_s
        return check_seconds(timeout_s, "timeout_s")

    @property
    def is_foreign(self) -> bool:
        """Whether this is a forked child of the process that opened the group."""
        return self.traffic.pid != os.getpid()

    def close(self) -> None:
        """Refuse further use; the last coordinator of a communicator frees it. Never communicates; twice is nothing."""
        if not self.is_open:
            return
        self.is_open = False
        self.traffic.users -= 1
        if self.traffic.users == 0:
            self.communicator.close()
            if self.control is not self.communicator:
                self.control.close()

    def _why_unusable(self, operation: str) -> str:
        if self.is_foreign:
            return (
                f"{operation} on group {self.name}: the group belongs to another process (pid {self.traffic.pid}, this is "
                f"{os.getpid()}); open a context of its own in a child process instead of forking one"
            )
        return f"{operation} on group {self.name}: the group is closed"

    def _who_is_inside(self, operation: str) -> str:
        current = self.traffic.recorder.current
        inside = "an operation" if current is None else f"seq {current.sequence} {current.operation} of {current.group}"
        return (
            f"{operation} on group {self.name} while another thread is inside {inside}; use one thread per group, "
            "or ctx.duplicate() for a second one"
        )


def _fingerprint(operation: str, agreed: tuple[object, ...]) -> str:
    """What a member entered, like ``"reduce to member 0 sum float32[2, 2]"``."""
    parts = (str(list(part)) if isinstance(part, tuple) else f" {str(part).removeprefix('torch.')}" for part in agreed)
    return operation + "".join(parts)


def _described(operation: str, tensor: Tensor | None) -> str:
    return describe(operation, None, ()) if tensor is None else describe(operation, tensor.dtype, tuple(tensor.shape))
