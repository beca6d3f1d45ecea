"""A context behind the getters of vLLM's ``parallel_state``."""

from typing import final

from parallel_runtime.context import ParallelContext
from parallel_runtime.interop.peer_group import PeerGroup
from parallel_runtime.interop.peer_state import PeerState

__all__ = ["VllmState", "vllm_state"]


@final
class VllmState(PeerState):
    """What vLLM's code asks its module of getters, answered by one context. Bound to it; several live side by side.

    Its "ep" group is the whole stage, whether or not experts are spread over it, as in vLLM.

    Args:
        ctx: Open, usually of a config from ``ParallelConfig.from_vllm``. Borrowed.
        pickle: Whether objects may be anything that can be pickled; only where every rank is trusted.
    """

    def __init__(self, ctx: ParallelContext, *, pickle: bool = False) -> None:
        super().__init__(ctx, ctx.tp, pickle=pickle)
        self._dp = self._wrapped(ctx.dp)
        self._pcp = self._wrapped(ctx.cp)
        self._ep = self._wrapped(ctx.stage)

    def get_dp_group(self) -> PeerGroup:
        """The data-parallel replicas of this position."""
        return self._dp

    def get_pcp_group(self) -> PeerGroup:
        """Ranks that split one sequence in prefill."""
        return self._pcp

    def get_ep_group(self) -> PeerGroup:
        """All ranks of this pipeline stage."""
        return self._ep

    def get_decode_context_model_parallel_world_size(self) -> int:
        """Number of ranks of the group that splits the context in decode."""
        return self._dcp.world_size

    def get_decode_context_model_parallel_rank(self) -> int:
        """This rank's position in the group that splits the context in decode."""
        return self._dcp.rank_in_group


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
