"""Contexts in the hands of other libraries: torch's meshes and compiler, checkpoints, Megatron, transformers; and resharding."""

from parallel_runtime.interop.checkpoint import load_checkpoint, save_checkpoint
from parallel_runtime.interop.megatron import megatron_process_groups
from parallel_runtime.interop.mesh import ContextMesh, device_mesh
from parallel_runtime.interop.model_state import local_state, model_placement
from parallel_runtime.interop.moves import Box, Move, Placement, TensorPlacement, bytes_lacking, plan_moves
from parallel_runtime.interop.pretrained import shard_pretrained
from parallel_runtime.interop.reshard import reshard

__all__ = [
    "Box",
    "ContextMesh",
    "Move",
    "Placement",
    "TensorPlacement",
    "bytes_lacking",
    "device_mesh",
    "load_checkpoint",
    "local_state",
    "megatron_process_groups",
    "model_placement",
    "plan_moves",
    "reshard",
    "save_checkpoint",
    "shard_pretrained",
]
