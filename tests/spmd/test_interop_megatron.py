"""Megatron-core's own tensor-parallel layers, run on the groups of a context. Skipped where megatron-core is not installed."""

import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch import distributed as dist

from parallel_runtime import ParallelConfig, ParallelContext, run_threads
from parallel_runtime.comm import hash_store
from parallel_runtime.interop import megatron_process_groups

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    pytest.importorskip("megatron.core.tensor_parallel", reason="megatron-core is not installed")
    from megatron.core.model_parallel_config import ModelParallelConfig
    from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")


@pytest.fixture
def default_group() -> Iterator[None]:
    """Megatron asks whether there is one, and never uses it."""
    dist.init_process_group("gloo", store=hash_store(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def _fill(tensor: Tensor) -> Tensor:
    return tensor.copy_(torch.linspace(-1, 1, tensor.numel()).sin().view(tensor.shape))


def _block(tp: Any, size: int) -> tuple[Any, Any, Any]:
    """Embedding, up and down projection; ``size`` is that of ``tp``."""
    config = ModelParallelConfig(tensor_model_parallel_size=size, use_cpu_initialization=True, params_dtype=torch.float32)
    common: dict[str, Any] = {"config": config, "init_method": _fill, "tp_group": tp}
    return (
        VocabParallelEmbedding(32, 16, init_method=_fill, config=config, tp_group=tp),
        ColumnParallelLinear(16, 24, bias=True, gather_output=False, **common),
        RowParallelLinear(24, 16, bias=True, input_is_parallel=True, skip_bias_add=False, **common),
    )


def _step(block: tuple[Any, Any, Any], ids: Tensor) -> tuple[Tensor, Tensor]:
    """The output, and the gradient of the embedding's rows that this rank holds."""
    embedding, up, down = block
    out = down(torch.relu(up(embedding(ids))[0]))[0]
    out.pow(2).sum().backward()
    return out.detach(), embedding.weight.grad


def test_its_layers_compute_on_our_groups(default_group: None) -> None:
    ids = torch.tensor([[1, 30], [17, 4]])
    out, grad = _step(_block(dist.group.WORLD, 1), ids)

    def body(ctx: ParallelContext) -> None:
        groups = megatron_process_groups(ctx)
        assert groups.tp is ctx.tp.process_group
        before = len(ctx.tp.recent(100))
        mine, my_grad = _step(_block(groups.tp, ctx.tp.world_size), ids)
        assert torch.allclose(mine, out, atol=1e-5)
        assert torch.allclose(my_grad, grad.chunk(ctx.tp.world_size)[ctx.tp.rank_in_group], atol=1e-4)
        assert len(ctx.tp.recent(100)) - before == 3  # two sums forward, one backward

    run_threads(body, ParallelConfig(tp=2, pp=2), timeout_s=60)


@pytest.mark.parametrize("pp", [1, 2, 3])
def test_every_group_has_the_ranks_that_megatron_means(default_group: None, pp: int) -> None:
    def body(ctx: ParallelContext) -> None:
        groups = megatron_process_groups(ctx)
        sizes = {
            name: getattr(groups, name).size() for name in ("tp", "pp", "mp", "tp_cp", "dp_cp", "tp_dp_cp", "intra_dist_opt")
        }
        assert sizes == {"tp": 2, "pp": pp, "mp": 2 * pp, "tp_cp": 2, "dp_cp": 2, "tp_dp_cp": 4, "intra_dist_opt": 4 * pp}
        assert (groups.ep.size(), groups.expt_tp.size(), groups.expt_dp.size(), groups.tp_ep.size()) == (2, 1, 2, 2)
        assert groups.tp_ep_pp.size() == 2 * pp
        assert (groups.pos_embd is not None) == ctx.pp.is_first_rank
        if ctx.pp.is_first_rank or ctx.pp.is_last_rank:
            rank = torch.tensor([float(ctx.rank)])
            dist.all_reduce(rank, group=groups.embd)
            assert rank == sum({ctx.pp.first_rank, ctx.pp.last_rank})
        else:
            assert groups.embd is None

    config = ParallelConfig.from_megatron(
        world_size=4 * pp,
        tensor_model_parallel_size=2,
        pipeline_model_parallel_size=pp,
        expert_model_parallel_size=2,
        expert_tensor_parallel_size=1,
    )
    run_threads(body, config, timeout_s=60)


def test_without_any_default_group_megatron_would_ignore_ours() -> None:
    def body(ctx: ParallelContext) -> None:
        with pytest.raises(ValueError, match="Megatron-core ignores the groups it is handed while torch has no default"):
            megatron_process_groups(ctx)

    run_threads(body, ParallelConfig(), timeout_s=60)
