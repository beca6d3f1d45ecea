"""Serving: what runs next, where it runs, and the loop that runs it."""

from typing import TYPE_CHECKING

from parallel_runtime.lazy import lazy_exports

if TYPE_CHECKING:
    from parallel_runtime.serving.answers import Completion, StreamEvent, Usage
    from parallel_runtime.serving.arguments import Prompt
    from parallel_runtime.serving.async_engine import AsyncEngine
    from parallel_runtime.serving.balancer import BalancePolicy, Balancer
    from parallel_runtime.serving.batch import Batch, Chunk
    from parallel_runtime.serving.blocks import BlockPool, blocks_for
    from parallel_runtime.serving.controller import DataParallelController
    from parallel_runtime.serving.engine import Engine, EngineState
    from parallel_runtime.serving.engine_config import EngineConfig
    from parallel_runtime.serving.engine_controls import EngineControls
    from parallel_runtime.serving.live_request import RequestState
    from parallel_runtime.serving.messages import FinishReason, Ready, Request, TokenLogprobs
    from parallel_runtime.serving.metrics import Histogram, MetricsSnapshot
    from parallel_runtime.serving.policy import PolicyLimits, SchedulingPolicy
    from parallel_runtime.serving.replicas import Replicas
    from parallel_runtime.serving.runner import ModelRunner
    from parallel_runtime.serving.sampling_params import SamplingParams
    from parallel_runtime.serving.scheduler import Scheduler
    from parallel_runtime.serving.serving_config import ServingConfig
    from parallel_runtime.serving.supervision import ReplicaState, Supervision
    from parallel_runtime.serving.weight_transfer import send_weights, weight_context
    from parallel_runtime.serving.worker import TpModelWorker
else:
    __getattr__, __dir__ = lazy_exports(__name__)

__all__ = [
    "AsyncEngine",
    "BalancePolicy",
    "Balancer",
    "Batch",
    "BlockPool",
    "Chunk",
    "Completion",
    "DataParallelController",
    "Engine",
    "EngineConfig",
    "EngineControls",
    "EngineState",
    "FinishReason",
    "Histogram",
    "MetricsSnapshot",
    "ModelRunner",
    "PolicyLimits",
    "Prompt",
    "Ready",
    "ReplicaState",
    "Replicas",
    "Request",
    "RequestState",
    "SamplingParams",
    "Scheduler",
    "SchedulingPolicy",
    "ServingConfig",
    "StreamEvent",
    "Supervision",
    "TokenLogprobs",
    "TpModelWorker",
    "Usage",
    "blocks_for",
    "send_weights",
    "weight_context",
]
