"""Contexts in the hands of other libraries: torch's meshes and compiler, checkpoints, Megatron, transformers; and resharding."""

from parallel_runtime.interop.checkpoint import load_checkpoint, save_checkpoint
from parallel_runtime.interop.megatron import megatron_process_groups
from parallel_runtime.interop.mesh import ContextMesh, device_mesh
from parallel_runtime.interop.model_state import local_state, model_placement
from parallel_runtime.interop.moves import Box, Move, Placement, TensorPlacement, bytes_lacking, plan_moves
from parallel_runtime.interop.peer_group import PeerGroup
from parallel_runtime.interop.pretrained import shard_pretrained
from parallel_runtime.interop.reshard import reshard
from parallel_runtime.interop.sglang import SglangState, sglang_state
from parallel_runtime.interop.vllm import VllmState, vllm_state

__all__ = [
    "Box",
    "ContextMesh",
    "Move",
    "PeerGroup",
    "Placement",
    "SglangState",
    "TensorPlacement",
    "VllmState",
    "bytes_lacking",
    "device_mesh",
    "load_checkpoint",
    "local_state",
    "megatron_process_groups",
    "model_placement",
    "plan_moves",
    "reshard",
    "save_checkpoint",
    "sglang_state",
    "shard_pretrained",
    "vllm_state",
]
