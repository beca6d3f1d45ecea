"""Pipelines of any number of stages and micro-batches end, whatever is under way, and say what one rank says."""

import random
from pathlib import Path

import pytest

from parallel_runtime.config import ParallelConfig
from parallel_runtime.serving import ServingConfig
from tests.spmd.replicas import Replicas
from tests.spmd.tiny_models import greedy_reference, write_tiny_model

pytestmark = pytest.mark.timeout(60)

NEW = 6
_RANDOM = random.Random(5)
PROMPTS = [tuple(_RANDOM.randrange(3, 100) for _ in range(length)) for length in (1, 30, 2, 9, 17, 3, 12)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("pipeline"))


@pytest.fixture(scope="module")
def expected(model: Path) -> list[tuple[int, ...]]:
    return greedy_reference(model, PROMPTS, NEW)


@pytest.mark.parametrize("stages", [1, 2, 3, 4])
@pytest.mark.parametrize("num_microbatches", [1, 2, 3, 4, 7])
def test_every_number_of_stages_and_micro_batches(
    stages: int, num_microbatches: int, model: Path, expected: list[tuple[int, ...]]
) -> None:
    """Little memory and small batches, so that prompts come in parts and requests are put back while batches are under way."""
    serving = ServingConfig(
        num_microbatches=num_microbatches, page_size=4, max_batch_tokens=8, max_batch_requests=5, kv_cache_tokens=64
    )
    with Replicas(model, ParallelConfig(pp=stages), serving=serving) as replicas:
        controls = replicas.controller.controls
        sinks = [replicas.submit(prompt, NEW) for prompt in PROMPTS]
        replicas.controller.abort("r3")
        controls.pause()
        assert controls.health()[0].is_paused
        controls.resume()
        made = [replicas.tokens(sink) for sink in sinks]
        (status,) = controls.health()
        assert (status.num_waiting, status.num_running, status.num_free_blocks) == (0, 0, 16)
    assert replicas.failure is None
    assert made[3] == expected[3][: len(made[3])]
    assert made[:3] + made[4:] == expected[:3] + expected[4:]
    assert len({tuple(batches) for batches in replicas.batches.values()}) == 1, "every stage computed the same batches"


def test_closing_in_the_middle_of_everything(model: Path) -> None:
    with Replicas(model, ParallelConfig(pp=3), serving=ServingConfig(num_microbatches=5)) as replicas:
        for prompt in PROMPTS:
            replicas.submit(prompt, 90)
    assert replicas.failure is None
