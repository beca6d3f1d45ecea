"""A roll call: every member says what it enters, and hands over what is small, before anything else moves.

A backend such as gloo compares nothing: members that enter different operations, or sizes, end in an abort or with wrong data.
One exchange of rows of a fixed size finds it before. A tensor that fits into a row travels in it, and nothing is left to move.
"""

from collections.abc import Callable, Sequence
from hashlib import blake2b
from typing import Final, NamedTuple, TypeAlias, final

import torch
from torch import Tensor

from parallel_runtime.comm.communicator import ReduceOp
from parallel_runtime.comm.diagnosis import different_operations, odd_members
from parallel_runtime.errors import CollectiveMismatchError

__all__ = ["Entered", "Exchange", "RollCall"]

_DIGEST_BYTES: Final = 16
_SAID_BYTES: Final = _DIGEST_BYTES + 8
_HEAD_BYTES: Final = 32
_LARGEST_ROW: Final = (4 << 10) + _HEAD_BYTES
_SMALLEST_ROW: Final = 512
_TABLE_BYTES: Final = 64 << 10
"""Of all rows together, where the smallest row allows it: what one call moves must not grow with the group."""
_TEXT_BYTES: Final = 256
_MOST_KEPT: Final = 256
_TO: Final = frozenset({"reduce", "gather"})


@final
class Entered(NamedTuple):
    """What has to be equal on every member.

    Attributes:
        operation: Its name.
        dtype: Of the tensor, ``None`` where there is none.
        shape: Of the tensor.
        op: How it is reduced, if it is.
        root: The member that it comes from or goes to, if there is one.
    """

    operation: str
    dtype: torch.dtype | None = None
    shape: tuple[int, ...] = ()
    op: ReduceOp | None = None
    root: int | None = None

    def __str__(self) -> str:
        where = "" if self.root is None else f" {'to' if self.operation in _TO else 'from'} member {self.root}"
        how = "" if self.op is None else f" {self.op}"
        what = "" if self.dtype is None else f" {str(self.dtype).removeprefix('torch.')}{list(self.shape)}"
        return f"{self.operation}{where}{how}{what}"


Exchange: TypeAlias = Callable[[Tensor, Tensor], None]
"""Fills the rows of the first table, in member order, with what the members hand over: any row of the second one, all equal."""


class _Known(NamedTuple):
    """What is worked out once per operation: its digest, and, where its tensor fits, the views of it."""

    digest: bytes
    mine: Tensor | None
    rows: Tensor | None


@final
class RollCall:
    """The rows of one group.

    Args:
        member: This one.
        ranks: World ranks of the group, in group order, for errors.

    Attributes:
        room: Bytes of a tensor that a row has room for.
    """

    __slots__ = ("_known", "_member", "_mine", "_ranks", "_row", "_rows", "_size", "_spoken", "_table", "room")

    def __init__(self, member: int, ranks: Sequence[int]) -> None:
        self._member = member
        self._ranks = ranks
        self._size = size = len(ranks)
        self._row = row = min(max(_TABLE_BYTES // size, _SMALLEST_ROW), _LARGEST_ROW) // _HEAD_BYTES * _HEAD_BYTES
        self.room = row - _HEAD_BYTES
        self._mine = bytearray(size * row)
        self._table = bytearray(size * row)
        self._spoken = torch.frombuffer(self._mine, dtype=torch.uint8).view(size, row)
        self._rows = torch.frombuffer(self._table, dtype=torch.uint8).view(size, row)
        self._known: dict[Entered, _Known] = {}

    def call(self, entered: Entered, step: int, payload: Tensor | None, exchange: Exchange) -> Tensor | None:
        """Compare what the members enter.

        Args:
            entered: By this one.
            step: How many operations of the group it has done.
            payload: Of one dtype and shape for all who enter the same; handed over if it fits.
            exchange: Moves the rows.

        Returns:
            The payloads of all members, ``(size, *shape)``, to be used before the next call; ``None`` where they do not fit.

        Raises:
            CollectiveMismatchError: The members entered different operations; raised on all of them.
        """
        known = self._known.get(entered) or self._learn(entered, payload)
        said = known.digest + step.to_bytes(8, "little")
        mine, table, row = self._mine, self._table, self._row
        starts = range(0, len(table), row)
        for start in starts:
            mine[start : start + _SAID_BYTES] = said
        if payload is not None and known.mine is not None:
            known.mine.copy_(payload)
        exchange(self._rows, self._spoken)
        if any(table[start : start + _SAID_BYTES] != said for start in starts):
            raise self._difference(entered, step, exchange)
        return known.rows

    def taken(self, member: int) -> memoryview:
        """What a member handed over in the last call, byte by byte."""
        start = member * self._row
        return memoryview(self._table)[start + _HEAD_BYTES : start + self._row]

    def compare_sizes(self, table: Sequence[Sequence[int]], operation: str) -> None:
        """Check that each member takes from each other one what that one sends.

        Args:
            table: Per member, the sizes of what it sends to each member, then of what it takes from each.
            operation: For the error.

        Raises:
            CollectiveMismatchError: They do not fit; raised on all members.
        """
        size, ranks = self._size, self._ranks
        odd = [
            (taker, giver) for taker in range(size) for giver in range(size) if table[giver][taker] != table[taker][size + giver]
        ]
        if not odd:
            return
        taker, giver = odd[0]
        error = CollectiveMismatchError(
            f"{operation}: rank {ranks[taker]} takes {table[taker][size + giver]} elements from rank {ranks[giver]}, "
            f"which sends {table[giver][taker]}"
        )
        always = set(odd[0]).intersection(*odd)
        error.members = tuple(sorted(always - {self._member} or always or {*odd[0]} - {self._member}))
        raise error

    def _learn(self, entered: Entered, payload: Tensor | None) -> _Known:
        digest = blake2b(str(entered).encode(), digest_size=_DIGEST_BYTES).digest()
        mine = rows = None
        if payload is not None and 0 < payload.nbytes <= self.room:
            shape, dtype, stop = payload.shape, payload.dtype, _HEAD_BYTES + payload.nbytes
            mine, rows = (table[:, _HEAD_BYTES:stop].view(dtype).view(self._size, *shape) for table in (self._spoken, self._rows))
        if len(self._known) >= _MOST_KEPT:
            self._known.clear()
        known = self._known[entered] = _Known(digest, mine, rows)
        return known

    def _difference(self, entered: Entered, step: int, exchange: Exchange) -> CollectiveMismatchError:
        """What all members entered, told to all."""
        text = str(entered).encode()
        if len(text) > _TEXT_BYTES:
            text = text[: _TEXT_BYTES - 3] + b"..."
        starts = range(0, len(self._table), self._row)
        steps = [int.from_bytes(self._table[start + _DIGEST_BYTES : start + _SAID_BYTES], "little") for start in starts]
        text = text.ljust(self.room, b"\0")
        for start in starts:
            self._mine[start + _HEAD_BYTES : start + self._row] = text
        exchange(self._rows, self._spoken)
        said = {member: bytes(self.taken(member)).rstrip(b"\0").decode(errors="replace") for member in range(self._size)}
        if len(set(said.values())) == 1:
            said = {member: f"{what} as its no. {steps[member] + 1}" for member, what in said.items()}
        error = CollectiveMismatchError(different_operations(said, self._ranks))
        error.members = odd_members(said, self._member)
        return error
