"""Everything that is said before a process starts: sizes, deadlines, the environment, the plan."""

from parallel_runtime.config.base import FrozenModel
from parallel_runtime.config.deadlines import Deadlines
from parallel_runtime.config.dialects import Dialect, NamedGroups, named_groups
from parallel_runtime.config.model_shape import ModelShape
from parallel_runtime.config.parallel_config import Backend, DeviceKind, ParallelConfig, Shm

__all__ = [
    "Backend",
    "Deadlines",
    "DeviceKind",
    "Dialect",
    "FrozenModel",
    "ModelShape",
    "NamedGroups",
    "ParallelConfig",
    "Shm",
    "named_groups",
]
