"""B066: an abort misses requests that are not in the current batch."""

from collections.abc import Iterator
from multiprocessing import Pipe
from pathlib import Path

import pytest

from parallel_runtime.config import ParallelConfig
from parallel_runtime.context import ParallelContext
from parallel_runtime.launch import run_threads
from parallel_runtime.serving import Batch, Engine, FinishReason, Request, SamplingParams, Scheduler, ServingConfig, TpModelWorker
from parallel_runtime.serving.messages import Abort, Shutdown, StepOutput, Submit, decode_leader, encode
from tests.spmd.tiny_models import PROMPTS, greedy_reference, write_tiny_model

pytestmark = pytest.mark.timeout(30)

LONG = SamplingParams(max_new_tokens=50)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_tiny_model(tmp_path / "model")


@pytest.fixture
def engine(model: Path) -> Iterator[Engine]:
    serving = ServingConfig(page_size=4, kv_cache_tokens=160, max_batch_tokens=8, max_batch_requests=4)
    with Engine(model, parallel=ParallelConfig(pp=2), serving=serving, executor="threads") as engine:
        yield engine


def test_b066_one_of_two_ends_and_the_other_completes(engine: Engine, model: Path) -> None:
    names, made = ["", ""], [list[int](), list[int]()]
    reasons: list[FinishReason | None] = [None, None]
    for event in engine.stream([PROMPTS[1], PROMPTS[3]], LONG):
        names[event.index] = event.request_id
        made[event.index].extend(event.token_ids)
        reasons[event.index] = event.finish_reason
        if event.index == 1 and len(made[1]) == 3:
            engine.abort(names[1])
    assert reasons == [FinishReason.LENGTH, FinishReason.ABORT]
    assert tuple(made[0]) == greedy_reference(model, [PROMPTS[1]], 50)[0]
    assert 3 <= len(made[1]) < 50
    fill_everything(engine)


def test_b066_abort_of_what_is_in_the_other_slot(model: Path) -> None:
    """A and B take turns on two stages; the abort of B is sent while a batch with A runs."""

    def run(ctx: ParallelContext) -> tuple[list[list[str]], int, list[int]]:
        front, link = Pipe()
        batches: list[list[str]] = []
        worker = TpModelWorker(ctx, model=model, config=ServingConfig(kv_cache_tokens=256))

        def observe(batch: Batch) -> None:
            batches.append([chunk.request_id for chunk in batch.chunks])
            if worker.is_leader and len(batches) == 9:
                front.send_bytes(encode(Abort("B")))
            if worker.is_leader and len(batches) == 30:
                front.send_bytes(encode(Shutdown()))

        for name, prompt in (("A", PROMPTS[1]), ("B", PROMPTS[3])):
            request = Request(request_id=name, prompt=prompt, sampling=LONG)
            front.send_bytes(encode(Submit(request)))
        with front, link:
            scheduler = Scheduler(ctx, worker, link=link if worker.is_leader else None, observer=observe)
            scheduler.run()
            tokens: list[int] = []
            while worker.is_leader and front.poll():
                told = decode_leader(front.recv_bytes())
                if isinstance(told, StepOutput) and told.request_id == "A":
                    tokens.extend(told.token_ids)
        return batches, scheduler.policy.num_free_blocks, tokens

    (batches, free, tokens), (others, also_free, _) = run_threads(run, ParallelConfig(pp=2))
    assert batches == others
    assert batches[:9] == [["A"], ["B"]] * 4 + [["A"]]
    assert all(batch == ["A"] for batch in batches[10:])
    assert free == also_free == 16
    assert tuple(tokens) == greedy_reference(model, [PROMPTS[1]], len(tokens))[0]
    assert len(tokens) > 20


def test_b066_abort_of_a_prompt_that_waits_or_is_half_computed(engine: Engine) -> None:
    long_prompts = [tuple(range(3, 43))] * 6  # 40 tokens in steps of 8; only some fit
    stream = engine.stream(long_prompts, LONG)
    reasons = {}
    first = next(stream)
    engine.abort()
    for event in stream:
        reasons[event.index] = event.finish_reason
    assert reasons == dict.fromkeys(range(6), FinishReason.ABORT)
    assert first.finish_reason is None
    fill_everything(engine)


def test_b066_unknown_and_repeated_aborts_are_nothing(engine: Engine) -> None:
    engine.abort("never seen")
    engine.abort()
    stream = engine.stream([PROMPTS[0]], LONG)
    name = next(stream).request_id
    for _ in range(3):
        engine.abort(name)
    *_, last = stream
    engine.abort(name)
    assert last.finish_reason is FinishReason.ABORT
    fill_everything(engine)


def test_b066_a_stream_that_is_left_early_frees_everything(engine: Engine) -> None:
    for _ in engine.stream(PROMPTS, LONG):
        break
    fill_everything(engine)


def fill_everything(engine: Engine) -> None:
    """A request that needs every block of the cache gets them: nothing has leaked."""
    room = engine.replicas[0].num_blocks * engine.replicas[0].page_size
    size = min(room, engine.replicas[0].max_request_tokens)
    assert room == 160
    results = engine.generate([(5,) * (size - 40)] * 2, SamplingParams(max_new_tokens=30))
    assert [result.finish_reason for result in results] == [FinishReason.LENGTH] * 2
