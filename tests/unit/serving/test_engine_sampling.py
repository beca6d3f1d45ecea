"""How an engine chooses tokens: alike on every layout, in every batch and after preemption; several answers; logprobs."""

from pathlib import Path

import pytest

from parallel_runtime.config import ParallelConfig
from parallel_runtime.errors import RequestError
from parallel_runtime.models import ChatTemplate
from parallel_runtime.serving import Completion, Engine, FinishReason, Prompt, SamplingParams, ServingConfig
from tests.spmd.tiny_models import PROMPTS, write_tiny_model

pytestmark = pytest.mark.timeout(60)

DRAWN = SamplingParams(
    max_new_tokens=24,
    temperature=1.3,
    top_p=0.97,
    min_p=0.001,
    repetition_penalty=1.1,
    frequency_penalty=0.2,
    presence_penalty=0.1,
    seed=11,
    n=2,
    logprobs=3,
    ignore_eos=True,
)
MIXED = [DRAWN, SamplingParams(max_new_tokens=24, temperature=0.8, seed=5, ignore_eos=True), SamplingParams(max_new_tokens=24)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("tiny"), vocab_size=300)


def serve(model: Path, prompts: list[Prompt], sampling: SamplingParams | list[SamplingParams], **sizes: int) -> list[Completion]:
    parallel = ParallelConfig.model_validate(sizes)
    with Engine(model, parallel=parallel, serving=ServingConfig(kv_cache_tokens=4096), executor="threads") as engine:
        return engine.generate(prompts, sampling)


@pytest.fixture(scope="module")
def alone(model: Path) -> list[Completion]:
    """Each request by itself, on one rank."""
    return [each for prompt, sampling in zip(PROMPTS, MIXED, strict=False) for each in serve(model, [prompt], sampling)]


def likeliest(answer: Completion) -> list[list[int]]:
    return [[token for token, _ in told.top] for told in answer.logprobs]


@pytest.mark.parametrize("sizes", [{"tp": 2}, {"tp": 3}, {"pp": 2}, {"tp": 2, "pp": 2}, {"dp": 2}])
def test_equal_seeds_give_equal_tokens_on_every_layout(model: Path, alone: list[Completion], sizes: dict[str, int]) -> None:
    together = serve(model, list(PROMPTS[:3]), MIXED, **sizes)
    assert [each.token_ids for each in together] == [each.token_ids for each in alone]
    for mine, theirs in zip(together, alone, strict=True):
        assert [told.logprob for told in mine.logprobs] == pytest.approx([told.logprob for told in theirs.logprobs], abs=1e-4)
        assert likeliest(mine) == likeliest(theirs)


def test_equal_seeds_give_equal_tokens_after_preemption(model: Path, alone: list[Completion]) -> None:
    longest = max(len(each.prompt_token_ids) for each in alone) + 24
    tight = ServingConfig(kv_cache_tokens=longest + 8, page_size=4)
    with Engine(model, serving=tight, executor="threads") as engine:
        together = engine.generate(PROMPTS[:3], MIXED)
        (status,) = engine.controls.health()
    assert [each.token_ids for each in together] == [each.token_ids for each in alone]
    assert status.num_preemptions > 0


def test_several_answers_differ_and_the_first_is_the_only_ones(model: Path) -> None:
    once = SamplingParams(max_new_tokens=12, temperature=1.5, seed=3)
    prompt = tuple(range(40))  # longer than a block, so that later answers wait for the first one's
    (single,) = serve(model, [prompt], once)
    many = serve(model, [prompt, PROMPTS[1]], SamplingParams(max_new_tokens=12, temperature=1.5, seed=3, n=4), tp=2)
    assert [(each.index, each.sample) for each in many] == [(index, sample) for index in range(2) for sample in range(4)]
    assert many[0].token_ids == single.token_ids
    assert len({each.token_ids for each in many[:4]}) == 4


def test_later_answers_find_the_prompt_computed(model: Path) -> None:
    with Engine(model, parallel=ParallelConfig(dp=2), serving=ServingConfig(kv_cache_tokens=2048), executor="threads") as engine:
        answers = engine.generate([tuple(range(64))], SamplingParams(max_new_tokens=3, temperature=1.0, n=5))
        reused = [status.num_reused_tokens for status in engine.controls.health()]
    assert {answer.dp_rank for answer in answers} == {answers[0].dp_rank}
    assert sorted(reused) == [0, 4 * 48]  # four later answers, three full blocks each: a last token is always computed


def test_log_probabilities_are_the_models(model: Path) -> None:
    (answer,) = serve(model, [PROMPTS[2]], SamplingParams(max_new_tokens=5, logprobs=2))
    for token, told in zip(answer.token_ids, answer.logprobs, strict=True):
        assert told.top[0] == (token, told.logprob)
        assert 0 > told.logprob > told.top[1][1]
    (plain,) = serve(model, [PROMPTS[2]], SamplingParams(max_new_tokens=5))
    assert plain.token_ids == answer.token_ids
    assert plain.logprobs == ()


def test_stop_texts_end_a_request_and_free_its_place(model: Path) -> None:
    whole = SamplingParams(max_new_tokens=100, ignore_eos=True)
    with Engine(model, serving=ServingConfig(kv_cache_tokens=4096), executor="threads") as engine:
        (full,) = engine.generate(["Hello"], whole)
        stop = full.text[5:8]
        stopped, other = engine.generate(
            ["Hello", "Hello"], [SamplingParams(max_new_tokens=100, ignore_eos=True, stop=("never", stop)), whole]
        )
        assert (stopped.text, stopped.stopped_by, stopped.finish_reason) == (full.text[: full.text.index(stop)], stop, "stop")
        assert stopped.token_ids == full.token_ids[: len(stopped.token_ids)]
        assert len(stopped.token_ids) < 100
        assert other.text == full.text
        snapshot = engine.metrics()
        assert snapshot.num_finished == {"length": 2, "stop": 1}
        assert snapshot.num_new_tokens == 200 + len(stopped.token_ids)


def test_stop_tokens_wait_for_the_least_number_of_tokens(model: Path) -> None:
    (free,) = serve(model, [PROMPTS[2]], SamplingParams(max_new_tokens=12))
    stop = free.token_ids[1]
    first = free.token_ids.index(stop)
    (early,) = serve(model, [PROMPTS[2]], SamplingParams(max_new_tokens=12, stop_token_ids=(stop,)))
    (late,) = serve(model, [PROMPTS[2]], SamplingParams(max_new_tokens=12, stop_token_ids=(stop,), min_new_tokens=6), tp=2)
    assert (early.token_ids, early.finish_reason, early.stopped_by) == (free.token_ids[: first + 1], FinishReason.STOP, stop)
    assert stop not in late.token_ids[:6]
    assert len(late.token_ids) >= 6


def test_a_chat_is_a_prompt(model: Path) -> None:
    turns = [{"role": "user", "content": "Hi"}]
    with Engine(model, executor="threads") as engine:
        with pytest.raises(RequestError, match="this model has no chat template"):
            engine.generate([turns])
        with pytest.raises(RequestError, match=r"prompt 0 has \{'role': 5\}, .* among its messages; each has a text 'role'"):
            engine.generate([[{"role": 5}]])  # type: ignore[list-item]  # what is tested
        engine.tokenizer.chat_template = ChatTemplate(source="{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}")
        (answer,) = engine.generate([turns], SamplingParams(max_new_tokens=2))
        assert engine.tokenizer.decode(answer.prompt_token_ids) == "<user>Hi"


def test_stop_texts_need_a_tokenizer(tmp_path: Path) -> None:
    with (
        Engine(write_tiny_model(tmp_path), executor="threads") as engine,
        pytest.raises(RequestError, match=r"stop=\('x',\) needs a tokenizer, and this model has none; give stop_token_ids"),
    ):
        engine.generate([[1]], SamplingParams(stop=("x",)))
