"""Every token meets every column of every expert exactly once, on any layout; no tensor is needed to see it."""

from collections import Counter

from hypothesis import given

from parallel_runtime.comm import GroupCoordinator, GroupSpec, open_coordinator
from parallel_runtime.comm.fake import FakeCommunicator
from parallel_runtime.config import ParallelConfig
from parallel_runtime.layers import ExpertGroups
from parallel_runtime.terms import Rank
from parallel_runtime.testing.strategies import configs


def group_of(config: ParallelConfig, rank: int, axis: str) -> GroupCoordinator:
    ranks = config.layout.group_of(rank, axis)
    communicator = FakeCommunicator(ranks.index(Rank(rank)), len(ranks)) if len(ranks) > 1 else None
    return open_coordinator(GroupSpec(name=f"{axis}#0", key="test", ranks=ranks, rank=Rank(rank)), communicator)


def groups_of(config: ParallelConfig, rank: int) -> ExpertGroups:
    tp, ep, etp = (group_of(config, rank, axis) for axis in ("tp", "ep", "etp"))
    return ExpertGroups(tp=tp, ep=ep, etp=etp)


@given(configs(max_axis=6, max_world_size=24))
def test_every_token_meets_every_column_of_every_expert_once(config: ParallelConfig) -> None:
    layout, stage = config.layout, config.layout.groups("stage")[0]
    groups = {rank: groups_of(config, rank) for rank in stage}
    assert len({(one.must_gather, one.must_exchange) for one in groups.values()}) == 1, "ranks of a stage decide differently"
    met: Counter[tuple[tuple[int, int], int, int, int]] = Counter()
    for rank in stage:
        one, place = groups[rank], layout.coordinate(rank)
        for source in layout.group_of(rank, "etp") if one.must_gather else (rank,):
            owner = layout.coordinate(source)
            for row in groups[source].share(5):
                for ep in range(config.ep) if one.must_exchange else (place.ep,):
                    met[(owner.dp, owner.cp), row, ep, place.etp] += 1
    sequences = config.dp * config.cp
    assert set(met.values()) == {1}
    assert len(met) == sequences * 5 * config.ep * layout.etp


@given(configs(max_axis=6, max_world_size=24))
def test_only_holders_of_the_same_tokens_go_without_an_exchange(config: ParallelConfig) -> None:
    layout = config.layout
    for rank in layout.groups("stage")[0]:
        one = groups_of(config, rank)
        held = set(layout.group_of(rank, "tp"))
        assert one.must_gather or set(layout.group_of(rank, "etp")) <= held
        assert one.must_exchange or set(layout.group_of(rank, "ep")) <= held
