"""Decode steps as graphs, on a pretended device: which one a batch is given to, and that replays compute what a forward does."""

from pathlib import Path

import pytest
import torch

from parallel_runtime.config import ParallelConfig
from parallel_runtime.context import ParallelContext
from parallel_runtime.errors import ArgumentError, StaleContextError
from parallel_runtime.launch import run_threads
from parallel_runtime.models import load_model, open_checkpoint
from parallel_runtime.serving import Batch, Chunk, ModelRunner, SamplingParams, ServingConfig, TpModelWorker
from parallel_runtime.serving.graphs import graph_sizes
from parallel_runtime.testing.checkpoints import tiny_moe_config, write_safetensors_checkpoint
from parallel_runtime.testing.graphs import FakeGraphs
from tests.spmd.tiny_models import write_tiny_model
from tests.unit.layers.ranks import alone

pytestmark = pytest.mark.timeout(60)

BLOCKS = ((0, 3, 5), (1, 2), (4,), (6, 7), (8,))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("tiny"))


def chunk(request: int, *tokens: int, start: int = 0) -> Chunk:
    return Chunk(
        request_id=str(request),
        arrival=request,
        start=start,
        token_ids=tokens,
        blocks=BLOCKS[request],
        is_sampled=True,
        sampling=SamplingParams(),
    )


def make_runner(model: Path, *, for_graphs: bool = True) -> ModelRunner:
    with open_checkpoint(model) as checkpoint:
        runner = ModelRunner(load_model(checkpoint, tp=alone()), page_size=4)
    runner.open_cache(9, for_graphs=for_graphs)
    return runner


PROMPTS = Batch(chunks=(chunk(0, *range(30, 39)), chunk(1, 7, 8, 9), chunk(2, 1), chunk(3, 4, 4, 4, 4)))
STEPS = (
    Batch(chunks=(chunk(0, 11, start=9), chunk(1, 12, start=3), chunk(3, 13, start=4))),
    Batch(chunks=(chunk(2, 14, start=1),)),
    Batch(chunks=(chunk(0, 15, start=10), chunk(1, 16, start=4), chunk(2, 17, start=2), chunk(3, 18, start=5), chunk(4, 1))),
    Batch(chunks=(chunk(1, 19, start=5), chunk(0, 20, start=11))),
    Batch(chunks=(chunk(1, 21, 22, start=6),)),
)


def test_sizes_are_powers_of_two_and_the_most_largest_first() -> None:
    assert graph_sizes(6, 300) == ((6, 1024), (6, 256), (4, 1024), (4, 256), (2, 1024), (2, 256), (1, 1024), (1, 256))
    assert graph_sizes(1, 256) == ((1, 256),)
    assert {length for _, length in graph_sizes(32, 100_000)} == {256, 1024, 4096}


def test_a_batch_is_padded_up_to_the_next_graph_and_gives_what_a_forward_gives(model: Path) -> None:
    def run(ctx: ParallelContext) -> list[str]:
        device, plain, graphed = FakeGraphs(), make_runner(model), make_runner(model)
        with ctx.graph_capture(graphs=device) as capture:
            graphed.capture_decodes([(4, 12), (1, 4), (2, 12), (2, 4)], capture)
        for batch in (PROMPTS, *STEPS):
            expected, given = plain.forward(batch), graphed.forward(batch)
            torch.testing.assert_close(given, expected)
        return [event for event in device.events if event.startswith("replay")]

    # captured as (4, 12), (2, 12), (2, 4), (1, 4); five requests, and two tokens of one, run without
    assert run_threads(run, ParallelConfig()) == [["replay 0", "replay 3", "replay 1"]]


def test_what_a_replay_returns_stays(model: Path) -> None:
    def run(ctx: ParallelContext) -> None:
        runner = make_runner(model)
        with ctx.graph_capture(graphs=FakeGraphs()) as capture:
            runner.capture_decodes([(1, 4)], capture)
        first = runner.forward(Batch(chunks=(chunk(2, 1),)))
        kept = first.clone()
        runner.forward(Batch(chunks=(chunk(4, 9),)))
        assert torch.equal(first, kept)

    run_threads(run, ParallelConfig())


def test_graphs_end_with_their_runner_or_context(model: Path) -> None:
    def run(ctx: ParallelContext) -> None:
        device, runner, step = FakeGraphs(), make_runner(model), Batch(chunks=(chunk(2, 1),))
        with ctx.duplicate("other") as other, other.graph_capture(graphs=device) as capture:
            runner.capture_decodes([(1, 4)], capture)
        with pytest.raises(StaleContextError, match="capture it again"):
            runner.forward(step)
        runner.close()
        assert device.events[-1] == "reset 0"
        assert runner.forward(step).shape == (1, runner.model.config.hidden_size)

    run_threads(run, ParallelConfig())


def test_refusals(model: Path, tmp_path: Path) -> None:
    def run(ctx: ParallelContext) -> None:
        with open_checkpoint(model) as checkpoint:
            runner = ModelRunner(load_model(checkpoint, tp=alone()), page_size=4)
        no_room = pytest.raises(ArgumentError, match="needs a KV cache with a block of its own")
        with ctx.graph_capture(graphs=FakeGraphs()) as capture, no_room:
            runner.capture_decodes([(1, 4)], capture)
        moe = TpModelWorker(ctx, model=experts, config=config, graphs=device)
        assert not moe.runner.can_capture
        experts_are_no_part = pytest.raises(ArgumentError, match="models with experts, and sequences that are cut")
        with ctx.graph_capture(graphs=FakeGraphs()) as capture, experts_are_no_part:
            moe.runner.capture_decodes([(1, 4)], capture)
        assert device.events == []

    experts = write_safetensors_checkpoint(tmp_path, tiny_moe_config())
    config, device = ServingConfig(page_size=4, kv_cache_tokens=32), FakeGraphs()
    run_threads(run, ParallelConfig())


@pytest.mark.parametrize("pp", [1, 2])
def test_a_worker_captures_at_start_and_again_after_a_sleep(model: Path, pp: int) -> None:
    config = ServingConfig(page_size=4, kv_cache_tokens=36, max_batch_requests=4, max_request_tokens=12)

    def serve(ctx: ParallelContext, device: FakeGraphs | None, settings: ServingConfig) -> list[tuple[int, ...] | None]:
        with ctx.duplicate("served") as inner:
            worker = TpModelWorker(inner, model=model, config=settings, graphs=device)
            told = [worker.forward(batch) for batch in (PROMPTS, *STEPS)]
            worker.sleep()
            worker.wake()
            return [*told, *[worker.forward(batch) for batch in (PROMPTS, STEPS[0])]]

    def run(ctx: ParallelContext) -> list[str]:
        device = FakeGraphs()
        without = serve(ctx, None, config)
        assert serve(ctx, device, config.model_copy(update={"decode_graphs": False})) == without
        assert device.events == []
        assert serve(ctx, device, config) == without
        return device.events

    events = ["stream None", *["record"] * 3, "stream left"]  # for 4, 2 and 1 requests
    replays = ["replay 0", "replay 2", "replay 1"]
    resets, last_resets = ["reset 2", "reset 1", "reset 0"], ["reset 5", "reset 4", "reset 3"]
    assert run_threads(run, ParallelConfig(pp=pp)) == [[*events, *replays, *resets, *events, "replay 3", *last_resets]] * pp
