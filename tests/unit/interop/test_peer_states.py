"""The getters of SGLang and vLLM on a context: the ranks the peers really have, and their groups' habits."""

from collections.abc import Callable

import pytest
import torch

from parallel_runtime.config import ParallelConfig, named_groups
from parallel_runtime.context import ParallelContext
from parallel_runtime.errors import ArgumentError, CollectiveMismatchError, ContextStateError, RankFailedError
from parallel_runtime.interop import PeerGroup, sglang_state, vllm_state
from parallel_runtime.launch import run_threads

SGLANG = {
    "tp": "get_tp_group",
    "attn_cp": "get_attn_cp_group",
    "attn_tp": "get_attention_tp_group",
    "moe_dp": "get_moe_dp_group",
    "moe_ep": "get_moe_ep_group",
    "moe_tp": "get_moe_tp_group",
    "pp": "get_pp_group",
}
VLLM = {name: f"get_{name}_group" for name in ("tp", "dcp", "pcp", "pp", "dp", "ep")}


@pytest.mark.parametrize(
    "config",
    [
        ParallelConfig.from_sglang(tp_size=8, attn_cp_size=2, ep_size=4, moe_dp_size=2),
        ParallelConfig.from_sglang(tp_size=4, pp_size=2, attn_dp_size=2, ep_size=2),
        ParallelConfig.from_sglang(tp_size=4, attn_cp_size=2, ep_size=4),
    ],
    ids=str,
)
def test_sglangs_groups(config: ParallelConfig) -> None:
    """Every rank finds itself in the rank list that SGLang has for that name (oracles: ``named_groups``)."""
    expected = named_groups(config, "sglang")

    def work(ctx: ParallelContext) -> None:
        state = sglang_state(ctx)
        for name, getter in SGLANG.items():
            group: PeerGroup = getattr(state, getter)()
            assert tuple(group.ranks) in expected[name]
            assert group.ranks[group.rank_in_group] == group.rank == ctx.rank
        assert state.get_tensor_model_parallel_world_size() == ctx.stage.world_size
        assert state.get_attention_dp_rank() == ctx.coordinate.dp
        assert state.get_moe_expert_parallel_rank() == ctx.coordinate.ep

    run_threads(work, config)


@pytest.mark.parametrize(
    "config",
    [
        ParallelConfig.from_vllm(tensor_parallel_size=2, pipeline_parallel_size=2, data_parallel_size=2),
        ParallelConfig.from_vllm(tensor_parallel_size=4, decode_context_parallel_size=2, data_parallel_size=2),
    ],
    ids=str,
)
def test_vllms_groups(config: ParallelConfig) -> None:
    expected = named_groups(config, "vllm")

    def work(ctx: ParallelContext) -> None:
        state = vllm_state(ctx)
        for name, getter in VLLM.items():
            assert tuple(getattr(state, getter)().ranks) in expected[name]
        assert state.get_tensor_model_parallel_rank() == ctx.coordinate.tp
        assert state.get_decode_context_model_parallel_world_size() == ctx.dcp.world_size
        assert state.get_world_group().unique_name == ctx.world.name

    run_threads(work, config)


def test_a_group_moves_what_the_peers_group_moves() -> None:
    def work(ctx: ParallelContext) -> None:
        group = sglang_state(ctx).get_tp_group()
        me = group.rank_in_group
        x_RC = torch.arange(4.0).reshape(2, 2) + me
        assert group.all_reduce(x_RC).tolist() == [[1.0, 3.0], [5.0, 7.0]]
        assert group.all_gather(x_RC).tolist() == [[0, 1, 1, 2], [2, 3, 3, 4]]
        assert group.reduce_scatter(x_RC).tolist() == [[[1.0], [5.0]], [[3.0], [7.0]]][me]
        assert group.all_gatherv(torch.full((me + 1,), float(me))).tolist() == [0, 1, 1]
        gathered = group.gather(x_RC, dst=1, dim=0)
        assert (gathered is None) == (me == 0)
        copied = torch.full((2,), float(me))
        assert group.broadcast(copied, src=1) is copied
        assert copied.tolist() == [1, 1]
        assert group.broadcast_object({"step": 3} if me == 1 else None, src=1) == {"step": 3}
        places = [me, me]
        assert group.broadcast_object_list(places) is places
        assert places == [0, 0]
        assert group.all_gather_object(me) == [0, 1]
        sent = {"x": x_RC, "n": 1}
        received = group.broadcast_tensor_dict(sent if me == 0 else None)
        assert received is not None
        assert (received is sent) == (me == 0)
        assert received["x"].tolist() == [[0, 1], [2, 3]]
        group.barrier()
        if me == 0:
            group.send(torch.ones(2))
            group.send_object("hello", 1)
            group.send_tensor_dict(sent)
        else:
            assert group.recv((2,), torch.float32).tolist() == [1, 1]
            assert group.recv_object(0) == "hello"
            assert (group.recv_tensor_dict() or {})["n"] == 1
        torch.distributed.all_reduce(copied, group=group.device_group)
        assert copied.tolist() == [2, 2]
        group.destroy()
        assert sglang_state(ctx).model_parallel_is_initialized()

    run_threads(work, ParallelConfig(tp=2))


def test_a_dict_travels_in_slices_between_stages() -> None:
    def work(ctx: ParallelContext) -> None:
        state = vllm_state(ctx)
        stages, same = state.get_pp_group(), state.get_tp_group()
        if stages.is_first_rank:
            assert stages.send_tensor_dict({"hidden": torch.arange(8.0), "n": 2}, all_gather_group=same) is None
        else:
            received = stages.recv_tensor_dict(all_gather_group=same)
            assert received is not None
            assert received["hidden"].tolist() == list(range(8))

    run_threads(work, ParallelConfig(tp=2, pp=2))


def test_a_group_of_one_hands_back_what_it_got() -> None:
    with ParallelContext(ParallelConfig()) as ctx:
        state = sglang_state(ctx)
        group, x = state.get_moe_ep_group(), torch.ones(2)
        assert all(
            call(x) is x for call in (group.all_reduce, group.all_gather, group.reduce_scatter, group.gather, group.broadcast)
        )
        assert state.tensor_model_parallel_all_reduce(x) is x
        tensors = {"x": x}
        assert group.send_tensor_dict(tensors) is tensors
        assert group.broadcast_tensor_dict(tensors) is tensors
        assert group.recv_tensor_dict() is None
        with pytest.raises(ArgumentError, match="CUDA"), state.graph_capture():
            pass
        state.destroy_model_parallel()
        state.destroy_distributed_environment()
    assert not state.model_parallel_is_initialized()
    with pytest.raises(ContextStateError):
        sglang_state(ctx)


def wrong_shape(group: PeerGroup) -> None:
    if group.rank_in_group == 0:
        group.send(torch.ones(2))
    else:
        group.recv((3,), torch.float32)


def wrong_length(group: PeerGroup) -> None:
    group.broadcast_object_list([None] * (1 + group.rank_in_group))


@pytest.mark.parametrize(("work", "error"), [(wrong_shape, CollectiveMismatchError), (wrong_length, ArgumentError)])
def test_what_does_not_fit_is_an_error(work: Callable[[PeerGroup], None], error: type[Exception]) -> None:
    with pytest.raises(RankFailedError) as caught:
        run_threads(lambda ctx: work(sglang_state(ctx).get_tp_group()), ParallelConfig(tp=2))
    assert isinstance(caught.value.__cause__, error)
