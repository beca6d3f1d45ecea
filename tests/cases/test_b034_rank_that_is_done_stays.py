"""B034: a data-parallel rank that is done first keeps taking part until the others are."""

from pathlib import Path
from queue import SimpleQueue
from typing import Any

import pytest

from parallel_runtime.config import ParallelConfig
from parallel_runtime.errors import PeerError, RankFailedError
from parallel_runtime.serving import Batch, Engine, SamplingParams
from parallel_runtime.testing.checkpoints import tiny_moe_config, write_safetensors_checkpoint
from tests.spmd.replicas import Replicas
from tests.spmd.tiny_models import PROMPTS, greedy_reference
from tests.unit.layers.ranks import sizes_of

pytestmark = pytest.mark.timeout(60)

SPLITS = (ParallelConfig(dp=2, ep=2), ParallelConfig(tp=2, dp=2, ep=4), ParallelConfig(pp=2, dp=2, ep=2))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_safetensors_checkpoint(tmp_path_factory.mktemp("b034"), tiny_moe_config(eos_ids=()))


@pytest.mark.parametrize("parallel", SPLITS, ids=sizes_of)
def test_b034_each_rank_closes_when_its_own_work_is_done(parallel: ParallelConfig, model: Path) -> None:
    ((first, second),) = [greedy_reference(model, PROMPTS[:2], 30)]
    with Replicas(model, parallel) as replicas:
        short, long = replicas.submit(PROMPTS[0], 2), replicas.submit(PROMPTS[1], 30)
        assert replicas.tokens(short) == first[:2]
        replicas.close(0)
        assert replicas.tokens(long) == second
        replicas.close(1)
        replicas.join()
    assert replicas.failure is None
    assert len(replicas.batches[0]) == len(replicas.batches[parallel.layout.rank(tp=0, pp=0, dp=1)]) >= 30


@pytest.mark.parametrize("idle", [0, 1])
def test_b034_a_rank_that_never_had_work_closes_at_once(model: Path, idle: int) -> None:
    (expected,) = greedy_reference(model, PROMPTS[1:2], 30)
    sink: SimpleQueue[Any] = SimpleQueue()
    with Replicas(model, ParallelConfig(dp=2, ep=2)) as replicas:
        replicas.controller.submit(replicas.request(PROMPTS[1], 30), sink, to=1 - idle)
        replicas.close(idle)
        assert replicas.tokens(sink) == expected
        replicas.close(1 - idle)
        replicas.join()
    assert replicas.failure is None
    assert replicas.batches[idle] == [0] * 30


def test_b034_a_rank_told_to_close_waits_for_the_idle_other(model: Path) -> None:
    with Replicas(model, ParallelConfig(dp=2, ep=2)) as replicas:
        replicas.generate(PROMPTS[0], new=1)
        replicas.close(0)
        assert replicas.generate(PROMPTS[1], new=3) == greedy_reference(model, PROMPTS[1:2], 3)  # rank 1 works on
    assert replicas.failure is None


def test_b034_a_rank_that_fails_is_an_error_for_the_other(model: Path) -> None:
    def fail(rank: int, batch: Batch) -> None:
        if rank == 0 and len(replicas.batches[0]) == 3:
            raise ZeroDivisionError("planted")

    replicas = Replicas(model, ParallelConfig(dp=2, ep=2), at_batch=fail)
    with replicas:
        replicas.submit(PROMPTS[1], 2)
        replicas.submit(PROMPTS[2], 30)
        replicas.join()
    assert isinstance(replicas.failure, RankFailedError)
    assert "planted" in str(replicas.failure)
    assert isinstance(replicas.errors[0], ZeroDivisionError)
    assert isinstance(replicas.errors[1], PeerError)


@pytest.mark.processes
def test_b034_uneven_work_in_processes(model: Path) -> None:
    sampling = [SamplingParams(max_new_tokens=count) for count in (2, 30)]
    with Engine(model, parallel=ParallelConfig(dp=2, ep=2)) as engine:
        completions = engine.generate(PROMPTS[:2], sampling)
    assert [one.token_ids for one in completions] == [
        tokens[:count] for tokens, count in zip(greedy_reference(model, PROMPTS[:2], 30), (2, 30), strict=True)
    ]
