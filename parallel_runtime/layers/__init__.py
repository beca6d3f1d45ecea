"""Layers split over groups; each is handed the groups it communicates over, and nothing else."""

from parallel_runtime.layers.attention import Attention, causal_attention, causal_mask
from parallel_runtime.layers.columns import ColumnPiece, ParallelColumns
from parallel_runtime.layers.context_parallel import KeyMask, merge_partials, partial_attention, plain_attention
from parallel_runtime.layers.embedding import ParallelHead, VocabParallelEmbedding
from parallel_runtime.layers.expert_groups import ExpertGroups
from parallel_runtime.layers.experts import Experts, Router, Routing
from parallel_runtime.layers.feed_forward import GatedFeedForward
from parallel_runtime.layers.fused import ResidualSum
from parallel_runtime.layers.linear import (
    ColumnParallelLinear,
    GateUpParallelLinear,
    QkvParallelLinear,
    RowParallelLinear,
)
from parallel_runtime.layers.moe import MixtureOfExperts, SharedExpert
from parallel_runtime.layers.norm import RMSNorm
from parallel_runtime.layers.packing import PackableLayer
from parallel_runtime.layers.regions import (
    copy_to_group,
    gather_from_group,
    gather_rows_to_group,
    reduce_from_group,
    scatter_rows_from_group,
)
from parallel_runtime.layers.rotary import RotaryAngles, RotaryPositions, rotate
from parallel_runtime.layers.sources import TensorSource

__all__ = [
    "Attention",
    "ColumnParallelLinear",
    "ColumnPiece",
    "ExpertGroups",
    "Experts",
    "GateUpParallelLinear",
    "GatedFeedForward",
    "KeyMask",
    "MixtureOfExperts",
    "PackableLayer",
    "ParallelColumns",
    "ParallelHead",
    "QkvParallelLinear",
    "RMSNorm",
    "ResidualSum",
    "RotaryAngles",
    "RotaryPositions",
    "Router",
    "Routing",
    "RowParallelLinear",
    "SharedExpert",
    "TensorSource",
    "VocabParallelEmbedding",
    "causal_attention",
    "causal_mask",
    "copy_to_group",
    "gather_from_group",
    "gather_rows_to_group",
    "merge_partials",
    "partial_attention",
    "plain_attention",
    "reduce_from_group",
    "rotate",
    "scatter_rows_from_group",
]
