"""A model of ``transformers``, loaded by ``from_pretrained`` and sharded by its own plan through our mesh."""

from pathlib import Path

import pytest
import torch
from torch import distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from parallel_runtime import ParallelConfig, ParallelContext, run_threads
from parallel_runtime.interop import shard_pretrained
from parallel_runtime.testing.checkpoints import tiny_llama_config, tiny_qwen3_config, write_safetensors_checkpoint

IDS = torch.tensor([[1, 50, 100, 7, 51]])


def _load(folder: Path) -> nn.Module:
    from transformers import AutoModelForCausalLM

    model: nn.Module = AutoModelForCausalLM.from_pretrained(folder)
    return model


@pytest.mark.parametrize("config", [tiny_llama_config(), tiny_qwen3_config()], ids=["llama", "qwen3"])
def test_it_says_what_the_whole_model_says(tmp_path: Path, config: object) -> None:
    folder = write_safetensors_checkpoint(tmp_path, config)  # type: ignore[arg-type]  # a ModelConfig
    whole = _load(folder)
    logits = whole(IDS).logits
    logits.pow(2).mean().backward()
    wanted = whole.get_parameter("model.layers.0.self_attn.q_proj.weight").grad
    assert wanted is not None
    loaded = [_load(folder) for _ in range(4)]  # here, one after another: from_pretrained patches transformers while it runs

    def body(ctx: ParallelContext) -> None:
        model = shard_pretrained(loaded[ctx.rank], ctx)
        query = model.get_parameter("model.layers.0.self_attn.q_proj.weight")
        assert isinstance(query, DTensor)
        assert query.to_local().shape[0] == query.shape[0] // ctx.tp.world_size
        with torch.no_grad():
            assert torch.allclose(model(IDS).logits, logits, atol=1e-4)
        model(IDS).logits.pow(2).mean().backward()
        assert isinstance(query.grad, DTensor)
        assert torch.allclose(query.grad.full_tensor(), wanted, atol=1e-5)
        assert not dist.is_initialized()

    run_threads(body, ParallelConfig(tp=2, dp=2), timeout_s=60)


def test_a_model_without_a_plan_is_refused() -> None:
    def body(ctx: ParallelContext) -> None:
        with pytest.raises(
            ValueError, match=r"^Linear has no tensor-parallel plan; set model.tp_plan, or use models.load_model$"
        ):
            shard_pretrained(nn.Linear(2, 2), ctx)

    run_threads(body, ParallelConfig(), timeout_s=60)
