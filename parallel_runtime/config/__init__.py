"""Everything that is said before a process starts: sizes, deadlines, the environment, the plan."""

from parallel_runtime.config.addresses import Address, parse_address
from parallel_runtime.config.base import FrozenModel
from parallel_runtime.config.deadlines import Deadlines
from parallel_runtime.config.dialects import Dialect, NamedGroups, named_groups
from parallel_runtime.config.environment import Identity, IdentitySource, current_environ, detect
from parallel_runtime.config.model_shape import ModelShape
from parallel_runtime.config.parallel_config import Backend, Checked, DeviceKind, ParallelConfig, Shm
from parallel_runtime.config.plan import Plan, make_plan

__all__ = [
    "Address",
    "Backend",
    "Checked",
    "Deadlines",
    "DeviceKind",
    "Dialect",
    "FrozenModel",
    "Identity",
    "IdentitySource",
    "ModelShape",
    "NamedGroups",
    "ParallelConfig",
    "Plan",
    "Shm",
    "current_environ",
    "detect",
    "make_plan",
    "named_groups",
    "parse_address",
]
