"""The engine where sequences are cut over ranks: the tokens of one plain loop, whatever the cut, the batch and the memory."""

from pathlib import Path

import pytest

from parallel_runtime.config import ParallelConfig
from parallel_runtime.context import ParallelContext
from parallel_runtime.launch import run_threads
from parallel_runtime.serving import Engine, SamplingParams, ServingConfig, TpModelWorker
from parallel_runtime.testing.checkpoints import tiny_llama_config, tiny_moe_config, write_safetensors_checkpoint
from tests.spmd.tiny_models import PROMPTS, greedy_reference, write_tiny_model

pytestmark = pytest.mark.timeout(60)

NEW = 8
GREEDY = SamplingParams(max_new_tokens=NEW)
LONG = (*PROMPTS, tuple(5 * place % 90 + 3 for place in range(40)))

LAYOUTS = (
    ParallelConfig(cp=2),
    ParallelConfig(tp=2, cp=2),
    ParallelConfig(cp=3, dcp=3),
    ParallelConfig(tp=4, dcp=2),
    ParallelConfig(tp=4, cp=2, dcp=4),
    ParallelConfig(cp=2, pp=2, dp=2),
    ParallelConfig(tp=2, cp=2, dcp=2, pp=2, order=("pp", "cp", "tp", "dp")),
)
TIGHT = ServingConfig(page_size=5, max_batch_tokens=24, kv_cache_tokens=60)


@pytest.mark.parametrize("parallel", LAYOUTS, ids=lambda parallel: f"{parallel.tp}-{parallel.cp}-{parallel.dcp}-{parallel.pp}")
def test_every_cut_says_the_same(parallel: ParallelConfig, tmp_path: Path) -> None:
    """In little memory: long prompts in several chunks, requests put back, prefixes used again."""
    model = write_tiny_model(tmp_path / "model")
    expected = greedy_reference(model, LONG, NEW)
    with Engine(model, parallel=parallel, serving=TIGHT, executor="threads") as engine:
        for _ in range(2):
            assert [completion.token_ids for completion in engine.generate(LONG, GREEDY)] == expected


EXPERT_LAYOUTS = (
    ParallelConfig(cp=2, ep=2),
    ParallelConfig(cp=2, etp=2, dcp=2),
    ParallelConfig(cp=2, dp=2, ep=2),
    ParallelConfig(cp=2, dp=2, ep=4),
    ParallelConfig(tp=2, cp=2, dp=2, ep=4, etp=2),
)


@pytest.mark.parametrize("shared", [False, True])
def test_experts_span_ranks_with_other_tokens_and_other_requests(shared: bool, tmp_path: Path) -> None:
    model = write_safetensors_checkpoint(tmp_path / "model", tiny_moe_config(shared=shared, num_layers=2, eos_ids=()))
    expected = greedy_reference(model, LONG, NEW)
    for parallel in EXPERT_LAYOUTS:
        with Engine(model, parallel=parallel, executor="threads") as engine:
            completions = engine.generate(LONG, GREEDY)
            alone = engine.generate(LONG[1:2], GREEDY)  # one token a step: every other rank has none
        assert [completion.token_ids for completion in completions] == expected, parallel
        assert alone[0].token_ids == expected[1], parallel


def test_draws_are_those_of_one_rank(tmp_path: Path) -> None:
    model = write_tiny_model(tmp_path / "model")
    sampling = SamplingParams(max_new_tokens=NEW, temperature=0.9, top_k=20, seed=3, logprobs=2)
    found = []
    for parallel in (ParallelConfig(), ParallelConfig(cp=2, pp=2), ParallelConfig(tp=4, dcp=2)):
        with Engine(model, parallel=parallel, executor="threads") as engine:
            found.append([completion.token_ids for completion in engine.generate(LONG, sampling)])
    assert found[1] == found[0]
    assert found[2] == found[0]


def test_every_rank_takes_new_weights_and_sleeps(tmp_path: Path) -> None:
    config = tiny_llama_config(num_layers=4, eos_ids=())
    old, new = (write_safetensors_checkpoint(tmp_path / str(seed), config, seed=seed) for seed in (0, 1))
    expected = greedy_reference(new, LONG, NEW)
    for parallel in (ParallelConfig(tp=2, cp=2), ParallelConfig(cp=2, dcp=2, pp=2)):
        with Engine(old, parallel=parallel, executor="threads") as engine:
            assert [completion.token_ids for completion in engine.generate(LONG, GREEDY)] != expected
            engine.controls.update_weights(new)
            assert [completion.token_ids for completion in engine.generate(LONG, GREEDY)] == expected
            engine.controls.sleep()
            engine.controls.wake()
            assert [completion.token_ids for completion in engine.generate(LONG, GREEDY)] == expected


def test_a_block_takes_a_share_of_its_memory_on_each_rank(tmp_path: Path) -> None:
    model = write_tiny_model(tmp_path / "model")

    def run(ctx: ParallelContext) -> tuple[int, str]:
        worker = TpModelWorker(ctx, model=model, config=ServingConfig(kv_cache_tokens=64))
        return worker.runner.block_bytes, worker.describe()

    whole = run_threads(run, ParallelConfig(tp=4))[0][0]
    assert run_threads(run, ParallelConfig(tp=4, cp=2))[0][0] == whole
    assert run_threads(run, ParallelConfig(tp=4, dcp=2))[0][0] == whole // 2
    found = run_threads(run, ParallelConfig(tp=4, cp=3, dcp=6))
    assert {size for size, _ in found} == {whole // 16 * 3}  # 16 tokens over 6 ranks: 3 rows
    assert found[5][1].startswith("rank 5: tp=1 pp=0 dp=0 cp=1, pid ")
    assert "cp#1 " in found[5][1]
    assert "dcp#" in found[5][1]
