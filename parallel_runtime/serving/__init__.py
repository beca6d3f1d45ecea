"""Serving: what runs next, where it runs, and the loop that runs it."""

from parallel_runtime.serving.balancer import BalancePolicy, Balancer
from parallel_runtime.serving.blocks import BlockPool, blocks_for
from parallel_runtime.serving.messages import FinishReason, Request, SamplingParams
from parallel_runtime.serving.policy import Batch, Chunk, PolicyLimits, RequestState, SchedulingPolicy

__all__ = [
    "BalancePolicy",
    "Balancer",
    "Batch",
    "BlockPool",
    "Chunk",
    "FinishReason",
    "PolicyLimits",
    "Request",
    "RequestState",
    "SamplingParams",
    "SchedulingPolicy",
    "blocks_for",
]
