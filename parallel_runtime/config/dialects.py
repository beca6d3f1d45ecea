"""The groups of a layout under the names another project gives them."""

from collections.abc import Callable
from math import prod
from typing import Literal, TypeAlias, cast, get_args

from parallel_runtime.config.parallel_config import ParallelConfig
from parallel_runtime.errors import ArgumentError, ConfigError
from parallel_runtime.terms import DENSE_AXES, DenseAxis, Rank
from parallel_runtime.topology import Layout, Mesh
from parallel_runtime.values import type_problem

__all__ = ["Dialect", "NamedGroups", "named_groups"]

Dialect: TypeAlias = Literal["sglang", "vllm", "megatron", "torchtitan"]
"""A project whose sizes and group names are understood."""

NamedGroups: TypeAlias = dict[str, tuple[tuple[Rank, ...], ...]]
"""All groups by name: members in the peer's order, groups in the peer's order."""


def named_groups(config: ParallelConfig, dialect: Dialect, *, dp_replicate: int = 1) -> NamedGroups:
    """Return the groups of a config as another project would list them.

    Args:
        config: A config whose layout the project can build too, for instance from ``ParallelConfig.from_vllm``.
        dialect: Which project.
        dp_replicate: For torchtitan, how much of ``config.dp`` is replicas; the rest shards parameters.

    Returns:
        The project's own group names and their rank lists, over the whole world.

    Raises:
        ArgumentError: ``dialect`` is not a name.
        ConfigError: The project has no such layout, or the dialect is unknown.
    """
    if problem := type_problem("dialect", dialect, str, f"use one of {', '.join(get_args(Dialect))}"):
        raise ArgumentError(problem)
    layout = config.layout
    if dialect == "torchtitan":
        return _torchtitan(layout, dp_replicate)
    if dp_replicate != 1:
        raise ConfigError(f"dp_replicate={dp_replicate} means something to torchtitan only, not to {dialect}")
    builders: dict[str, Callable[[Layout], NamedGroups]] = {"sglang": _sglang, "vllm": _vllm, "megatron": _megatron}
    if dialect not in builders:
        raise ConfigError(f"dialect {dialect!r} is unknown; there are {', '.join(get_args(Dialect))}")
    return builders[dialect](layout)


def _sglang(layout: Layout) -> NamedGroups:
    _need_order(layout, DENSE_AXES, peer="SGLang")
    if layout.dcp > 1 and layout.cp > 1:
        raise ConfigError(
            f"dcp={layout.dcp} with cp={layout.cp}: SGLang does not combine them, so it has no names for these groups"
        )
    names = {
        "tp": "stage",
        "attn_cp": "cp",
        "attn_tp": "tp",
        "moe_dp": "cp" if layout.cp > layout.edp else "edp",
        "moe_ep": "ep",
        "moe_tp": "etp",
        "pp": "pp",
        **({"dcp": "dcp"} if layout.dcp > 1 else {}),
    }
    return {name: layout.groups(axis) for name, axis in names.items()}


def _vllm(layout: Layout) -> NamedGroups:
    order: tuple[DenseAxis, ...] = ("tp", "cp", "pp", "dp")
    _need_order(layout, order, peer="vLLM")
    if layout.ep > 1 and layout.ep != layout.stage_size:
        raise ConfigError(f"ep={layout.ep}: vLLM's ep group is always the whole stage, tp*cp*dp = {layout.stage_size}")
    mesh = Mesh(order, (layout.tp, layout.cp, layout.pp, layout.dp))
    return {
        "tp": layout.groups("tp"),
        "dcp": layout.groups("dcp"),
        "pcp": layout.groups("cp"),
        "pp": _groups(layout, mesh, "pp", outer=("cp", "tp", "dp")),
        "dp": _groups(layout, mesh, "dp", outer=("cp", "pp", "tp")),
        "ep": layout.groups("stage"),
    }


def _megatron(layout: Layout) -> NamedGroups:
    before_pp = prod(getattr(layout, axis) for axis in layout.order[: layout.order.index("pp")])
    pp_last = before_pp == layout.stage_size or layout.pp == 1
    if not pp_last and (layout.edp != layout.dp or before_pp not in (1, layout.etp, layout.etp * layout.ep)):
        raise ConfigError(
            f"order={'-'.join(layout.order)} with pp={layout.pp}, dp={layout.dp}, etp={layout.etp}, ep={layout.ep}, "
            f"edp={layout.edp}: unless pp comes last, Megatron wants edp = dp and the same distance between stages in both views"
        )
    dense = ("tp", "pp", "dp", "cp", "dp-cp", "tp-pp", "tp-cp", "tp-dp", "tp-dp-cp")
    expert = {
        "ep": ("ep",),
        "expert_tp": ("etp",),
        "expert_dp": ("edp",),
        "expert_tp-ep": ("etp", "ep"),
        "expert_tp-ep-pp": ("etp", "ep", "pp"),
        "expert_pp": ("pp",),
    }
    return {
        **{name: layout.groups(*name.split("-")) for name in dense},
        **{name: layout.groups(*axes) for name, axes in expert.items()},
    }


def _torchtitan(layout: Layout, dp_replicate: int) -> NamedGroups:
    _need_order(layout, DENSE_AXES, peer="torchtitan")
    if type(dp_replicate) is not int or dp_replicate < 1 or layout.dp % dp_replicate:
        raise ConfigError(f"dp_replicate={dp_replicate!r} does not divide dp={layout.dp}")
    dp_shard = layout.dp // dp_replicate
    sparse = layout.tp * layout.cp * dp_shard
    if layout.etp > 1 or sparse % layout.ep:
        raise ConfigError(
            f"etp={layout.etp}, ep={layout.ep}: torchtitan has etp=1 and spreads experts inside one replica, so ep divides "
            f"tp*cp*dp_shard = {layout.tp}*{layout.cp}*{dp_shard} = {sparse}"
        )
    mesh = Mesh(("tp", "cp", "dp_shard", "dp_replicate", "pp"), (layout.tp, layout.cp, dp_shard, dp_replicate, layout.pp))
    experts = Mesh(("ep", "efsdp", "dp_replicate", "pp"), (layout.ep, sparse // layout.ep, dp_replicate, layout.pp))
    return {
        **{axis: _groups(layout, mesh, axis) for axis in mesh.axes},
        "batch": _groups(layout, mesh, "dp_shard", "dp_replicate"),
        "fsdp": _groups(layout, mesh, "cp", "dp_shard"),
        "loss": _groups(layout, mesh, "cp", "dp_shard", "dp_replicate"),
        "efsdp": _groups(layout, experts, "efsdp"),
        "ep": _groups(layout, experts, "ep"),
    }


def _groups(layout: Layout, mesh: Mesh, *axes: str, outer: tuple[str, ...] | None = None) -> tuple[tuple[Rank, ...], ...]:
    """List the groups of a mesh over the whole world as ranks."""
    groups = mesh.groups(axes, outer=outer)
    return cast(tuple[tuple[Rank, ...], ...], tuple(tuple([layout.ranks[place] for place in group]) for group in groups))


def _need_order(layout: Layout, order: tuple[DenseAxis, ...], *, peer: str) -> None:
    """Refuse an order that differs from the peer's on the axes that have any size."""
    ours = [axis for axis in layout.order if getattr(layout, axis) > 1]
    theirs = [axis for axis in order if getattr(layout, axis) > 1]
    if ours != theirs:
        raise ConfigError(f"order={layout.order!r}: {peer} always has {order!r}, fastest first")
