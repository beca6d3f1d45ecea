"""Starting ranks on this machine, as processes or as threads, and bringing back what they return."""

from parallel_runtime.launch.processes import LocalRanks, launch
from parallel_runtime.launch.threads import run_threads

__all__ = ["LocalRanks", "launch", "run_threads"]
