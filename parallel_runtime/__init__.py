"""The parallel runtime under large PyTorch models: typed layouts, explicit contexts, no globals."""

from parallel_runtime.comm import Channel, GroupCoordinator, ReduceOp
from parallel_runtime.config import Deadlines, ModelShape, ParallelConfig, named_groups
from parallel_runtime.context import ContextState, ParallelContext
from parallel_runtime.errors import ConfigError, LaunchError, ParallelRuntimeError, PeerError
from parallel_runtime.launch import launch, run_threads
from parallel_runtime.models import CausalLM, ModelConfig
from parallel_runtime.serving import DataParallelController, Engine, ModelRunner, SamplingParams, Scheduler, TpModelWorker
from parallel_runtime.terms import Rank, RankInGroup
from parallel_runtime.topology import Coordinate, Layout

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
