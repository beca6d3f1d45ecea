"""Tensors from one layout to another, between ranks that hold them and ranks that need them."""

from collections.abc import Iterator, Mapping
from hashlib import blake2b
from typing import Final

import torch
from torch import Tensor

from parallel_runtime.comm import GroupCoordinator, SendHandle
from parallel_runtime.errors import ArgumentError, CollectiveMismatchError, ConfigError, PeerFailedError
from parallel_runtime.interop.moves import Box, Move, Placement, plan_moves
from parallel_runtime.terms import Rank

__all__ = ["reshard"]

_DIGEST: Final = 16
_TAG: Final = 7_001
_MESSAGE_BYTES: Final = 2**25
"""How much one message carries, unless a single part is larger."""


def reshard(
    state: Mapping[str, Tensor],
    source: Placement,
    target: Placement,
    *,
    over: GroupCoordinator,
    out: Mapping[str, Tensor] | None = None,
    timeout_s: float | None = None,
) -> dict[str, Tensor]:
    """Give every rank its part of the target layout.

    Tensors go straight from a rank that has them to the ranks that lack them; what a rank has already stays where it is. The
    bytes sent are the fewest that the placements allow, and the receiver compares a hash of each message with the sender's.

    Args:
        state: This rank's parts of the tensors, as ``source`` says; ``{}`` on ranks outside of it. Untouched.
        source: What is where, by world rank; see ``model_placement``.
        target: What is to be where.
        over: A group with every rank of both layouts, such as the world of the context that both were derived from.
        out: Where to write, such as views of a live model's parameters; new tensors by default.
        timeout_s: Longest wait for one message in seconds; the group's own deadline by default.

    Returns:
        This rank's parts as ``target`` says, ``out``'s tensors where given; ``{}`` on ranks outside of it.

    Raises:
        ArgumentError: A tensor is missing, or of the wrong shape or dtype, on any rank; raised on all, naming both.
        ConfigError: ``over`` lacks a rank of a layout.
        CollectiveMismatchError: The ranks were given different placements.
        PeerFailedError: What arrived is not what was sent.

    Collective: all ranks of ``over``; a small all_gather_object, then sends between pairs.
    """
    moves = plan_moves(source, target)
    missing = {rank for placement in (source, target) for tensor in placement.values() for rank in tensor.boxes} - set(over.ranks)
    if missing:
        raise ConfigError(f"ranks {sorted(missing)} of a layout are not in {over.name} with ranks {over.ranks}")
    dtypes = _agree(state, out, source, target, moves, over)
    own = _own_boxes(source, over.rank)
    results = _results(target, dtypes, over, out)
    boxes = _own_boxes(target, over.rank)
    for name, tensor in results.items():
        if name in own:
            kept = tuple(range(max(a.start, b.start), min(a.stop, b.stop)) for a, b in zip(own[name], boxes[name], strict=True))
            if all(kept):
                _part(tensor, boxes[name], kept).copy_(_part(state[name], own[name], kept))
    for step in range(1, over.world_size):  # in every step, each rank sends to one and receives from one
        dst, src = (over.ranks[(over.rank_in_group + way) % over.world_size] for way in (step, -step))
        sending = [_send(message, state, own, over) for message in _messages(_between(moves, over.rank, dst))]
        for message in _messages(_between(moves, src, over.rank)):
            _receive(message, results, boxes, over, timeout_s)
        for handle in sending:
            handle.wait(timeout_s)
    return results


def _own_boxes(placement: Placement, rank: Rank) -> dict[str, Box]:
    return {name: tensor.boxes[rank] for name, tensor in placement.items() if rank in tensor.boxes}


def _between(moves: tuple[Move, ...], src: Rank, dst: Rank) -> list[Move]:
    return [move for move in moves if (move.src, move.dst) == (src, dst)]


def _part(tensor: Tensor, box: Box, part: Box) -> Tensor:
    """``part`` of the whole tensor, of which ``tensor`` is ``box``. A view."""
    return tensor[tuple(slice(p.start - b.start, p.stop - b.start) for p, b in zip(part, box, strict=True))]


def _agree(
    state: Mapping[str, Tensor],
    out: Mapping[str, Tensor] | None,
    source: Placement,
    target: Placement,
    moves: tuple[Move, ...],
    over: GroupCoordinator,
) -> dict[str, torch.dtype]:
    """Compare what the ranks were given, before anything is sent.

    Returns:
        The dtype of every tensor.
    """
    problem = _problem(state, source, over.rank, "state") or (_problem(out, target, over.rank, "out") if out is not None else "")
    mine = [("on", name, _dtype(state[name])) for name in _own_boxes(source, over.rank) if name in state]
    mine += [("in out on", name, _dtype(out[name])) for name in _own_boxes(target, over.rank) if out is not None and name in out]
    digest = blake2b(repr(moves).encode(), digest_size=_DIGEST).hexdigest()
    told = over.all_gather_object((problem, digest, mine))
    for rank, (said, _, _) in zip(over.ranks, told, strict=True):
        if said:
            raise ArgumentError(f"rank {rank}: {said}")
    if len({plan for _, plan, _ in told}) > 1:
        odd = [rank for rank, (_, plan, _) in zip(over.ranks, told, strict=True) if plan != told[0][1]]
        raise CollectiveMismatchError(
            f"ranks {odd} were given other placements than rank {over.ranks[0]}; give all ranks the same"
        )
    seen: dict[str, tuple[str, str]] = {}
    for rank, (_, _, dtypes) in zip(over.ranks, told, strict=True):
        for where, name, dtype in dtypes:
            first, place = seen.setdefault(name, (dtype, f"{where} rank {rank}"))
            if first != dtype:
                raise ArgumentError(f"{name} is {first} {place} and {dtype} {where} rank {rank}; convert one of them first")
    return {name: getattr(torch, dtype) for name, (dtype, _) in seen.items()}


def _problem(tensors: Mapping[str, Tensor], placement: Placement, rank: Rank, word: str) -> str:
    for name, box in _own_boxes(placement, rank).items():
        shape, itemsize = tuple(map(len, box)), placement[name].itemsize
        if name not in tensors:
            return f"{name} is not in {word}, where a part of shape {list(shape)} is wanted"
        tensor = tensors[name]
        if tuple(tensor.shape) != shape or tensor.itemsize != itemsize:
            return (
                f"{name} in {word} is {_dtype(tensor)}{list(tensor.shape)}; the layout says a part of "
                f"shape {list(shape)} with {itemsize} bytes an element"
            )
    return ""


def _dtype(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _results(
    target: Placement, dtypes: Mapping[str, torch.dtype], over: GroupCoordinator, out: Mapping[str, Tensor] | None
) -> dict[str, Tensor]:
    own = _own_boxes(target, over.rank)
    if out is not None:
        return {name: out[name] for name in own}
    return {name: torch.empty(tuple(map(len, box)), dtype=dtypes[name], device=over.device) for name, box in own.items()}


def _messages(moves: list[Move]) -> Iterator[list[Move]]:
    """Moves that travel together: up to ``_MESSAGE_BYTES``, or one that is larger."""
    message: list[Move] = []
    for move in moves:
        if message and sum(each.num_bytes for each in message) + move.num_bytes > _MESSAGE_BYTES:
            yield message
            message = []
        message.append(move)
    if message:
        yield message


def _send(message: list[Move], state: Mapping[str, Tensor], own: Mapping[str, Box], over: GroupCoordinator) -> SendHandle:
    parts = [_part(state[move.name].detach(), own[move.name], move.box).reshape(-1).view(torch.uint8) for move in message]
    payload = torch.cat([*parts, torch.empty(_DIGEST, dtype=torch.uint8, device=over.device)])
    payload[-_DIGEST:] = _digest(payload)
    return over.isend(payload, over.ranks.index(message[0].dst), _TAG, copy=False)


def _receive(
    message: list[Move],
    results: Mapping[str, Tensor],
    own: Mapping[str, Box],
    over: GroupCoordinator,
    timeout_s: float | None,
) -> None:
    src, size = message[0].src, sum(move.num_bytes for move in message)
    payload = torch.empty(size + _DIGEST, dtype=torch.uint8, device=over.device)
    over.recv(over.ranks.index(src), _TAG, out=payload, timeout_s=timeout_s)
    if not torch.equal(_digest(payload), payload[-_DIGEST:]):
        names = ", ".join(dict.fromkeys(move.name for move in message))
        raise PeerFailedError(f"what arrived from rank {src} at rank {over.rank} is not what was sent: {names}")
    offset = 0
    for move in message:
        goal = _part(results[move.name], own[move.name], move.box)
        goal.copy_(payload[offset : offset + move.num_bytes].clone().view(goal.dtype).view(goal.shape))
        offset += move.num_bytes


def _digest(payload: Tensor) -> Tensor:
    digest = blake2b(payload[:-_DIGEST].cpu().numpy().data, digest_size=_DIGEST).digest()
    return torch.frombuffer(bytearray(digest), dtype=torch.uint8).to(payload.device)
