"""``parallel-runtime serve`` with real processes: a drain by SIGTERM, a killed rank, and nothing left of either."""

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, final

import httpx2
import psutil
import pytest
from openai import OpenAI

from tests.spmd.tiny_models import write_tiny_model

pytestmark = [pytest.mark.processes, pytest.mark.timeout(90)]

LIMIT_S = 60.0


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("models") / "tiny", vocab_size=300, max_positions=2048)


@final
class Command:
    """A running ``parallel-runtime serve``."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        self.url = ""
        self._children: list[psutil.Process] = []

    def wait_ready(self) -> None:
        assert self.process.stdout is not None
        self.url = json.loads(self.process.stdout.readline())["url"]
        self._children = psutil.Process(self.process.pid).children(recursive=True)

    def get(self, path: str) -> httpx2.Response:
        return httpx2.get(f"{self.url}{path}", timeout=LIMIT_S)

    def doing(self) -> list[dict[str, Any]]:
        """What the ranks of the first replica are in."""
        (leader,) = self.get("/status").json()["replicas"][0]["leaders"]
        return list(leader["doing"])

    def pids(self) -> list[int]:
        """Of the ranks, replica by replica."""
        ranks = [
            rank
            for replica in self.get("/status").json()["replicas"]
            for leader in replica["leaders"]
            for rank in leader["ranks"]
        ]
        return [int(found[1]) for rank in ranks if (found := re.search(r"pid (\d+)", rank))]

    def ended(self) -> tuple[int, str]:
        """Exit status and what it said, once it and all its processes are gone and its port is free."""
        _, said = self.process.communicate(timeout=LIMIT_S)
        wait_until(lambda: not any(child.is_running() and child.status() != "zombie" for child in self._children))
        with pytest.raises(httpx2.ConnectError):
            self.get("/health")
        return self.process.returncode, said


@contextmanager
def serve(model: Path, *more: str) -> Iterator[Command]:
    arguments = ("serve", "--model", str(model), "--port", "0", "--json", "--kv-cache-tokens", "4096", *more)
    command = [sys.executable, "-m", "parallel_runtime.cli.main", *arguments]
    environ = {**os.environ, "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environ) as process:
        try:
            each = Command(process)
            each.wait_ready()
            yield each
        finally:
            process.kill()


@contextmanager
def stream(command: Command, max_tokens: int) -> Iterator[Any]:
    with (
        OpenAI(base_url=f"{command.url}/v1", api_key="x", max_retries=0, timeout=LIMIT_S) as client,
        client.completions.create(model="tiny", prompt="Hello", max_tokens=max_tokens, stream=True) as chunks,
    ):
        next(chunks)
        yield chunks


def wait_until(is_true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not is_true():
        assert time.monotonic() < deadline, "it does not come"
        threading.Event().wait(0.02)


def test_sigterm_lets_running_answers_end(model: Path) -> None:
    with serve(model, "--tp", "2") as command:
        assert len(set(command.pids())) == 2
        with stream(command, 300) as chunks:
            command.process.send_signal(signal.SIGTERM)
            wait_until(lambda: command.get("/health").status_code == 503)
            response = httpx2.post(f"{command.url}/v1/completions", json={"prompt": "Hi"})
            assert (response.status_code, response.json()["error"]["code"]) == (503, "draining")
            *_, last = chunks
        assert last.choices[0].finish_reason == "length"
        status, said = command.ended()
    assert status == 0
    assert "draining: 1 request(s) under way have 30 s to end" in said


def test_a_second_signal_ends_running_answers(model: Path) -> None:
    with serve(model, "--executor", "threads") as command:
        with stream(command, 2000) as chunks:
            command.process.send_signal(signal.SIGINT)
            wait_until(lambda: command.get("/health").status_code == 503)
            command.process.send_signal(signal.SIGINT)
            with pytest.raises(Exception, match="ended this answer before it was whole"):
                list(chunks)
        status, said = command.ended()
    assert status == 130
    assert said.endswith("ending now\n")


def test_a_killed_rank_of_the_only_replica_ends_the_server(model: Path) -> None:
    with serve(model, "--tp", "2") as command:
        with stream(command, 2000) as chunks:
            stopped = command.pids()[1]
            os.kill(stopped, signal.SIGSTOP)
            wait_until(lambda: [doing["is_silent"] for doing in command.doing()] == [False, True])
            wait_until(lambda: bool(command.doing()[0]["operation"]))  # the page tells in what it waits for the stopped one
            os.kill(stopped, signal.SIGKILL)
            with pytest.raises(Exception, match=r"rank 1 .*SIGKILL"):
                list(chunks)
        status, said = command.ended()
    assert status == 1
    assert re.search(r"parallel-runtime: rank 1 .*SIGKILL", said.splitlines()[-1])


def test_a_killed_rank_of_one_replica_loses_no_answer(model: Path) -> None:
    with serve(model, "--replicas", "2", "--backoff-s", "2") as command:
        with stream(command, 400) as first, stream(command, 400) as second:
            os.kill(command.pids()[0], signal.SIGKILL)
            wait_until(lambda: command.get("/health").json()["status"] == "degraded")
            assert command.get("/health").status_code == 200
            assert 'replica_up{replica="0"} 0' in command.get("/metrics").text
            for chunks in (first, second):
                *_, last = chunks
                assert last.choices[0].finish_reason == "length"
        wait_until(lambda: command.get("/health").json()["status"] == "serving")
        command.process.send_signal(signal.SIGTERM)
        assert command.ended()[0] == 0


def test_a_signal_while_the_model_is_loaded_ends_it(model: Path) -> None:
    command = [sys.executable, "-m", "parallel_runtime.cli.main", "serve", "--model", str(model), "--port", "0", "--tp", "2"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        assert process.stderr.readline().startswith("listening on http://127.0.0.1:")
        process.send_signal(signal.SIGTERM)
        _, said = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 0
    assert said == "ending now\n"
