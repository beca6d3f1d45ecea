"""A context behind the getters of SGLang's ``parallel_state``."""

from typing import final

from parallel_runtime.context import ParallelContext
from parallel_runtime.interop.peer_group import PeerGroup
from parallel_runtime.interop.peer_state import PeerState

__all__ = ["SglangState", "sglang_state"]


@final
class SglangState(PeerState):
    """What SGLang's code asks its module of getters, answered by one context. Bound to it; several live side by side.

    Its "tp" group is the whole stage, attention replicas included, as in SGLang; ``attn_tp`` is ours called ``tp``.

    Args:
        ctx: Open, usually of a config from ``ParallelConfig.from_sglang``. Borrowed.
        pickle: Whether objects may be anything that can be pickled; only where every rank is trusted.
    """

    def __init__(self, ctx: ParallelContext, *, pickle: bool = False) -> None:
        super().__init__(ctx, ctx.stage, pickle=pickle)
        self._attn_tp = self._wrapped(ctx.tp)
        self._cp = self._wrapped(ctx.cp)
        self._dp = self._wrapped(ctx.dp)
        self._ep = self._wrapped(ctx.ep)
        self._etp = self._wrapped(ctx.etp)
        self._moe_dp = self._wrapped(ctx.cp if ctx.config.cp > ctx.config.edp else ctx.edp)

    def get_tensor_model_parallel_group(self) -> PeerGroup:
        """``get_tp_group``."""
        return self._tp

    def get_pipeline_model_parallel_group(self) -> PeerGroup:
        """``get_pp_group``."""
        return self._pp

    def get_attn_tp_group(self) -> PeerGroup:
        """Ranks that split one attention layer."""
        return self._attn_tp

    def get_attention_tp_group(self) -> PeerGroup:
        """``get_attn_tp_group``."""
        return self._attn_tp

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

    def get_pipeline_model_parallel_world_size(self) -> int:
        """Number of ranks of the pipeline."""
        return self._pp.world_size

    def get_pipeline_model_parallel_rank(self) -> int:
        """This rank's position in the pipeline."""
        return self._pp.rank_in_group

    def get_attn_tensor_model_parallel_world_size(self) -> int:
        """Number of ranks of the attention tp group."""
        return self._attn_tp.world_size

    def get_attn_tensor_model_parallel_rank(self) -> int:
        """This rank's position in the attention tp group."""
        return self._attn_tp.rank_in_group

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
        return self._attn_tp.world_size

    def get_attention_tp_rank(self) -> int:
        """This rank's position in the attention tp group."""
        return self._attn_tp.rank_in_group

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
