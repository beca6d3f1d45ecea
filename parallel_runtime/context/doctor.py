"""Looking at a machine before a job: what ranks will need, tried out where that is harmless."""

import os
import resource
import socket
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal, TypeAlias, final

import torch

from parallel_runtime.comm.c10d import connect_store, listen_store
from parallel_runtime.comm.shm.segment import available_bytes, create_file
from parallel_runtime.config.addresses import check_interface, check_master_host, interface_names, resolve_host
from parallel_runtime.config.environment import detect
from parallel_runtime.errors import LauncherEnvironmentError, ParallelRuntimeError

__all__ = ["Finding", "Verdict", "examine_machine"]

Verdict: TypeAlias = Literal["ok", "note", "bad"]
"""Fine; worth knowing; will fail."""

_LAUNCHERS: Final = (
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "MASTER_",
    "PARALLEL_RUNTIME_",
    "OMPI_COMM_",
    "PMI_",
    "SLURM_",
    "TORCHELASTIC_",
)
_FEW_DESCRIPTORS: Final = 1024
_MUCH_SLEEP_S: Final = 60.0
_PAGE: Final = 1 << 16


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """What one look found.

    Attributes:
        topic: What was looked at.
        verdict: How it is.
        text: What was found and, where it is not fine, what to do.
    """

    topic: str
    verdict: Verdict
    text: str


def examine_machine(environ: Mapping[str, str]) -> list[Finding]:
    """Look at everything that ranks started here would meet.

    Args:
        environ: Variables of this process.

    Returns:
        One finding for each topic, in a fixed order.
    """
    looks: tuple[tuple[str, Callable[[Mapping[str, str]], tuple[Verdict, str]]], ...] = (
        ("versions", _versions),
        ("identity", _identity),
        ("leftover variables", _leftovers),
        ("meeting point", _meeting_point),
        ("host name", _host_name),
        ("interfaces", _interfaces),
        ("ports", _ports),
        ("shared memory", _shared_memory),
        ("clocks", _clocks),
        ("limits", _limits),
        ("cores and threads", _threads),
        ("GPUs", _gpus),
    )
    findings = []
    for topic, look in looks:
        try:
            verdict, text = look(environ)
        except (OSError, ParallelRuntimeError) as error:
            verdict, text = "bad", str(error)
        findings.append(Finding(topic=topic, verdict=verdict, text=text))
    return findings


def _versions(environ: Mapping[str, str]) -> tuple[Verdict, str]:
    del environ
    return "ok", f"torch {torch.__version__}, Python {'.'.join(map(str, sys.version_info[:3]))}, kernel {os.uname().release}"


def _identity(environ: Mapping[str, str]) -> tuple[Verdict, str]:
    found = detect(environ)
    text = f"rank {found.rank} of {found.world_size}, local rank {found.local_rank} ({found.source})"
    return ("note", f"{text}; {'; '.join(found.set_aside)}") if found.set_aside else ("ok", text)


def _leftovers(environ: Mapping[str, str]) -> tuple[Verdict, str]:
    names = sorted(name for name in environ if name.startswith(_LAUNCHERS))
    if not names:
        return "ok", "no launcher has left any"
    with suppress(LauncherEnvironmentError):
        if detect(environ).world_size > 1:
            return "ok", f"this process is a rank, so {', '.join(names)} belong to it"
    return "note", f"{', '.join(names)} are set although this process is no rank of several; unset them before you start ranks"


def _meeting_point(environ: Mapping[str, str]) -> tuple[Verdict, str]:
    host = environ.get("MASTER_ADDR")
    if not host:
        return "ok", "MASTER_ADDR is not set; ranks started here meet on loopback"
    hosts = detect(environ, needs_master=False).num_hosts or 1
    check_master_host(host, num_hosts=hosts, environ=environ)
    try:
        return "ok", f"MASTER_ADDR={host} resolves to {', '.join(resolve_host(host))}"
    except OSError as error:
        return "bad", f"MASTER_ADDR={host} does not resolve on this host ({error}); use a name or address that every host knows"


def _host_name(environ: Mapping[str, str]) -> tuple[Verdict, str]:
    del environ
    name = os.uname().nodename
    try:
        return "ok", f"{name} resolves to {', '.join(resolve_host(name, timeout_s=2.0))}"
    except OSError as error:
        return "note", f"{name} does not resolve ({error}); ranks of one host meet on loopback and do not need it"


def _interfaces(environ: Mapping[str, str]) -> tuple[Verdict, str]:
    names = interface_names()
    check_interface(environ, names)
    return "ok", f"{', '.join(names)}; GLOO_SOCKET_IFNAME is {environ.get('GLOO_SOCKET_IFNAME') or 'not set'}"


def _ports(environ: Mapping[str, str]) -> tuple[Verdict, str]:
    start = time.monotonic()
    server = listen_store()
    connect_store(server.host, server.port, timeout_s=5.0).set("doctor", "was here")
    text = f"a store on loopback answered within {(time.monotonic() - start) * 1e3:.0f} ms"
    port = environ.get("MASTER_PORT", "")
    if not port.isdecimal():
        return "ok", text
    with socket.socket() as probe:
        is_taken = probe.connect_ex(("127.0.0.1", int(port))) == 0
    return "ok", f"{text}; MASTER_PORT={port} is {'served already' if is_taken else 'free'} on loopback"


def _shared_memory(environ: Mapping[str, str]) -> tuple[Verdict, str]:
    del environ
    descriptor, _ = create_file([_PAGE])
    os.close(descriptor)
    text = f"{available_bytes() / 2**30:.1f} GiB can be reserved"
    with suppress(OSError):
        shm = os.statvfs("/dev/shm")
        free, total = (blocks * shm.f_frsize / 2**30 for blocks in (shm.f_bavail, shm.f_blocks))
        text += f"; /dev/shm has {free:.1f} of {total:.1f} GiB free"
    return "ok", text


def _clocks(environ: Mapping[str, str]) -> tuple[Verdict, str]:
    del environ
    slept_s = time.clock_gettime(time.CLOCK_BOOTTIME) - time.monotonic()
    if slept_s > _MUCH_SLEEP_S:
        return "note", f"this machine has slept for {slept_s:.0f} s since it started; deadlines do not count that, other hosts do"
    return "ok", f"deadlines use the monotonic clock (now {time.monotonic():.0f} s); the machine has not slept"


def _limits(environ: Mapping[str, str]) -> tuple[Verdict, str]:
    del environ
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    processes, _ = resource.getrlimit(resource.RLIMIT_NPROC)
    text = f"{_number(soft)} descriptors (up to {_number(hard)}), {_number(processes)} processes and threads"
    for name in ("memory.max", "memory/memory.limit_in_bytes"):
        with suppress(OSError, ValueError):
            limit = int(Path("/sys/fs/cgroup", name).read_text())
            text += f", {limit / 2**30:.0f} GiB of memory" if limit < 1 << 60 else ""
    if soft != resource.RLIM_INFINITY and soft < _FEW_DESCRIPTORS:
        return "note", f"{text}; every gloo group takes one descriptor per peer: raise it with ulimit -n"
    return "ok", text


def _threads(environ: Mapping[str, str]) -> tuple[Verdict, str]:
    cores, chosen = len(os.sched_getaffinity(0)), environ.get("OMP_NUM_THREADS", "")
    text = f"{cores} cores; OMP_NUM_THREADS is {chosen or 'not set, so the launcher divides the cores among its ranks'}"
    if chosen.isdecimal() and int(chosen) > cores:
        return "note", f"{text}: more than there are cores, on every rank"
    return "ok", text


def _gpus(environ: Mapping[str, str]) -> tuple[Verdict, str]:
    count, visible = torch.cuda.device_count(), environ.get("CUDA_VISIBLE_DEVICES")
    text = f"{count} visible; CUDA_VISIBLE_DEVICES is {'not set' if visible is None else repr(visible)}"
    return "ok", text


def _number(limit: int) -> str:
    return "unlimited" if limit == resource.RLIM_INFINITY else f"{limit:,}"
