"""Qwen3, Qwen3-MoE and Qwen2-MoE equal ``transformers`` on the same directory; ranks read only their own experts."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from parallel_runtime.comm import GroupCoordinator
from parallel_runtime.config import ParallelConfig
from parallel_runtime.context import ParallelContext
from parallel_runtime.errors import ArgumentError, CheckpointError, ConfigError
from parallel_runtime.launch import run_threads
from parallel_runtime.layers import ExpertGroups
from parallel_runtime.models import CausalLM, ModelConfig, load_model, open_checkpoint
from parallel_runtime.models.hf_config import model_config_from_hf
from parallel_runtime.models.safetensors import read_json
from parallel_runtime.testing.checkpoints import (
    random_state,
    tiny_llama_config,
    tiny_moe_config,
    tiny_qwen3_config,
    write_gguf_checkpoint,
    write_safetensors_checkpoint,
)
from tests.unit.layers.ranks import alone, on_ranks
from tests.unit.models.test_llama import IDS, logits_of

pytestmark = pytest.mark.timeout(60)

CONFIGS = {
    "qwen3": tiny_qwen3_config(),
    "qwen3 tied": tiny_qwen3_config(tie_word_embeddings=True),
    "qwen3 with biases": tiny_qwen3_config(attention_bias=True, attention_output_bias=True),
    "qwen3 with one kv head": tiny_qwen3_config(num_kv_heads=1, head_dim=6),
    "qwen3_moe": tiny_moe_config(),
    "qwen3_moe unscaled": tiny_moe_config(mixture={"normalize": False}),
    "qwen3_moe one expert per token": tiny_moe_config(mixture={"num_per_token": 1}),
    "qwen3_moe all experts per token": tiny_moe_config(mixture={"num_per_token": 8}),
    "qwen3_moe dense first": tiny_moe_config(num_layers=3, mixture={"dense_layers": frozenset({0})}),
    "qwen2_moe": tiny_moe_config(shared=True),
    "qwen2_moe dense last": tiny_moe_config(shared=True, mixture={"dense_layers": frozenset({1})}),
}


def one_rank(config: ModelConfig) -> ExpertGroups | None:
    one = alone()
    return None if config.mixture is None else ExpertGroups(tp=one, ep=one, etp=one)


def within(tp: GroupCoordinator) -> ExpertGroups:
    return ExpertGroups(tp=tp, ep=alone(), etp=tp)


@torch.inference_mode()
def reference(folder: Path) -> Tensor:
    from transformers import AutoModelForCausalLM

    logits: Tensor = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)(IDS.unsqueeze(0)).logits[0]
    return logits


@pytest.mark.parametrize("name", CONFIGS)
def test_logits_equal_transformers(name: str, tmp_path: Path) -> None:
    config = CONFIGS[name]
    folder = write_safetensors_checkpoint(tmp_path / "model", config)
    expected = reference(folder)

    def run(tp: GroupCoordinator) -> Tensor:
        with open_checkpoint(folder) as checkpoint:
            assert checkpoint.config == config
            model = load_model(checkpoint, tp=tp, experts=within(tp))
        return logits_of([model], chunks=(4, 1, 6))

    for tp in (1, 2, 3):
        for logits in on_ranks(tp, run):
            assert (logits - expected).abs().max() <= 1e-4, f"tp={tp}"


@pytest.mark.parametrize("name", CONFIGS)
def test_full_state_is_what_was_loaded_bit_for_bit(name: str, tmp_path: Path) -> None:
    config = CONFIGS[name]
    folder = write_safetensors_checkpoint(tmp_path / "model", config, num_files=3)
    written = random_state(config)

    def run(ctx: ParallelContext) -> dict[str, Tensor]:
        with open_checkpoint(folder) as checkpoint:
            model = load_model(checkpoint, tp=ctx.tp, experts=ExpertGroups(tp=ctx.tp, ep=ctx.ep, etp=ctx.etp))
        return model.full_state()

    for parallel in (ParallelConfig(), ParallelConfig(tp=4, ep=2 if config.mixture else 1)):
        for state in run_threads(run, parallel):
            assert state.keys() == written.keys()
            assert all(torch.equal(state[key], written[key]) for key in written)


def test_a_rank_looks_at_its_own_experts_only(tmp_path: Path) -> None:
    folder = write_safetensors_checkpoint(tmp_path / "model", CONFIGS["qwen2_moe"])

    def run(ctx: ParallelContext) -> set[int]:
        with open_checkpoint(folder) as checkpoint:
            asked: list[str] = []
            look_up = checkpoint.tensor
            checkpoint.tensor = lambda name, shape=None: asked.append(name) or look_up(name, shape)  # type: ignore[method-assign,func-returns-value]  # a list of what is asked for
            load_model(checkpoint, tp=ctx.tp, experts=ExpertGroups(tp=ctx.tp, ep=ctx.ep, etp=ctx.etp))
        return {int(name.split(".")[5]) for name in asked if ".experts." in name}

    assert run_threads(run, ParallelConfig(dp=4, ep=4)) == [{0, 1}, {2, 3}, {4, 5}, {6, 7}]


def test_experts_need_their_groups(tmp_path: Path) -> None:
    config = CONFIGS["qwen3_moe"]
    with pytest.raises(ArgumentError, match=r"this model has experts; say where: experts=ExpertGroups"):
        CausalLM(config, tp=alone())

    def run(tp: GroupCoordinator) -> None:
        with pytest.raises(ArgumentError, match=r"experts\.tp has ranks \(0,\), tp has \(0, 1\); both are one group"):
            CausalLM(config, tp=tp, experts=one_rank(config))

    on_ranks(2, run)


def test_qwen3_in_gguf_is_the_model_in_safetensors(tmp_path: Path) -> None:
    config = tiny_qwen3_config(num_kv_heads=1, rms_norm_eps=2**-17)  # a float32, as the format has it
    with open_checkpoint(write_gguf_checkpoint(tmp_path / "model.gguf", config)) as checkpoint:
        assert checkpoint.config == config
        state = load_model(checkpoint, tp=alone()).full_state()
    written = random_state(config)
    assert state.keys() == written.keys()
    assert all(torch.equal(state[name], tensor) for name, tensor in written.items())
    with pytest.raises(ArgumentError, match="experts are written to directories only"):
        write_gguf_checkpoint(tmp_path / "moe.gguf", CONFIGS["qwen3_moe"])


def hf_config(folder: Path, config: ModelConfig, **changes: object) -> dict[str, object]:
    raw = read_json(write_safetensors_checkpoint(folder, config) / "config.json")
    assert isinstance(raw, dict)
    return raw | changes


def test_the_sparse_layers_are_those_of_transformers(tmp_path: Path) -> None:
    raw = hf_config(tmp_path, tiny_moe_config(num_layers=6), decoder_sparse_step=2, mlp_only_layers=[3])
    mixture = model_config_from_hf(raw, where="").mixture
    assert mixture is not None
    assert mixture.dense_layers == {0, 2, 3, 4}
    for changes in ({"decoder_sparse_step": 7}, {"num_experts": 0}, {"mlp_only_layers": list(range(6))}):
        assert model_config_from_hf(raw | changes, where="").mixture is None


def test_a_window_that_is_switched_off_is_none(tmp_path: Path) -> None:
    raw = hf_config(tmp_path, tiny_qwen3_config(), sliding_window=4096)
    for changes in ({}, {"use_sliding_window": False}):
        assert model_config_from_hf(raw | changes, where="").qk_norm
    with pytest.raises(CheckpointError, match="sliding_window is 4096"):
        model_config_from_hf(raw | {"use_sliding_window": True}, where="")


def test_head_dim_defaults_to_that_of_transformers(tmp_path: Path) -> None:
    raw = hf_config(tmp_path, tiny_qwen3_config())
    del raw["head_dim"]
    assert model_config_from_hf(raw, where="").head_dim == 128


def test_wrong_numbers_of_experts_are_refused(tmp_path: Path) -> None:
    for changes, text in (
        ({"num_experts": 0}, "num_experts=0; it must be at least 1"),
        ({"num_per_token": 9}, "num_per_token=9 is more than the 8 experts of a layer"),
        ({"shared_intermediate_size": -1}, "shared_intermediate_size=-1; it must be 0 or more"),
    ):
        with pytest.raises(ConfigError, match=text):
            tiny_moe_config(mixture=changes)
    raw = hf_config(tmp_path, tiny_moe_config(), num_experts_per_tok=9)
    with pytest.raises(CheckpointError, match="num_per_token=9 is more than the 8 experts"):
        model_config_from_hf(raw, where="config.json")
    with pytest.raises(ArgumentError, match=r"no config\.json describes a model of these parts"):
        write_safetensors_checkpoint(tmp_path, tiny_llama_config(attention_bias=True))


def test_the_shape_of_a_mixture_is_that_of_its_experts() -> None:
    shape = tiny_moe_config().shape
    assert (shape.num_experts, shape.intermediate_size) == (8, 24)
    ParallelConfig(tp=2, dp=4, ep=8).check_model(shape)
    with pytest.raises(ConfigError, match="ep=3 does not split 8 experts evenly"):
        ParallelConfig(dp=3, ep=3).check_model(shape)


def test_a_missing_expert_is_named(tmp_path: Path) -> None:
    config = tiny_moe_config(mixture={"num_experts": 4})
    folder = write_safetensors_checkpoint(tmp_path / "model", config)
    file = folder / "config.json"
    file.write_text(file.read_text().replace('"num_experts": 4', '"num_experts": 5'))
    with (
        open_checkpoint(folder) as checkpoint,
        pytest.raises(CheckpointError, match=r"'model\.layers\.0\.mlp\.gate\.weight' has shape \(4, 32\); expected \(5, 32\)"),
    ):
        load_model(checkpoint, tp=alone(), experts=one_rank(checkpoint.config))
