"""What callers give an engine, checked and made into lists: prompts, and how to continue each."""

from collections.abc import Iterable, Mapping, Set
from typing import TypeAlias

from parallel_runtime.errors import RequestError
from parallel_runtime.serving.sampling_params import SamplingParams

__all__ = ["Prompt", "prompt_list", "sampling_list"]

Prompt: TypeAlias = str | Iterable[int]
"""Text, or token ids."""

_WANTED = "a prompt is a text or a list of token ids, and prompts is a list of such"


def prompt_list(prompts: Iterable[Prompt]) -> list[str | tuple[int, ...]]:
    """Read prompts.

    Args:
        prompts: Any iterable of texts and of lists of token ids.

    Returns:
        The texts, and the token ids as tuples; a ``Request`` judges the ids.

    Raises:
        RequestError: It is something else, such as one prompt alone.
    """
    if isinstance(prompts, str):
        raise RequestError("prompts is a list of prompts; for one text give [text]")
    if not _is_list(prompts):
        raise RequestError(f"prompts is {_named(prompts)}; {_WANTED}")
    return [_read_prompt(index, prompt) for index, prompt in enumerate(prompts)]


def sampling_list(sampling: SamplingParams | Iterable[SamplingParams] | None, *, count: int) -> list[SamplingParams]:
    """Read how prompts are to be continued.

    Args:
        sampling: For all prompts, or one for each; ``None`` is greedy.
        count: Number of prompts.

    Returns:
        One for each prompt.

    Raises:
        RequestError: It is something else, or there is another number of them.
    """
    if sampling is None or isinstance(sampling, SamplingParams):
        return [sampling or SamplingParams()] * count
    if not _is_list(sampling):
        raise RequestError(
            f"sampling is {_named(sampling)}; give SamplingParams(...) for all prompts, or a list with one for each"
        )
    each = list(sampling)
    for index, params in enumerate(each):
        if not isinstance(params, SamplingParams):
            raise RequestError(f"sampling {index} is {_named(params)}; give SamplingParams(...) for each prompt")
    if len(each) != count:
        raise RequestError(f"{count} prompts and {len(each)} sampling parameters; give one for all or one for each")
    return each


def _read_prompt(index: int, prompt: Prompt) -> str | tuple[int, ...]:
    if isinstance(prompt, str):
        return prompt
    if not _is_list(prompt):
        hint = "; for one prompt of token ids give [ids]" if isinstance(prompt, int) else ""
        raise RequestError(f"prompt {index} is {_named(prompt)}; {_WANTED}{hint}")
    return tuple(prompt)


def _is_list(value: object) -> bool:
    """Whether its items have an order and are meant as items; those of bytes, mappings and sets are not."""
    return isinstance(value, Iterable) and not isinstance(value, str | bytes | bytearray | memoryview | Mapping | Set)


def _named(value: object) -> str:
    text = repr(value)
    return f"{text if len(text) <= 60 else text[:57] + '...'}, of type {type(value).__name__}"
