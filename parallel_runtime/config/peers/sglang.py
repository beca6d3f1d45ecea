"""SGLang's sizes, what it refuses, and how they are read here."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import ClassVar, final

from pydantic import ConfigDict

from parallel_runtime.config.peers.sizes import PeerSizes
from parallel_runtime.errors import ConfigError
from parallel_runtime.topology.sizes import divisors, join_sizes, nearest

__all__ = ["SglangSizes"]


@final
class SglangSizes(PeerSizes):
    """SGLang's sizes, by its own argument names (checked against 0.5.23).

    Attributes:
        tp_size: Width of a whole stage, attention replicas included.
        pp_size: Pipeline stages.
        dp_size: Attention replicas when ``enable_dp_attention`` is set; whole replicas otherwise, which are separate worlds here.
        enable_dp_attention: Whether ``dp_size`` counts attention replicas.
        attn_dp_size: Attention replicas, said directly.
        attn_cp_size: Context-parallel size of attention.
        ep_size: Expert-parallel width.
        moe_dp_size: Copies of every expert in a stage.
        dcp_size: Decode-context-parallel width.

    Raises:
        ConfigError: SGLang refuses the combination, or it has no counterpart here.
    """

    model_config = ConfigDict(title="SGLang sizes")

    tp_size: int = 1
    pp_size: int = 1
    dp_size: int = 1
    enable_dp_attention: bool = False
    attn_dp_size: int = 1
    attn_cp_size: int = 1
    ep_size: int = 1
    moe_dp_size: int = 1
    dcp_size: int = 1

    spellings: ClassVar[Mapping[str, str]] = MappingProxyType(
        {
            **dict.fromkeys(("tp", "tensor_parallel_size"), "tp_size"),
            **dict.fromkeys(("pp", "pipeline_parallel_size"), "pp_size"),
            **dict.fromkeys(("dp", "data_parallel_size"), "dp_size"),
            **dict.fromkeys(("ep", "expert_parallel_size"), "ep_size"),
            **dict.fromkeys(("cp", "attention_context_parallel_size"), "attn_cp_size"),
            **dict.fromkeys(("dcp", "decode_context_parallel_size"), "dcp_size"),
            "moe_data_parallel_size": "moe_dp_size",
        }
    )

    @property
    def attention_replicas(self) -> int:
        """Attention replicas, whichever way they were said."""
        return self.dp_size if self.enable_dp_attention else self.attn_dp_size

    def _check_peer(self) -> None:
        if self.dp_size > 1 and self.attn_dp_size > 1:
            raise ConfigError(
                f"dp_size={self.dp_size} and attn_dp_size={self.attn_dp_size}: SGLang takes only one of them above 1; "
                f"both would be dp here, so keep attn_dp_size"
            )
        if self.dp_size > 1 and not self.enable_dp_attention:
            raise ConfigError(
                f"dp_size={self.dp_size} without enable_dp_attention makes {self.dp_size} replicas in SGLang, each a world of "
                f"its own; here that is {self.dp_size} replicas of an engine, not a size of one world; set "
                f"enable_dp_attention=True to have {self.dp_size} attention replicas in one world"
            )
        self._check_attention()
        self._check_experts()

    def _check_attention(self) -> None:
        replicas, width = self.attention_replicas, self.attention_replicas * self.attn_cp_size
        if self.tp_size % width:
            allowed = divisors(self.tp_size)
            raise ConfigError(
                f"tp_size={self.tp_size} is not divisible by attention dp*cp = {replicas}*{self.attn_cp_size} = {width}: "
                "SGLang's tp_size spans the whole stage, and here tp = tp_size/(dp*cp); products that work nearby: "
                f"{join_sizes(nearest(allowed, width))}"
            )
        if self.dcp_size > 1 and self.attn_cp_size > 1:
            raise ConfigError(
                f"dcp_size={self.dcp_size} with attn_cp_size={self.attn_cp_size}: SGLang does not combine decode and prefill "
                "context parallelism; set one of them to 1"
            )
        attention_tp = self.tp_size // width
        if attention_tp % self.dcp_size:
            allowed = divisors(attention_tp)
            raise ConfigError(
                f"dcp_size={self.dcp_size} does not divide tp_size/attention dp = {self.tp_size}/{replicas} = {attention_tp}: "
                "here a dcp group is a slice of an attention tp group; nearest that do: "
                f"{join_sizes(nearest(allowed, self.dcp_size))}"
            )

    def _check_experts(self) -> None:
        experts, copies = self.ep_size, self.moe_dp_size
        if self.tp_size % (experts * copies):
            allowed = divisors(self.tp_size)
            raise ConfigError(
                f"tp_size={self.tp_size} is not divisible by ep_size*moe_dp_size = {experts}*{copies} = {experts * copies}: in "
                f"SGLang tp_size = ep_size*moe_tp*moe_dp_size, read here as stage_size = ep*etp*edp; products that work nearby: "
                f"{join_sizes(nearest(allowed, experts * copies))}"
            )
        if copies > 1 and self.pp_size > 1:
            raise ConfigError(
                f"moe_dp_size={copies} with pp_size={self.pp_size}: SGLang takes moe_dp_size above 1 only without pipeline "
                "parallelism; set one of them to 1, or write the sizes as ParallelConfig(ep=..., etp=..., pp=...), which allows "
                "it"
            )
        if copies > 1 and self.attn_cp_size != copies:
            fitting = " or ".join(f"moe_dp_size={size}" for size in sorted({1, self.attn_cp_size}))
            raise ConfigError(
                f"moe_dp_size={copies} with attn_cp_size={self.attn_cp_size}: SGLang takes moe_dp_size above 1 only if both are "
                f"equal; use {fitting}, or write the sizes as ParallelConfig(...): edp is free"
            )
        if copies > 1 and experts > 1 and experts * copies != self.tp_size:
            raise ConfigError(
                f"ep_size*moe_dp_size = {experts}*{copies} = {experts * copies} but tp_size={self.tp_size}: with both above 1 "
                f"SGLang wants no tensor parallelism inside an expert (etp=1); use ep_size={self.tp_size // copies}, or write "
                "the sizes as ParallelConfig(...): etp is free"
            )

    def settings(self) -> dict[str, object]:
        return {
            "tp": self.tp_size // (self.attention_replicas * self.attn_cp_size),
            "cp": self.attn_cp_size,
            "dp": self.attention_replicas,
            "pp": self.pp_size,
            "ep": self.ep_size,
            "etp": self.tp_size // (self.ep_size * self.moe_dp_size),
            "dcp": self.dcp_size,
        }
