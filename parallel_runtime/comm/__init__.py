"""Groups of ranks and what moves bytes between them."""

from typing import TYPE_CHECKING

from parallel_runtime.lazy import lazy_exports

if TYPE_CHECKING:
    from parallel_runtime.comm.c10d import (
        C10dCommunicator,
        HostedStore,
        Store,
        connect_store,
        file_store,
        gloo_device,
        hash_store,
        listen_store,
        prefix_store,
        wrap,
    )
    from parallel_runtime.comm.channel import Channel
    from parallel_runtime.comm.communicator import Communicator, Operation, ReduceOp, Work
    from parallel_runtime.comm.coordinator import GroupCoordinator, open_coordinator
    from parallel_runtime.comm.fake import FakeCommunicator
    from parallel_runtime.comm.groups import GroupSpec, GroupTimeouts
    from parallel_runtime.comm.local import LocalCommunicator, LocalHub
    from parallel_runtime.comm.p2p import RecvHandle, SendHandle
    from parallel_runtime.comm.recorder import Record
else:
    __getattr__, __dir__ = lazy_exports(__name__)

__all__ = [
    "C10dCommunicator",
    "Channel",
    "Communicator",
    "FakeCommunicator",
    "GroupCoordinator",
    "GroupSpec",
    "GroupTimeouts",
    "HostedStore",
    "LocalCommunicator",
    "LocalHub",
    "Operation",
    "Record",
    "RecvHandle",
    "ReduceOp",
    "SendHandle",
    "Store",
    "Work",
    "connect_store",
    "file_store",
    "gloo_device",
    "hash_store",
    "listen_store",
    "open_coordinator",
    "prefix_store",
    "wrap",
]
