"""B066: an abort misses requests that are not in the current batch."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from parallel_runtime.config import ParallelConfig
from parallel_runtime.serving import Engine, FinishReason, SamplingParams, ServingConfig
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
