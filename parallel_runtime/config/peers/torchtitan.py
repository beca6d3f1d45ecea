"""torchtitan's degrees, what it refuses, and how they are read here."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import ClassVar, final

from pydantic import ConfigDict

from parallel_runtime.config.peers.sizes import PeerSizes
from parallel_runtime.errors import ConfigError
from parallel_runtime.topology.sizes import divisors, join_sizes, nearest

__all__ = ["TorchtitanSizes"]


@final
class TorchtitanSizes(PeerSizes):
    """torchtitan's degrees, by the names of its parallelism config.

    Attributes:
        tensor_parallel_degree: Tensor-parallel size.
        pipeline_parallel_degree: Pipeline stages.
        context_parallel_degree: Context-parallel size.
        data_parallel_replicate_degree: Data-parallel replicas (HSDP).
        data_parallel_shard_degree: Ranks that share one replica's sharded parameters (FSDP).
        expert_parallel_degree: Expert-parallel width.

    Raises:
        ConfigError: torchtitan refuses the combination.
    """

    model_config = ConfigDict(title="torchtitan degrees")

    tensor_parallel_degree: int = 1
    pipeline_parallel_degree: int = 1
    context_parallel_degree: int = 1
    data_parallel_replicate_degree: int = 1
    data_parallel_shard_degree: int = 1
    expert_parallel_degree: int = 1

    spellings: ClassVar[Mapping[str, str]] = MappingProxyType(
        {
            **dict.fromkeys(("tp", "tensor_parallel_size"), "tensor_parallel_degree"),
            **dict.fromkeys(("pp", "pipeline_parallel_size"), "pipeline_parallel_degree"),
            **dict.fromkeys(("cp", "context_parallel_size"), "context_parallel_degree"),
            **dict.fromkeys(("dp", "data_parallel_size"), "data_parallel_shard_degree"),
            **dict.fromkeys(("ep", "expert_parallel_size"), "expert_parallel_degree"),
        }
    )

    def _check_peer(self) -> None:
        shard, cp, tp = self.data_parallel_shard_degree, self.context_parallel_degree, self.tensor_parallel_degree
        ep, sparse = self.expert_parallel_degree, shard * cp * tp
        if sparse % ep:
            allowed = divisors(sparse)
            raise ConfigError(
                f"expert_parallel_degree={ep} does not divide dp_shard*cp*tp = {shard}*{cp}*{tp} = {sparse}: torchtitan spreads "
                f"experts inside one replica, read here as ep inside dp_shard of dp; nearest that do: "
                f"{join_sizes(nearest(allowed, ep))} (all: {join_sizes(allowed)})"
            )

    def settings(self) -> dict[str, object]:
        return {
            "tp": self.tensor_parallel_degree,
            "cp": self.context_parallel_degree,
            "dp": self.data_parallel_replicate_degree * self.data_parallel_shard_degree,
            "pp": self.pipeline_parallel_degree,
            "ep": self.expert_parallel_degree,
            "etp": 1,
        }
