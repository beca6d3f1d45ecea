"""The rules that sizes obey, each with the text that says what would work."""

from collections.abc import Sequence
from math import gcd, prod
from typing import Final

from parallel_runtime.errors import ConfigError
from parallel_runtime.terms import DENSE_AXES
from parallel_runtime.topology.sizes import divisors, join_sizes, nearest
from parallel_runtime.values import shown

__all__ = ["check_dcp", "check_expert_sizes", "check_order", "check_ranks", "check_sizes", "fit_world"]

_MOST_RANKS: Final = 2**31 - 1


def check_sizes(**sizes: int) -> None:
    """Refuse anything but positive integers, of which the dense axes multiply to a world that can be numbered.

    Args:
        **sizes: Sizes by name.

    Raises:
        ConfigError: One of them is not an integer of 1 or more, or one or the world is above 2**31 - 1.
    """
    for name, size in sizes.items():
        if type(size) is not int or size < 1:
            raise ConfigError(
                f"{name}={shown(size)}: a size is an integer of 1 or more; leave {name} out, or use {name}=1, to not split"
            )
        if size > _MOST_RANKS:
            raise ConfigError(f"{name}={shown(size)}: a size is at most 2**31 - 1 = {_MOST_RANKS}")
    dense = {axis: sizes[axis] for axis in DENSE_AXES if axis in sizes}
    if (world_size := prod(dense.values())) > _MOST_RANKS:
        formula = f"{'*'.join(dense)} = {'*'.join(map(str, dense.values()))} = {world_size}"
        raise ConfigError(f"{formula} ranks: a world has at most 2**31 - 1 = {_MOST_RANKS}; use smaller sizes")


def check_order(order: Sequence[str]) -> None:
    """Refuse an order that is not a permutation of the dense axes.

    Args:
        order: Axis names, fastest first.

    Raises:
        ConfigError: An axis is missing, named twice or unknown.
    """
    if not isinstance(order, tuple) or sorted(order) != sorted(DENSE_AXES):
        raise ConfigError(f"order={order!r} must name each of tp, cp, dp, pp once, fastest first, such as {DENSE_AXES!r}")


def check_expert_sizes(*, tp: int, cp: int, dp: int, ep: int, etp: int) -> None:
    """Refuse expert sizes that do not tile a stage.

    Args:
        tp: Tensor-parallel size.
        cp: Context-parallel size.
        dp: Data-parallel size.
        ep: Expert-parallel width.
        etp: Tensor-parallel width inside an expert.

    Raises:
        ConfigError: ``ep`` does not divide the stage, or ``etp`` does not divide what ``ep`` leaves of it.
    """
    stage = tp * cp * dp
    if stage % ep:
        allowed = divisors(stage)
        raise ConfigError(
            f"ep={ep} does not divide stage_size = tp*cp*dp = {tp}*{cp}*{dp} = {stage}; "
            f"nearest ep that do: {join_sizes(nearest(allowed, ep))} (all: {join_sizes(allowed)})"
        )
    if (stage // ep) % etp:
        allowed = divisors(stage // ep)
        raise ConfigError(
            f"etp={etp} does not divide stage_size/ep = {stage}/{ep} = {stage // ep}; "
            f"nearest etp that do: {join_sizes(nearest(allowed, etp))} (all: {join_sizes(allowed)}); "
            f"left out, etp is gcd(tp, stage_size/ep) = {gcd(tp, stage // ep)}"
        )


def check_dcp(dcp: int, *, tp: int, cp: int) -> None:
    """Refuse a decode-context-parallel width that does not tile the tp x cp block.

    Args:
        dcp: Decode-context-parallel width.
        tp: Tensor-parallel size.
        cp: Context-parallel size.

    Raises:
        ConfigError: ``dcp`` is neither 1 nor ``cp`` times a divisor of ``tp``.
    """
    if dcp == 1 or (dcp % cp == 0 and tp % (dcp // cp) == 0):
        return
    allowed = tuple(sorted({1, *(cp * width for width in divisors(tp))}))
    rule = f"does not divide tp={tp}, and a dcp group is a slice of a tp group"
    if cp > 1:
        rule = f"is not cp times a divisor of tp with tp={tp}, cp={cp}, and a dcp group is a slice of tp times all of cp"
    raise ConfigError(
        f"dcp={dcp} {rule}; nearest dcp that work: {join_sizes(nearest(allowed, dcp))} (all: {join_sizes(allowed)})"
    )


def check_ranks(ranks: Sequence[int], *, world_size: int) -> None:
    """Refuse a world that does not name ``world_size`` different ranks.

    Args:
        ranks: The rank at each place, a range or a tuple.
        world_size: How many there must be.

    Raises:
        ConfigError: There are more or fewer, or one of them is negative, not an integer or named twice.
    """
    if not isinstance(ranks, range | tuple):
        raise ConfigError(f"ranks must be a range or a tuple of ranks, not {type(ranks).__name__}")
    if len(ranks) != world_size:
        raise ConfigError(f"{len(ranks)} ranks are named but tp*cp*dp*pp = {world_size}; name {world_size} ranks")
    if isinstance(ranks, range):
        lowest = min(ranks[0], ranks[-1])
        if lowest < 0:
            raise ConfigError(f"rank {lowest} is negative; ranks count from 0")
        return
    wrong = next((rank for rank in ranks if type(rank) is not int or rank < 0), None)
    if wrong is not None:
        raise ConfigError(f"rank {wrong!r} is not an integer of 0 or more")
    if len(set(ranks)) < len(ranks):
        twice = next(rank for place, rank in enumerate(ranks) if rank in ranks[:place])
        raise ConfigError(f"rank {twice} is named twice; a rank has one place in a world")


def fit_world(sizes: dict[str, int], *, world_size: int) -> dict[str, int]:
    """Fit the dense sizes to a world: infer the one that is -1, or check that all of them multiply to it.

    Args:
        sizes: The sizes of tp, cp, dp and pp; at most one of them is -1.
        world_size: Ranks that will be there.

    Returns:
        The sizes, all positive.

    Raises:
        ConfigError: No size makes them fit.
    """
    check_sizes(world_size=world_size)
    open_axis = next((axis for axis, size in sizes.items() if size == -1), None)
    known = {axis: size for axis, size in sizes.items() if axis != open_axis}
    product = prod(known.values())
    formula = f"{'*'.join(known)} = {'*'.join(map(str, known.values()))} = {product}"
    if open_axis is not None:
        if world_size % product:
            worlds = nearest((world_size // product * product, (world_size // product + 1) * product), world_size)
            raise ConfigError(
                f"{open_axis}=-1 cannot be inferred: {formula} does not divide world_size={world_size}; nearest worlds "
                f"that work: {join_sizes(size for size in worlds if size)}{_or_sizes(known, product, world_size, exact=False)}"
            )
        return {**sizes, open_axis: world_size // product}
    if product != world_size:
        raise ConfigError(
            f"world_size={world_size} but {formula}; launch {product} ranks{_or_sizes(known, product, world_size, exact=True)}"
        )
    return dict(sizes)


def _or_sizes(known: dict[str, int], product: int, world_size: int, *, exact: bool) -> str:
    """Name the single changes of size that would fit the world."""
    offers: list[str] = []
    for axis, size in known.items():
        others = product // size
        if world_size % others:
            continue
        room = world_size // others
        fitting = (room,) if exact else nearest(divisors(room), size)
        offers.extend(f"{axis}={fit}" for fit in fitting)
    return f", or change one size: {', '.join(offers)}" if offers else ""
