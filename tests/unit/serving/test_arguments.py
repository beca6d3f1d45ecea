"""What callers give an engine: any list of prompts, and nothing that only looks like one."""

import re
from types import MappingProxyType

import pytest
import torch

from parallel_runtime.errors import RequestError
from parallel_runtime.serving.arguments import prompt_list, sampling_list
from parallel_runtime.serving.messages import Request
from parallel_runtime.serving.sampling_params import SamplingParams

GREEDY, DRAWN = SamplingParams(), SamplingParams(temperature=1.0)


def test_any_iterable_of_prompts_will_do() -> None:
    expected: list[str | tuple[int, ...]] = ["a", (1, 2), (3,)]
    assert prompt_list(["a", [1, 2], (3,)]) == expected
    assert prompt_list(iter(expected)) == expected
    assert prompt_list(prompt if isinstance(prompt, str) else iter(prompt) for prompt in expected) == expected
    assert prompt_list([range(2)]) == [(0, 1)]
    assert prompt_list([]) == []


@pytest.mark.parametrize(
    ("prompts", "text"),
    [
        ("text", "prompts is a list of prompts; for one text give [text]"),
        (None, "prompts is None, of type NoneType; a prompt is a text, a list of token ids or a list of chat messages"),
        (5, "prompts is 5, of type int;"),
        (b"abc", "prompts is b'abc', of type bytes;"),
        ({"a": 1}, "prompts is {'a': 1}, of type dict;"),
        ({(1,)}, "prompts is {(1,)}, of type set;"),
        ([None], "prompt 0 is None, of type NoneType; a prompt is a text, a list of token ids or a list of chat messages"),
        (
            ["a", 5],
            "prompt 1 is 5, of type int; a prompt is a text, a list of token ids or a list of chat messages, "
            "and prompts is a list of such; for one",
        ),
        ([b"abc"], "prompt 0 is b'abc', of type bytes;"),
        ([bytearray(b"abc")], "prompt 0 is "),
        ([{1: 2}], "prompt 0 is {1: 2}, of type dict;"),
        ([MappingProxyType({1: 2})], "prompt 0 is "),
        ([frozenset({1})], "prompt 0 is "),
        (
            [dict.fromkeys(range(100), 0)],
            "prompt 0 is {0: 0, 1: 0, 2: 0, 3: 0, 4: 0, 5: 0, 6: 0, 7: 0, 8: 0, 9:..., of type dict;",
        ),
    ],
)
def test_what_is_no_list_of_prompts_is_named(prompts: object, text: str) -> None:
    with pytest.raises(RequestError, match="^" + re.escape(text)):
        prompt_list(prompts)  # type: ignore[arg-type]  # wrong on purpose


@pytest.mark.parametrize("prompt", [[1.5], ["a"], [-1], [True], [2**64], [None], [[1]], torch.tensor([1])])
def test_items_that_are_no_token_ids_are_left_to_the_request(prompt: list[int]) -> None:
    (tokens,) = prompt_list([prompt])
    assert isinstance(tokens, tuple)
    with pytest.raises(RequestError, match=r"a prompt token of request 'a' must be .*, got"):
        Request(request_id="a", prompt=tokens, sampling=GREEDY)


def test_one_sampling_for_all_or_one_for_each() -> None:
    assert sampling_list(None, count=2) == [GREEDY, GREEDY]
    assert sampling_list(DRAWN, count=2) == [DRAWN, DRAWN]
    assert sampling_list((params for params in (DRAWN, GREEDY)), count=2) == [DRAWN, GREEDY]


@pytest.mark.parametrize(
    ("sampling", "text"),
    [
        ({"max_new_tokens": 3}, "sampling is {'max_new_tokens': 3}, of type dict; give SamplingParams(...) for all prompts"),
        ("greedy", "sampling is 'greedy', of type str; give SamplingParams(...)"),
        (0, "sampling is 0, of type int;"),
        ([None], "sampling 0 is None, of type NoneType; give SamplingParams(...) for each prompt"),
        ([{"seed": 1}], "sampling 0 is "),
        ([GREEDY, GREEDY], "1 prompts and 2 sampling parameters; give one for all or one for each"),
        ([], "1 prompts and 0 sampling parameters"),
    ],
)
def test_what_is_no_sampling_is_named(sampling: object, text: str) -> None:
    with pytest.raises(RequestError, match="^" + re.escape(text)):
        sampling_list(sampling, count=1)  # type: ignore[arg-type]  # wrong on purpose
