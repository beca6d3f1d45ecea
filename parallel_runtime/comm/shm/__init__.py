"""Communication between ranks of one host through memory they share."""

from typing import TYPE_CHECKING

from parallel_runtime.lazy import lazy_exports

if TYPE_CHECKING:
    from parallel_runtime.comm.shm.communicator import ShmCommunicator
    from parallel_runtime.comm.shm.segment import KeyValueStore, Unavailable
    from parallel_runtime.comm.shm.waiting import Errands
else:
    __getattr__, __dir__ = lazy_exports(__name__)

__all__ = ["Errands", "KeyValueStore", "ShmCommunicator", "Unavailable"]
