"""A communicator without peers: every other member seems to do exactly what this one does.

Of one member it is the whole truth, and so serves groups of one. Of more it answers with the right shapes and dtypes, for
dry runs of one rank of a big world.
"""

from collections.abc import Sequence
from typing import final

import torch
from torch import Tensor

from parallel_runtime.comm.communicator import Communicator, Operation, ReduceOp, Work
from parallel_runtime.comm.tensors import fold

__all__ = ["FakeCommunicator"]


@final
class _Done(Work):
    def is_done(self) -> bool:
        return True

    def wait(self, timeout_s: float) -> None:
        del timeout_s


@final
class FakeCommunicator(Communicator):
    """Acts as if every member had handed over the same tensors.

    Args:
        rank_in_group: The member to be.
        world_size: Members of the pretended group.
        kind: What ``group.describe()`` calls it.
    """

    def __init__(self, rank_in_group: int, world_size: int, *, kind: str = "fake") -> None:
        self.kind = kind
        self.rank_in_group = rank_in_group
        self.world_size = world_size

    def supports(self, operation: Operation, dtype: torch.dtype, nbytes: int) -> bool:
        """Everything."""
        del operation, dtype, nbytes
        return True

    @property
    def is_capturable(self) -> bool:
        """Always: it computes on tensors, and nothing else."""
        return True

    def all_reduce_(self, tensor: Tensor, op: ReduceOp, timeout_s: float) -> None:
        """As if all members held ``tensor``."""
        if self.world_size > 1:
            tensor.copy_(fold(tensor.expand(self.world_size, *tensor.shape), op))

    def all_gather(self, output: Tensor, tensor: Tensor, timeout_s: float) -> None:
        """``world_size`` copies."""
        output.copy_(tensor.expand_as(output))

    def all_gatherv(self, outputs: Sequence[Tensor], tensor: Tensor, timeout_s: float) -> None:
        """Its own rows, zeros from members whose rows have another shape."""
        for output in outputs:
            _fill(output, tensor)

    def reduce_scatter(self, output: Tensor, tensor: Tensor, op: ReduceOp, timeout_s: float) -> None:
        """Its row, combined ``world_size`` times."""
        row = tensor[self.rank_in_group]
        output.copy_(fold(row.expand(self.world_size, *row.shape), op))

    def all_to_allv(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], timeout_s: float) -> None:
        """What every member sends to this one."""
        for output in outputs:
            _fill(output, inputs[self.rank_in_group])

    def broadcast_(self, tensor: Tensor, src: int, timeout_s: float) -> None:
        """Zeros where another member is the source."""
        if src != self.rank_in_group:
            tensor.zero_()

    def reduce(self, output: Tensor | None, tensor: Tensor, dst: int, op: ReduceOp, timeout_s: float) -> None:
        """As if all members held ``tensor``."""
        if output is not None:
            output.copy_(fold(tensor.expand(self.world_size, *tensor.shape), op))

    def gather(self, outputs: Sequence[Tensor] | None, tensor: Tensor, dst: int, timeout_s: float) -> None:
        """``world_size`` copies."""
        for output in outputs or ():
            output.copy_(tensor)

    def scatter(self, output: Tensor, inputs: Sequence[Tensor] | None, src: int, timeout_s: float) -> None:
        """Its own input, or zeros where another member is the source."""
        if inputs is None:
            output.zero_()
        else:
            output.copy_(inputs[self.rank_in_group])

    def barrier(self, timeout_s: float) -> None:
        """Nobody to wait for."""

    def isend(self, tensor: Tensor, dst: int, tag: int) -> Work:
        """Sent to nobody."""
        return _Done()

    def irecv(self, tensor: Tensor, src: int, tag: int) -> Work:
        """Zeros."""
        tensor.zero_()
        return _Done()

    def close(self) -> None:
        """Nothing to free."""


def _fill(output: Tensor, tensor: Tensor) -> None:
    if output.shape == tensor.shape:
        output.copy_(tensor)
    else:
        output.zero_()
