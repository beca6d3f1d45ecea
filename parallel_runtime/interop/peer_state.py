"""What the module of getters of SGLang and that of vLLM have in common, answered by one context."""

from abc import ABC, abstractmethod
from contextlib import AbstractContextManager

from torch import Tensor

from parallel_runtime.comm import GroupCoordinator
from parallel_runtime.context import ContextState, ParallelContext
from parallel_runtime.context.capture import GraphCapture
from parallel_runtime.interop.peer_group import PeerGroup

__all__ = ["PeerState"]


class PeerState(ABC):
    """A context behind another project's functions. Bound to it; several live side by side.

    Args:
        ctx: Open. Borrowed.
        tp: What the project calls its tensor-parallel group.
        pickle: Whether objects may be anything that can be pickled; only where every rank is trusted.
    """

    @abstractmethod
    def __init__(self, ctx: ParallelContext, tp: GroupCoordinator, *, pickle: bool) -> None:
        self._ctx = ctx
        self._pickle = pickle
        self._world = self._wrapped(ctx.world)
        self._pp = self._wrapped(ctx.pp)
        self._tp = self._wrapped(tp)
        self._dcp = self._wrapped(ctx.dcp)

    def _wrapped(self, group: GroupCoordinator) -> PeerGroup:
        return PeerGroup(group, pickle=self._pickle)

    def get_world_group(self) -> PeerGroup:
        """All ranks."""
        return self._world

    def get_tp_group(self) -> PeerGroup:
        """The group that the project calls tensor-parallel."""
        return self._tp

    def get_pp_group(self) -> PeerGroup:
        """The stages above each other."""
        return self._pp

    def get_dcp_group(self) -> PeerGroup:
        """Ranks that split the context in decode."""
        return self._dcp

    def get_tensor_model_parallel_world_size(self) -> int:
        """Number of ranks of ``get_tp_group``."""
        return self._tp.world_size

    def get_tensor_model_parallel_rank(self) -> int:
        """This rank's position in ``get_tp_group``."""
        return self._tp.rank_in_group

    def tensor_model_parallel_all_reduce(self, input_: Tensor) -> Tensor:
        """Sum over the tensor-parallel group; see ``PeerGroup.all_reduce``.

        Args:
            input_: Same shape and dtype on every member.

        Returns:
            A new tensor; the input in a group of one.

        Collective: all ranks of the group.
        """
        return self._tp.all_reduce(input_)

    def tensor_model_parallel_all_gather(self, input_: Tensor, dim: int = -1) -> Tensor:
        """Join over the tensor-parallel group; see ``PeerGroup.all_gather``.

        Args:
            input_: Same shape and dtype on every member.
            dim: Along which.

        Returns:
            A new tensor; the input in a group of one.

        Collective: all ranks of the group.
        """
        return self._tp.all_gather(input_, dim)

    def tensor_model_parallel_gather(self, input_: Tensor, dst: int = 0, dim: int = -1) -> Tensor | None:
        """Join on one rank of the tensor-parallel group; see ``PeerGroup.gather``.

        Args:
            input_: Same shape and dtype on every member.
            dst: Position in the group.
            dim: Along which.

        Returns:
            A new tensor on ``dst``, ``None`` elsewhere.

        Collective: all ranks of the group.
        """
        return self._tp.gather(input_, dst, dim)

    def graph_capture(self, stream: object | None = None) -> AbstractContextManager[GraphCapture]:
        """The capture of the context's groups; see ``ParallelContext.graph_capture``.

        Args:
            stream: To capture on; a new one by default.

        Returns:
            For ``with``.

        Collective: all ranks; they meet at the end of the block.
        """
        return self._ctx.graph_capture(stream)

    def model_parallel_is_initialized(self) -> bool:
        """Whether the context is open."""
        return self._ctx.state is ContextState.OPEN

    def destroy_model_parallel(self) -> None:
        """Do nothing: the ``with`` block of the context closes its groups."""
        return

    def destroy_distributed_environment(self) -> None:
        """Do nothing: the ``with`` block of the context closes everything."""
        return
