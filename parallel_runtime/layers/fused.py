"""Row-parallel products summed over a group straight into the residual and the norm behind it.

On the fused way, where members can read each other's memory, each one writes its product into a slot that all of them see; after
one step without data every member adds up the slots and the residual, one piece that stays in the cache after the other. Slots
are used in turn, two of them: who writes to one again has been through a later step that all readers of the first entered when
they were done, so no closing barrier is needed. Everywhere else, and where gradients are wanted, it is a plain all-reduce.
Both give equal bits: slots are added in the order of ranks, more than two of low precision in float32, as reductions do.

Legend: T tokens, D hidden size, I local inputs.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, final

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling

from parallel_runtime.comm import GroupCoordinator
from parallel_runtime.errors import PeerFailedError
from parallel_runtime.layers.linear import RowParallelLinear
from parallel_runtime.layers.norm import RMSNorm

__all__ = ["ResidualSum"]

_SLOT_BYTES: Final = 512 << 10
"""Longer batches go in pieces of this size, each with a step of its own, so that memory is bounded and sums stay in the cache."""
_LOW_PRECISION: Final = (torch.float16, torch.bfloat16)


@final
@dataclass(frozen=True, slots=True)
class _Slot:
    mine: Tensor
    views: tuple[Tensor, ...]


@final
class _Slots:
    """Two slots of all members, ``(rows, D)`` of one dtype, used in turn."""

    def __init__(self, slots: Sequence[_Slot]) -> None:
        self._slots = tuple(slots)
        self.rows = slots[0].mine.shape[0]
        self._turn = 0
        self._parts: dict[tuple[int, int], _Slot] = {}

    def next(self, rows: int) -> _Slot:
        """The first rows of the slot whose turn it is."""
        self._turn ^= 1
        key = (self._turn, rows)
        part = self._parts.get(key)
        if part is None:
            slot = self._slots[self._turn]
            part = self._parts[key] = _Slot(slot.mine[:rows], tuple(view[:rows] for view in slot.views))
        return part


@final
class ResidualSum:
    """What follows a row-parallel product in a decoder layer: sum over the group, bias, residual, norm.

    Args:
        tp: Group the products are spread over. Borrowed. Slots are taken from it at the first use, and go with it.
        fused: Take the way through slots where it can be had; the same on every member. Not the default: on two ranks of one
            host it was 3 to 10% slower than the all-reduce, which adds with fewer calls; see ``benchmarks/fused.md``.
    """

    def __init__(self, tp: GroupCoordinator, *, fused: bool = False) -> None:
        self._tp = tp
        self._fused = fused
        self._slots: dict[tuple[int, torch.dtype], _Slots | None] = {}

    def __call__(
        self, layer: RowParallelLinear, x_TI: Tensor, residual_TD: Tensor, norm: RMSNorm | None
    ) -> tuple[Tensor, Tensor]:
        """Apply ``layer``, add the residual, take the norm.

        Args:
            layer: Whose ``tp`` is this one's.
            x_TI: This member's inputs of the layer.
            residual_TD: Equal on every member.
            norm: What follows; ``None`` for nothing.

        Returns:
            ``hidden_TD``, the residual plus the layer's output, new; and its norm, or the same tensor. Equal on all members.

        Collective: one sum of ``(T, D)``, as an all_reduce or as steps without data; all members, same order.
        """
        slots = self._slots_for(x_TI, residual_TD, layer)
        if slots is None:
            return self.plain(layer, x_TI, residual_TD, norm)
        count = x_TI.shape[0]
        hidden_TD = torch.empty_like(residual_TD)
        if count <= slots.rows:
            slot = slots.next(count)
            layer.partial_into(x_TI, slot.mine)
            self._share(slot, hidden_TD, layer.bias, residual_TD)
        else:
            partial_TD = layer.partial(x_TI)
            for start in range(0, count, slots.rows):
                rows = slice(start, min(start + slots.rows, count))
                slot = slots.next(rows.stop - start)
                slot.mine.copy_(partial_TD[rows])
                self._share(slot, hidden_TD[rows], layer.bias, residual_TD[rows])
        return hidden_TD, hidden_TD if norm is None else norm(hidden_TD)

    def plain(self, layer: RowParallelLinear, x_TI: Tensor, residual_TD: Tensor, norm: RMSNorm | None) -> tuple[Tensor, Tensor]:
        """The same with an all-reduce, and with gradients: what ``__call__`` has to equal.

        Args:
            layer: As there.
            x_TI: As there.
            residual_TD: As there.
            norm: As there.

        Returns:
            As there.

        Collective: one all_reduce of ``(T, D)``; all members, same order.
        """
        hidden_TD = layer.add_to(residual_TD, x_TI)
        return hidden_TD, hidden_TD if norm is None else norm(hidden_TD)

    def _share(self, slot: _Slot, out_TD: Tensor, bias_D: Tensor | None, residual_TD: Tensor) -> None:
        """Add everything up into ``out_TD``, as soon as every member has filled its slot."""
        self._tp.publish(slot.mine)
        _add(slot.views, out_TD)
        if bias_D is not None:
            out_TD += bias_D
        out_TD += residual_TD

    def _slots_for(self, x_TI: Tensor, residual_TD: Tensor, layer: RowParallelLinear) -> _Slots | None:
        if not self._fused or self._tp.world_size == 1 or not x_TI.is_cpu or is_dynamo_compiling() or not residual_TD.numel():
            return None
        if torch.is_grad_enabled() and (x_TI.requires_grad or residual_TD.requires_grad or layer.weight.requires_grad):
            return None
        key = (residual_TD.shape[-1], residual_TD.dtype)
        if key not in self._slots:
            self._slots[key] = _open_slots(self._tp, *key)
        return self._slots[key]


def _open_slots(tp: GroupCoordinator, size: int, dtype: torch.dtype) -> _Slots | None:
    """``None``, on all members alike, where they cannot read each other's memory."""
    rows = max(_SLOT_BYTES // (size * dtype.itemsize), 1)
    slots: list[_Slot] = []
    with torch.inference_mode(mode=False), torch.no_grad():  # used in either mode later on
        for _ in range(2):
            try:
                mine = tp.symmetric_empty((rows, size), dtype)
            except PeerFailedError:  # no memory on one of the members; all of them know
                return None
            views = tp.symmetric_views(mine)
            if views is None:
                return None
            slots.append(_Slot(mine, views))
    return _Slots(slots)


def _add(parts: Sequence[Tensor], out: Tensor) -> None:
    """The sum in rank order."""
    first, second, *others = parts
    if first.dtype not in _LOW_PRECISION or not others:
        torch.add(first, second, out=out)
        for part in others:
            out += part
        return
    total = first.float() + second
    for part in others:
        total += part
    out.copy_(total)
