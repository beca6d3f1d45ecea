"""The context: a world of ranks that have met, and the groups between them."""

from parallel_runtime.context.base import ContextState
from parallel_runtime.context.parallel_context import ParallelContext

__all__ = ["ContextState", "ParallelContext"]
