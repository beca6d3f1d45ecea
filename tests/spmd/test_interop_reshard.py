"""Parameters from a trainer's layout to a server's, between live contexts."""

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from parallel_runtime import ParallelConfig, ParallelContext, run_threads
from parallel_runtime.interop import bytes_lacking, local_state, model_placement, plan_moves, reshard
from parallel_runtime.layers import ExpertGroups
from parallel_runtime.models import CausalLM, ModelConfig, open_checkpoint, split_stages
from parallel_runtime.models.causal_lm import load_model
from parallel_runtime.testing.checkpoints import tiny_llama_config, tiny_moe_config, write_safetensors_checkpoint

LLAMA = ParallelConfig(tp=2, pp=2), ParallelConfig(tp=4)


def _empty(ctx: ParallelContext, config: ModelConfig) -> CausalLM:
    layers = split_stages(config, num_stages=ctx.pp.world_size)[ctx.pp.rank_in_group]
    return CausalLM(config, tp=ctx.tp, experts=ExpertGroups(tp=ctx.tp, ep=ctx.ep, etp=ctx.etp), layers=layers)


def _loaded(ctx: ParallelContext, folder: Path) -> CausalLM:
    with open_checkpoint(folder) as checkpoint:
        layers = split_stages(checkpoint.config, num_stages=ctx.pp.world_size)[ctx.pp.rank_in_group]
        groups = ExpertGroups(tp=ctx.tp, ep=ctx.ep, etp=ctx.etp)
        return load_model(checkpoint, tp=ctx.tp, experts=groups, layers=layers)


def _hand_over(
    world: ParallelContext, folder: Path, trainer: ParallelConfig, server: ParallelConfig, first: int
) -> tuple[dict[str, nn.Parameter], dict[str, nn.Parameter], int]:
    """Train on the first ranks, serve on those from ``first`` on; what the server has, what it should have, and what was sent."""
    train_ranks, serve_ranks = range(trainer.world_size), range(first, first + server.world_size)
    with open_checkpoint(folder) as checkpoint:
        config = checkpoint.config
    trainer, server = trainer.replace(ranks=tuple(train_ranks)), server.replace(ranks=tuple(serve_ranks))
    source, target = model_placement(config, trainer.layout), model_placement(config, server.layout)
    state: dict[str, Tensor] = {}
    got: dict[str, nn.Parameter] = {}
    wanted: dict[str, nn.Parameter] = {}
    if world.rank in train_ranks:
        with world.derive(trainer) as ctx:
            state = local_state(_loaded(ctx, folder))
            held = {name: tensor.shape for name, tensor in state.items()}
            assert held == {
                name: tuple(map(len, tensor.boxes[world.rank])) for name, tensor in source.items() if world.rank in tensor.boxes
            }
    if world.rank in serve_ranks:
        with world.derive(server) as ctx:
            model, reference = _empty(ctx, config), _loaded(ctx, folder)
            got, wanted = (dict(each.named_parameters()) for each in (model, reference))
            reshard(state, source, target, over=world.world, out=local_state(model))
    else:
        assert reshard(state, source, target, over=world.world) == {}
    moves = plan_moves(source, target)
    assert sum(move.num_bytes for move in moves) == bytes_lacking(source, target)
    return got, wanted, sum(move.num_bytes for move in moves)


def _check(world_size: int, folder: Path, trainer: ParallelConfig, server: ParallelConfig, first: int) -> int:
    results = run_threads(_hand_over, ParallelConfig(dp=world_size), folder, trainer, server, first, timeout_s=60)
    for got, wanted, _ in results:
        assert got.keys() == wanted.keys()
        for name in wanted:
            assert torch.equal(got[name], wanted[name]), name
    assert results[first][0]
    return results[0][2]


@pytest.mark.parametrize("first", [0, 2, 4], ids=["same ranks", "some ranks", "other ranks"])
def test_a_trainer_hands_its_llama_to_a_server(tmp_path: Path, first: int) -> None:
    folder = write_safetensors_checkpoint(tmp_path, tiny_llama_config(num_layers=4))
    _check(first + 4, folder, *LLAMA, first)


@pytest.mark.parametrize(
    ("trainer", "server"),
    [
        (ParallelConfig(tp=2, pp=2), ParallelConfig(tp=3)),  # uneven heads, vocabulary and columns
        (ParallelConfig(tp=1, pp=3), ParallelConfig(tp=4)),  # a stage of two layers, KV heads held twice
        (ParallelConfig(tp=4), ParallelConfig(tp=2, pp=2)),
    ],
    ids=str,
)
@pytest.mark.parametrize("tied", [False, True])
def test_any_layout_to_any_other(tmp_path: Path, trainer: ParallelConfig, server: ParallelConfig, tied: bool) -> None:
    folder = write_safetensors_checkpoint(tmp_path, tiny_llama_config(num_layers=4, vocab_size=101, tie_word_embeddings=tied))
    _check(4, folder, trainer, server, 0)


def test_experts_move_to_their_new_ranks(tmp_path: Path) -> None:
    folder = write_safetensors_checkpoint(tmp_path, tiny_moe_config(shared=True))
    _check(4, folder, ParallelConfig(tp=4, ep=4), ParallelConfig(tp=2, dp=2, ep=2, etp=2), 0)


def test_a_layout_moves_nothing_to_itself(tmp_path: Path) -> None:
    folder = write_safetensors_checkpoint(tmp_path, tiny_llama_config())
    assert _check(2, folder, ParallelConfig(tp=2), ParallelConfig(tp=2), 0) == 0
