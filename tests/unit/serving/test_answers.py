"""Events of one answer: text up to the first stop text, what ended it, and tokens counted; joined they are the whole answer."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers

from parallel_runtime.models import Tokenizer
from parallel_runtime.serving.answers import AnswerReader, JoinedAnswers, Usage
from parallel_runtime.serving.messages import FinishReason, Request, StepOutput, TokenLogprobs
from parallel_runtime.serving.sampling_params import SamplingParams


def byte_tokenizer() -> Tokenizer:
    backend = Backend(models.BPE({token: index for index, token in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return Tokenizer(backend)


TOKENIZER = byte_tokenizer()
LENGTH, STOP, ABORT = FinishReason.LENGTH, FinishReason.STOP, FinishReason.ABORT


def reader(*stops: str, tokenizer: Tokenizer | None = TOKENIZER, **sampling: object) -> AnswerReader:
    params = SamplingParams(**sampling)  # type: ignore[arg-type]  # of many types
    request = Request(request_id="a", prompt=(1, 2, 3), sampling=params)
    return AnswerReader(request, index=4, sample=1, stops=stops, tokenizer=tokenizer)


def output(text: str, reason: FinishReason | None = None) -> StepOutput:
    return StepOutput(request_id="a", token_ids=tuple(TOKENIZER.encode(text)), finish_reason=reason)


def test_text_ends_before_a_stop_text_that_spans_tokens() -> None:
    answer = reader("lo w")
    events = [answer.read(output(letter), dp_rank=2) for letter in "hello w"]
    assert [event.text for event in events] == ["h", "e", "", "l", "", "", ""]
    last = events[-1]
    assert (last.finish_reason, last.stopped_by, last.index, last.sample, last.dp_rank) == (STOP, "lo w", 4, 1, 2)
    assert last.usage == Usage(num_prompt_tokens=3, num_new_tokens=7)
    assert last.usage.num_tokens == 10
    assert answer.is_over


def test_tokens_after_the_stop_are_dropped() -> None:
    logprobs = tuple(TokenLogprobs(-float(number)) for number in range(6))
    made = StepOutput(request_id="a", token_ids=tuple(TOKENIZER.encode("abXYcd")), finish_reason=LENGTH, logprobs=logprobs)
    event = reader("XY").read(made)
    assert (event.text, event.finish_reason, event.stopped_by) == ("ab", STOP, "XY")
    assert event.token_ids == tuple(TOKENIZER.encode("abXY"))
    assert event.logprobs == logprobs[:4]


@pytest.mark.parametrize(("reason", "stops"), [(LENGTH, ("zz",)), (ABORT, ("zz",)), (LENGTH, ())])
def test_what_was_held_back_comes_with_the_end(reason: FinishReason, stops: tuple[str, ...]) -> None:
    answer = reader(*stops)
    text = "".join(answer.read(made).text for made in (output("az"), StepOutput(request_id="a", finish_reason=reason)))
    assert text == "az"
    assert answer.is_over


def test_a_stop_token_ends_the_text_before_itself() -> None:
    (stop,) = TOKENIZER.encode("!")
    event = reader(stop_token_ids=(stop,)).read(output("ab!", STOP))
    assert (event.text, event.stopped_by, len(event.token_ids)) == ("ab", stop, 3)


def test_stop_texts_count_after_the_least_number_of_tokens_only() -> None:
    answer = reader("a", min_new_tokens=2, max_new_tokens=9)
    assert [answer.read(output(letter)).finish_reason for letter in "aaba"] == [None, None, None, STOP]


def test_a_model_without_a_tokenizer_gives_tokens() -> None:
    event = reader(tokenizer=None).read(StepOutput(request_id="a", token_ids=(5,), finish_reason=LENGTH))
    assert (event.text, event.token_ids) == ("", (5,))


@given(st.text("aé😀b", max_size=8), st.lists(st.integers(1, 3), max_size=20), st.lists(st.text("aéb", min_size=1), max_size=2))
def test_events_join_to_the_answer_however_tokens_come(text: str, sizes: list[int], stops: list[str]) -> None:
    tokens = TOKENIZER.encode(text)

    def joined(cuts: list[int]) -> tuple[str, tuple[int, ...], str | int | None]:
        answer, rest = reader(*stops), list(tokens)
        answers = JoinedAnswers([answer])
        for size in [*cuts, len(tokens)]:
            part, rest = rest[:size], rest[size:]
            if not answer.is_over:
                reason = None if rest else LENGTH
                answers.add(answer.read(StepOutput(request_id="a", token_ids=tuple(part), finish_reason=reason)))
        (completion,) = answers.completions()
        assert completion.usage.num_new_tokens == len(completion.token_ids)
        return completion.text, completion.token_ids, completion.stopped_by

    assert joined(sizes) == joined([])
    if not stops:
        assert joined(sizes)[:2] == (text, tuple(tokens))
