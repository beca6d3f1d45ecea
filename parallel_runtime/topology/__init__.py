"""Layouts, shards and hosts: integers only, no torch."""

from parallel_runtime.topology.hosts import HostMap, Hosts, place_ranks
from parallel_runtime.topology.layout import Coordinate, Layout
from parallel_runtime.topology.mesh import Mesh
from parallel_runtime.topology.sequence import TokenSpan, kept_rows, rows_per_block, split_tokens
from parallel_runtime.topology.shards import (
    HeadShard,
    Uneven,
    split_even,
    split_experts,
    split_heads,
    split_intermediate,
    split_layers,
    split_vocabulary,
)

__all__ = [
    "Coordinate",
    "HeadShard",
    "HostMap",
    "Hosts",
    "Layout",
    "Mesh",
    "TokenSpan",
    "Uneven",
    "kept_rows",
    "place_ranks",
    "rows_per_block",
    "split_even",
    "split_experts",
    "split_heads",
    "split_intermediate",
    "split_layers",
    "split_tokens",
    "split_vocabulary",
]
