"""The engine: its life, what it refuses, what it gives back, and how it ends when a rank does."""

import os
import re
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from parallel_runtime.config import Deadlines, ParallelConfig
from parallel_runtime.errors import ArgumentError, CheckpointError, ConfigError, ContextStateError, RankFailedError, RequestError
from parallel_runtime.serving import Engine, EngineConfig, EngineState, FinishReason, SamplingParams, ServingConfig, StreamEvent
from parallel_runtime.testing.checkpoints import tiny_moe_config, write_safetensors_checkpoint
from tests.spmd.tiny_models import PROMPTS, greedy_reference, write_tiny_model

pytestmark = pytest.mark.timeout(60)

NEW = 8


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Has a byte vocabulary, so it takes and gives text."""
    return write_tiny_model(tmp_path_factory.mktemp("tiny"), vocab_size=300)


@pytest.fixture(scope="module")
def expected(model: Path) -> list[tuple[int, ...]]:
    return greedy_reference(model, PROMPTS, NEW)


@pytest.fixture(scope="module")
def engine(model: Path) -> Iterator[Engine]:
    serving = ServingConfig(kv_cache_tokens=2048, max_waiting=8, max_batch_requests=2)
    with Engine(model, parallel=ParallelConfig(tp=2), serving=serving, executor="threads") as engine:
        yield engine


def test_it_is_entered_once_and_used_inside(model: Path) -> None:
    engine = Engine(model, executor="threads")
    for early in (lambda: engine.generate(["text"]), lambda: engine.stream(["text"])):
        with pytest.raises(ContextStateError, match="this Engine is new, so it serves nothing; enter it"):
            early()
    with engine:
        assert engine.state is EngineState.OPEN
        with pytest.raises(ContextStateError, match="entered once; this one is open"):
            engine.__enter__()
    engine.close()
    assert (engine.failure, len(engine.replicas)) == (None, 1)
    for call in (lambda: engine.generate([]), lambda: engine.stream([]), engine.abort):
        with pytest.raises(ContextStateError, match="this Engine is closed, so it serves nothing; make a new one"):
            call()


def test_a_model_that_cannot_fit_into_the_memory_starts_nothing(model: Path) -> None:
    before = threading.active_count()
    serving = ServingConfig(kv_cache_tokens=10**12)
    with pytest.raises(ConfigError, match=r"1 ranks need .* for the KV cache, and .* are free"):
        Engine(model, serving=serving).__enter__()
    assert threading.active_count() == before


def test_priority_reaches_the_requests_of_a_call(engine: Engine) -> None:
    sampling = SamplingParams(max_new_tokens=1, n=2)
    requests = [reader.request for reader in engine.read_prompts(PROMPTS[:2], sampling, priority=3)]
    assert [request.priority for request in requests] == [3] * 4
    for call in (engine.generate, engine.stream):
        with pytest.raises(RequestError, match=r"priority of request 'r[0-9]+' must be an integer from -8 to 8, got 9"):
            call(PROMPTS[:1], priority=9)
    assert len(engine.generate(PROMPTS[:1], sampling, priority=-8)) == 2


def test_impossible_settings_start_nothing(model: Path) -> None:
    before = threading.active_count()
    for parallel, serving, text in (
        (ParallelConfig(tp=5), ServingConfig(), "tp=5 is more than the 4 query heads"),
        (ParallelConfig(pp=2), ServingConfig(stage_layers=(1, 1)), "stage sizes"),
        (
            ParallelConfig(tp=2, ep=2),
            ServingConfig(),
            r"ep=2: this model is dense .* use ep=1 \(in vLLM's words enable_expert_parallel=False",
        ),
    ):
        with pytest.raises(ConfigError, match=text):
            Engine(model, parallel=parallel, serving=serving, executor="threads").__enter__()
    with pytest.raises(CheckpointError, match="no model at"):
        Engine(model / "nowhere").__enter__()
    assert threading.active_count() == before


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"model": 5}, "model=5 is neither a name nor a path; give 'smollm2'"),
        ({"parallel": 2}, "parallel=2 should be a valid dictionary or instance of ParallelConfig"),
        ({"serving": ParallelConfig()}, "serving=.* should be a valid dictionary or instance of ServingConfig"),
        ({"executor": "thread"}, "executor='thread' should be 'processes', 'threads' or 'ray'"),
        ({"executor": []}, r"executor=\[\] should be 'processes', 'threads' or 'ray'"),
        ({"tp": 2}, "tp=2: EngineConfig has no setting 'tp'; did you mean 'parallel'?"),
        ({"model": EngineConfig(), "replicas": 2}, "an EngineConfig says everything, and replicas came beside it"),
    ],
)
def test_arguments_of_another_kind_are_refused_at_once(arguments: dict[str, Any], text: str) -> None:
    with pytest.raises((ArgumentError, ConfigError), match=text):
        Engine(**arguments)


def test_vllms_sizes_serve_a_dense_model(model: Path, expected: list[tuple[int, ...]]) -> None:
    parallel = ParallelConfig.from_vllm(tensor_parallel_size=2, data_parallel_size=2)
    with Engine(model, parallel=parallel, executor="threads") as engine:
        completions = engine.generate(PROMPTS, SamplingParams(max_new_tokens=NEW))
    assert [completion.token_ids for completion in completions] == expected


def test_prompts_that_cannot_be_served(engine: Engine, expected: list[tuple[int, ...]]) -> None:
    for prompts, sampling, text in (
        ("text", None, "prompts is a list of prompts"),
        ([[]], None, "empty prompt"),
        ([[1], [300]], None, "has token 300, but the model's tokens are 0 to 299"),
        ([[1] * 100], SamplingParams(max_new_tokens=29), "100 prompt tokens and asks for 29 new ones, 129 together"),
        ([[1]], [SamplingParams()] * 2, "1 prompts and 2 sampling parameters"),
    ):
        with pytest.raises(RequestError, match=text):
            engine.generate(prompts, sampling)
    completions = engine.generate(PROMPTS, SamplingParams(max_new_tokens=NEW))
    assert [completion.token_ids for completion in completions] == expected


def test_more_prompts_than_the_queue_holds(engine: Engine, expected: list[tuple[int, ...]]) -> None:
    completions = engine.generate(PROMPTS * 7, SamplingParams(max_new_tokens=NEW))
    assert [completion.token_ids for completion in completions] == expected * 7
    assert engine.generate([]) == []


def test_a_stream_joins_to_the_completion(engine: Engine) -> None:
    texts, sampling = ["Hello", "Ünïcödé"], SamplingParams(max_new_tokens=40)
    completions = engine.generate(texts, sampling)
    events: list[list[StreamEvent]] = [[], []]
    for event in engine.stream(texts, sampling):
        events[event.index].append(event)
    for completion, mine in zip(completions, events, strict=True):
        assert tuple(token for event in mine for token in event.token_ids) == completion.token_ids
        assert "".join(event.text for event in mine) == completion.text
        assert [event.finish_reason for event in mine] == [None] * (len(mine) - 1) + [FinishReason.LENGTH]
    assert completions[0].prompt_token_ids == tuple(engine.tokenizer.encode("Hello"))


def test_stop_tokens_end_a_request(engine: Engine, expected: list[tuple[int, ...]]) -> None:
    stop = expected[2][3]
    (completion,) = engine.generate([PROMPTS[2]], SamplingParams(max_new_tokens=NEW, stop_token_ids=(stop,)))
    assert completion.finish_reason is FinishReason.STOP
    assert completion.token_ids == expected[2][: expected[2].index(stop) + 1]


def test_the_models_end_of_text_ends_a_request_unless_told_otherwise(tmp_path: Path, expected: list[tuple[int, ...]]) -> None:
    from parallel_runtime.testing.checkpoints import tiny_llama_config, write_safetensors_checkpoint

    end = expected[2][3]
    model = write_safetensors_checkpoint(tmp_path, tiny_llama_config(num_layers=4, eos_ids=(end,), vocab_size=300))
    with Engine(model, executor="threads") as engine:
        (completion,) = engine.generate([PROMPTS[2]], SamplingParams(max_new_tokens=NEW))
        (going_on,) = engine.generate([PROMPTS[2]], SamplingParams(max_new_tokens=NEW, ignore_eos=True))
    assert completion.finish_reason is FinishReason.STOP
    assert completion.token_ids == expected[2][: expected[2].index(end) + 1]
    assert going_on.token_ids == expected[2]


def test_several_threads_share_it(engine: Engine, expected: list[tuple[int, ...]]) -> None:
    results: dict[int, list[tuple[int, ...]]] = {}

    def work(number: int) -> None:
        completions = engine.generate(PROMPTS[number:], SamplingParams(max_new_tokens=NEW))
        results[number] = [completion.token_ids for completion in completions]

    threads = [threading.Thread(target=work, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == {number: expected[number:] for number in range(3)}


def test_a_model_without_a_tokenizer_takes_token_ids(tmp_path: Path) -> None:
    model = write_tiny_model(tmp_path)
    with Engine(model, executor="threads") as engine:
        with pytest.raises(RequestError, match=r"text needs a tokenizer, and this model has none: .*tokenizer.json: missing"):
            engine.generate(["Hello"])
        (completion,) = engine.generate([[5]], SamplingParams(max_new_tokens=2))
    assert (completion.text, len(completion.token_ids)) == ("", 2)


def test_closing_ends_what_runs(model: Path) -> None:
    engine = Engine(model, parallel=ParallelConfig(pp=2), executor="threads").__enter__()
    stream = engine.stream([PROMPTS[0]], SamplingParams(max_new_tokens=120))
    next(stream)
    engine.close()
    *_, last = stream
    assert last.finish_reason is FinishReason.ABORT


def test_a_file_that_is_not_what_its_config_says_starts_nothing(model: Path) -> None:
    from safetensors.torch import load_file, save_file

    broken = write_tiny_model(model.parent / "broken")
    state = load_file(broken / "model.safetensors")
    del state["model.layers.3.mlp.up_proj.weight"]
    save_file(state, broken / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"no tensor 'model\.layers\.3\.mlp\.up_proj\.weight'"):
        Engine(broken, parallel=ParallelConfig(pp=2), executor="threads").__enter__()


def test_a_rank_that_fails_while_starting(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As one whose memory is taken by somebody else after the engine has looked."""
    monkeypatch.setattr("parallel_runtime.serving.worker.available_bytes", lambda device: 1)
    with pytest.raises(RankFailedError, match=r"rank \d of 2 failed in .*serve_rank: .*memory"):
        Engine(model, parallel=ParallelConfig(pp=2), executor="threads").__enter__()


def test_an_idle_engine_outlives_the_control_deadline(model: Path) -> None:
    parallel = ParallelConfig(tp=2, deadlines=Deadlines(control_s=0.2, collective_s=30.0))
    with Engine(model, parallel=parallel, executor="threads") as engine:
        threading.Event().wait(0.7)  # time itself is what is tested
        assert len(engine.generate([PROMPTS[0]], SamplingParams(max_new_tokens=3))[0].token_ids) == 3


def test_idle_replicas_in_lockstep_outlive_the_control_deadline(tmp_path: Path) -> None:
    model = write_safetensors_checkpoint(tmp_path / "moe", tiny_moe_config(eos_ids=()))
    parallel = ParallelConfig(tp=2, dp=2, ep=4, deadlines=Deadlines(control_s=0.4, collective_s=30.0))
    with Engine(model, parallel=parallel, executor="threads") as engine:
        for _ in range(2):
            assert len(engine.generate([PROMPTS[0]], SamplingParams(max_new_tokens=3))[0].token_ids) == 3
            threading.Event().wait(1.0)  # time itself is what is tested


@pytest.mark.processes
def test_a_killed_rank_is_named_in_every_call(model: Path) -> None:
    parallel = ParallelConfig(tp=2, pp=2)
    with Engine(model, parallel=parallel) as engine:
        pids = [int(found[1]) for line in engine.replicas[0].ranks if (found := re.search(r"pid (\d+)", line))]
        stream = engine.stream([PROMPTS[0]], SamplingParams(max_new_tokens=127, ignore_eos=True))
        next(stream)
        os.kill(pids[3], signal.SIGKILL)
        with pytest.raises(RankFailedError, match="rank 3 of 4 was killed by SIGKILL"):
            for _ in stream:
                pass
        with pytest.raises(RankFailedError, match="rank 3 of 4 was killed by SIGKILL"):
            engine.generate([PROMPTS[0]])
