"""How the parts of a model are cut: layers over stages; heads, vocabulary, experts and intermediate size over ranks.

Every function returns one ``range`` (or ``HeadShard``) for each part, in order; together the ranges tile the whole exactly once,
and nothing is padded. The only exception is deliberate: with more parts than KV heads, a KV head is held by several parts.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal, TypeAlias, final

from parallel_runtime.errors import ConfigError
from parallel_runtime.topology.sizes import divisors, join_sizes

__all__ = [
    "HeadShard",
    "Uneven",
    "split_even",
    "split_experts",
    "split_heads",
    "split_intermediate",
    "split_layers",
    "split_vocabulary",
]

Uneven: TypeAlias = Literal["allow", "refuse"]
"""Whether parts may differ in size."""


@final
@dataclass(frozen=True, slots=True)
class HeadShard:
    """The attention heads that one part holds.

    Attributes:
        query: Its query heads, as numbers of the whole model.
        kv: The KV heads those query heads read, as numbers of the whole model. Their count divides the count of query heads, and
            local query head ``i`` reads local KV head ``i // (len(query) // len(kv))``.
    """

    query: range
    kv: range


def split_even(total: int, *, parts: int) -> tuple[range, ...]:
    """Cut ``range(total)`` into consecutive parts whose sizes differ by one at most.

    Args:
        total: How many things there are, 0 or more.
        parts: How many parts, 1 or more. With more parts than things the last parts are empty.

    Returns:
        One range for each part; the first ``total % parts`` parts hold one more.

    Raises:
        ConfigError: ``total`` is negative or ``parts`` is not positive.
    """
    _check_at_least(0, total=total)
    _check_at_least(1, parts=parts)
    base, rest = divmod(total, parts)
    return _ranges([base + 1] * rest + [base] * (parts - rest))


def split_layers(num_layers: int, *, num_stages: int, sizes: Sequence[int] | None = None) -> tuple[range, ...]:
    """Cut the layers of a model over pipeline stages.

    Without ``sizes`` the first ``num_layers % num_stages`` stages hold one layer more: the last stage, which also computes the
    logits, is never the larger one.

    Args:
        num_layers: Layers of the model, 1 or more.
        num_stages: Pipeline stages, at most ``num_layers``.
        sizes: How many layers each stage gets, if the even split is not wanted.

    Returns:
        One range of layer numbers for each stage; none is empty.

    Raises:
        ConfigError: A stage would be empty, or ``sizes`` does not add up.
    """
    _check_at_least(1, num_layers=num_layers, num_stages=num_stages)
    if sizes is None:
        _check_not_more(num_stages, num_layers, part="pp", whole="layers")
        return split_even(num_layers, parts=num_stages)
    if len(sizes) != num_stages or sum(sizes) != num_layers or min(sizes) < 1:
        raise ConfigError(
            f"stage sizes {tuple(sizes)}: {len(sizes)} stages and {sum(sizes)} layers, but the model has {num_layers} layers on "
            f"{num_stages} stages; give {num_stages} positive sizes that add up to {num_layers}"
        )
    return _ranges(sizes)


def split_vocabulary(vocab_size: int, *, parts: int, uneven: Uneven = "allow") -> tuple[range, ...]:
    """Cut the vocabulary over the ranks of a tp group, without padding.

    Args:
        vocab_size: Tokens in the vocabulary.
        parts: Ranks, at most ``vocab_size``.
        uneven: ``"refuse"`` demands that ``parts`` divides ``vocab_size``.

    Returns:
        One range of token ids for each part.

    Raises:
        ConfigError: A part would be empty, or parts would differ in size where that is refused.
    """
    return _split(vocab_size, parts=parts, uneven=uneven, whole="vocabulary entries")


def split_intermediate(
    size: int, *, parts: int, uneven: Uneven = "allow", multiple_of: int = 1, axis: str = "tp"
) -> tuple[range, ...]:
    """Cut the intermediate size of an MLP over the ranks of a tp or etp group.

    Args:
        size: Intermediate size of the whole MLP.
        parts: Ranks, at most ``size // multiple_of``.
        uneven: ``"refuse"`` demands parts of equal size.
        multiple_of: Every part is a multiple of this (the block size of a quantised weight).
        axis: What an error calls ``parts``.

    Returns:
        One range of columns for each part.

    Raises:
        ConfigError: ``multiple_of`` does not divide ``size``, a part would be empty, or parts would differ where that is refused.
    """
    _check_at_least(1, size=size, multiple_of=multiple_of)
    blocks, rest = divmod(size, multiple_of)
    if rest:
        raise ConfigError(
            f"an intermediate size of {size} is not a multiple of {multiple_of}; "
            f"blocks that divide it: {join_sizes(divisors(size))}"
        )
    whole = "intermediate columns" if multiple_of == 1 else f"blocks of {multiple_of} intermediate columns"
    cut = _split(blocks, parts=parts, uneven=uneven, whole=whole, part=axis)
    return tuple(range(part.start * multiple_of, part.stop * multiple_of) for part in cut)


def split_experts(num_experts: int, *, ep: int) -> tuple[range, ...]:
    """Cut the experts of a mixture over the ranks of an ep group; all ranks hold the same number.

    Args:
        num_experts: Experts of one layer.
        ep: Expert-parallel width; divides ``num_experts``.

    Returns:
        One range of expert numbers for each rank.

    Raises:
        ConfigError: ``ep`` does not divide ``num_experts``.
    """
    return _split(num_experts, parts=ep, uneven="refuse", whole="experts", part="ep")


def split_heads(num_query_heads: int, num_kv_heads: int, *, parts: int, uneven: Uneven = "allow") -> tuple[HeadShard, ...]:
    """Cut attention heads over the ranks of a tp group.

    Up to ``num_kv_heads`` parts, whole KV heads are dealt out with all their query heads. Beyond that every part holds one KV
    head (several parts hold the same one) and a share of its query heads. Any number of parts up to ``num_query_heads`` works.

    Args:
        num_query_heads: Query heads of the model; a multiple of ``num_kv_heads``.
        num_kv_heads: KV heads of the model.
        parts: Ranks, at most ``num_query_heads``.
        uneven: ``"refuse"`` demands that all parts hold equally many query heads and equally many KV heads.

    Returns:
        One shard for each part; none is empty.

    Raises:
        ConfigError: The KV heads do not divide the query heads, a part would be empty, or parts would differ where that is
            refused.
    """
    _check_at_least(1, num_query_heads=num_query_heads, num_kv_heads=num_kv_heads, parts=parts)
    per_kv, rest = divmod(num_query_heads, num_kv_heads)
    if rest:
        raise ConfigError(
            f"{num_query_heads} query heads cannot share {num_kv_heads} KV heads equally; "
            f"KV heads that work: {join_sizes(divisors(num_query_heads))}"
        )
    _check_not_more(parts, num_query_heads, part="tp", whole="query heads")
    if uneven == "refuse":
        _check_even_heads(num_query_heads, num_kv_heads, parts)
    if parts <= num_kv_heads:
        cut = split_even(num_kv_heads, parts=parts)
        return tuple(HeadShard(query=range(kv.start * per_kv, kv.stop * per_kv), kv=kv) for kv in cut)
    return tuple(_replicated(num_kv_heads, per_kv, parts))


def _replicated(num_kv_heads: int, per_kv: int, parts: int) -> Iterator[HeadShard]:
    for kv_head, holders in enumerate(split_even(parts, parts=num_kv_heads)):
        first = kv_head * per_kv
        for share in split_even(per_kv, parts=len(holders)):
            yield HeadShard(query=range(first + share.start, first + share.stop), kv=range(kv_head, kv_head + 1))


def _check_even_heads(num_query_heads: int, num_kv_heads: int, parts: int) -> None:
    def works(size: int) -> bool:
        return num_kv_heads % size == 0 or size % num_kv_heads == 0

    _check_divides(
        parts,
        num_query_heads,
        part="tp",
        whole=f"query heads ({num_kv_heads} KV heads)" if num_kv_heads != num_query_heads else "query heads",
        works=works,
    )


def _split(total: int, *, parts: int, uneven: Uneven, whole: str, part: str = "tp") -> tuple[range, ...]:
    _check_at_least(1, parts=parts)
    if total < 1:
        raise ConfigError(f"{total} {whole} cannot be split; there must be at least 1")
    if uneven == "refuse":
        _check_divides(parts, total, part=part, whole=whole)
    _check_not_more(parts, total, part=part, whole=whole)
    return split_even(total, parts=parts)


def _check_divides(parts: int, total: int, *, part: str, whole: str, works: Callable[[int], bool] = lambda size: True) -> None:
    allowed = [size for size in divisors(total) if works(size)]
    if parts not in allowed:
        raise ConfigError(f"{part}={parts} does not split {total} {whole} evenly; sizes that do: {join_sizes(allowed)}")


def _check_not_more(parts: int, total: int, *, part: str, whole: str) -> None:
    if parts > total:
        raise ConfigError(f"{part}={parts} is more than the {total} {whole}: a rank would hold none; use 1 to {total}")


def _check_at_least(least: int, **numbers: int) -> None:
    for name, number in numbers.items():
        if isinstance(number, bool) or not isinstance(number, int) or number < least:
            raise ConfigError(f"{name}={number!r} must be an integer of {least} or more")


def _ranges(sizes: Sequence[int]) -> tuple[range, ...]:
    bounds = [0]
    for size in sizes:
        bounds.append(bounds[-1] + size)
    return tuple(range(start, stop) for start, stop in pairwise(bounds))
