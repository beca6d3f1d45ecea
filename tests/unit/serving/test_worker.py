"""The worker and the runner: what they agree on, what they refuse, and how long messages of a chunked prompt are handled."""

from pathlib import Path

import pytest
import torch

from parallel_runtime.config import ParallelConfig
from parallel_runtime.context import ParallelContext
from parallel_runtime.errors import ArgumentError, ConfigError, RankFailedError
from parallel_runtime.launch import run_threads
from parallel_runtime.models import load_model, open_checkpoint
from parallel_runtime.serving import (
    Batch,
    Chunk,
    ModelRunner,
    PolicyLimits,
    SamplingParams,
    Scheduler,
    ServingConfig,
    TpModelWorker,
)
from parallel_runtime.serving.memory import available_bytes
from parallel_runtime.serving.worker import check_servable
from parallel_runtime.testing.checkpoints import tiny_llama_config, tiny_moe_config
from tests.spmd.tiny_models import write_tiny_model
from tests.unit.layers.ranks import alone

pytestmark = pytest.mark.timeout(30)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("tiny"))


def make_chunk(**changes: object) -> Chunk:
    values: dict[str, object] = {
        "request_id": "a",
        "arrival": 0,
        "start": 0,
        "token_ids": (5, 6, 7),
        "blocks": (0,),
        "is_sampled": True,
        "sampling": SamplingParams(),
    }
    return Chunk(**values | changes)  # type: ignore[arg-type]  # fields of a chunk


def test_a_replica_agrees_on_the_least_memory_and_one_seed(model: Path) -> None:
    def run(ctx: ParallelContext) -> tuple[PolicyLimits, int, int]:
        worker = TpModelWorker(ctx, model=model, config=ServingConfig(page_size=4, max_batch_requests=2))
        return worker.limits, worker.seed, worker.runner.block_bytes

    results = run_threads(run, ParallelConfig(tp=3, dp=2))
    limits = {result[0] for result in results}
    assert limits == {
        PolicyLimits(num_blocks=64, page_size=4, max_batch_requests=2, max_batch_tokens=512, max_request_tokens=128)
    }
    seeds = [result[1] for result in results]
    assert len(set(seeds[:3])) == len(set(seeds[3:])) == 1
    assert seeds[0] != seeds[3]
    assert [result[2] for result in results[:3]] == [2 * 4 * 4 * heads * 8 * 4 for heads in (1, 1, 1)]


def test_the_rank_with_the_least_room_decides(model: Path) -> None:
    """Stages of 2, 1 and 1 layers: a block of the first needs twice the memory."""

    def run(ctx: ParallelContext) -> int:
        config = ServingConfig(page_size=2**16, max_batch_requests=1000, max_batch_tokens=1000)
        return TpModelWorker(ctx, model=model, config=config).limits.num_blocks

    assert len(set(run_threads(run, ParallelConfig(pp=3)))) == 1


def test_limits_follow_the_config(model: Path) -> None:
    def run(ctx: ParallelContext) -> PolicyLimits:
        config = ServingConfig(
            page_size=8, kv_cache_tokens=100, max_batch_tokens=3, max_batch_requests=9, max_waiting=5, max_request_tokens=60
        )
        return TpModelWorker(ctx, model=model, config=config).limits

    (limits,) = run_threads(run, ParallelConfig())
    assert limits == PolicyLimits(
        num_blocks=13, page_size=8, max_batch_tokens=3, max_batch_requests=3, max_waiting=5, max_request_tokens=60
    )


def test_a_block_larger_than_memory_is_refused_on_every_rank(model: Path) -> None:
    def run(ctx: ParallelContext) -> str:
        with pytest.raises(ConfigError, match=r"not one block of 1099511627776 tokens of KV cache fits into 30%") as caught:
            TpModelWorker(ctx, model=model, config=ServingConfig(page_size=2**40))
        return str(caught.value)

    assert len(run_threads(run, ParallelConfig(tp=2))) == 2


def test_layouts_without_use_are_refused() -> None:
    with pytest.raises(ConfigError, match="dcp=2 spreads the tokens of a KV head over 2 neighbours"):
        check_servable(ParallelConfig(tp=2, dcp=2), tiny_moe_config().shape)
    with pytest.raises(ConfigError, match="ep=2: this model is dense and has no experts to spread; use ep=1"):
        check_servable(ParallelConfig(tp=2, ep=2), tiny_llama_config().shape)
    check_servable(ParallelConfig(tp=2, pp=3, dp=4), tiny_llama_config().shape)
    check_servable(ParallelConfig(tp=4, cp=2, dcp=4), tiny_llama_config().shape)
    check_servable(ParallelConfig(tp=2, pp=3, dp=4, ep=8), tiny_moe_config().shape)


def test_the_leader_alone_has_a_link(model: Path) -> None:
    def run(ctx: ParallelContext) -> None:
        worker = TpModelWorker(ctx, model=model)
        assert worker.describe().startswith(f"rank {ctx.rank}: tp=0 pp={ctx.rank} dp=0, pid ")
        Scheduler(ctx, worker)

    with pytest.raises(RankFailedError, match="rank 0 leads its replica; leaders alone have a link"):
        run_threads(run, ParallelConfig(pp=2))


def test_a_result_is_taken_once_and_by_the_leader(model: Path) -> None:
    def run(ctx: ParallelContext) -> tuple[int, ...] | None:
        worker = TpModelWorker(ctx, model=model)
        result = worker.forward(Batch(chunks=(make_chunk(),)))
        with pytest.raises(ArgumentError, match="takes the result of a batch that was started, on the leader"):
            worker.finish()
        return result

    first, second = run_threads(run, ParallelConfig(tp=2))
    assert first is not None
    assert len(first) == 1
    assert second is None


def test_free_memory_is_measured() -> None:
    assert 2**20 < available_bytes(torch.device("cpu")) < 2**50


def test_a_runner_wants_its_cache_and_its_inputs(model: Path) -> None:
    with open_checkpoint(model) as checkpoint:
        stages = [load_model(checkpoint, tp=alone(), layers=layers) for layers in (range(2), range(2, 4))]
    first, last = (ModelRunner(stage, page_size=4) for stage in stages)
    batch = Batch(chunks=(make_chunk(),))
    with pytest.raises(ArgumentError, match="needs its KV cache before a forward"):
        first.forward(batch)
    for runner in (first, last):
        runner.open_cache(2)
    with pytest.raises(ArgumentError, match="the first stage takes tokens"):
        last.forward(batch)
    with pytest.raises(ArgumentError, match="the first stage takes tokens"):
        first.forward(batch, torch.zeros(3, 32))
    hidden = last.forward(batch, first.forward(batch))
    assert hidden.shape == (3, 32)
    with pytest.raises(ArgumentError, match="has no head"):
        first.sample(batch, hidden, base_seed=0)


def test_greedy_and_drawn_rows_of_one_batch_keep_their_places(model: Path) -> None:
    with open_checkpoint(model) as checkpoint:
        runner = ModelRunner(load_model(checkpoint, tp=alone()), page_size=4)
    runner.open_cache(8)
    drawn = SamplingParams(temperature=1.0, top_k=1)  # the most likely token, by the other way
    chunks = [
        make_chunk(blocks=(0,)),
        make_chunk(request_id="b", token_ids=(9, 8), blocks=(1,), sampling=drawn),
        make_chunk(request_id="c", token_ids=(1, 2), blocks=(2,), is_sampled=False),
        make_chunk(request_id="d", token_ids=(4,), blocks=(3,), sampling=drawn),
        make_chunk(request_id="e", token_ids=(30, 31, 32, 33), blocks=(4,)),
    ]
    batch = Batch(chunks=tuple(chunks))
    together = runner.sample(batch, runner.forward(batch), base_seed=0)
    alone_each: list[int] = []
    for chunk in (chunks[0], chunks[1], chunks[3], chunks[4]):
        single = Batch(chunks=(chunk,))
        alone_each += runner.sample(single, runner.forward(single), base_seed=0).token_ids
    assert list(together.token_ids) == alone_each
