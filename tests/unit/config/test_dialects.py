"""Other projects' rank lists, bit for bit, and the combinations they have no name for."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import chain, permutations, product
from typing import Any, cast

import pytest

from parallel_runtime.config.dialects import Dialect, NamedGroups, named_groups
from parallel_runtime.config.parallel_config import ParallelConfig
from parallel_runtime.errors import ArgumentError, ConfigError
from parallel_runtime.terms import DENSE_AXES, DenseAxis
from parallel_runtime.topology import Layout
from tests.oracles import load_oracle

RANK_GROUPS: list[dict[str, Any]] = load_oracle("rank_groups")
MORE_PEERS: dict[str, list[dict[str, Any]]] = load_oracle("more_peers")


def of(peer: str) -> Iterator[tuple[dict[str, Any], dict[str, list[list[int]]]]]:
    """Yield sizes and rank lists of the entries that come from one project."""
    entries = [entry for entry in RANK_GROUPS if entry["source"].startswith(peer)]
    assert entries
    for entry in entries:
        yield entry["config"], entry["groups"]


def assert_same(ours: Mapping[str, Sequence[Sequence[int]]], theirs: Mapping[str, list[list[int]]], sizes: object) -> None:
    """Compare names, members, member order and group order."""
    for name, groups in theirs.items():
        assert [list(group) for group in ours[name]] == groups, (name, sizes)


def sglang_config(sizes: dict[str, int]) -> ParallelConfig:
    """Write SGLang's sizes by the table, without its rules on arguments (the recorded group construction has none)."""
    return ParallelConfig(
        tp=sizes["tp"] // (sizes["attn_dp"] * sizes["attn_cp"]),
        cp=sizes["attn_cp"],
        dp=sizes["attn_dp"],
        pp=sizes["pp"],
        ep=sizes["ep"],
        etp=sizes["tp"] // (sizes["ep"] * sizes["moe_dp"]),
    )


def test_sglang_rank_lists() -> None:
    for sizes, groups in of("sglang"):
        config = sglang_config(sizes)
        ours = named_groups(config, "sglang")
        assert set(ours) == set(groups), sizes
        assert config.edp == sizes["moe_dp"]
        assert_same(ours, groups, sizes)


def test_from_sglang_takes_exactly_what_its_argument_rules_allow() -> None:
    taken = 0
    for sizes, _ in of("sglang"):
        tp, ep, copies, cp = sizes["tp"], sizes["ep"], sizes["moe_dp"], sizes["attn_cp"]
        refused = copies > 1 and (sizes["pp"] > 1 or cp != copies or (ep > 1 and ep * copies != tp))
        arguments = {
            "tp_size": tp,
            "pp_size": sizes["pp"],
            "dp_size": sizes["attn_dp"],
            "enable_dp_attention": sizes["attn_dp"] > 1,
            "attn_cp_size": cp,
            "ep_size": ep,
            "moe_dp_size": copies,
        }
        if refused:
            with pytest.raises(ConfigError, match="SGLang"):
                ParallelConfig.from_sglang(**arguments)
        else:
            taken += 1
            assert ParallelConfig.from_sglang(**arguments) == sglang_config(sizes)
    assert taken > 200


def test_sglang_dcp_groups_are_slices_of_the_attention_tp_group() -> None:
    groups = named_groups(ParallelConfig.from_sglang(tp_size=8, attn_dp_size=2, dcp_size=2), "sglang")
    assert groups["dcp"] == ((0, 1), (2, 3), (4, 5), (6, 7))


def is_unusual_dcp(sizes: dict[str, int]) -> bool:
    """Tell a width that vLLM's group construction takes and its arguments refuse."""
    return sizes["pcp"] > 1 and sizes["dcp"] not in (1, sizes["pcp"], sizes["tp"] * sizes["pcp"])


def vllm_groups(sizes: dict[str, int], replicas: int) -> dict[str, list[Sequence[int]]]:
    """Build vLLM's groups; its external replicas are worlds of their own, one after the other."""
    tp, cp, dcp = sizes["tp"], sizes["pcp"], sizes["dcp"]
    config = ParallelConfig.from_vllm(
        tensor_parallel_size=tp,
        pipeline_parallel_size=sizes["pp"],
        data_parallel_size=sizes["dp"],
        prefill_context_parallel_size=cp,
        decode_context_parallel_size=1 if is_unusual_dcp(sizes) else dcp,
    ).replace(dcp=dcp)
    worlds = [
        named_groups(config.replace(rank_offset=replica * config.world_size), "vllm") if replica else named_groups(config, "vllm")
        for replica in range(replicas)
    ]
    return {name: list(chain.from_iterable(world[name] for world in worlds)) for name in worlds[0]}


def test_vllm_rank_lists() -> None:
    for sizes, groups in of("vllm"):
        ours = vllm_groups(sizes, sizes["external_dp"])
        assert set(ours) == set(groups)
        assert_same(ours, groups, sizes)
    for entry in MORE_PEERS["vllm"]:
        ours = vllm_groups(entry, entry["ext"])
        assert_same(ours, entry["groups"], entry)
        assert all(list(group) == sorted(group) for group in ours["dcp"]) is entry["dcp_ascending"]


def test_vllm_has_its_ep_group_even_where_experts_are_cut() -> None:
    config = ParallelConfig.from_vllm(tensor_parallel_size=2, data_parallel_size=2, enable_expert_parallel=False)
    assert config.ep == 1
    assert named_groups(config, "vllm")["ep"] == ((0, 1, 2, 3),)


def test_megatron_rank_lists() -> None:
    for sizes, groups in of("megatron"):
        ours = named_groups(megatron_config(sizes), "megatron")
        assert set(ours) == set(groups)
        assert_same(ours, groups, sizes)


def megatron_config(sizes: dict[str, Any]) -> ParallelConfig:
    """Read the sizes of a Megatron entry."""
    return ParallelConfig.from_megatron(
        world_size=sizes["tp"] * sizes["cp"] * sizes["pp"] * sizes["dp"],
        tensor_model_parallel_size=sizes["tp"],
        context_parallel_size=sizes["cp"],
        pipeline_model_parallel_size=sizes["pp"],
        expert_model_parallel_size=sizes.get("ep", 1),
        expert_tensor_parallel_size=sizes.get("etp"),
        order=sizes["order"],
    )


def test_megatron_generators_alone() -> None:
    for entry in MORE_PEERS["mcore"]:
        axes = [axis for axis in entry["order"].split("-") if axis != "ep"]
        order = cast(tuple[DenseAxis, ...], (*axes, *(axis for axis in DENSE_AXES if axis not in axes)))
        if "etp" in entry:
            layout = ParallelConfig(
                tp=entry["etp"] * entry["ep"] * entry["edp"],
                pp=entry["pp"],
                ep=entry["ep"],
                etp=entry["etp"],
                order=order,
                rank_offset=entry["rank_offset"],
            ).layout
            ours = {name: layout.groups(*EXPERT_TOKENS[name]) for name in entry["groups"]}
        else:
            layout = Layout.of(tp=entry["tp"], cp=entry["cp"], dp=entry["dp"], pp=entry["pp"], order=order)
            ours = {name: layout.groups(*name.split("-")) for name in entry["groups"]}
        assert_same(ours, entry["groups"], entry["order"])


EXPERT_TOKENS = {
    "ep": ("ep",),
    "tp": ("etp",),
    "dp": ("edp",),
    "pp": ("pp",),
    "tp-ep": ("etp", "ep"),
    "tp-ep-pp": ("etp", "ep", "pp"),
}


def test_hypercommgrid_rank_lists() -> None:
    for entry in MORE_PEERS["hypercommgrid"]:
        ((expert_sizes, _),) = entry["view"].values()
        sizes = dict(zip(entry["dims"], entry["shape"], strict=True))
        layout = ParallelConfig(**sizes, ep=expert_sizes[1], etp=expert_sizes[0], rank_offset=entry["rank_offset"]).layout
        ours = {name: layout.groups(*name.removeprefix("expert/").split("-")) for name in entry["groups"]}
        assert layout.edp == expert_sizes[2]
        assert_same(ours, entry["groups"], entry)


def test_torchtitan_rank_lists() -> None:
    for entry in MORE_PEERS["torchtitan"]:
        config = ParallelConfig.from_torchtitan(
            tensor_parallel_degree=entry["tp"],
            pipeline_parallel_degree=entry["pp"],
            context_parallel_degree=entry["cp"],
            data_parallel_replicate_degree=entry["dp_replicate"],
            data_parallel_shard_degree=entry["dp_shard"],
            expert_parallel_degree=entry["ep"],
        )
        ours = named_groups(config, "torchtitan", dp_replicate=entry["dp_replicate"])
        assert set(ours) == set(entry["groups"])
        assert_same(ours, entry["groups"], entry)


@pytest.mark.parametrize(
    ("peer", "order", "names"),
    [
        ("nanotron", ("tp", "cp", "dp", "pp"), {"mp": ("tp", "pp"), "dp_cp": ("dp", "cp")}),
        ("picotron", ("tp", "cp", "pp", "dp"), {"cp_dp": ("cp", "dp"), "pp_dp": ("pp", "dp")}),
    ],
)
def test_teaching_trainers_rank_lists(peer: str, order: tuple[DenseAxis, ...], names: dict[str, tuple[str, ...]]) -> None:
    for entry in MORE_PEERS[peer]:
        layout = ParallelConfig(**{axis: entry[axis] for axis in DENSE_AXES}, order=order).layout
        for name, theirs in entry["groups"].items():
            ours = [list(group) for group in layout.groups(*names.get(name, (name,)))]
            # nanotron numbers its groups by rotating the axes: a group order of its own, with the same members in the same order
            assert ours == (sorted(theirs) if peer == "nanotron" else theirs), (name, entry)


def megatron_rank_lists(sizes: dict[str, int], order: str, tokens: str) -> list[list[int]]:
    """Number the ranks as Megatron's generator does, first axis fastest, and join those that agree on all other axes."""
    axes = tuple(reversed(order.split("-")))
    others = [at for at, axis in enumerate(axes) if axis not in tokens.split("-")]
    groups: dict[tuple[int, ...], list[int]] = {}
    for rank, indices in enumerate(product(*(range(sizes[axis]) for axis in axes))):
        groups.setdefault(tuple([indices[at] for at in others]), []).append(rank)
    return list(groups.values())


def test_every_megatron_order_is_read_right_or_refused_for_a_reason() -> None:
    """Compare all orders with Megatron's own rules, written here as it runs them."""
    taken = refused = 0
    for tp, cp, dp, pp, ep, etp in product((1, 2), (1, 2), (1, 2, 4), (1, 2), (1, 2), (1, 2)):
        world = tp * cp * dp * pp
        if world % (etp * ep * pp):
            continue
        edp = world // (etp * ep * pp)
        dense = {"tp": tp, "cp": cp, "dp": dp, "pp": pp, "ep": 1}
        expert = {"tp": etp, "cp": 1, "dp": edp, "pp": pp, "ep": ep}
        for axes in permutations(("tp", "cp", "ep", "dp", "pp")):
            order = "-".join(axes)
            pp_last = order.endswith("pp") or pp == 1 or edp == dp
            peer_takes = pp_last and megatron_rank_lists(dense, order, "pp") == megatron_rank_lists(expert, order, "pp")
            split = [axis for axis in axes if expert[axis] > 1 and axis in ("tp", "ep", "dp")]
            ours_takes = peer_takes and split == sorted(split, key=("tp", "ep", "dp").index)
            sizes = {"tp": tp, "cp": cp, "dp": dp, "pp": pp, "ep": ep, "etp": etp, "order": order}
            if not ours_takes:
                refused += 1
                with pytest.raises(ConfigError, match="Megatron"):
                    megatron_config(sizes)
                continue
            taken += 1
            ours = named_groups(megatron_config(sizes), "megatron")
            for token in ("tp", "cp", "dp", "pp", "tp-cp", "tp-dp-cp", "tp-pp"):
                assert [list(group) for group in ours[token]] == megatron_rank_lists(dense, order, token), sizes
            for name, token in (("expert_tp", "tp"), ("ep", "ep"), ("expert_dp", "dp"), ("expert_tp-ep-pp", "tp-ep-pp")):
                assert [list(group) for group in ours[name]] == megatron_rank_lists(expert, order, token), sizes
    assert taken > 3000
    assert refused > 3000


@pytest.mark.parametrize(
    ("config", "dialect", "text"),
    [
        (ParallelConfig(tp=2, dp=2, order=("dp", "tp", "cp", "pp")), "sglang", "SGLang always has"),
        (ParallelConfig(tp=2, cp=2, dcp=2), "sglang", "dcp=2 with cp=2: SGLang does not combine them"),
        (ParallelConfig(dp=2, pp=2), "vllm", "vLLM always has"),
        (ParallelConfig(tp=4, ep=2), "vllm", r"ep=2: vLLM's ep group is always the whole stage, tp\*cp\*dp = 4"),
        (ParallelConfig(tp=2, pp=2, order=("pp", "tp", "cp", "dp")), "torchtitan", "torchtitan always has"),
        (ParallelConfig(tp=2), "torchtitan", "etp=2, ep=1: torchtitan has etp=1"),
        (ParallelConfig(tp=2, pp=2, dp=2, etp=1, order=("tp", "pp", "cp", "dp")), "megatron", "edp=4.*unless pp comes last"),
        (ParallelConfig(tp=2), "deepspeed", "dialect 'deepspeed' is unknown; there are sglang, vllm, megatron, torchtitan"),
    ],
)
def test_a_layout_that_the_peer_cannot_have_is_refused(config: ParallelConfig, dialect: Dialect, text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        named_groups(config, dialect)


def test_dp_replicate_belongs_to_torchtitan_and_divides_dp() -> None:
    config = ParallelConfig(dp=4, etp=1)
    with pytest.raises(ConfigError, match="dp_replicate=3 does not divide dp=4"):
        named_groups(config, "torchtitan", dp_replicate=3)
    with pytest.raises(ConfigError, match="dp_replicate=2 means something to torchtitan only, not to vllm"):
        named_groups(config, "vllm", dp_replicate=2)


def test_an_order_counts_only_where_it_makes_a_difference() -> None:
    config = ParallelConfig(tp=2, pp=2, order=("cp", "tp", "pp", "dp"))
    groups: NamedGroups = named_groups(config, "sglang")
    assert groups["tp"] == ((0, 1), (2, 3))


def test_ranks_of_a_world_that_is_not_consecutive() -> None:
    config = ParallelConfig(tp=2, dp=2, etp=1, ranks=(8, 9, 12, 13))
    assert named_groups(config, "torchtitan")["dp_shard"] == ((8, 12), (9, 13))
    assert named_groups(config, "vllm")["dp"] == ((8, 12), (9, 13))


def test_a_dialect_that_is_no_name_is_refused() -> None:
    with pytest.raises(ArgumentError, match=r"dialect must be a str, got \[\] \(list\); use one of sglang, vllm"):
        named_groups(ParallelConfig(), [])  # type: ignore[arg-type]  # what is tested
