"""Starting ranks on this machine, as processes or as threads, and bringing back what they return."""

from typing import TYPE_CHECKING

from parallel_runtime.launch.launching import launch
from parallel_runtime.lazy import lazy_exports

if TYPE_CHECKING:
    from parallel_runtime.launch.processes import LocalRanks
    from parallel_runtime.launch.ray_ranks import RayRanks, launch_on_ray
    from parallel_runtime.launch.threads import run_threads
else:
    __getattr__, __dir__ = lazy_exports(__name__)

__all__ = ["LocalRanks", "RayRanks", "launch", "launch_on_ray", "run_threads"]
