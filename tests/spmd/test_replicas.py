"""Replicas as real processes that are killed, stopped, drained and fail to start, under requests that lose nothing."""

import os
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path

import psutil
import pytest

from parallel_runtime.config import ParallelConfig
from parallel_runtime.context import ParallelContext
from parallel_runtime.errors import LaunchError
from parallel_runtime.launch import LocalRanks, launch
from parallel_runtime.serving import (
    DataParallelController,
    Engine,
    EngineConfig,
    FinishReason,
    Replicas,
    ReplicaState,
    SamplingParams,
    ServingConfig,
    Supervision,
)
from parallel_runtime.serving.executors import RankExecutor
from parallel_runtime.testing.checkpoints import tiny_llama_config, write_safetensors_checkpoint
from tests.spmd.tiny_models import PROMPTS, greedy_reference, write_tiny_model

pytestmark = [pytest.mark.processes, pytest.mark.timeout(100)]

NEW = 300
SAMPLING = (
    SamplingParams(max_new_tokens=NEW),
    SamplingParams(max_new_tokens=NEW, temperature=0.9, seed=11),
    SamplingParams(max_new_tokens=NEW, temperature=1.3, top_k=20, seed=5, repetition_penalty=1.2, frequency_penalty=0.3),
    SamplingParams(max_new_tokens=NEW),
)
LIMIT_S = 60.0
RULES = Supervision(backoff_s=0.05)
WATCHFUL = RULES.replace(health_s=2.0)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("tiny"), vocab_size=300, max_positions=512)


def config(model: Path, *, tp: int = 1, replicas: int = 2, supervision: Supervision = RULES) -> EngineConfig:
    serving = ServingConfig(kv_cache_tokens=2048, max_request_tokens=400)
    return EngineConfig(
        model=str(model), parallel=ParallelConfig(tp=tp), replicas=replicas, serving=serving, supervision=supervision
    )


@pytest.fixture(scope="module")
def expected(model: Path) -> list[tuple[int, ...]]:
    """Tokens of an engine to which nothing happens."""
    with Engine(model, serving=ServingConfig(kv_cache_tokens=2048, max_request_tokens=400), executor="threads") as engine:
        return [completion.token_ids for completion in engine.generate(PROMPTS, SAMPLING)]


def nothing(ctx: ParallelContext) -> None:
    """Opens what stays in a process that launches: multiprocessing's helpers, and a pipe of the store's library."""


@pytest.fixture(scope="module", autouse=True)
def _helpers_run() -> None:
    launch(nothing, ParallelConfig(tp=2))


def open_things() -> tuple[int, int, int]:
    """Processes, threads and descriptors of this process."""
    own = psutil.Process()
    return len(own.children(recursive=True)), threading.active_count(), own.num_fds()


def wait_until_nothing_is_left_of(before: tuple[int, int, int]) -> None:
    """Fewer than before may be open: what an earlier test left behind ends when it likes."""
    wait_until(lambda: all(now <= then for now, then in zip(open_things(), before, strict=True)))


@pytest.fixture(autouse=True)
def _nothing_is_left(_helpers_run: None, expected: list[tuple[int, ...]]) -> Iterator[None]:
    before = open_things()
    yield
    wait_until_nothing_is_left_of(before)


def pids(engine: Engine, replica: int) -> list[int]:
    return [int(found[1]) for line in engine.replicas[replica].ranks if (found := re.search(r"pid (\d+)", line))]


def wait_until(is_true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not is_true():
        assert time.monotonic() < deadline, "it does not come"
        threading.Event().wait(0.02)


def serves(engine: Engine) -> bool:
    return all(state is ReplicaState.SERVING for state in engine.supervisor.states)


def stream_through(
    engine: Engine, fault: Callable[[], None]
) -> tuple[list[tuple[int, ...]], list[FinishReason | None], set[int]]:
    """Tokens and ends of all prompts, and the ranks that served; the fault comes once every request has some tokens."""
    tokens: list[tuple[int, ...]] = [()] * len(PROMPTS)
    ends: list[FinishReason | None] = [None] * len(PROMPTS)
    ranks, is_done = set(), False
    for event in engine.stream(PROMPTS, SAMPLING):
        assert ends[event.index] is None, "it was answered already"
        tokens[event.index] += event.token_ids
        ends[event.index] = event.finish_reason
        ranks.add(event.dp_rank)
        if not is_done and all(len(made) > 3 for made in tokens):
            is_done = True
            fault()
    return tokens, ends, ranks


@pytest.mark.parametrize(("tp", "victim"), [(1, 0), (2, 1)])
def test_a_killed_rank_costs_no_token(model: Path, expected: list[tuple[int, ...]], tp: int, victim: int) -> None:
    with Engine(config(model, tp=tp)) as engine:
        old = pids(engine, 0)
        tokens, ends, ranks = stream_through(engine, lambda: os.kill(old[victim], signal.SIGKILL))
        assert tokens == expected
        assert (set(ends), ranks) == ({FinishReason.LENGTH}, {0, 1})
        assert not any(map(psutil.pid_exists, old))
        wait_until(lambda: serves(engine))
        completions = engine.generate(PROMPTS, SAMPLING)
        assert [completion.token_ids for completion in completions] == expected
        assert {completion.dp_rank for completion in completions} == {0, 1}, "the one that was started again takes part"


def test_a_stopped_rank_is_found_by_its_silence(model: Path, expected: list[tuple[int, ...]]) -> None:
    with Engine(config(model, supervision=WATCHFUL)) as engine:
        (hung,) = pids(engine, 1)
        tokens, ends, _ = stream_through(engine, lambda: os.kill(hung, signal.SIGSTOP))
        assert tokens == expected
        assert set(ends) == {FinishReason.LENGTH}
        wait_until(lambda: not psutil.pid_exists(hung) and serves(engine))


def test_an_idle_replica_that_stops_is_replaced_too(model: Path) -> None:
    with Engine(config(model, supervision=WATCHFUL)) as engine:
        (hung,) = pids(engine, 0)
        os.kill(hung, signal.SIGSTOP)
        wait_until(lambda: not psutil.pid_exists(hung) and serves(engine))


def test_a_rolling_restart_loses_nothing(model: Path, expected: list[tuple[int, ...]]) -> None:
    with Engine(config(model)) as engine:

        def roll() -> None:
            assert engine.supervisor.drain(0, LIMIT_S)
            engine.supervisor.restart(0)

        before = pids(engine, 0)
        thread = threading.Thread(target=roll)
        tokens, _, _ = stream_through(engine, thread.start)
        thread.join()
        assert tokens == expected
        wait_until(lambda: not psutil.pid_exists(before[0]) and serves(engine))


def test_when_all_are_killed_everybody_hears_so(model: Path) -> None:
    rules = RULES.replace(max_restarts=0)
    with Engine(config(model, supervision=rules)) as engine:
        victims = [pid for replica in range(2) for pid in pids(engine, replica)]

        def kill_all() -> None:
            for pid in victims:
                os.kill(pid, signal.SIGKILL)

        with pytest.raises(LaunchError, match=r"none of the 2 replicas is left; the last .* was killed by SIGKILL"):
            stream_through(engine, kill_all)
        with pytest.raises(LaunchError, match="none of the 2 replicas is left"):
            engine.generate(PROMPTS)


def test_one_that_was_killed_comes_back_with_the_weights_of_the_others(model: Path, tmp_path: Path) -> None:
    tiny = tiny_llama_config(num_layers=4, eos_ids=(), vocab_size=300, max_positions=512)
    new = write_safetensors_checkpoint(tmp_path, tiny, seed=1)
    expected = greedy_reference(new, PROMPTS[:2], 8)
    with Engine(config(model)) as engine:
        engine.controls.update_weights(new)
        (victim,) = pids(engine, 0)
        os.kill(victim, signal.SIGKILL)
        wait_until(lambda: not serves(engine))
        wait_until(lambda: serves(engine))
        assert {status.weights_version for status in engine.controls.health()} == {1}
        answers = engine.generate(PROMPTS[:2], SamplingParams(max_new_tokens=8), dp_rank=0)
        assert [answer.token_ids for answer in answers] == expected


def test_a_killed_replica_of_a_real_model_costs_no_token() -> None:
    texts = ["The capital of France is", "One, two, three,", "Once upon a time", "Water boils at"]
    sampling = [SamplingParams(max_new_tokens=24, ignore_eos=True, temperature=0.8 * (i % 2), seed=i) for i in range(4)]
    settings = config(Path("smollm2")).replace(serving=ServingConfig(kv_cache_tokens=512, max_request_tokens=128))

    def stream(fault: Callable[[Engine], None]) -> list[str]:
        made, is_done = [""] * 4, False
        for event in engine.stream(texts, sampling):
            made[event.index] += event.text
            if not is_done and all(made):
                is_done = True
                fault(engine)
        return made

    with Engine(settings) as engine:
        undisturbed = stream(lambda engine: None)
        assert stream(lambda engine: os.kill(pids(engine, 1)[0], signal.SIGKILL)) == undisturbed


def die(ctx: ParallelContext) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def test_replicas_that_die_while_they_start_are_tried_so_often_and_no_more() -> None:
    num_starts = 0

    def start_world(stack: ExitStack) -> tuple[RankExecutor, Sequence[Connection]]:
        nonlocal num_starts
        num_starts += 1
        front, leader = Pipe()
        stack.callback(front.close)
        stack.callback(leader.close)
        ranks: RankExecutor = stack.enter_context(LocalRanks(die, ParallelConfig()))
        return ranks, [front]

    controller = DataParallelController(replicas=2)
    rules = Supervision(max_restarts=1, backoff_s=0.01)
    with ExitStack() as stack:
        Replicas(controller, start_world, count=2, rules=rules, exit_s=5.0).start(stack)
        with pytest.raises(LaunchError, match=r"rank 0 of 1 was killed by SIGKILL"):
            controller.wait_ready(LIMIT_S)
    assert 3 <= num_starts <= 4, "each is started once and tried again once; the engine fails with the first that is lost"
