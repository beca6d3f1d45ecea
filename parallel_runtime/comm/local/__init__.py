"""Ranks as threads of one process: the same protocol in memory, with an error at once where it could only hang."""

from parallel_runtime.comm.local.communicator import LocalCommunicator
from parallel_runtime.comm.local.hub import LocalHub

__all__ = ["LocalCommunicator", "LocalHub"]
