"""What other projects refuse is refused here too, with their rule and our reading of it."""

from collections.abc import Callable

import pytest

from parallel_runtime.config.dialects import named_groups
from parallel_runtime.config.parallel_config import ParallelConfig
from parallel_runtime.config.peers import MegatronSizes, SglangSizes, TorchtitanSizes, VllmSizes
from parallel_runtime.errors import ConfigError

sglang, vllm = ParallelConfig.from_sglang, ParallelConfig.from_vllm
megatron, torchtitan = ParallelConfig.from_megatron, ParallelConfig.from_torchtitan


def test_sizes_are_read_by_the_table() -> None:
    assert sglang(tp_size=8, attn_dp_size=2, attn_cp_size=2, ep_size=4) == ParallelConfig(tp=2, cp=2, dp=2, ep=4, etp=2)
    assert sglang(tp_size=8, dp_size=4, enable_dp_attention=True) == ParallelConfig(tp=2, dp=4, etp=8)
    assert vllm(tensor_parallel_size=2, data_parallel_size=2, pipeline_parallel_size=2) == ParallelConfig(
        tp=2, dp=2, pp=2, etp=4, order=("tp", "cp", "pp", "dp")
    )
    spread = vllm(tensor_parallel_size=2, data_parallel_size=2, enable_expert_parallel=True)
    assert (spread.ep, spread.etp) == (4, 1)
    assert named_groups(spread, "vllm") == named_groups(spread.replace(ep=1, etp=4), "vllm")
    assert megatron(
        world_size=16, tensor_model_parallel_size=2, expert_model_parallel_size=4, order="tp-pp-ep-dp"
    ) == ParallelConfig(tp=2, dp=8, ep=4, etp=2, order=("tp", "pp", "dp", "cp"))
    assert torchtitan(data_parallel_replicate_degree=2, data_parallel_shard_degree=4, expert_parallel_degree=2) == ParallelConfig(
        dp=8, ep=2, etp=1
    )


def test_each_reading_is_also_a_model() -> None:
    assert ParallelConfig.model_validate(SglangSizes(tp_size=4).settings()) == sglang(tp_size=4)
    assert ParallelConfig.model_validate(VllmSizes().settings()) == vllm()
    assert ParallelConfig.model_validate(MegatronSizes(world_size=2).settings()) == megatron(world_size=2)
    assert ParallelConfig.model_validate(TorchtitanSizes().settings()) == torchtitan()


@pytest.mark.parametrize(
    ("refused", "text"),
    [
        (lambda: sglang(tp_size=0), "tp_size=0: a size is an integer of 1 or more"),
        (lambda: sglang(tp_size=True), "tp_size=True is a bool"),
        (lambda: sglang(tp=2), "tp=2: SGLang sizes have no setting 'tp'; did you mean 'tp_size'"),
        (lambda: sglang(tp_size=8, dp_size=2, attn_dp_size=2), "dp_size=2 and attn_dp_size=2: SGLang takes only one of them"),
        (lambda: sglang(tp_size=8, dp_size=2), "dp_size=2 without enable_dp_attention makes 2 replicas in SGLang"),
        (
            lambda: sglang(tp_size=8, attn_dp_size=3),
            r"tp_size=8 is not divisible by attention dp\*cp = 3\*1 = 3: .* here tp = tp_size/\(dp\*cp\); .* nearby: 2, 4",
        ),
        (lambda: sglang(tp_size=8, attn_cp_size=2, dcp_size=2), "dcp_size=2 with attn_cp_size=2: SGLang does not combine"),
        (lambda: sglang(tp_size=8, attn_dp_size=4, dcp_size=4), "dcp_size=4 does not divide .* = 8/4 = 2: .* nearest that do: 2"),
        (
            lambda: sglang(tp_size=8, ep_size=3),
            r"not divisible by ep_size\*moe_dp_size = 3\*1 = 3: .* read here as stage_size = ep\*etp\*edp; .* 2, 4",
        ),
        (lambda: sglang(tp_size=8, pp_size=2, moe_dp_size=2, attn_cp_size=2), "moe_dp_size=2 with pp_size=2: SGLang takes"),
        (lambda: sglang(tp_size=8, moe_dp_size=2, attn_cp_size=4), "use moe_dp_size=1 or moe_dp_size=4, or write"),
        (lambda: sglang(tp_size=8, moe_dp_size=2), "attn_cp_size=1: .* are equal; use moe_dp_size=1, or write"),
        (
            lambda: sglang(tp_size=8, moe_dp_size=2, attn_cp_size=2, ep_size=2),
            r"ep_size\*moe_dp_size = 2\*2 = 4 but tp_size=8: .* use ep_size=4",
        ),
        (
            lambda: vllm(tensor_parallel_size=8, decode_context_parallel_size=3),
            "decode_context_parallel_size=3 with tensor_parallel_size=8 .* must divide tensor_parallel_size, .* work: 1, 2, 4, 8",
        ),
        (
            lambda: vllm(tensor_parallel_size=4, prefill_context_parallel_size=2, decode_context_parallel_size=4),
            "prefill_context_parallel_size=2: in vLLM it must be 1, the prefill size, or the product of both, .* work: 1, 2, 8",
        ),
        (lambda: vllm(tp=2), "vLLM sizes have no setting 'tp'; did you mean 'tensor_parallel_size'"),
        (lambda: megatron(world_size=8, tp=2), "did you mean 'tensor_model_parallel_size'"),
        (lambda: torchtitan(dp=2), "did you mean 'data_parallel_shard_degree'"),
        (megatron, r"^Megatron sizes need world_size=\.\.\.$"),
        (lambda: megatron(world_size=8, data_parallel_size=2), "did you mean 'world_size'"),
        (
            lambda: megatron(world_size=8, tensor_model_parallel_size=3),
            r"world_size=8 is not divisible by tp\*pp\*cp = 3\*1\*1 = 3: Megatron takes the rest .* worlds that work: 6, 9",
        ),
        (lambda: megatron(world_size=8, expert_model_parallel_size=3), r"by etp\*ep\*pp = 1\*3\*1 = 3: .* work: 6, 9"),
        (lambda: megatron(world_size=8, expert_tensor_parallel_size=0), "expert_tensor_parallel_size=0: a size is an integer"),
        (lambda: megatron(world_size=8, order="tp-tp"), "order='tp-tp': Megatron's order names each of tp, cp, ep, dp, pp"),
        (lambda: megatron(world_size=8, order="tp-xp"), "order='tp-xp': Megatron's order names each"),
        (lambda: megatron(world_size=8, order="tp-pp"), "order='tp-pp' leaves out dp=8: Megatron lets only axes of size 1"),
        (
            lambda: megatron(world_size=8, expert_model_parallel_size=2, order="tp-dp-ep-pp"),
            "numbers the expert ranks dp-ep .* Megatron allows that, but here .* then ep, then edp; .* come as ep-dp",
        ),
        (
            lambda: megatron(
                world_size=8, tensor_model_parallel_size=2, pipeline_model_parallel_size=2, expert_tensor_parallel_size=1,
                order="tp-pp-dp",
            ),
            "with pp=2, dp=2, edp=4: unless pp comes last, Megatron wants .* read here as edp = .* = 4/.*tp.cp = 2",
        ),
        (
            lambda: megatron(
                world_size=8, tensor_model_parallel_size=2, pipeline_model_parallel_size=2, expert_tensor_parallel_size=1,
                expert_model_parallel_size=2, order="tp-pp-ep-dp",
            ),
            "neighbouring stages are 2 ranks apart by the dense sizes but 1 by the expert sizes .* use an order that ends in pp",
        ),
        (
            lambda: torchtitan(data_parallel_replicate_degree=2, data_parallel_shard_degree=2, expert_parallel_degree=4),
            r"expert_parallel_degree=4 does not divide dp_shard\*cp\*tp = 2\*1\*1 = 2: torchtitan .* inside dp_shard of dp; .* 2",
        ),
    ],
)  # fmt: skip
def test_refusals(refused: Callable[[], object], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        refused()
