"""B018: a data-parallel rank without requests takes part where its experts are needed, and rests where nobody needs them."""

import time
from pathlib import Path

import pytest

from parallel_runtime.config import ParallelConfig
from parallel_runtime.context import ParallelContext
from parallel_runtime.serving import Engine, SamplingParams
from parallel_runtime.testing.checkpoints import tiny_moe_config, write_safetensors_checkpoint
from tests.spmd.replicas import Replicas
from tests.spmd.tiny_models import PROMPTS, greedy_reference
from tests.unit.layers.ranks import sizes_of

pytestmark = pytest.mark.timeout(60)

NEW = 8
FIVE = (9, 2, 77, 40, 5)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_safetensors_checkpoint(tmp_path_factory.mktemp("b018"), tiny_moe_config(eos_ids=()))


@pytest.mark.parametrize(
    "parallel",
    [ParallelConfig(dp=2, ep=2), ParallelConfig(tp=2, dp=2, ep=4), ParallelConfig(pp=2, dp=2, ep=2), ParallelConfig(dp=2, etp=2)],
    ids=sizes_of,
)
def test_b018_one_busy_rank_then_the_other_then_both(parallel: ParallelConfig, model: Path) -> None:
    (expected,) = greedy_reference(model, [FIVE], NEW)
    with Replicas(model, parallel) as replicas:
        assert replicas.generate(FIVE, new=NEW) == [expected]
        for rank, batches in replicas.batches.items():
            is_busy = parallel.layout.coordinate(rank).dp == 0
            assert batches == ([5] + [1] * (NEW - 1) if is_busy else [0] * NEW), f"rank {rank}"
        assert replicas.generate(FIVE, new=NEW) == [expected]
        assert [replicas.batches[parallel.layout.rank(tp=0, pp=0, dp=dp)] for dp in (0, 1)] == [
            [5, *[1] * (NEW - 1), *[0] * NEW],
            [*[0] * NEW, 5, *[1] * (NEW - 1)],
        ]
        both = (PROMPTS[0], PROMPTS[2])
        assert [len(prompt) for prompt in both] == [1, 17]
        assert replicas.generate(*both, new=NEW) == greedy_reference(model, both, NEW)
    assert replicas.failure is None
    assert len({len(batches) for batches in replicas.batches.values()}) == 1, "ranks ran different numbers of steps"


def test_b018_nothing_runs_while_all_are_idle(model: Path) -> None:
    seen: dict[int, int] = {}

    def note(ctx: ParallelContext) -> None:
        seen[ctx.rank] = ctx.dp.recent()[-1].sequence

    with Replicas(model, ParallelConfig(dp=2, ep=2), at_end=note) as replicas:
        replicas.generate(FIVE, new=2)
        turns = [len(batches) for batches in replicas.batches.values()]
        time.sleep(1)  # nothing is waited for: a busy loop would show
        assert [len(batches) for batches in replicas.batches.values()] == turns
        assert replicas.generate(FIVE, new=NEW) == greedy_reference(model, [FIVE], NEW)
    # a busy loop agrees thousands of times in a second; dp and ep are one pair here and counted together
    assert max(seen.values()) < 400, seen


@pytest.mark.parametrize(("backend", "shm"), [("local", "auto"), ("gloo", "on"), ("gloo", "off")])
def test_b018_an_engine_whose_ranks_are_busy_in_turn(backend: str, shm: str, model: Path) -> None:
    (expected,) = greedy_reference(model, [FIVE], NEW)
    both = (PROMPTS[0], PROMPTS[2])
    parallel = ParallelConfig.model_validate({"dp": 2, "ep": 2, "backend": backend, "shm": shm})
    new = SamplingParams(max_new_tokens=NEW)
    with Engine(model, parallel=parallel, executor="threads") as engine:
        for dp_rank in (0, 1):
            (completion,) = engine.generate([FIVE], new, dp_rank=dp_rank)
            assert (completion.token_ids, completion.dp_rank) == (expected, dp_rank)
        together = engine.generate(both, new)
    assert [completion.token_ids for completion in together] == greedy_reference(model, both, NEW)
    assert sorted(completion.dp_rank for completion in together) == [0, 1]
