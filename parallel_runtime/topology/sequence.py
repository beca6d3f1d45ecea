"""Which tokens of sequences are whose, where context parallelism cuts sequences over ranks. Integers only.

Two questions with two answers. Who *computes* a new token: head and tail. The new tokens of a sequence are cut into twice as many
consecutive pieces as there are ranks, and a rank takes one from the front and its mirror image from the back, so that all ranks
have as many tokens, and, since a later token sees more, as much attention. Who *keeps* a token's keys and values: taking turns.
Neighbours within a block go to different ranks, so that all ranks keep as many, however long a sequence grows.
"""

from collections.abc import Sequence
from typing import NamedTuple, final

from parallel_runtime.errors import ConfigError
from parallel_runtime.topology.shards import split_even

__all__ = ["TokenSpan", "kept_rows", "rows_per_block", "split_tokens"]


@final
class TokenSpan(NamedTuple):
    """Consecutive new tokens of one sequence.

    Attributes:
        sequence: Its number in the step.
        tokens: Which of its new tokens, from 0.
    """

    sequence: int
    tokens: range


def split_tokens(counts: Sequence[int], *, parts: int) -> tuple[tuple[TokenSpan, ...], ...]:
    """Deal the new tokens of a step to the ranks of a context-parallel group, head and tail.

    The first piece of each sequence goes to the next rank in turn, so that many sequences of one token are spread as well.

    Args:
        counts: New tokens of each sequence, 0 or more; any number, also fewer than ``parts``.
        parts: Ranks.

    Returns:
        The spans of each rank, by sequence and position: none of them empty, at most two of one sequence, never two that touch.
        Every token is in one. The ranks' tokens of one sequence differ in number by one at most.

    Raises:
        ConfigError: A count is negative, or ``parts`` is not positive.
    """
    if parts < 1:
        raise ConfigError(f"parts={parts} must be an integer of 1 or more")
    spans: tuple[list[TokenSpan], ...] = tuple([] for _ in range(parts))
    for sequence, count in enumerate(counts):
        pieces = split_even(count, parts=2 * parts)
        for part in range(parts):
            head, tail = pieces[part], pieces[-1 - part]
            own = (range(head.start, tail.stop),) if head.stop == tail.start else (head, tail)
            spans[(part + sequence) % parts].extend(TokenSpan(sequence, tokens) for tokens in own if tokens)
    return tuple(tuple(each) for each in spans)


def rows_per_block(page_size: int, *, parts: int) -> int:
    """How many tokens of a block each rank makes room for.

    Args:
        page_size: Tokens of a block.
        parts: Ranks that share it. Where they do not divide ``page_size`` the last row of some stays empty.

    Returns:
        ``page_size / parts``, rounded up.

    Raises:
        ConfigError: One of them is not positive.
    """
    if page_size < 1 or parts < 1:
        raise ConfigError(f"page_size={page_size} and parts={parts} must be integers of 1 or more")
    return -(-page_size // parts)


def kept_rows(page_size: int, *, part: int, parts: int) -> range:
    """The tokens of a block whose keys and values one rank keeps; the one at index ``i`` stands in row ``i`` of its block.

    Args:
        page_size: Tokens of a block.
        part: The rank.
        parts: Ranks that share the block.
    """
    return range(part, page_size, parts)
