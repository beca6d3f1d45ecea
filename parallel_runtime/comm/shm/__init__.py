"""Communication between ranks of one host through memory they share."""

from parallel_runtime.comm.shm.communicator import ShmCommunicator
from parallel_runtime.comm.shm.segment import KeyValueStore, Unavailable
from parallel_runtime.comm.shm.waiting import Errands

__all__ = ["Errands", "KeyValueStore", "ShmCommunicator", "Unavailable"]
