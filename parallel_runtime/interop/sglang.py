"""A context behind the getters of SGLang's ``parallel_state``."""

from contextlib import AbstractContextManager
from typing import final

from torch import Tensor

from parallel_runtime.context import ContextState, ParallelContext
from parallel_runtime.context.capture import GraphCapture
from parallel_runtime.interop.peer_group import PeerGroup

__all__ = ["SglangState", "sglang_state"]


@final
class SglangState:
    """What SGLang's code asks its module of getters, answered by one context. Bound to it; several live side by side.

    Its "tp" group is the whole stage, attention replicas included, as in SGLang; ``attn_tp`` is ours called ``tp``.

    Args:
        ctx: Open, usually of a config from ``ParallelConfig.from_sglang``. Borrowed.
        pickle: Whether objects may be anything that can be pickled; only where every rank is trusted.
    """

    def __init__(self, ctx: ParallelContext, *, pickle: bool = False) -> None:
        self._ctx = ctx
        self._world = PeerGroup(ctx.world, pickle=pickle)
        self._stage = PeerGroup(ctx.stage, pickle=pickle)
        self._pp = PeerGroup(ctx.pp, pickle=pickle)
        self._tp = PeerGroup(ctx.tp, pickle=pickle)
        self._cp = PeerGroup(ctx.cp, pickle=pickle)
        self._dp = PeerGroup(ctx.dp, pickle=pickle)
        self._ep = PeerGroup(ctx.ep, pickle=pickle)
        self._etp = PeerGroup(ctx.etp, pickle=pickle)
        self._moe_dp = PeerGroup(ctx.cp if ctx.config.cp > ctx.config.edp else ctx.edp, pickle=pickle)
        self._dcp = PeerGroup(ctx.dcp, pickle=pickle)

    def get_world_group(self) -> PeerGroup:
        """All ranks."""
        return self._world

    def get_tp_group(self) -> PeerGroup:
        """All ranks of this pipeline stage."""
        return self._stage

    def get_tensor_model_parallel_group(self) -> PeerGroup:
        """``get_tp_group``."""
        return self._stage

    def get_pp_group(self) -> PeerGroup:
        """The stages above each other."""
        return self._pp

    def get_pipeline_model_parallel_group(self) -> PeerGroup:
        """``get_pp_group``."""
        return self._pp

    def get_attn_tp_group(self) -> PeerGroup:
        """Ranks that split one attention layer."""
        return self._tp

    def get_attention_tp_group(self) -> PeerGroup:
        """``get_attn_tp_group``."""
        return self._tp

    def get_attn_cp_group(self) -> PeerGroup:
        """Ranks that split one sequence."""
        return self._cp

    def get_attention_cp_group(self) -> PeerGroup:
        """``get_attn_cp_group``."""
        return self._cp

    def get_moe_ep_group(self) -> PeerGroup:
        """Ranks over which experts are spread."""
        return self._ep

    def get_moe_tp_group(self) -> PeerGroup:
        """Ranks that split one expert."""
        return self._etp

    def get_moe_dp_group(self) -> PeerGroup:
        """Ranks with equal experts; the attention cp group where that is wider, as in SGLang."""
        return self._moe_dp

    def get_dcp_group(self) -> PeerGroup:
        """Ranks that split the context in decode."""
        return self._dcp

    def get_tensor_model_parallel_world_size(self) -> int:
        """Number of ranks of the stage."""
        return self._stage.world_size

    def get_tensor_model_parallel_rank(self) -> int:
        """This rank's position in the stage."""
        return self._stage.rank_in_group

    def get_pipeline_model_parallel_world_size(self) -> int:
        """Number of ranks of the pipeline."""
        return self._pp.world_size

    def get_pipeline_model_parallel_rank(self) -> int:
        """This rank's position in the pipeline."""
        return self._pp.rank_in_group

    def get_attn_tensor_model_parallel_world_size(self) -> int:
        """Number of ranks of the attention tp group."""
        return self._tp.world_size

    def get_attn_tensor_model_parallel_rank(self) -> int:
        """This rank's position in the attention tp group."""
        return self._tp.rank_in_group

    def get_attn_context_model_parallel_world_size(self) -> int:
        """Number of ranks of the attention cp group."""
        return self._cp.world_size

    def get_attn_context_model_parallel_rank(self) -> int:
        """This rank's position in the attention cp group."""
        return self._cp.rank_in_group

    def get_moe_expert_parallel_world_size(self) -> int:
        """Number of ranks of the expert-parallel group."""
        return self._ep.world_size

    def get_moe_expert_parallel_rank(self) -> int:
        """This rank's position in the expert-parallel group."""
        return self._ep.rank_in_group

    def get_moe_tensor_parallel_world_size(self) -> int:
        """Number of ranks of the tensor-parallel group of an expert."""
        return self._etp.world_size

    def get_moe_tensor_parallel_rank(self) -> int:
        """This rank's position in the tensor-parallel group of an expert."""
        return self._etp.rank_in_group

    def get_moe_data_parallel_world_size(self) -> int:
        """Number of ranks of the group with equal experts."""
        return self._moe_dp.world_size

    def get_moe_data_parallel_rank(self) -> int:
        """This rank's position in the group with equal experts."""
        return self._moe_dp.rank_in_group

    def get_attention_tp_size(self) -> int:
        """Number of ranks of the attention tp group."""
        return self._tp.world_size

    def get_attention_tp_rank(self) -> int:
        """This rank's position in the attention tp group."""
        return self._tp.rank_in_group

    def get_attention_cp_size(self) -> int:
        """Number of ranks of the attention cp group."""
        return self._cp.world_size

    def get_attention_cp_rank(self) -> int:
        """This rank's position in the attention cp group."""
        return self._cp.rank_in_group

    def get_attention_dp_size(self) -> int:
        """Number of ranks of the attention replicas of a stage."""
        return self._dp.world_size

    def get_attention_dp_rank(self) -> int:
        """This rank's position in the attention replicas of a stage."""
        return self._dp.rank_in_group

    def tensor_model_parallel_all_reduce(self, input_: Tensor) -> Tensor:
        """Sum over the tensor-parallel group; see ``PeerGroup.all_reduce``.

        Args:
            input_: Same shape and dtype on every member.

        Returns:
            A new tensor; the input in a group of one.

        Collective: all ranks of the group.
        """
        return self._stage.all_reduce(input_)

    def tensor_model_parallel_all_gather(self, input_: Tensor, dim: int = -1) -> Tensor:
        """Join over the tensor-parallel group; see ``PeerGroup.all_gather``.

        Args:
            input_: Same shape and dtype on every member.
            dim: Along which.

        Returns:
            A new tensor; the input in a group of one.

        Collective: all ranks of the group.
        """
        return self._stage.all_gather(input_, dim)

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
        return self._stage.gather(input_, dst, dim)

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


def sglang_state(ctx: ParallelContext, *, pickle: bool = False) -> SglangState:
    """SGLang's getters for one context.

    Args:
        ctx: Open. Borrowed.
        pickle: As for ``SglangState``.

    Returns:
        The object, such as for ``sglang_state(ctx).get_tp_group().all_reduce(x)``.

    Raises:
        ContextStateError: The context is not open.
    """
    return SglangState(ctx, pickle=pickle)
