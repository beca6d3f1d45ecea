"""Megatron-core's sizes, what it refuses, and how they are read here."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import ClassVar, final

from pydantic import ConfigDict

from parallel_runtime.config.peers.sizes import PeerSizes
from parallel_runtime.errors import ConfigError
from parallel_runtime.terms import DENSE_AXES
from parallel_runtime.topology.sizes import join_sizes

__all__ = ["MegatronSizes"]


@final
class MegatronSizes(PeerSizes):
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

    def settings(self) -> dict[str, object]:
        etp, ep, _ = self._expert
        return {**self._dense, "ep": ep, "etp": etp, "order": tuple(axis for axis in self._axes if axis != "ep")}
