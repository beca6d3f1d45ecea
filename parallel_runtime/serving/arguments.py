"""What callers give an engine, checked and made into lists: prompts, and how to continue each."""

from collections.abc import Iterable, Mapping, Set
from dataclasses import dataclass
from typing import TypeAlias, final

from parallel_runtime.errors import RequestError
from parallel_runtime.models.tokenizer import Message
from parallel_runtime.serving.sampling_params import SamplingParams

__all__ = ["Chat", "Prompt", "prompt_list", "sampling_list"]

Prompt: TypeAlias = str | Iterable[int] | Iterable[Message]
"""Text, token ids, or the messages of a chat, each with ``role`` and ``content``."""

_WANTED = "a prompt is a text, a list of token ids or a list of chat messages, and prompts is a list of such"


@final
@dataclass(frozen=True, slots=True)
class Chat:
    """A prompt that the model's chat template writes down.

    Attributes:
        messages: The turns so far, at least one.
    """

    messages: tuple[Message, ...]


def prompt_list(prompts: Iterable[Prompt]) -> list[str | tuple[int, ...] | Chat]:
    """Read prompts.

    Args:
        prompts: Any iterable of texts, of lists of token ids and of lists of messages.

    Returns:
        The texts, the token ids as tuples, and chats; a ``Request`` judges the ids, and the template the messages.

    Raises:
        RequestError: It is something else, such as one prompt alone.
    """
    if isinstance(prompts, str):
        raise RequestError("prompts is a list of prompts; for one text give [text]")
    if not _is_list(prompts):
        raise RequestError(f"prompts is {_named(prompts)}; {_WANTED}")
    return [_read_prompt(index, prompt) for index, prompt in enumerate(prompts)]


def sampling_list(
    sampling: SamplingParams | Iterable[SamplingParams] | None, *, count: int, default: SamplingParams | None = None
) -> list[SamplingParams]:
    """Read how prompts are to be continued.

    Args:
        sampling: For all prompts, or one for each.
        count: Number of prompts.
        default: What ``None`` means; greedy by default.

    Returns:
        One for each prompt.

    Raises:
        RequestError: It is something else, or there is another number of them.
    """
    if sampling is None or isinstance(sampling, SamplingParams):
        return [sampling or default or SamplingParams()] * count
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


def _read_prompt(index: int, prompt: Prompt) -> str | tuple[int, ...] | Chat:
    if isinstance(prompt, str):
        return prompt
    if not _is_list(prompt):
        hint = "; for one prompt of token ids give [ids]" if isinstance(prompt, int) else ""
        raise RequestError(f"prompt {index} is {_named(prompt)}; {_WANTED}{hint}")
    items: tuple[object, ...] = tuple(prompt)
    if not items or not isinstance(items[0], Mapping):
        return items  # type: ignore[return-value]  # a Request judges them
    for message in items:
        texts = [message.get(name) for name in ("role", "content")] if isinstance(message, Mapping) else [None]
        if not all(isinstance(text, str) for text in texts):
            raise RequestError(f"prompt {index} has {_named(message)} among its messages; each has a text 'role' and 'content'")
    return Chat(items)  # type: ignore[arg-type]  # checked above


def _is_list(value: object) -> bool:
    """Whether its items have an order and are meant as items; those of bytes, mappings and sets are not."""
    return isinstance(value, Iterable) and not isinstance(value, str | bytes | bytearray | memoryview | Mapping | Set)


def _named(value: object) -> str:
    text = repr(value)
    return f"{text if len(text) <= 60 else text[:57] + '...'}, of type {type(value).__name__}"
