"""Contexts in the hands of other libraries: torch's meshes and compiler, checkpoints, Megatron, transformers; and resharding."""

from parallel_runtime.interop.mesh import ContextMesh, device_mesh

__all__ = ["ContextMesh", "device_mesh"]
