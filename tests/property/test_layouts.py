"""What holds for every layout, and a slow reference that knows nothing of how the layout computes."""

import copy
import pickle
from itertools import chain, combinations
from math import gcd, prod

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from parallel_runtime.config import ParallelConfig
from parallel_runtime.errors import ConfigError
from parallel_runtime.terms import DENSE_AXES, GROUP_NAMES
from parallel_runtime.testing.strategies import configs, layouts
from parallel_runtime.topology import Layout

AXIS_SETS: list[tuple[str, ...]] = [
    *((name,) for name in GROUP_NAMES),
    *(axes for size in range(5) for axes in combinations(DENSE_AXES, size)),
    *(axes for size in range(5) for axes in combinations(("etp", "ep", "edp", "pp"), size)),
]


def dense_grid(layout: Layout) -> np.ndarray:
    """Ranks as an array indexed [tp, cp, dp, pp], by reshaping and transposing."""
    sizes = [getattr(layout, axis) for axis in reversed(layout.order)]
    array = np.array(layout.ranks).reshape(sizes)
    axes = list(reversed(layout.order))
    return array.transpose([axes.index(axis) for axis in DENSE_AXES])


def expert_grid(layout: Layout) -> np.ndarray:
    """Ranks as an array indexed [etp, ep, edp, pp]: the stage, numbered by the dense order without pp, cut anew."""
    sizes = [getattr(layout, axis) for axis in reversed(layout.order)]
    axes = list(reversed(layout.order))
    stages = np.moveaxis(np.array(layout.ranks).reshape(sizes), axes.index("pp"), 0).reshape(layout.pp, layout.stage_size)
    return stages.reshape(layout.pp, layout.edp, layout.ep, layout.etp).transpose(3, 2, 1, 0)


def slow_groups(layout: Layout, axes: tuple[str, ...]) -> list[list[int]]:
    """List groups by moving the wanted axes to the back; members and groups sorted by place."""
    place = {rank: at for at, rank in enumerate(layout.ranks)}
    if axes in (("world",), ("stage",)):
        axes = ("tp", "cp", "dp", *(("pp",) if axes == ("world",) else ()))
    if axes == ("dcp",):
        blocks = dense_grid(layout).transpose(2, 3, 0, 1).reshape(-1, layout.tp * layout.cp)  # cp fastest
        return sorted((list(chunk) for chunk in blocks.reshape(-1, layout.dcp)), key=lambda group: place[group[0]])
    expert = not set(axes) <= set(DENSE_AXES)
    names = ("etp", "ep", "edp", "pp") if expert else DENSE_AXES
    grid = expert_grid(layout) if expert else dense_grid(layout)
    kept = [at for at, name in enumerate(names) if name not in axes]
    moved = [at for at, name in enumerate(names) if name in axes]
    width = prod(grid.shape[at] for at in moved)
    groups = grid.transpose([*kept, *moved]).reshape(-1, width)
    return sorted((sorted(group, key=place.__getitem__) for group in groups.tolist()), key=lambda group: place[group[0]])


@given(layouts(), st.sampled_from(AXIS_SETS))
def test_groups_agree_with_a_slow_reference(layout: Layout, axes: tuple[str, ...]) -> None:
    groups = layout.groups(*axes)
    assert [list(group) for group in groups] == slow_groups(layout, axes)
    for index, group in enumerate(groups):
        for rank in group:
            assert layout.group_of(rank, *axes) == group
            assert layout.group_index(rank, *axes) == index


@given(configs())
def test_groups_partition_the_world(config: ParallelConfig) -> None:
    for name in GROUP_NAMES:
        groups = config.layout.groups(name)
        assert sorted(chain.from_iterable(groups)) == sorted(config.layout.ranks)
        assert len({len(group) for group in groups}) == 1


@given(layouts())
def test_coordinates_agree_with_the_grids_and_lead_back(layout: Layout) -> None:
    dense, expert = dense_grid(layout), expert_grid(layout)
    for rank in layout.ranks:
        at = layout.coordinate(rank)
        assert dense[at.tp, at.cp, at.dp, at.pp] == rank
        assert expert[at.etp, at.ep, at.edp, at.pp] == rank
        assert layout.rank(tp=at.tp, cp=at.cp, dp=at.dp, pp=at.pp) == rank
        assert layout.rank(etp=at.etp, ep=at.ep, edp=at.edp, pp=at.pp) == rank
        assert layout.group_of(rank, "dcp")[at.dcp] == rank
        assert sorted(layout.group_of(rank, "stage"), key=list(layout.ranks).index)[at.stage_rank] == rank


@given(layouts(), st.sampled_from(AXIS_SETS), st.data())
def test_groups_nest(layout: Layout, axes: tuple[str, ...], data: st.DataObject) -> None:
    fewer = data.draw(st.sets(st.sampled_from(axes))) if axes else ()
    for inner, outer in ((fewer, axes), (("tp", "cp"), ("stage",)), (("etp", "ep"), ("stage",)), (("stage",), ("world",))):
        for rank in layout.ranks:
            assert set(layout.group_of(rank, *inner)) <= set(layout.group_of(rank, *outer))


@given(configs())
def test_copies_are_equal_and_the_digest_is_stable(config: ParallelConfig) -> None:
    copies = (
        pickle.loads(pickle.dumps(config)),
        copy.deepcopy(config),
        config.model_copy(),
        ParallelConfig.model_validate_json(config.model_dump_json()),
        ParallelConfig.model_validate(config.model_dump()),
    )
    for other in copies:
        assert other == config
        assert hash(other) == hash(config)
        assert other.digest() == config.digest()
        assert other.layout == config.layout


@given(configs(), configs())
def test_digests_are_equal_exactly_when_the_settings_are(one: ParallelConfig, other: ParallelConfig) -> None:
    assert (one.digest() == other.digest()) == (one.agreed_settings() == other.agreed_settings())


@given(configs(), st.sampled_from(DENSE_AXES))
def test_an_open_size_is_inferred(config: ParallelConfig, axis: str) -> None:
    settings = {name: getattr(config, name) for name in ("tp", "cp", "dp", "pp", "ep", "dcp", "order", "rank_offset", "ranks")}
    opened = ParallelConfig.model_validate({**settings, axis: -1, "etp": config.etp})
    assert opened.resolve(world_size=config.world_size) == config


def tiles(total: int, *parts: int) -> bool:
    """Tell by search, without division, whether equal parts of these sizes fill a total."""
    return any(prod(parts) * copies == total for copies in range(1, total + 1))


def is_possible(tp: int, cp: int, dp: int, pp: int, ep: int, etp: int | None, dcp: int) -> bool:
    """Tell whether the sizes can be built, from what the words mean."""
    if min(tp, cp, dp, pp, ep, dcp) < 1 or (etp is not None and etp < 1):
        return False
    stage = tp * cp * dp
    experts = tiles(stage, ep) if etp is None else tiles(stage, ep, etp)
    block = [(t, c) for t in range(tp) for c in range(cp)]
    chunks = [block[at : at + dcp] for at in range(0, len(block), dcp)]
    rectangles = [[(t, c) for t in sorted({t for t, _ in chunk}) for c in range(cp)] for chunk in chunks]
    return experts and (dcp == 1 or (chunks == rectangles and {len(chunk) for chunk in chunks} == {dcp}))


small = st.integers(0, 6)


@given(small, small, small, small, small, st.none() | small, small)
def test_a_config_is_rejected_exactly_when_it_is_impossible(
    tp: int, cp: int, dp: int, pp: int, ep: int, etp: int | None, dcp: int
) -> None:
    if not is_possible(tp, cp, dp, pp, ep, etp, dcp):
        with pytest.raises(ConfigError):
            ParallelConfig(tp=tp, cp=cp, dp=dp, pp=pp, ep=ep, etp=etp, dcp=dcp)
        return
    config = ParallelConfig(tp=tp, cp=cp, dp=dp, pp=pp, ep=ep, etp=etp, dcp=dcp)
    layout = config.layout
    assert layout.etp * layout.ep * layout.edp == layout.stage_size
    assert etp is not None or layout.etp == gcd(tp, layout.stage_size // ep)
    for name in GROUP_NAMES:
        assert sorted(chain.from_iterable(layout.groups(name))) == list(range(config.world_size))


@given(st.integers(1, 6), st.integers(1, 6), st.sampled_from((-1, 1, 2, 3)), st.integers(1, 40))
def test_a_world_is_refused_exactly_when_no_size_fits(tp: int, pp: int, dp: int, world_size: int) -> None:
    config = ParallelConfig(tp=tp, pp=pp, dp=dp)
    fitting = [size for size in range(1, 41) if tp * pp * size == world_size and dp in (-1, size)]
    if fitting:
        assert config.resolve(world_size=world_size).dp == fitting[0]
    else:
        with pytest.raises(ConfigError, match=f"world_size={world_size}"):
            config.resolve(world_size=world_size)
