"""What ``GroupCoordinator`` offers between two members, and on objects."""

from abc import ABC
from collections.abc import Collection, Mapping
from typing import Any, Self, TypeVar

from torch import Tensor

from parallel_runtime.comm.channel import Channel
from parallel_runtime.comm.collectives import Collectives
from parallel_runtime.comm.core import GroupCore
from parallel_runtime.comm.dicts import TensorDicts
from parallel_runtime.comm.messages import Messages
from parallel_runtime.comm.outbox import Outbox
from parallel_runtime.comm.p2p import PointToPoint, RecvHandle, SendHandle, check_peer
from parallel_runtime.errors import ArgumentError

__all__ = ["MessageCalls"]

_T = TypeVar("_T")


class MessageCalls(ABC):
    """Point-to-point operations, objects and channels of a ``GroupCoordinator``, whose text says what holds for all of them."""

    __slots__ = ()

    _core: GroupCore
    _collectives: Collectives
    _dicts: TensorDicts
    _messages: Messages
    _outbox: Outbox
    _p2p: PointToPoint

    def send(self, tensor: Tensor, dst: int | None = None, tag: int = 0, *, timeout_s: float | None = None) -> None:
        """Send ``tensor`` and wait until the receiver has it.

        Args:
            tensor: Any shape and dtype.
            dst: Group-local; by default the next member.
            tag: Matches the ``recv`` with the same tag.
            timeout_s: Deadline in seconds.

        Raises:
            ArgumentError: ``dst`` is not another member, or ``tag`` is out of range.
            CollectiveMismatchError: The receiver has room for another shape or dtype; it raises, too.
        """
        self._p2p.send(tensor, dst, tag, timeout_s)

    def recv(self, src: int | None = None, tag: int = 0, *, out: Tensor | None = None, timeout_s: float | None = None) -> Tensor:
        """Receive a tensor; its shape and dtype come along.

        Args:
            src: Group-local; by default the previous member.
            tag: Matches the ``send`` with the same tag.
            out: Where to write: exactly what is sent, else it is an error on both sides.
            timeout_s: Deadline in seconds.

        Returns:
            ``out``, or a new tensor on ``device``.

        Raises:
            ArgumentError: ``src`` is not another member, ``tag`` is out of range, or ``out`` is expanded.
            CollectiveMismatchError: ``out`` is of another shape or dtype than what was sent; the sender raises, too.
        """
        return self._p2p.recv(src, tag, out, timeout_s)

    def isend(self, tensor: Tensor, dst: int | None = None, tag: int = 0, *, copy: bool = True) -> SendHandle:
        """Start sending ``tensor``. The group keeps what it needs, also when the handle is dropped.

        Args:
            tensor: Any shape and dtype.
            dst: Group-local; by default the next member.
            tag: Matches the ``recv`` with the same tag.
            copy: Copy first, so that ``tensor`` may be changed at once. ``False`` saves the copy; leave it alone until ``wait``
                returns.

        Returns:
            A handle; waiting for it twice is fine.

        Raises:
            ArgumentError: ``dst`` is not another member, or ``tag`` is out of range.
        """
        return self._p2p.isend(tensor, dst, tag, copy)

    def irecv(self, src: int | None = None, tag: int = 0, *, out: Tensor | None = None) -> RecvHandle:
        """Start receiving. Receives from one member with one tag are filled in the order they were started.

        Args:
            src: Group-local; by default the previous member.
            tag: Matches the ``send`` with the same tag.
            out: As in ``recv``.

        Returns:
            A handle whose ``wait`` returns the tensor.

        Raises:
            ArgumentError: ``src`` is not another member, ``tag`` is out of range, or ``out`` is expanded.
        """
        return self._p2p.irecv(src, tag, out)

    def exchange(
        self,
        tensor: Tensor,
        dst: int | None = None,
        src: int | None = None,
        tag: int = 0,
        *,
        out: Tensor | None = None,
        timeout_s: float | None = None,
    ) -> Tensor:
        """Send one way and receive the other way at once, which two blocking sends could not.

        Args:
            tensor: What to send.
            dst: Group-local; by default the next member.
            src: Group-local; by default the previous member.
            tag: Of both.
            out: Where to receive.
            timeout_s: Deadline in seconds.

        Returns:
            ``out``, or a new tensor.

        Raises:
            ArgumentError: A peer is not another member, ``tag`` is out of range, or ``out`` is expanded.
            CollectiveMismatchError: ``out`` is of another shape or dtype than what was sent.
        """
        return self._p2p.exchange(tensor, dst, src, tag, out, timeout_s)

    def broadcast_object(self, value: Any, src: int = 0, *, pickle: bool = False, timeout_s: float | None = None) -> Any:
        """Send an object to all members.

        Args:
            value: On ``src`` plain data, containers, tensors or numpy values; ignored elsewhere, may be ``None``.
            src: Group-local.
            pickle: Pickle instead, equal on all members: only among members that trust each other.
            timeout_s: Deadline in seconds; the control deadline by default.

        Returns:
            ``value`` itself on ``src``, a new equal object elsewhere; tensors arrive detached.

        Raises:
            ArgumentError: ``src`` is not a member.
            SerializationError: It cannot be encoded (on ``src``), or not decoded (here only).
            PeerEncodingError: ``src`` could not encode it. The group is as usable as before.

        Collective: one broadcast of 1 KiB on the control plane, one more for a bigger body and for every tensor from 64 KiB.
        """
        return self._messages.broadcast_object(value, src, pickle, timeout_s)

    def all_gather_object(self, value: Any, *, pickle: bool = False, timeout_s: float | None = None) -> list[Any]:
        """Give every member the objects of all.

        Args:
            value: As in ``broadcast_object``.
            pickle: As in ``broadcast_object``.
            timeout_s: Deadline in seconds; the control deadline by default.

        Returns:
            The objects in group order; at this member's place ``value`` itself.

        Raises:
            SerializationError: This member's object cannot be encoded, or another's not decoded here.
            PeerEncodingError: Another member could not encode its object; raised on all, naming it.

        Collective: one all-gather of 1 KiB per member on the control plane, a second one if a body is bigger.
        """
        return self._messages.all_gather_object(value, pickle, timeout_s)

    def send_object(
        self, value: Any, dst: int | None = None, tag: int = 0, *, pickle: bool = False, timeout_s: float | None = None
    ) -> None:
        """Send an object to one member. Returns without waiting for it, unless 64 earlier ones are unconfirmed.

        Args:
            value: As in ``broadcast_object``; tensors are copied.
            dst: Group-local; by default the next member.
            tag: Matches the ``recv_object`` with the same tag; apart from the tags of ``send``.
            pickle: Pickle instead; the receiver has to allow it.
            timeout_s: How long it may wait for room, in seconds.

        Raises:
            ArgumentError: ``dst`` is not another member, or ``tag`` is out of range.
            SerializationError: It cannot be encoded; the receiver gets a ``PeerEncodingError``.
        """
        self._messages.send_object(value, dst, tag, pickle, timeout_s)

    def recv_object(self, src: int | None = None, tag: int = 0, *, pickle: bool = False, timeout_s: float | None = None) -> Any:
        """Receive an object.

        Args:
            src: Group-local; by default the previous member.
            tag: Matches the ``send_object`` with the same tag.
            pickle: Allow a pickled one: only from members that are trusted.
            timeout_s: Deadline in seconds.

        Returns:
            A new object.

        Raises:
            ArgumentError: ``src`` is not another member, or ``tag`` is out of range.
            SerializationError: It cannot be decoded here; the message is used up and the next one is fine.
            PeerEncodingError: The sender could not encode it.
        """
        return self._messages.recv_object(src, tag, pickle, timeout_s)

    def broadcast_tensor_dict(
        self, tensors: Mapping[Any, Any] | None, src: int = 0, *, pickle: bool = False, timeout_s: float | None = None
    ) -> dict[Any, Any]:
        """Send a dict of tensors and plain values, nested in any way, to all members.

        Args:
            tensors: On ``src`` a dict; ignored elsewhere, may be ``None``.
            src: Group-local.
            pickle: As in ``broadcast_object``.
            timeout_s: Deadline in seconds; the control deadline by default.

        Returns:
            ``tensors`` itself on ``src``, a new dict elsewhere: same keys in the same order, same containers, detached.

        Raises:
            ArgumentError: ``src`` is not a member, or its value is no dict (a ``PeerEncodingError`` on the others).
            SerializationError: As in ``broadcast_object``.
            PeerEncodingError: As in ``broadcast_object``.

        Collective: as ``broadcast_object``.
        """
        return self._messages.broadcast_tensor_dict(tensors, src, pickle, timeout_s)

    def send_tensor_dict(
        self,
        tensors: dict[Any, Any],
        dst: int | None = None,
        tag: int = 0,
        *,
        slice_over: Self | None = None,
        slice_keys: Collection[Any] = (),
        check_slices: bool | None = None,
        timeout_s: float | None = None,
    ) -> None:
        """Send a dict of tensors and plain values to one member and wait until it has it.

        Args:
            tensors: Nested in any way.
            dst: Group-local; by default the next member.
            tag: Matches the ``recv_tensor_dict`` with the same tag.
            slice_over: A group whose members all send an equal copy of the tensors in ``slice_keys``, each to a receiver in a
                group like it: every member sends only its share. Tensors that do not divide are sent whole.
            slice_keys: Top-level keys of tensors that are equal on all members of ``slice_over``.
            check_slices: Compare them first, with a small all-gather over ``slice_over``; by default where the group is checked.
            timeout_s: Deadline in seconds.

        Raises:
            ArgumentError: ``dst`` is not another member, ``tag`` is out of range, or ``slice_keys`` do not fit.
            SerializationError: It cannot be encoded; the receiver gets a ``PeerEncodingError``.
            CollectiveMismatchError: A tensor to be sliced differs between members of ``slice_over``.
        """
        self._dicts.send(tensors, dst, tag, _slices(slice_over, slice_keys), check_slices, timeout_s)

    def isend_tensor_dict(
        self,
        tensors: dict[Any, Any],
        dst: int | None = None,
        tag: int = 0,
        *,
        slice_over: Self | None = None,
        slice_keys: Collection[Any] = (),
        check_slices: bool | None = None,
        copy: bool = True,
    ) -> SendHandle:
        """Start ``send_tensor_dict``.

        Args:
            tensors: As in ``send_tensor_dict``.
            dst: As in ``send_tensor_dict``.
            tag: As in ``send_tensor_dict``.
            slice_over: As in ``send_tensor_dict``.
            slice_keys: As in ``send_tensor_dict``.
            check_slices: As in ``send_tensor_dict``.
            copy: Copy big tensors first, so that they may be changed at once.

        Returns:
            A handle; the group keeps what it needs, also when it is dropped.

        Raises:
            ArgumentError: As in ``send_tensor_dict``.
            SerializationError: As in ``send_tensor_dict``.
            CollectiveMismatchError: As in ``send_tensor_dict``.
        """
        return self._dicts.isend(tensors, dst, tag, _slices(slice_over, slice_keys), check_slices, copy)

    def recv_tensor_dict(
        self,
        src: int | None = None,
        tag: int = 0,
        *,
        slice_over: Self | None = None,
        timeout_s: float | None = None,
    ) -> dict[Any, Any]:
        """Receive a dict of tensors.

        Args:
            src: Group-local; by default the previous member.
            tag: Matches the ``send_tensor_dict`` with the same tag.
            slice_over: The receivers' group, needed where the sender sliced: it joins the slices, so all its members receive.
            timeout_s: Deadline in seconds.

        Returns:
            A new dict.

        Raises:
            ArgumentError: ``src`` is not another member, ``tag`` is out of range, or ``slice_over`` does not fit the slices.
            SerializationError: It cannot be decoded here.
            PeerEncodingError: The sender could not encode it.
            CollectiveMismatchError: The sender sent an object that is no tensor dict.
        """
        over = None if slice_over is None else slice_over._collectives
        return self._dicts.recv(src, tag, over, timeout_s)

    def channel(self, name: str, schema: type[_T], peer: int | None = None) -> Channel[_T]:
        """Open this member's end of a typed line to another member. Opening does not communicate.

        Args:
            name: Equal at both ends, unique between the two while open.
            schema: Type of its messages, equal at both ends: anything msgspec knows, like a ``msgspec.Struct`` with tensors.
            peer: Group-local; may be left out in a group of two.

        Returns:
            One end; messages of other channels and tags never meet its own.

        Raises:
            ArgumentError: ``peer`` is not another member or was left out, the name is taken, or the schema is unusable.
            ContextStateError: The group is closed, or belongs to another process.
        """
        self._core.check_usable(f"channel {name!r}")
        if peer is None and self._core.communicator.world_size != 2:
            raise ArgumentError(
                f"channel {name!r}: say which of the {self._core.communicator.world_size} members of {self._core.name} is it"
            )
        return Channel(self._core, self._outbox, name, schema, check_peer(self._core, peer, "peer", 1))


def _slices(over: MessageCalls | None, keys: Collection[Any]) -> tuple[Collectives | None, Collection[object]]:
    return (None if over is None else over._collectives), keys
