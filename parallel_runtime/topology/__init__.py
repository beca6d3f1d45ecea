"""Layouts, shards and hosts: integers only, no torch."""

from parallel_runtime.topology.hosts import HostMap, Hosts, place_ranks
from parallel_runtime.topology.layout import Coordinate, Layout
from parallel_runtime.topology.mesh import Mesh
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
    "Uneven",
    "place_ranks",
    "split_even",
    "split_experts",
    "split_heads",
    "split_intermediate",
    "split_layers",
    "split_vocabulary",
]
