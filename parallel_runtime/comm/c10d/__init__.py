"""What ``torch.distributed`` gives: its backends and its stores. Nothing else of the runtime asks it for them."""

from parallel_runtime.comm.c10d.backends import gloo_device
from parallel_runtime.comm.c10d.communicator import C10dCommunicator
from parallel_runtime.comm.c10d.stores import (
    HostedStore,
    Store,
    adopted,
    connect_store,
    file_store,
    hash_store,
    listen_store,
    need_descriptors,
    prefix_store,
    wrap,
)
from parallel_runtime.comm.c10d.symm_mem import SymmMemCommunicator, open_symm_mem

__all__ = [
    "C10dCommunicator",
    "HostedStore",
    "Store",
    "SymmMemCommunicator",
    "adopted",
    "connect_store",
    "file_store",
    "gloo_device",
    "hash_store",
    "listen_store",
    "need_descriptors",
    "open_symm_mem",
    "prefix_store",
    "wrap",
]
