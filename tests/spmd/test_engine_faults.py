"""An engine of two processes whose rank is killed or stopped, or that is itself interrupted: who is named, and what is left."""

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from parallel_runtime.config import Deadlines, ParallelConfig
from parallel_runtime.errors import ParallelRuntimeError, PeerTimeoutError, RankFailedError
from parallel_runtime.launch import launch
from parallel_runtime.serving import Engine, SamplingParams, ServingConfig, Supervision
from tests.spmd.test_replicas import nothing, open_things, pids, wait_until, wait_until_nothing_is_left_of
from tests.spmd.tiny_models import PROMPTS, write_tiny_model

pytestmark = [pytest.mark.processes, pytest.mark.timeout(60)]

LAYOUTS = [pytest.param({"tp": 2}, id="tp2"), pytest.param({"pp": 2}, id="pp2")]
SAMPLING = SamplingParams(max_new_tokens=480)
SERVING = ServingConfig(kv_cache_tokens=2048)
SCRIPT = """
import sys
from parallel_runtime.config import ParallelConfig
from parallel_runtime.serving import Engine, SamplingParams, ServingConfig

def main() -> None:
    with Engine(sys.argv[1], parallel=ParallelConfig(tp=2), serving=ServingConfig(kv_cache_tokens=2048)) as engine:
        print(*(line.split("pid ")[1].split()[0] for line in engine.replicas[0].ranks), flush=True)
        while True:
            engine.generate([(1, 2, 3)], SamplingParams(max_new_tokens=100))

if __name__ == "__main__":
    main()
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    launch(nothing, ParallelConfig(tp=2))
    return write_tiny_model(tmp_path_factory.mktemp("tiny"), max_positions=512)


def segments() -> set[str]:
    """Named shared memory of this machine, without the semaphores of whoever else tests here: an engine has none."""
    return {name for name in os.listdir("/dev/shm") if not name.startswith("sem.mp-")}


@pytest.fixture(autouse=True)
def _nothing_is_left(model: Path) -> Iterator[None]:
    before, named = open_things(), segments()
    yield
    wait_until_nothing_is_left_of(before)
    assert segments() <= named


def fail_midway(engine: Engine, victim: int, how: signal.Signals) -> tuple[ParallelRuntimeError, float]:
    """What a stream ends with once a signal has hit a rank, and after how many seconds; later calls get the same."""
    stream = engine.stream(PROMPTS, [SAMPLING] * len(PROMPTS))
    next(stream)
    os.kill(pids(engine, 0)[victim], how)
    began_s = time.monotonic()
    with pytest.raises(ParallelRuntimeError) as first:
        for _ in stream:
            pass
    took_s = time.monotonic() - began_s
    with pytest.raises(type(first.value), match=re.escape(str(first.value))):
        engine.generate(PROMPTS)
    return first.value, took_s


@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize("sizes", LAYOUTS)
def test_a_killed_rank_is_named(model: Path, sizes: dict[str, int], victim: int) -> None:
    with Engine(model, parallel=ParallelConfig.model_validate(sizes), serving=SERVING) as engine:
        error, took_s = fail_midway(engine, victim, signal.SIGKILL)
    assert isinstance(error, RankFailedError)
    assert re.search(f"rank {victim} of 2 was killed by SIGKILL", str(error))
    assert took_s < 10


@pytest.mark.parametrize("sizes", LAYOUTS)
def test_a_stopped_rank_is_named_by_the_one_that_waits_for_it(model: Path, sizes: dict[str, int]) -> None:
    deadlines = Deadlines(collective_s=1.0, control_s=1.0, exit_s=1.0)
    parallel = ParallelConfig.model_validate(sizes).replace(deadlines=deadlines)
    with Engine(model, parallel=parallel, serving=SERVING) as engine:
        error, took_s = fail_midway(engine, 1, signal.SIGSTOP)
    assert isinstance(error, RankFailedError)
    assert re.search(r"rank 0 of 2 failed in .*rank 1", str(error), re.DOTALL)
    assert took_s < 15


@pytest.mark.parametrize("sizes", LAYOUTS)
def test_a_stopped_leader_is_found_by_its_silence(model: Path, sizes: dict[str, int]) -> None:
    parallel = ParallelConfig.model_validate(sizes).replace(deadlines=Deadlines(exit_s=1.0))
    with Engine(model, parallel=parallel, serving=SERVING, supervision=Supervision(health_s=1.0)) as engine:
        error, took_s = fail_midway(engine, 0, signal.SIGSTOP)
    assert isinstance(error, PeerTimeoutError)
    assert str(error) == "replica 0: leader 0 has not answered for 1 s (health_s)"
    assert took_s < 15


def test_an_exception_in_the_middle_of_a_request_ends_the_ranks(model: Path) -> None:
    ranks: list[int] = []

    def use() -> None:
        with Engine(model, parallel=ParallelConfig(tp=2), serving=SERVING) as engine:
            ranks.extend(pids(engine, 0))
            next(engine.stream(PROMPTS, [SAMPLING] * len(PROMPTS)))
            raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        use()
    assert ranks
    assert not any(map(psutil.pid_exists, ranks))


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_ranks_end_with_a_front_that_is_interrupted(model: Path, tmp_path: Path, how: signal.Signals) -> None:
    script = tmp_path / "serve.py"
    script.write_text(SCRIPT)
    named = segments()
    with subprocess.Popen(
        [sys.executable, script, model], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as front:
        assert front.stdout is not None
        ranks = [int(pid) for pid in front.stdout.readline().split()]
        assert len(ranks) == 2
        threading.Event().wait(0.2)  # in the middle of a request
        front.send_signal(how)
        _, errors = front.communicate(timeout=30)
    assert front.returncode in (-how, 128 + how)
    if how is signal.SIGINT:
        assert errors.rstrip().endswith("KeyboardInterrupt")
    wait_until(lambda: not any(map(psutil.pid_exists, ranks)))
    assert segments() <= named
