"""Running a script the way a user does: a file, an interpreter, an exit status and what it wrote."""

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import psutil

IMPORTS = """
import multiprocessing, os, sys, time
import torch
from parallel_runtime.config import ParallelConfig
from parallel_runtime.context import ParallelContext
from parallel_runtime.launch import launch
"""


def clean_environ(**changes: str) -> dict[str, str]:
    """This process's variables with one thread per rank, and with some more.

    Without ``PYTHONUNBUFFERED``: under it ``print`` writes a line in pieces, and ranks that share a pipe mix theirs.
    """
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    return {**environ, "OMP_NUM_THREADS": "1", **changes}


def write_script(folder: Path, body: str, name: str = "script.py") -> Path:
    """Save a script that starts with ``IMPORTS``."""
    path = folder / name
    path.write_text(IMPORTS + body)
    return path


def free_port() -> int:
    """A TCP port of loopback that was free a moment ago, for launchers that must be told one."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def start(arguments: list[str], environ: Mapping[str, str] | None = None) -> "subprocess.Popen[str]":
    """Start an interpreter with these arguments."""
    return start_program([sys.executable, *arguments], environ)


def start_program(command: list[str], environ: Mapping[str, str] | None = None) -> "subprocess.Popen[str]":
    """Start a program."""
    return subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=dict(environ) if environ is not None else clean_environ(),
    )


def finish(process: "subprocess.Popen[str]", timeout_s: float = 60.0) -> tuple[int, str, str]:
    """Wait for it: exit status, stdout, stderr."""
    try:
        out, err = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        process.kill()
        try:
            out, err = process.communicate(timeout=10)
        except subprocess.TimeoutExpired as late:  # its children hold the streams
            out, err = str(late.stdout), str(late.stderr)
        raise AssertionError(f"still running after {timeout_s} s\n{out}\n{err}") from None
    return process.returncode, out, err


def run(script: Path, *arguments: str, environ: Mapping[str, str] | None = None) -> tuple[int, str, str]:
    """Run a script to its end: exit status, stdout, stderr."""
    return finish(start([str(script), *arguments], environ))


def signal_when_up(process: "subprocess.Popen[str]", number: signal.Signals, lines: int) -> list[int]:
    """Send a signal once it has written so many lines that end in a pid; those pids."""
    assert process.stdout is not None
    pids = [int(process.stdout.readline().split()[-1]) for _ in range(lines)]
    process.send_signal(number)
    return pids


def still_alive(pids: list[int], timeout_s: float = 10.0) -> list[int]:
    """Those of the processes that do not end within a while. Zombies have ended."""
    found = [psutil.Process(pid) for pid in pids if psutil.pid_exists(pid)]
    _, alive = psutil.wait_procs(found, timeout=timeout_s)
    return [process.pid for process in alive if process.is_running() and process.status() != psutil.STATUS_ZOMBIE]
