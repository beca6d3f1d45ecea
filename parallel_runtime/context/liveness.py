"""Whether a process of this host has ended."""

import os
from contextlib import suppress
from pathlib import Path

__all__ = ["has_ended", "machine"]

_ENDED_STATES = frozenset("ZXx")


def has_ended(pid: int) -> bool:
    """Look whether a process is gone, without being its parent.

    Args:
        pid: On this host.

    Returns:
        ``True`` if there is no such process, or only its exit status is left of it.
    """
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return True
    return stat.rpartition(")")[2].split()[0] in _ENDED_STATES


def machine() -> str:
    """Names the kernel and the table of processes that this process lives in."""
    with suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}/{os.stat('/proc/self/ns/pid').st_ino}"
    return os.uname().nodename
