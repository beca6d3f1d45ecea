"""Tensor dicts from one member to another, with the opt-in shortcut for tensors that a second group holds equal copies of."""

from collections.abc import Collection
from hashlib import blake2b
from math import prod
from typing import Any, cast, final

import torch
from torch import Tensor

from parallel_runtime.comm.collectives import Collectives
from parallel_runtime.comm.core import GroupCore
from parallel_runtime.comm.frames import Content
from parallel_runtime.comm.mail import attempt, failed, post, take, unpack
from parallel_runtime.comm.outbox import Outbox, Sending
from parallel_runtime.comm.p2p import SendHandle, check_peer, check_tag
from parallel_runtime.comm.tensors import as_bytes, dense
from parallel_runtime.comm.traffic import MAIL_LANE
from parallel_runtime.errors import ArgumentError, CollectiveMismatchError

__all__ = ["TensorDicts"]


@final
class TensorDicts:
    """Sends and receives tensor dicts over ``core``.

    Raises:
        ArgumentError: The dict, the keys to slice or the group to join slices over do not fit.
        CollectiveMismatchError: What was to be sliced differs between members.
    """

    __slots__ = ("_core", "_outbox")

    def __init__(self, core: GroupCore, outbox: Outbox) -> None:
        self._core = core
        self._outbox = outbox

    def isend(
        self,
        tensors: dict[Any, Any],
        dst: int | None,
        tag: int,
        slices: tuple[Collectives | None, Collection[object]],
        check_slices: bool | None,
        copy: bool,
    ) -> SendHandle:
        """Start a send."""
        sending = self._post("isend_tensor_dict", tensors, dst, tag, slices, check_slices, copy, self._core.p2p_s)
        return SendHandle(self._core, sending, None, "isend_tensor_dict")

    def send(
        self,
        tensors: dict[Any, Any],
        dst: int | None,
        tag: int,
        slices: tuple[Collectives | None, Collection[object]],
        check_slices: bool | None,
        timeout_s: float | None,
    ) -> None:
        """Send and wait for the confirmation."""
        limit_s = self._core.deadline(timeout_s, self._core.p2p_s)
        sending = self._post("send_tensor_dict", tensors, dst, tag, slices, check_slices, False, limit_s)
        self._core.run("send_tensor_dict", None, sending.finish, limit_s)

    def recv(self, src: int | None, tag: int, over: Collectives | None, timeout_s: float | None) -> dict[Any, Any]:
        """Receive."""
        core = self._core
        limit_s = core.deadline(timeout_s, core.p2p_s)
        stream = (check_peer(core, src, "src", -1), check_tag(tag) + MAIL_LANE)
        body = core.run("recv_tensor_dict", None, take, core, self._outbox, stream, limit_s, Content.TENSOR_DICT)
        message = unpack(body, f"{core.name}: member {stream[0]}", pickle=False)
        tensors, sliced = cast(tuple[dict[Any, Any], dict[Any, Any]], message)
        for key, shape in sliced.items():
            tensors[key] = self._joined(key, tensors[key], shape, over, timeout_s)
        return tensors

    def _post(
        self,
        operation: str,
        tensors: dict[Any, Any],
        dst: int | None,
        tag: int,
        slices: tuple[Collectives | None, Collection[object]],
        check_slices: bool | None,
        copy: bool,
        limit_s: float,
    ) -> Sending:
        core = self._core
        stream = (check_peer(core, dst, "dst", 1), check_tag(tag) + MAIL_LANE)
        over, keys = slices
        try:
            message = _sliced(operation, tensors, over, keys, core.spec.checked if check_slices is None else check_slices)
            outcome = attempt(message, pickle=False)
        except (ArgumentError, CollectiveMismatchError) as exc:
            outcome = failed(exc)
        sending = core.run(
            operation, None, lambda: post(core, self._outbox, outcome, stream, limit_s, Content.TENSOR_DICT, copy=copy)
        )
        if outcome.error is not None:
            raise outcome.error
        return sending

    def _joined(
        self, key: object, piece: Tensor, shape: tuple[int, ...], over: Collectives | None, timeout_s: float | None
    ) -> Tensor:
        if over is None or piece.numel() * over.world_size != prod(shape):
            have = "no group" if over is None else f"a group of {over.world_size}"
            raise ArgumentError(
                f"recv_tensor_dict: {key!r} was sent in slices of {piece.numel()} of {prod(shape)} elements, to be joined over "
                f"slice_over= with {prod(shape) // max(piece.numel(), 1)} members; got {have}"
            )
        return over.all_gather(piece, 0, None, timeout_s).view(shape)


def _sliced(
    operation: str, tensors: dict[Any, Any], over: Collectives | None, keys: Collection[object], check: bool
) -> tuple[dict[Any, Any], dict[object, tuple[int, ...]]]:
    """The message: the dict with this member's slices in it, and the full shapes of what was sliced."""
    if not isinstance(tensors, dict):
        raise ArgumentError(f"{operation}: expected a dict, got {type(tensors).__name__}")
    if keys and over is None:
        raise ArgumentError(f"{operation}: slice_keys={list(keys)} needs slice_over=, the group that holds equal copies")
    message, shapes = dict(tensors), {}
    for key in keys:
        tensor = tensors.get(key)
        if not isinstance(tensor, Tensor):
            raise ArgumentError(f"{operation}: slice_keys names {key!r}, which is no tensor of the dict")
        assert over is not None
        if check:
            _check_equal(operation, key, tensor, over)
        if over.world_size > 1 and tensor.numel() and tensor.numel() % over.world_size == 0:
            message[key] = dense(tensor).view(-1).chunk(over.world_size)[over.rank_in_group]
            shapes[key] = tuple(tensor.shape)
    return message, shapes


def _check_equal(operation: str, key: object, tensor: Tensor, over: Collectives) -> None:
    """Compare a digest over the group that is said to hold equal copies."""
    digest = blake2b(as_bytes(dense(tensor).cpu()).numpy().data, digest_size=8).digest()
    rows = over.all_gather(torch.tensor([int.from_bytes(digest, "little", signed=True)], device=over.device), 0, None, None)
    if len(set(rows.tolist())) > 1:
        raise CollectiveMismatchError(
            f"{operation}: {key!r} is not equal on the members of {over.name}, so it cannot be sent in slices; "
            "take it out of slice_keys"
        )
