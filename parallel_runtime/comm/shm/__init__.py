"""Communication between ranks of one host through memory they share."""

from parallel_runtime.comm.shm.communicator import ShmCommunicator
from parallel_runtime.comm.shm.segment import KeyValueStore, Unavailable

__all__ = ["KeyValueStore", "ShmCommunicator", "Unavailable"]
