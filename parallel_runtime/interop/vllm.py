"""A context behind the getters of vLLM's ``parallel_state``."""

from contextlib import AbstractContextManager
from typing import final

from torch import Tensor

from parallel_runtime.context import ContextState, ParallelContext
from parallel_runtime.context.capture import GraphCapture
from parallel_runtime.interop.peer_group import PeerGroup

__all__ = ["VllmState", "vllm_state"]


@final
class VllmState:
    """What vLLM's code asks its module of getters, answered by one context. Bound to it; several live side by side.

    Its "ep" group is the whole stage, whether or not experts are spread over it, as in vLLM.

    Args:
        ctx: Open, usually of a config from ``ParallelConfig.from_vllm``. Borrowed.
        pickle: Whether objects may be anything that can be pickled; only where every rank is trusted.
    """

    def __init__(self, ctx: ParallelContext, *, pickle: bool = False) -> None:
        self._ctx = ctx
        self._world = PeerGroup(ctx.world, pickle=pickle)
        self._tp = PeerGroup(ctx.tp, pickle=pickle)
        self._pp = PeerGroup(ctx.pp, pickle=pickle)
        self._dp = PeerGroup(ctx.dp, pickle=pickle)
        self._pcp = PeerGroup(ctx.cp, pickle=pickle)
        self._dcp = PeerGroup(ctx.dcp, pickle=pickle)
        self._ep = PeerGroup(ctx.stage, pickle=pickle)

    def get_world_group(self) -> PeerGroup:
        """All ranks."""
        return self._world

    def get_tp_group(self) -> PeerGroup:
        """Ranks that split one layer."""
        return self._tp

    def get_pp_group(self) -> PeerGroup:
        """The stages above each other."""
        return self._pp

    def get_dp_group(self) -> PeerGroup:
        """The data-parallel replicas of this position."""
        return self._dp

    def get_pcp_group(self) -> PeerGroup:
        """Ranks that split one sequence in prefill."""
        return self._pcp

    def get_dcp_group(self) -> PeerGroup:
        """Ranks that split the context in decode."""
        return self._dcp

    def get_ep_group(self) -> PeerGroup:
        """All ranks of this pipeline stage."""
        return self._ep

    def get_tensor_model_parallel_world_size(self) -> int:
        """Number of ranks of the tensor-parallel group."""
        return self._tp.world_size

    def get_tensor_model_parallel_rank(self) -> int:
        """This rank's position in the tensor-parallel group."""
        return self._tp.rank_in_group

    def get_decode_context_model_parallel_world_size(self) -> int:
        """Number of ranks of the group that splits the context in decode."""
        return self._dcp.world_size

    def get_decode_context_model_parallel_rank(self) -> int:
        """This rank's position in the group that splits the context in decode."""
        return self._dcp.rank_in_group

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

    def destroy_distributed_environment(self) -> None:
        """Do nothing: the ``with`` block of the context closes everything."""


def vllm_state(ctx: ParallelContext, *, pickle: bool = False) -> VllmState:
    """vLLM's getters for one context.

    Args:
        ctx: Open. Borrowed.
        pickle: As for ``VllmState``.

    Returns:
        The object, such as for ``vllm_state(ctx).get_tp_group().all_reduce(x)``.

    Raises:
        ContextStateError: The context is not open.
    """
    return VllmState(ctx, pickle=pickle)
