"""Imported by the fork server alone: what the ranks of an engine need, without looking for garbage among new modules.

What is there at the end is never looked at again in a rank, so that it stays shared between ranks.
"""

import gc
from importlib import import_module
from typing import Final

__all__ = ["MODULES"]

MODULES: Final = ("torch", "parallel_runtime.launch.rank_process", "parallel_runtime.serving.executors")
"""In the order in which they are imported."""

gc.disable()
for _module in MODULES:
    import_module(_module)
gc.freeze()
gc.enable()
