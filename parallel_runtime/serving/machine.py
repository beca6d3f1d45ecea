"""What this machine has for an engine."""

import os
import resource
import socket
from dataclasses import dataclass
from typing import final

import torch

from parallel_runtime.serving.memory import available_bytes

__all__ = ["Machine", "measure_machine"]


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """Facts about a machine.

    Attributes:
        host: Its name.
        cores: Cores that this process may use.
        memory_bytes: Memory that is free now.
        gpu_bytes: Free memory of each GPU.
        descriptors: File descriptors that this process may open beside those it has.
        has_loopback: Whether ranks can meet on 127.0.0.1.
    """

    host: str
    cores: int
    memory_bytes: int
    gpu_bytes: tuple[int, ...] = ()
    descriptors: int = 1024
    has_loopback: bool = True


def measure_machine() -> Machine:
    """Look at this machine; nothing is started.

    Returns:
        What was found.
    """
    gpus = range(torch.cuda.device_count())
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    in_use = len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else 0
    return Machine(
        host=socket.gethostname(),
        cores=len(os.sched_getaffinity(0)),
        memory_bytes=available_bytes(torch.device("cpu")),
        gpu_bytes=tuple(available_bytes(torch.device("cuda", index)) for index in gpus),
        descriptors=max(0, (2**31 if limit == resource.RLIM_INFINITY else limit) - in_use),
        has_loopback=_can_listen(),
    )


def _can_listen() -> bool:
    try:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            probe.listen(1)
    except OSError:
        return False
    return True
