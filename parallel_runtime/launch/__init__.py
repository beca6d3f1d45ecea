"""Starting ranks on this machine, as processes or as threads, and bringing back what they return."""

from parallel_runtime.launch.processes import LocalRanks, launch
from parallel_runtime.launch.ray_ranks import RayRanks, launch_on_ray
from parallel_runtime.launch.threads import run_threads

__all__ = ["LocalRanks", "RayRanks", "launch", "launch_on_ray", "run_threads"]
