"""How much memory this machine can still give, and how free memory gets back to it."""

import ctypes
import gc
import os
from pathlib import Path

import torch

__all__ = ["available_bytes", "give_back"]

_MEMINFO = Path("/proc/meminfo")


def available_bytes(device: torch.device) -> int:
    """Measure the memory that is free now.

    Args:
        device: Where it is wanted.

    Returns:
        Bytes: on CUDA what the driver calls free, on CPU what the kernel calls available.
    """
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return free
    try:
        lines = _MEMINFO.read_text(encoding="ascii").splitlines()
    except OSError:
        lines = []
    for line in lines:
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def give_back() -> None:
    """Collect garbage, and hand over what the allocator keeps for later: glibc's keeps every hole below what is still in use."""
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
