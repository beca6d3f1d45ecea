"""Weights from the ranks of a trainer to serving ranks, over a group that both are in.

The senders come first in the group. Everyone hears first what will come (names, shapes, dtypes, who sends); then every tensor is
broadcast once, and each receiver keeps what it needs.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import final

import msgspec
import torch
from torch import Tensor

from parallel_runtime.comm import GroupCoordinator
from parallel_runtime.config.environment import Identity
from parallel_runtime.config.parallel_config import ParallelConfig
from parallel_runtime.context import ParallelContext
from parallel_runtime.errors import ArgumentError
from parallel_runtime.terms import Rank

__all__ = ["ReceivedWeights", "receive_weights", "send_weights", "weight_context"]


class _Parcel(msgspec.Struct, frozen=True):
    name: str
    shape: tuple[int, ...]
    dtype: str


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class ReceivedWeights:
    """What arrived.

    Attributes:
        shapes: Of everything that was sent, by name; equal on every receiver.
        tensors: What this receiver wanted.
    """

    shapes: Mapping[str, tuple[int, ...]]
    tensors: Mapping[str, Tensor]


def weight_context(rank: int, world_size: int, *, host: str, port: int, config: ParallelConfig | None = None) -> ParallelContext:
    """A context over a trainer's and an engine's ranks, beside whatever each of them has open already.

    Args:
        rank: Position among all of them: the trainer's ranks come first.
        world_size: How many there are.
        host: Where rank 0 listens.
        port: Its TCP port.
        config: Backend, device and deadlines; its sizes are not used. Equal on all of them.

    Returns:
        The context, to be entered; its group is ``world``.
    """
    settings = (config or ParallelConfig()).model_dump(include={"backend", "device", "deadlines"})
    identity = Identity(rank=Rank(rank), world_size=world_size, local_rank=rank, master_host=host, master_port=port)
    return ParallelContext(ParallelConfig(dp=world_size, **settings), identity=identity)


def send_weights(group: GroupCoordinator, tensors: Mapping[str, Tensor], *, num_senders: int = 1) -> None:
    """Send full tensors to every receiver; on a sender.

    Args:
        group: Senders, then receivers.
        tensors: This sender's part, under the names of ``transformers``; no other sender has one of the same name.
        num_senders: How many of the group's first members send.

    Raises:
        ArgumentError: This member is no sender, or two senders have a tensor of the same name.
        PeerError: A member failed or left.

    Collective: one small message, then one broadcast of each tensor; all members of the group.
    """
    if group.rank_in_group >= num_senders:
        raise ArgumentError(
            f"member {group.rank_in_group} of {group.world_size} does not send; members 0 to {num_senders - 1} do"
        )
    own = [_Parcel(name, tuple(tensor.shape), str(tensor.dtype).removeprefix("torch.")) for name, tensor in tensors.items()]
    parcels = _announce(group, own, num_senders)
    _move(group, parcels, lambda parcel: tensors[parcel.name] if parcel.name in tensors else _empty(parcel, group))


def receive_weights(
    group: GroupCoordinator, *, num_senders: int = 1, wants: Callable[[str], bool] = lambda name: True
) -> ReceivedWeights:
    """Take what the senders send; on a receiver.

    Args:
        group: Senders, then receivers.
        num_senders: How many of the group's first members send.
        wants: Whether to keep a tensor of that name.

    Returns:
        What arrived.

    Raises:
        ArgumentError: This member is a sender, or two senders have a tensor of the same name.
        PeerError: A member failed or left.

    Collective: as ``send_weights``.
    """
    if group.rank_in_group < num_senders:
        raise ArgumentError(f"member {group.rank_in_group} of {group.world_size} sends; members from {num_senders} on receive")
    kept: dict[str, Tensor] = {}

    def make(parcel: _Parcel) -> Tensor:
        tensor = _empty(parcel, group)
        if wants(parcel.name):
            kept[parcel.name] = tensor
        return tensor

    parcels = _announce(group, [], num_senders)
    _move(group, parcels, make)
    return ReceivedWeights(shapes={parcel.name: parcel.shape for part in parcels for parcel in part}, tensors=kept)


def _empty(parcel: _Parcel, group: GroupCoordinator) -> Tensor:
    return torch.empty(parcel.shape, dtype=getattr(torch, parcel.dtype), device=group.device)


def _announce(group: GroupCoordinator, own: list[_Parcel], num_senders: int) -> list[list[_Parcel]]:
    said = group.all_gather_object([(parcel.name, parcel.shape, parcel.dtype) for parcel in own])[:num_senders]
    parcels = [[_Parcel(*each) for each in part] for part in said]
    names = [parcel.name for part in parcels for parcel in part]
    if len(set(names)) != len(names):
        twice = sorted({name for name in names if names.count(name) > 1})
        raise ArgumentError(f"{len(twice)} tensors have more than one sender, such as {twice[0]!r}; each is sent once")
    return parcels


def _move(group: GroupCoordinator, parcels: Sequence[Sequence[_Parcel]], tensor_of: Callable[[_Parcel], Tensor]) -> None:
    for sender, part in enumerate(parcels):
        for parcel in part:
            tensor = tensor_of(parcel).detach().to(group.device).contiguous()
            group.broadcast_(tensor, src=sender)
