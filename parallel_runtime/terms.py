"""The words that must not mix: ranks of two kinds, and the names of axes and groups."""

from typing import Literal, NewType, TypeAlias

__all__ = ["DENSE_AXES", "EXPERT_AXES", "GROUP_NAMES", "Axis", "DenseAxis", "ExpertAxis", "GroupName", "Rank", "RankInGroup"]

Rank = NewType("Rank", int)
"""Position in the world of ``world_size``."""

RankInGroup = NewType("RankInGroup", int)
"""Position inside one group, ``0 <= rank_in_group < group.world_size``."""

DenseAxis: TypeAlias = Literal["tp", "cp", "dp", "pp"]
"""An axis of the dense view; the product of their sizes is ``world_size``."""

ExpertAxis: TypeAlias = Literal["etp", "ep", "edp"]
"""An axis of the expert view of one stage; the product of their sizes is ``stage_size``."""

Axis: TypeAlias = Literal["tp", "cp", "dp", "pp", "etp", "ep", "edp", "dcp"]
"""Every axis a rank has a coordinate on."""

GroupName: TypeAlias = Literal["world", "stage", "tp", "cp", "dp", "pp", "ep", "etp", "edp", "dcp"]
"""Every group a context opens by itself."""

DENSE_AXES: tuple[DenseAxis, ...] = ("tp", "cp", "dp", "pp")
"""The axes of the dense view in their usual order, fastest first."""

EXPERT_AXES: tuple[ExpertAxis, ...] = ("etp", "ep", "edp")
"""The axes of the expert view, fastest first."""

GROUP_NAMES: tuple[GroupName, ...] = ("world", "stage", "tp", "cp", "dp", "pp", "ep", "etp", "edp", "dcp")
"""All group names in their usual order: where two name the same ranks, the earlier one opens the communicators."""
