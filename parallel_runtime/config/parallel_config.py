"""ParallelConfig: the sizes, and everything else that must be said before ranks start."""

import hashlib
import json
from collections.abc import Mapping
from functools import cached_property
from types import MappingProxyType
from typing import Annotated, ClassVar, Literal, Self, final

from pydantic import BeforeValidator, model_validator

from parallel_runtime.config.base import FrozenModel
from parallel_runtime.config.checks import check_model_fits
from parallel_runtime.config.deadlines import Deadlines
from parallel_runtime.config.model_shape import ModelShape
from parallel_runtime.config.peers import MegatronSizes, SglangSizes, TorchtitanSizes, VllmSizes
from parallel_runtime.config.plan import Plan, make_plan
from parallel_runtime.errors import ConfigError
from parallel_runtime.terms import DENSE_AXES, DenseAxis
from parallel_runtime.topology import Layout, Uneven
from parallel_runtime.topology.hosts import Hosts
from parallel_runtime.topology.rules import check_order, check_sizes, fit_world

__all__ = ["Backend", "Checked", "DeviceKind", "ParallelConfig", "Shm"]

Backend = Literal["auto", "gloo", "nccl", "local", "fake"]
"""Which communicators carry the data plane."""

DeviceKind = Literal["auto", "cpu", "cuda"]
"""Where a rank keeps its tensors."""

Shm = Literal["auto", "on", "off"]
"""Whether ranks of one host talk through shared memory."""

Checked = Literal["auto", True, False]
"""Whether members of a group compare what they enter before it runs."""


def _as_tuple(value: object) -> object:
    return tuple(value) if isinstance(value, list | range) else value


@final
class ParallelConfig(FrozenModel):
    """How one world is cut, and how its ranks talk.

    One of ``tp``, ``pp``, ``dp``, ``cp`` may be -1 until ``resolve`` infers it from a world size.

    Attributes:
        tp: Tensor-parallel size of the dense part.
        pp: Pipeline stages.
        dp: Data-parallel size.
        cp: Context-parallel size.
        ep: Expert-parallel width; ``etp * ep`` divides ``tp * cp * dp``.
        etp: Tensor-parallel width inside an expert; left out, ``gcd(tp, stage_size // ep)``. ``None`` only while a size is -1.
        dcp: Decode-context-parallel width: 1, or ``cp`` times a divisor of ``tp`` (slices of a tp group, each with all of cp).
        order: The dense axes, fastest first.
        backend: Communicators of the data plane.
        device: Where tensors live.
        deadlines: How long each plane may wait.
        shm: Whether ranks of one host talk through shared memory: where it can be had (``auto``), always (``on``: a group that
            cannot is a ``ConfigError``), or never (``off``).
        checked: Whether collectives are compared between their members before they run: where the members would otherwise be
            aborted or get wrong data (``"auto"``: over gloo; shared memory and threads compare in any case), everywhere and
            with all arguments (``True``), or nowhere (``False``).
        rank_offset: First rank of the world, where it is a consecutive part of a larger numbering.
        ranks: The rank at each place of the layout, where they are not consecutive.

    Raises:
        ConfigError: A value, or a combination of values, is impossible.
    """

    tp: int = 1
    pp: int = 1
    dp: int = 1
    cp: int = 1
    ep: int = 1
    etp: int | None = None
    dcp: int = 1
    order: Annotated[tuple[DenseAxis, ...], BeforeValidator(_as_tuple)] = DENSE_AXES
    backend: Backend = "auto"
    device: DeviceKind = "auto"
    deadlines: Deadlines = Deadlines()
    shm: Shm = "auto"
    checked: Checked = "auto"
    rank_offset: int = 0
    ranks: Annotated[tuple[int, ...] | None, BeforeValidator(_as_tuple)] = None

    spellings: ClassVar[Mapping[str, str]] = MappingProxyType(
        {
            **dict.fromkeys(("tensor_parallel", "tensor_parallel_size", "tensor_model_parallel_size", "tp_size"), "tp"),
            "tensor_parallel_degree": "tp",
            **dict.fromkeys(("pipeline_parallel", "pipeline_parallel_size", "pipeline_model_parallel_size", "pp_size"), "pp"),
            "pipeline_parallel_degree": "pp",
            **dict.fromkeys(("data_parallel", "data_parallel_size", "dp_size", "attn_dp_size"), "dp"),
            **dict.fromkeys(("data_parallel_shard_degree", "data_parallel_replicate_degree"), "dp"),
            **dict.fromkeys(("context_parallel", "context_parallel_size", "cp_size", "attn_cp_size", "pcp"), "cp"),
            **dict.fromkeys(("context_parallel_degree", "prefill_context_parallel_size"), "cp"),
            **dict.fromkeys(("expert_parallel", "expert_parallel_size", "expert_model_parallel_size", "ep_size"), "ep"),
            "expert_parallel_degree": "ep",
            **dict.fromkeys(("expert_tensor_parallel_size", "moe_tp_size", "moe_tp"), "etp"),
            **dict.fromkeys(("decode_context_parallel_size", "dcp_size"), "dcp"),
        }
    )

    @model_validator(mode="after")
    def _check(self) -> Self:
        sizes = self._dense_sizes
        check_sizes(ep=self.ep, dcp=self.dcp)
        check_order(self.order)
        unknown = [axis for axis, size in sizes.items() if size == -1]
        if len(unknown) > 1:
            raise ConfigError(
                f"{' and '.join(f'{axis}=-1' for axis in unknown)}: only one size can be inferred from the world size"
            )
        check_sizes(**{axis: size for axis, size in sizes.items() if size != -1})
        if self.rank_offset < 0:
            raise ConfigError(f"rank_offset={self.rank_offset} is negative; ranks count from 0")
        if self.ranks is not None and self.rank_offset:
            raise ConfigError(
                f"rank_offset={self.rank_offset} and explicit ranks exclude each other; put the offset into the ranks"
            )
        if self.etp is None:
            self.__pydantic_fields_set__.discard("etp")
        if not unknown:
            self.__dict__["etp"] = self.layout.etp
        return self

    @property
    def _dense_sizes(self) -> dict[str, int]:
        return {"tp": self.tp, "cp": self.cp, "dp": self.dp, "pp": self.pp}

    @property
    def is_resolved(self) -> bool:
        """Whether every size is known."""
        return -1 not in self._dense_sizes.values()

    @cached_property
    def layout(self) -> Layout:
        """The arrangement of ranks these sizes mean.

        Raises:
            ConfigError: A size is still -1.
        """
        self._need_resolved("layout")
        world_size = self.tp * self.cp * self.dp * self.pp
        return Layout.of(
            tp=self.tp,
            cp=self.cp,
            dp=self.dp,
            pp=self.pp,
            ep=self.ep,
            etp=self.etp,
            dcp=self.dcp,
            order=self.order,
            ranks=range(self.rank_offset, self.rank_offset + world_size) if self.ranks is None else self.ranks,
        )

    @property
    def world_size(self) -> int:
        """Ranks in the world, ``tp * cp * dp * pp``.

        Raises:
            ConfigError: A size is still -1.
        """
        self._need_resolved("world size")
        return self.layout.world_size

    @property
    def stage_size(self) -> int:
        """Ranks in one pipeline stage, ``tp * cp * dp``.

        Raises:
            ConfigError: A size is still -1.
        """
        self._need_resolved("stage size")
        return self.layout.stage_size

    @property
    def edp(self) -> int:
        """Copies of every expert in one stage, ``stage_size // (etp * ep)``.

        Raises:
            ConfigError: A size is still -1.
        """
        self._need_resolved("edp size")
        return self.layout.edp

    def resolve(self, world_size: int) -> Self:
        """Fit the sizes to a world: infer the one that is -1, or check that they multiply to it.

        Args:
            world_size: Ranks that will be there.

        Returns:
            A config without -1; this one if nothing was open.

        Raises:
            ConfigError: The sizes cannot fit; the text names sizes and worlds that would.
        """
        sizes = fit_world(self._dense_sizes, world_size=world_size)
        return self if self.is_resolved else self.replace(**sizes)

    def check_model(self, shape: ModelShape, *, uneven: Uneven = "allow") -> None:
        """Refuse a model that this layout cannot cut.

        Args:
            shape: Numbers of the model.
            uneven: ``"refuse"`` demands that heads, vocabulary and intermediate size are cut into equal parts.

        Raises:
            ConfigError: A size is still -1, or something does not fit; the text holds everything that does not.
        """
        check_model_fits(shape, self.layout, uneven=uneven)

    def plan(self, *, hosts: Hosts | None = None) -> Plan:
        """Work out everything this config implies, as data, before anything is opened.

        Args:
            hosts: Number of hosts of equal size, or a host name for each rank, or the ranks of each host by name. By default one
                host holds all.

        Returns:
            The plan. ``backend="auto"`` is read as gloo, or as nccl with ``device="cuda"``; a plan looks for no devices.

        Raises:
            ConfigError: A size is still -1, or the ranks cannot be placed on these hosts.
        """
        self._need_resolved("plan")
        backend = self.backend
        if backend == "auto":
            backend = "nccl" if self.device == "cuda" else "gloo"
        return make_plan(self.layout, hosts=hosts, backend=backend, uses_shm=self.shm != "off")

    def agreed_settings(self) -> dict[str, object]:
        """Return what must be equal on all ranks, as plain JSON values.

        Two configs that mean the same world are equal here. ``deadlines`` are left out: a rank may be more patient than others.

        Returns:
            Setting names and values.

        Raises:
            ConfigError: A size is still -1.
        """
        self._need_resolved("set of settings to agree on")
        settings = self.model_dump(mode="json", exclude={"deadlines"})
        if self.ranks is not None and self.ranks == tuple(range(self.ranks[0], self.ranks[0] + len(self.ranks))):
            settings.update(ranks=None, rank_offset=self.ranks[0])
        return settings

    def digest(self) -> str:
        """Return a fingerprint that is equal on two ranks exactly when their ``agreed_settings`` are.

        Returns:
            64 hexadecimal digits: the SHA-256 of those settings as canonical JSON.

        Raises:
            ConfigError: A size is still -1.
        """
        self._need_resolved("digest")
        text = json.dumps(self.agreed_settings(), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()

    @classmethod
    def from_sglang(cls, **sizes: int) -> Self:
        """Read SGLang's sizes.

        Args:
            **sizes: ``tp_size``, ``pp_size``, ``dp_size``, ``enable_dp_attention``, ``attn_dp_size``, ``attn_cp_size``,
                ``ep_size``, ``moe_dp_size``, ``dcp_size``; see ``SglangSizes``.

        Returns:
            The config with the same groups.

        Raises:
            ConfigError: SGLang refuses the combination, or it has no counterpart here.
        """
        return cls.model_validate(SglangSizes.model_validate(sizes).settings())

    @classmethod
    def from_vllm(cls, **sizes: int) -> Self:
        """Read vLLM's sizes.

        Args:
            **sizes: ``tensor_parallel_size``, ``pipeline_parallel_size``, ``data_parallel_size``,
                ``prefill_context_parallel_size``, ``decode_context_parallel_size``, ``enable_expert_parallel``; see
                ``VllmSizes``.

        Returns:
            The config with the same groups.

        Raises:
            ConfigError: vLLM refuses the combination.
        """
        return cls.model_validate(VllmSizes.model_validate(sizes).settings())

    @classmethod
    def from_megatron(cls, **sizes: int | str | None) -> Self:
        """Read Megatron-core's sizes.

        Args:
            **sizes: ``world_size`` (needed), ``tensor_model_parallel_size``, ``pipeline_model_parallel_size``,
                ``context_parallel_size``, ``expert_model_parallel_size``, ``expert_tensor_parallel_size``, ``order``; see
                ``MegatronSizes``.

        Returns:
            The config with the same groups.

        Raises:
            ConfigError: Megatron refuses the combination, or its expert ranks follow another rule than ours.
        """
        return cls.model_validate(MegatronSizes.model_validate(sizes).settings())

    @classmethod
    def from_torchtitan(cls, **degrees: int) -> Self:
        """Read torchtitan's degrees.

        Args:
            **degrees: ``tensor_parallel_degree``, ``pipeline_parallel_degree``, ``context_parallel_degree``,
                ``data_parallel_replicate_degree``, ``data_parallel_shard_degree``, ``expert_parallel_degree``; see
                ``TorchtitanSizes``.

        Returns:
            The config with the same groups.

        Raises:
            ConfigError: torchtitan refuses the combination.
        """
        return cls.model_validate(TorchtitanSizes.model_validate(degrees).settings())

    def _need_resolved(self, what: str) -> None:
        for axis, size in self._dense_sizes.items():
            if size == -1:
                raise ConfigError(
                    f"{axis}=-1 is not known yet, so there is no {what}; call resolve(world_size=...) first, "
                    f"or give {axis} its size"
                )
