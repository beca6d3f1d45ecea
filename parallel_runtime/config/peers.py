"""Other projects' size vocabularies: the names they use, the combinations they refuse, and how both are read here."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, ClassVar, Self, final

from pydantic import ConfigDict, model_validator

from parallel_runtime.config.base import FrozenModel
from parallel_runtime.errors import ConfigError
from parallel_runtime.terms import DENSE_AXES
from parallel_runtime.topology.rules import check_sizes
from parallel_runtime.topology.sizes import divisors, join_sizes, nearest

__all__ = ["MegatronSizes", "SglangSizes", "TorchtitanSizes", "VllmSizes"]


class _Sizes(FrozenModel):
    @model_validator(mode="after")
    def _check_all(self) -> Self:
        check_sizes(**{name: value for name, value in self if type(value) is int})
        self._check_peer()
        return self

    def _check_peer(self) -> None:
        """Refuse what the peer refuses."""


@final
class SglangSizes(_Sizes):
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
            raise ConfigError(
                f"moe_dp_size={copies} with attn_cp_size={self.attn_cp_size}: SGLang takes moe_dp_size above 1 only if both are "
                f"equal; use moe_dp_size=1 or moe_dp_size={self.attn_cp_size}, or write the sizes as ParallelConfig(...): edp is "
                "free"
            )
        if copies > 1 and experts > 1 and experts * copies != self.tp_size:
            raise ConfigError(
                f"ep_size*moe_dp_size = {experts}*{copies} = {experts * copies} but tp_size={self.tp_size}: with both above 1 "
                f"SGLang wants no tensor parallelism inside an expert (etp=1); use ep_size={self.tp_size // copies}, or write "
                "the sizes as ParallelConfig(...): etp is free"
            )

    def settings(self) -> dict[str, Any]:
        """Read the sizes as a ``ParallelConfig`` would be written.

        Returns:
            Its arguments.
        """
        return {
            "tp": self.tp_size // (self.attention_replicas * self.attn_cp_size),
            "cp": self.attn_cp_size,
            "dp": self.attention_replicas,
            "pp": self.pp_size,
            "ep": self.ep_size,
            "etp": self.tp_size // (self.ep_size * self.moe_dp_size),
            "dcp": self.dcp_size,
        }


@final
class VllmSizes(_Sizes):
    """vLLM's sizes, by its own argument names (checked against 0.33.0).

    Attributes:
        tensor_parallel_size: Tensor-parallel size.
        pipeline_parallel_size: Pipeline stages.
        data_parallel_size: Data-parallel ranks of one world.
        prefill_context_parallel_size: Context-parallel size.
        decode_context_parallel_size: Decode-context-parallel width.
        enable_expert_parallel: Whether experts are spread over the stage (``ep`` is its size) or each is cut over it (``etp``
            is). vLLM builds its ep group, which is the whole stage, either way.

    Raises:
        ConfigError: vLLM refuses the combination.
    """

    model_config = ConfigDict(title="vLLM sizes")

    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    data_parallel_size: int = 1
    prefill_context_parallel_size: int = 1
    decode_context_parallel_size: int = 1
    enable_expert_parallel: bool = False

    spellings: ClassVar[Mapping[str, str]] = MappingProxyType(
        {
            **dict.fromkeys(("tp", "tp_size"), "tensor_parallel_size"),
            **dict.fromkeys(("pp", "pp_size"), "pipeline_parallel_size"),
            **dict.fromkeys(("dp", "dp_size"), "data_parallel_size"),
            **dict.fromkeys(("cp", "pcp"), "prefill_context_parallel_size"),
            "dcp": "decode_context_parallel_size",
            "ep": "enable_expert_parallel",
        }
    )

    def settings(self) -> dict[str, Any]:
        """Read the sizes as a ``ParallelConfig`` would be written.

        Returns:
            Its arguments.
        """
        stage = self.tensor_parallel_size * self.prefill_context_parallel_size * self.data_parallel_size
        return {
            "tp": self.tensor_parallel_size,
            "cp": self.prefill_context_parallel_size,
            "dp": self.data_parallel_size,
            "pp": self.pipeline_parallel_size,
            "ep": stage if self.enable_expert_parallel else 1,
            "etp": 1 if self.enable_expert_parallel else stage,
            "dcp": self.decode_context_parallel_size,
            "order": ("tp", "cp", "pp", "dp"),
        }

    def _check_peer(self) -> None:
        tp, cp, dcp = self.tensor_parallel_size, self.prefill_context_parallel_size, self.decode_context_parallel_size
        allowed = divisors(tp) if cp == 1 else tuple(sorted({1, cp, tp * cp}))
        if dcp not in allowed:
            rule = "it must divide tensor_parallel_size" if cp == 1 else "it must be 1, the prefill size, or the product of both"
            raise ConfigError(
                f"decode_context_parallel_size={dcp} with tensor_parallel_size={tp} and prefill_context_parallel_size={cp}: in "
                f"vLLM {rule}, and dcp obeys the same rule here; sizes that work: {join_sizes(allowed)}"
            )


@final
class MegatronSizes(_Sizes):
    """Megatron-core's sizes, by the argument names of its ``initialize_model_parallel`` (checked against 0.16.1).

    Attributes:
        world_size: Ranks in the world; Megatron's data-parallel size is what the others leave of it.
        tensor_model_parallel_size: Tensor-parallel size.
        pipeline_model_parallel_size: Pipeline stages.
        context_parallel_size: Context-parallel size.
        expert_model_parallel_size: Expert-parallel width.
        expert_tensor_parallel_size: Tensor-parallel width inside an expert; left out, the tensor-parallel size.
        order: Axis names joined by ``-``, fastest first; an axis of size 1 may be left out.

    Raises:
        ConfigError: Megatron refuses the combination, or its expert ranks follow another rule than ours.
    """

    model_config = ConfigDict(title="Megatron sizes")

    world_size: int
    tensor_model_parallel_size: int = 1
    pipeline_model_parallel_size: int = 1
    context_parallel_size: int = 1
    expert_model_parallel_size: int = 1
    expert_tensor_parallel_size: int | None = None
    order: str = "tp-cp-ep-dp-pp"

    spellings: ClassVar[Mapping[str, str]] = MappingProxyType(
        {
            **dict.fromkeys(("tp", "tensor_parallel_size"), "tensor_model_parallel_size"),
            **dict.fromkeys(("pp", "pipeline_parallel_size"), "pipeline_model_parallel_size"),
            **dict.fromkeys(("dp", "data_parallel_size"), "world_size"),
            "cp": "context_parallel_size",
            **dict.fromkeys(("ep", "expert_parallel_size"), "expert_model_parallel_size"),
            "etp": "expert_tensor_parallel_size",
        }
    )

    def _check_peer(self) -> None:
        self._check_world()
        self._check_order()
        self._check_pipeline()

    def _check_world(self) -> None:
        dense, expert = self._dense, self._expert
        for names, sizes in (("tp*pp*cp", (dense["tp"], dense["pp"], dense["cp"])), ("etp*ep*pp", (*expert[:2], dense["pp"]))):
            product = sizes[0] * sizes[1] * sizes[2]
            if self.world_size % product:
                below = self.world_size // product * product
                raise ConfigError(
                    f"world_size={self.world_size} is not divisible by {names} = {'*'.join(map(str, sizes))} = {product}: "
                    "Megatron takes the rest of the world as data parallel, and so do we; nearest worlds that work: "
                    f"{join_sizes(size for size in (below, below + product) if size)}"
                )

    def _check_order(self) -> None:
        named = self.order.lower().split("-")
        if len(set(named)) < len(named) or not {*named} <= {*DENSE_AXES, "ep"}:
            raise ConfigError(
                f"order={self.order!r}: Megatron's order names each of tp, cp, ep, dp, pp at most once, joined by '-'"
            )
        sizes = {**self._dense, "ep": self._expert[1]}
        missing = [f"{axis}={size}" for axis, size in sizes.items() if axis not in named and size > 1]
        if missing:
            raise ConfigError(
                f"order={self.order!r} leaves out {', '.join(missing)}: Megatron lets only axes of size 1 be left out"
            )
        expert_sizes = dict(zip(("tp", "ep", "dp"), self._expert, strict=True))
        ours = [axis for axis, size in expert_sizes.items() if size > 1]
        theirs = [axis for axis in named if axis in ours]
        if theirs != ours:
            raise ConfigError(
                f"order={self.order!r} numbers the expert ranks {'-'.join(theirs)} (etp={self._expert[0]}, ep={self._expert[1]}, "
                f"edp={self._expert[2]}): Megatron allows that, but here the expert view of a stage is always etp fastest, then "
                f"ep, then edp; use an order in which they come as {'-'.join(ours)}"
            )

    def _check_pipeline(self) -> None:
        dense, (etp, ep, edp) = self._dense, self._expert
        if dense["pp"] == 1:
            return
        if not self.order.endswith("pp") and edp != dense["dp"]:
            raise ConfigError(
                f"order={self.order!r} with pp={dense['pp']}, dp={dense['dp']}, edp={edp}: unless pp comes last, Megatron wants "
                "as many expert copies as data-parallel ranks; read here as edp = stage_size/(etp*ep) = "
                f"{etp * ep * edp}/({etp}*{ep}); use an order that ends in pp, or expert sizes with etp*ep = tp*cp = "
                f"{dense['tp'] * dense['cp']}"
            )
        before_pp = self._axes[: self._axes.index("pp")]
        expert = {"tp": etp, "ep": ep, "dp": edp}
        dense_stride = expert_stride = 1
        for axis in before_pp:
            dense_stride *= dense.get(axis, 1)
            expert_stride *= expert.get(axis, 1)
        if dense_stride != expert_stride:
            raise ConfigError(
                f"order={self.order!r}: neighbouring stages are {dense_stride} ranks apart by the dense sizes but "
                f"{expert_stride} by the expert sizes (etp={etp}, ep={ep}, edp={edp}): Megatron wants the same pipeline groups "
                "in both, and here a stage has one numbering; use an order that ends in pp"
            )

    @property
    def _dense(self) -> dict[str, int]:
        tp, cp, pp = self.tensor_model_parallel_size, self.context_parallel_size, self.pipeline_model_parallel_size
        return {"tp": tp, "cp": cp, "dp": self.world_size // (tp * cp * pp), "pp": pp}

    @property
    def _expert(self) -> tuple[int, int, int]:
        etp = self.expert_tensor_parallel_size or self.tensor_model_parallel_size
        ep = self.expert_model_parallel_size
        return etp, ep, self.world_size // (etp * ep * self.pipeline_model_parallel_size)

    @property
    def _axes(self) -> tuple[str, ...]:
        """All axes, fastest first: those that ``order`` leaves out come last."""
        named = self.order.lower().split("-")
        return (*named, *(axis for axis in ("tp", "pp", "dp", "ep", "cp") if axis not in named))

    def settings(self) -> dict[str, Any]:
        """Read the sizes as a ``ParallelConfig`` would be written.

        Returns:
            Its arguments.
        """
        etp, ep, _ = self._expert
        return {**self._dense, "ep": ep, "etp": etp, "order": tuple(axis for axis in self._axes if axis != "ep")}


@final
class TorchtitanSizes(_Sizes):
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

    def settings(self) -> dict[str, Any]:
        """Read the degrees as a ``ParallelConfig`` would be written.

        Returns:
            Its arguments.
        """
        return {
            "tp": self.tensor_parallel_degree,
            "cp": self.context_parallel_degree,
            "dp": self.data_parallel_replicate_degree * self.data_parallel_shard_degree,
            "pp": self.pipeline_parallel_degree,
            "ep": self.expert_parallel_degree,
            "etp": 1,
        }
