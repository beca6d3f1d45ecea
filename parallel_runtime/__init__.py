"""The parallel runtime under large PyTorch models: typed layouts, explicit contexts, no globals."""

from typing import TYPE_CHECKING

from parallel_runtime.launch import launch  # at once: later the package of this name would hide it
from parallel_runtime.lazy import lazy_exports

if TYPE_CHECKING:
    from parallel_runtime.comm import Channel, GroupCoordinator, ReduceOp
    from parallel_runtime.config import Deadlines, ModelShape, ParallelConfig, named_groups
    from parallel_runtime.context import ContextState, ParallelContext
    from parallel_runtime.errors import ConfigError, LaunchError, ParallelRuntimeError, PeerError
    from parallel_runtime.launch import run_threads
    from parallel_runtime.models import CausalLM, ModelConfig
    from parallel_runtime.serving import DataParallelController, Engine, ModelRunner, SamplingParams, Scheduler, TpModelWorker
    from parallel_runtime.terms import Rank, RankInGroup
    from parallel_runtime.topology import Coordinate, Layout
else:
    __getattr__, __dir__ = lazy_exports(__name__)

__all__ = [
    "CausalLM",
    "Channel",
    "ConfigError",
    "ContextState",
    "Coordinate",
    "DataParallelController",
    "Deadlines",
    "Engine",
    "GroupCoordinator",
    "LaunchError",
    "Layout",
    "ModelConfig",
    "ModelRunner",
    "ModelShape",
    "ParallelConfig",
    "ParallelContext",
    "ParallelRuntimeError",
    "PeerError",
    "Rank",
    "RankInGroup",
    "ReduceOp",
    "SamplingParams",
    "Scheduler",
    "TpModelWorker",
    "launch",
    "named_groups",
    "run_threads",
]
