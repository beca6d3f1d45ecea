"""The context: a world of ranks that have met, and the groups between them."""

from typing import TYPE_CHECKING

from parallel_runtime.lazy import lazy_exports

if TYPE_CHECKING:
    from parallel_runtime.context.base import ContextState
    from parallel_runtime.context.parallel_context import ParallelContext
else:
    __getattr__, __dir__ = lazy_exports(__name__)

__all__ = ["ContextState", "ParallelContext"]
