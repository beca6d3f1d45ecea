"""A tiny Llama equals ``transformers`` on the same weights, however it is split."""

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor

from parallel_runtime.comm import GroupCoordinator
from parallel_runtime.errors import ArgumentError, CheckpointError, ConfigError
from parallel_runtime.models import CausalLM, ModelConfig, SlotKvCache, load_model, open_checkpoint
from parallel_runtime.testing.checkpoints import (
    random_state,
    tiny_llama_config,
    write_gguf_checkpoint,
    write_safetensors_checkpoint,
)
from parallel_runtime.topology.shards import split_layers
from tests.unit.layers.ranks import alone, on_ranks

IDS = torch.tensor([1, 50, 100, 7, 51, 99, 3, 3, 0, 64, 20])

CONFIGS = {
    "plain": tiny_llama_config(),
    "tied": tiny_llama_config(tie_word_embeddings=True),
    "one kv head": tiny_llama_config(num_kv_heads=1),
    "as many kv heads": tiny_llama_config(num_kv_heads=4),
    "9 query and 3 kv heads": tiny_llama_config(num_query_heads=9, num_kv_heads=3, head_dim=4, hidden_size=36),
    "one layer": tiny_llama_config(num_layers=1),
    "biases": tiny_llama_config(attention_bias=True, attention_output_bias=True, mlp_bias=True),
    "odd widths": tiny_llama_config(hidden_size=20, intermediate_size=37, head_dim=6),
}


def new_cache(model: CausalLM, *, num_slots: int = 1) -> SlotKvCache:
    return SlotKvCache(
        num_layers=len(model.layers),
        num_kv_heads=model.num_kv_heads,
        head_dim=model.head_dim,
        num_slots=num_slots,
        max_length=64,
        dtype=model.dtype,
    )


@torch.inference_mode()
def logits_of(stages: list[CausalLM], ids: Tensor = IDS, *, chunks: tuple[int, ...] = ()) -> Tensor:
    """Logits of one sequence that goes through the stages in chunks."""
    caches = [new_cache(stage) for stage in stages]
    done, rows = 0, []
    for count in chunks or (len(ids),):
        hidden, positions = ids[done : done + count], torch.arange(done, done + count)
        for stage, cache in zip(stages, caches, strict=True):
            hidden = stage(hidden, positions, cache.step([0], [count]))
        rows.append(stages[-1].logits(hidden))
        done += count
    return torch.cat(rows)


@torch.inference_mode()
def reference_logits(config: ModelConfig, ids: Tensor = IDS, dtype: torch.dtype = torch.float32) -> Tensor:
    """The same from ``transformers``, which is handed the weights themselves and none of our code."""
    import transformers

    reference = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=config.vocab_size,
            hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size,
            num_hidden_layers=config.num_layers,
            num_attention_heads=config.num_query_heads,
            num_key_value_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            rms_norm_eps=config.rms_norm_eps,
            rope_parameters={"rope_type": "default", "rope_theta": config.rope_theta},
            max_position_embeddings=config.max_positions,
            tie_word_embeddings=config.tie_word_embeddings,
            attention_bias=config.attention_bias,
            mlp_bias=config.mlp_bias,
        )
    )
    state = random_state(config)
    state.setdefault("lm_head.weight", state["model.embed_tokens.weight"])
    reference.load_state_dict(state)
    logits: Tensor = reference.to(dtype)(ids.unsqueeze(0)).logits[0]
    return logits


@pytest.mark.parametrize("name", CONFIGS)
def test_logits_equal_transformers_for_every_split(name: str, tmp_path: Path) -> None:
    config = CONFIGS[name]
    folder = write_safetensors_checkpoint(tmp_path / "model", config)
    reference = reference_logits(config)

    def run(tp: GroupCoordinator) -> list[Tensor]:
        with open_checkpoint(folder) as checkpoint:
            found = []
            for num_stages in {1, config.num_layers}:
                stages = [
                    load_model(checkpoint, tp=tp, layers=part) for part in split_layers(config.num_layers, num_stages=num_stages)
                ]
                found.append(logits_of(stages))
        return found

    for tp in (1, 2, 3, 4):
        for rank, found in enumerate(on_ranks(tp, run)):
            for logits in found:
                assert logits.shape == (len(IDS), config.vocab_size)
                assert (logits - reference).abs().max() <= 1e-4, f"tp={tp} rank={rank}"


def test_the_stages_of_a_pipeline_have_the_ends_they_need(tmp_path: Path) -> None:
    folder = write_safetensors_checkpoint(tmp_path / "model", tiny_llama_config(num_layers=3, tie_word_embeddings=True))
    with open_checkpoint(folder) as checkpoint:
        first, middle, last = (load_model(checkpoint, tp=alone(), layers=range(layer, layer + 1)) for layer in range(3))
    assert (first.is_first_stage, first.is_last_stage) == (True, False)
    assert (middle.is_first_stage, middle.is_last_stage) == (False, False)
    assert (last.is_first_stage, last.is_last_stage) == (False, True)
    with pytest.raises(ArgumentError, match="the stage of layers 1 to 1 has no head; logits come from the stage of layer 2"):
        middle.logits(torch.zeros(1, 32))


def test_a_prompt_in_chunks_gives_the_logits_of_a_whole_one(tmp_path: Path) -> None:
    with open_checkpoint(write_safetensors_checkpoint(tmp_path / "model", CONFIGS["9 query and 3 kv heads"])) as checkpoint:
        model = load_model(checkpoint, tp=alone())
    whole = logits_of([model])
    for chunks in ((1,) * len(IDS), (4, 7), (5, 1, 4, 1)):
        torch.testing.assert_close(logits_of([model], chunks=chunks), whole, atol=1e-5, rtol=0)


@torch.inference_mode()
def test_sequences_in_one_step_do_not_see_each_other(tmp_path: Path) -> None:
    with open_checkpoint(write_safetensors_checkpoint(tmp_path / "model", tiny_llama_config())) as checkpoint:
        model = load_model(checkpoint, tp=alone())
    prompts = [IDS, IDS[:1], IDS[3:8]]
    cache = new_cache(model, num_slots=4)
    counts = [len(prompt) for prompt in prompts]
    positions = torch.cat([torch.arange(count) for count in counts])
    hidden = model(torch.cat(prompts), positions, cache.step([3, 0, 2], counts))
    for prompt, rows in zip(prompts, model.logits(hidden).split(counts), strict=True):  # type: ignore[no-untyped-call]  # torch
        torch.testing.assert_close(rows, logits_of([model], prompt), atol=1e-5, rtol=0)


@torch.inference_mode()
def test_a_step_without_tokens_gives_no_rows(tmp_path: Path) -> None:
    folder = write_safetensors_checkpoint(tmp_path / "model", tiny_llama_config())

    def run(tp: GroupCoordinator) -> tuple[int, ...]:
        with open_checkpoint(folder) as checkpoint:
            model = load_model(checkpoint, tp=tp)
        none = torch.zeros(0, dtype=torch.int64)
        hidden = model(none, none, new_cache(model).step([], []))
        return tuple(hidden.shape) + tuple(model.logits(hidden).shape) + tuple(model.greedy(hidden).shape)

    assert on_ranks(2, run) == [(0, 32, 0, 101, 0)] * 2


def test_bfloat16_stays_close_to_float32(tmp_path: Path) -> None:
    config = CONFIGS["biases"]
    folder = write_safetensors_checkpoint(tmp_path / "model", config)
    exact = reference_logits(config)
    noise = (reference_logits(config, dtype=torch.bfloat16).float() - exact).abs().max()

    def run(tp: GroupCoordinator) -> Tensor:
        with open_checkpoint(folder) as checkpoint:
            return logits_of([load_model(checkpoint, tp=tp, dtype=torch.bfloat16)])

    for tp in (1, 2, 3):
        for logits in on_ranks(tp, run):
            assert logits.dtype == torch.bfloat16
            assert (logits.float() - exact).abs().max() < 2 * noise, "further from float32 than transformers' own bfloat16"


@pytest.mark.parametrize("name", CONFIGS)
def test_full_state_is_what_was_loaded_bit_for_bit(name: str, tmp_path: Path) -> None:
    config = CONFIGS[name]
    folder = write_safetensors_checkpoint(tmp_path / "model", config, num_files=3)
    written = random_state(config)

    def run(tp: GroupCoordinator) -> dict[str, Tensor]:
        with open_checkpoint(folder) as checkpoint:
            stages = [load_model(checkpoint, tp=tp, layers=range(layer, layer + 1)) for layer in range(config.num_layers)]
        return {name: tensor for stage in stages for name, tensor in stage.full_state().items()}

    for tp in (1, 3, 4):
        for state in on_ranks(tp, run):
            assert state.keys() == written.keys()
            assert all(torch.equal(state[key], written[key]) for key in written)


def test_gguf_and_safetensors_of_the_same_weights_are_the_same_model(tmp_path: Path) -> None:
    config = CONFIGS["biases"]
    from_gguf = write_gguf_checkpoint(tmp_path / "model.gguf", config)
    with open_checkpoint(from_gguf) as checkpoint:
        assert checkpoint.config.attention_bias
        assert checkpoint.config.mlp_bias
        assert not checkpoint.config.tie_word_embeddings
        state = load_model(checkpoint, tp=alone()).full_state()
    assert all(torch.equal(state[name], tensor) for name, tensor in random_state(config).items())


def test_rope_factors_change_the_logits(tmp_path: Path) -> None:
    config = tiny_llama_config(rope_factors=(1.0, 2.0, 8.0, 8.0))
    with open_checkpoint(write_gguf_checkpoint(tmp_path / "scaled.gguf", config)) as checkpoint:
        assert checkpoint.config.rope_factors == config.rope_factors
        scaled = logits_of([load_model(checkpoint, tp=alone())])
    assert (scaled - reference_logits(tiny_llama_config())).abs().max() > 1e-2


def test_layers_outside_the_model_are_refused() -> None:
    for layers in (range(0), range(1, 3), range(-1, 1), range(0, 2, 2)):
        with pytest.raises(ArgumentError, match=r"is no part of the model's 2 layers"):
            CausalLM(tiny_llama_config(), tp=alone(), layers=layers)


def test_positions_of_another_length_are_refused() -> None:
    model = CausalLM(tiny_llama_config(), tp=alone())
    with pytest.raises(ArgumentError, match=r"\(2,\) positions for inputs of shape \(3,\)"):
        model(torch.zeros(3, dtype=torch.int64), torch.arange(2), new_cache(model).step([0], [3]))


def test_uneven_shards_can_be_refused() -> None:
    def run(tp: GroupCoordinator) -> None:
        with pytest.raises(ConfigError, match="101"):
            CausalLM(tiny_llama_config(), tp=tp, uneven="refuse")

    on_ranks(2, run)


def test_a_checkpoint_without_a_tensor_its_config_asks_for_is_refused(tmp_path: Path) -> None:
    folder = write_safetensors_checkpoint(tmp_path / "model", tiny_llama_config())
    config_file = folder / "config.json"
    config_file.write_text(config_file.read_text().replace('"num_hidden_layers": 2', '"num_hidden_layers": 3'))
    with (
        open_checkpoint(folder) as checkpoint,
        pytest.raises(CheckpointError, match=r"model: no tensor 'model\.layers\.2\.input_layernorm\.weight' among the 21 it has"),
    ):
        load_model(checkpoint, tp=alone())


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("vocab_size", 10**13, r"'model\.embed_tokens\.weight' has shape \(101, 32\); expected \(10000000000000, 32\)"),
        ("intermediate_size", 10**13, r"'model\.layers\.0\.mlp\.gate_proj\.weight' has shape"),
        ("num_attention_heads", 2 * 10**13, r"'model\.layers\.0\.self_attn\.q_proj\.weight' has shape"),
    ],
)
def test_sizes_no_machine_has_memory_for_are_refused_first(key: str, value: int, message: str, tmp_path: Path) -> None:
    folder = write_safetensors_checkpoint(tmp_path / "model", tiny_llama_config())
    config_file = folder / "config.json"
    config_file.write_text(json.dumps(json.loads(config_file.read_text()) | {key: value}))
    with open_checkpoint(folder) as checkpoint:
        for call in (checkpoint.check, lambda: load_model(checkpoint, tp=alone())):
            with pytest.raises(CheckpointError, match=message):
                call()


def test_a_checkpoint_with_a_tensor_of_another_shape_is_refused(tmp_path: Path) -> None:
    folder = write_safetensors_checkpoint(tmp_path / "model", tiny_llama_config())
    config_file = folder / "config.json"
    config_file.write_text(config_file.read_text().replace('"intermediate_size": 64', '"intermediate_size": 72'))
    with (
        open_checkpoint(folder) as checkpoint,
        pytest.raises(
            CheckpointError,
            match=r"'model\.layers\.0\.mlp\.gate_proj\.weight' has shape \(64, 32\); expected \(72, 32\)",
        ),
    ):
        load_model(checkpoint, tp=alone())
