"""A group of a context with the methods and habits of SGLang's and vLLM's ``GroupCoordinator``."""

from collections.abc import Sequence
from typing import Any, final

import torch
from torch import Tensor

from parallel_runtime.comm import GroupCoordinator
from parallel_runtime.errors import ArgumentError
from parallel_runtime.interop.peer_place import PeerPlace

__all__ = ["PeerGroup"]


@final
class PeerGroup(PeerPlace):
    """Wraps one group; the group stays with its context, which also closes it.

    Where the peers' class differs from ours, it is theirs that is kept: a group of one returns its input, ``dim`` is the last by
    default, ``broadcast`` writes into its argument, peers default to the neighbours in the ring, a group of one gives a dict back
    from ``send_tensor_dict``. What differs from theirs: objects are plain data unless ``pickle=True`` was given here, every wait
    has a deadline, and a mismatch between ranks is an error.

    Args:
        group: Of an open context. Borrowed.
        pickle: Whether objects may be anything that can be pickled; only where every member is trusted.
    """

    def __init__(self, group: GroupCoordinator, *, pickle: bool = False) -> None:
        super().__init__(group)
        self._pickle = pickle

    def all_reduce(self, input_: Tensor) -> Tensor:
        """Sum over the members. Callers use what is returned, here as there.

        Args:
            input_: Same shape and dtype on every member. Not changed.

        Returns:
            A new tensor; the input in a group of one.

        Raises:
            PeerError: A member failed, left, is late or differs.

        Collective: all members.
        """
        return input_ if self.world_size == 1 else self.group.all_reduce(input_)

    def all_gather(self, input_: Tensor, dim: int = -1) -> Tensor:
        """Join the members' tensors along ``dim``.

        Args:
            input_: Same shape and dtype on every member.
            dim: Counted from the end if negative.

        Returns:
            A new tensor; the input in a group of one.

        Raises:
            DimError: The tensor has no such dim.
            PeerError: A member failed, left, is late or differs.

        Collective: all members.
        """
        return input_ if self.world_size == 1 else self.group.all_gather(input_, dim)

    def all_gatherv(self, input_: Tensor, dim: int = 0, sizes: Sequence[int] | None = None) -> Tensor:
        """Join tensors of different lengths.

        Args:
            input_: Of this member.
            dim: Along which they are joined and may differ.
            sizes: Length of each member's tensor; ``None`` asks the members.

        Returns:
            A new tensor; the input in a group of one.

        Raises:
            ArgumentError: ``sizes`` do not fit.
            PeerError: A member failed, left, is late or differs.

        Collective: all members.
        """
        if self.world_size == 1:
            return input_
        return self.group.all_gatherv(input_, sizes, dim)

    def reduce_scatter(self, input_: Tensor, dim: int = -1) -> Tensor:
        """Sum over the members and keep this member's part along ``dim``.

        Args:
            input_: Same shape and dtype on every member; ``dim`` divides by the number of members.
            dim: Counted from the end if negative.

        Returns:
            A new tensor; the input in a group of one.

        Raises:
            ArgumentError: The length does not divide.
            DimError: The tensor has no such dim.
            PeerError: A member failed, left, is late or differs.

        Collective: all members.
        """
        return input_ if self.world_size == 1 else self.group.reduce_scatter(input_, dim)

    def gather(self, input_: Tensor, dst: int = 0, dim: int = -1) -> Tensor | None:
        """Join the members' tensors on one of them.

        Args:
            input_: Same shape and dtype on every member.
            dst: Position in the group of who gets the result.
            dim: Counted from the end if negative.

        Returns:
            A new tensor on ``dst``, ``None`` on the others; the input in a group of one.

        Raises:
            ArgumentError: There is no member ``dst``.
            PeerError: A member failed, left, is late or differs.

        Collective: all members.
        """
        return input_ if self.world_size == 1 else self.group.gather(input_, dst, dim)

    def broadcast(self, input_: Tensor, src: int = 0) -> Tensor:
        """Copy one member's tensor into the others', in place.

        Args:
            input_: Same shape and dtype on every member.
            src: Position in the group of who has it.

        Returns:
            The input.

        Raises:
            ArgumentError: There is no member ``src``.
            PeerError: A member failed, left, is late or differs.

        Collective: all members.
        """
        return self.group.broadcast_(input_, src)

    def broadcast_object(self, obj: Any = None, src: int = 0) -> Any:
        """Send an object from one member to all.

        Args:
            obj: On ``src``, what to send; ignored elsewhere.
            src: Position in the group; any member, not only the first.

        Returns:
            The object.

        Raises:
            PeerError: A member failed, left or is late.
            SerializationError: The object is not plain data, and pickle was not asked for.

        Collective: all members.
        """
        return obj if self.world_size == 1 else self.group.broadcast_object(obj, src, pickle=self._pickle)

    def broadcast_object_list(self, obj_list: list[Any], src: int = 0) -> list[Any]:
        """Fill a list with that of one member, in place.

        Args:
            obj_list: As long on every member.
            src: Position in the group of who has it.

        Returns:
            The list.

        Raises:
            ArgumentError: The list has another length than that of ``src``.
            PeerError: A member failed, left or is late.
            SerializationError: An object is not plain data, and pickle was not asked for.

        Collective: all members.
        """
        received = self.broadcast_object(obj_list if self.rank_in_group == src else None, src)
        if len(received) != len(obj_list):
            raise ArgumentError(f"this list has {len(obj_list)} places, but that of member {src} has {len(received)}")
        obj_list[:] = received
        return obj_list

    def all_gather_object(self, obj: Any) -> list[Any]:
        """Collect an object of every member.

        Args:
            obj: Of this member.

        Returns:
            One per member, in group order.

        Raises:
            PeerError: A member failed, left or is late.
            SerializationError: An object is not plain data, and pickle was not asked for.

        Collective: all members.
        """
        return self.group.all_gather_object(obj, pickle=self._pickle)

    def broadcast_tensor_dict(self, tensor_dict: dict[str, Any] | None = None, src: int = 0) -> dict[str, Any] | None:
        """Send a dict of tensors and plain data from one member to all.

        Args:
            tensor_dict: On ``src``, what to send; ignored elsewhere.
            src: Position in the group.

        Returns:
            The dict itself on ``src``, a new one elsewhere.

        Raises:
            PeerError: A member failed, left or is late.
            SerializationError: A value is neither tensor nor plain data.

        Collective: all members.
        """
        if self.world_size == 1:
            return tensor_dict
        received: dict[str, Any] = self.group.broadcast_tensor_dict(tensor_dict if self.rank_in_group == src else None, src)
        return tensor_dict if self.rank_in_group == src else received

    def send_tensor_dict(
        self, tensor_dict: dict[str, Any], dst: int | None = None, all_gather_group: "PeerGroup | None" = None
    ) -> dict[str, Any] | None:
        """Send a dict of tensors and plain data to one member.

        Args:
            tensor_dict: What to send.
            dst: Position in the group; the next one by default.
            all_gather_group: A group whose members hold equal copies; each sends its part of every tensor, receivers join them.

        Returns:
            The dict in a group of one, which sends nothing; else ``None``.

        Raises:
            PeerError: The peer failed, left or is late.
            SerializationError: A value is neither tensor nor plain data.
        """
        if self.world_size == 1:
            return tensor_dict
        keys = [key for key, value in tensor_dict.items() if isinstance(value, Tensor)] if all_gather_group else []
        self.group.send_tensor_dict(tensor_dict, dst, slice_over=_inner(all_gather_group), slice_keys=keys)
        return None

    def recv_tensor_dict(self, src: int | None = None, all_gather_group: "PeerGroup | None" = None) -> dict[str, Any] | None:
        """Receive what a member sent by ``send_tensor_dict``.

        Args:
            src: Position in the group; the previous one by default.
            all_gather_group: As for the sender.

        Returns:
            A new dict; ``None`` in a group of one.

        Raises:
            PeerError: The peer failed, left or is late.
        """
        if self.world_size == 1:
            return None
        received: dict[str, Any] = self.group.recv_tensor_dict(src, slice_over=_inner(all_gather_group))
        return received

    def send_object(self, obj: Any, dst: int) -> None:
        """Send an object to one member.

        Args:
            obj: What to send.
            dst: Position in the group.

        Raises:
            PeerError: The peer failed, left or is late.
            SerializationError: The object is not plain data, and pickle was not asked for.
        """
        self.group.send_object(obj, dst, pickle=self._pickle)

    def recv_object(self, src: int) -> Any:
        """Receive an object from one member.

        Args:
            src: Position in the group.

        Returns:
            The object.

        Raises:
            PeerError: The peer failed, left or is late.
        """
        return self.group.recv_object(src, pickle=self._pickle)

    def send(self, tensor: Tensor, dst: int | None = None) -> None:
        """Send a tensor to one member.

        Args:
            tensor: What to send.
            dst: Position in the group; the next one by default.

        Raises:
            PeerError: The peer failed, left or is late.
        """
        self.group.send(tensor, dst)

    def recv(self, size: Sequence[int], dtype: torch.dtype, src: int | None = None) -> Tensor:
        """Receive a tensor from one member.

        Args:
            size: Its shape.
            dtype: Its dtype.
            src: Position in the group; the previous one by default.

        Returns:
            A new tensor.

        Raises:
            CollectiveMismatchError: Another shape or dtype came.
            PeerError: The peer failed, left or is late.
        """
        return self.group.recv(src, out=torch.empty(tuple(size), dtype=dtype, device=self.device))

    def barrier(self) -> None:
        """Wait for all members.

        Raises:
            PeerError: A member failed, left or is late.

        Collective: all members.
        """
        self.group.barrier()

    def destroy(self) -> None:
        """Do nothing: the context that opened the group closes it."""


def _inner(group: PeerGroup | None) -> GroupCoordinator | None:
    return None if group is None else group.group
