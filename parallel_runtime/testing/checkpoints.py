"""Tiny Llama, Qwen3 and Qwen3-MoE checkpoints with random weights, in both formats: real files, made in milliseconds."""

import json
import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from parallel_runtime.errors import ArgumentError
from parallel_runtime.models.config import MixtureConfig, ModelConfig
from parallel_runtime.models.gguf_checkpoint import gguf_tensor_name

__all__ = [
    "random_state",
    "tiny_llama_config",
    "tiny_moe_config",
    "tiny_qwen3_config",
    "write_gguf_checkpoint",
    "write_safetensors_checkpoint",
]

_BYTES = 256


def tiny_llama_config(**changes: object) -> ModelConfig:
    """A model with 2 layers, 4 query and 2 key/value heads of 8, hidden size 32 and a vocabulary of 101.

    Args:
        changes: Fields of ``ModelConfig`` that are to differ.

    Raises:
        ConfigError: The sizes do not fit.
    """
    config = ModelConfig(
        vocab_size=101,
        hidden_size=32,
        intermediate_size=64,
        num_layers=2,
        num_query_heads=4,
        num_kv_heads=2,
        head_dim=8,
        max_positions=128,
        bos_id=1,
        eos_ids=(2,),
    )
    return replace(config, **changes)  # type: ignore[arg-type]  # ModelConfig judges the values


def tiny_qwen3_config(**changes: object) -> ModelConfig:
    """The same with normalised query and key heads of 12, so that heads and hidden size do not go together.

    Args:
        changes: Fields of ``ModelConfig`` that are to differ.

    Raises:
        ConfigError: The sizes do not fit.
    """
    return replace(tiny_llama_config(head_dim=12, qk_norm=True), **changes)  # type: ignore[arg-type]  # as above


def tiny_moe_config(*, shared: bool = False, mixture: Mapping[str, object] | None = None, **changes: object) -> ModelConfig:
    """A Qwen3-MoE with 8 experts of 24, of which each token visits 3; or, with a shared expert, a Qwen2-MoE.

    Args:
        shared: Whether a gated shared expert of 40 joins them, and the biases of Qwen2 replace the norms of Qwen3.
        mixture: Fields of ``MixtureConfig`` that are to differ.
        changes: Fields of ``ModelConfig`` that are to differ.

    Raises:
        ConfigError: The sizes do not fit.
    """
    experts = MixtureConfig(num_experts=8, num_per_token=3, intermediate_size=24, normalize=not shared)
    if shared:
        experts = replace(experts, shared_intermediate_size=40, shared_gate=True)
        config = tiny_llama_config(attention_bias=True)
    else:
        config = tiny_qwen3_config()
    experts = replace(experts, **(mixture or {}))  # type: ignore[arg-type]  # MixtureConfig judges the values
    return replace(config, mixture=experts, **changes)  # type: ignore[arg-type]  # as above


def random_state(config: ModelConfig, *, seed: int = 0, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """Random weights whose logits spread widely, so that greedy choices are clear.

    Args:
        config: Of the model.
        seed: Equal seeds give equal weights.
        dtype: Of the weights.

    Returns:
        Every parameter under the names of ``transformers``; a tied head is left out.
    """
    draw = _Draw(seed, dtype)
    hidden, heads, kv = config.hidden_size, config.num_query_heads * config.head_dim, config.num_kv_heads * config.head_dim
    state = {"model.embed_tokens.weight": draw.matrix(config.vocab_size, hidden) * hidden**0.5}
    for layer in range(config.num_layers):
        prefix = f"model.layers.{layer}"
        for name in ("input_layernorm", "post_attention_layernorm"):
            state[f"{prefix}.{name}.weight"] = draw.norm(hidden)
        for name, shape in {"q_proj": (heads, hidden), "k_proj": (kv, hidden), "v_proj": (kv, hidden)}.items():
            state |= draw.projection(f"{prefix}.self_attn.{name}", shape, bias=config.attention_bias)
        state |= draw.projection(f"{prefix}.self_attn.o_proj", (hidden, heads), bias=config.attention_output_bias)
        if config.qk_norm:
            state |= {f"{prefix}.self_attn.{name}.weight": draw.norm(config.head_dim) for name in ("q_norm", "k_norm")}
        if (mixture := config.mixture_of(layer)) is None:
            state |= draw.feed_forward(f"{prefix}.mlp", hidden, config.intermediate_size, bias=config.mlp_bias)
        else:
            state |= draw.mixture(f"{prefix}.mlp", hidden, mixture)
    state["model.norm.weight"] = draw.norm(hidden)
    if not config.tie_word_embeddings:
        state["lm_head.weight"] = 2 * draw.matrix(config.vocab_size, hidden)
    return state


class _Draw:
    """Random parameters of every kind, each drawn after the other."""

    def __init__(self, seed: int, dtype: torch.dtype) -> None:
        self._generator = torch.Generator().manual_seed(seed)
        self._dtype = dtype

    def matrix(self, *shape: int) -> Tensor:
        return (torch.randn(shape, generator=self._generator) / math.sqrt(shape[-1])).to(self._dtype)

    def norm(self, size: int) -> Tensor:
        return (1 + 0.1 * torch.randn(size, generator=self._generator)).to(self._dtype)

    def projection(self, name: str, shape: tuple[int, int], *, bias: bool = False) -> dict[str, Tensor]:
        state = {f"{name}.weight": 2 * self.matrix(*shape)}
        return state | {f"{name}.bias": self.matrix(shape[0])} if bias else state

    def feed_forward(self, name: str, hidden: int, size: int, *, bias: bool = False) -> dict[str, Tensor]:
        shapes = {"gate_proj": (size, hidden), "up_proj": (size, hidden), "down_proj": (hidden, size)}
        parts = [self.projection(f"{name}.{part}", shape, bias=bias) for part, shape in shapes.items()]
        return parts[0] | parts[1] | parts[2]

    def mixture(self, name: str, hidden: int, mixture: MixtureConfig) -> dict[str, Tensor]:
        state = self.projection(f"{name}.gate", (mixture.num_experts, hidden))
        for expert in range(mixture.num_experts):
            state |= self.feed_forward(f"{name}.experts.{expert}", hidden, mixture.intermediate_size)
        if mixture.shared_intermediate_size:
            state |= self.feed_forward(f"{name}.shared_expert", hidden, mixture.shared_intermediate_size)
        if mixture.shared_gate:
            state |= self.projection(f"{name}.shared_expert_gate", (1, hidden))
        return state


def write_safetensors_checkpoint(
    folder: Path, config: ModelConfig, *, seed: int = 0, dtype: torch.dtype = torch.float32, num_files: int = 1
) -> Path:
    """Write ``config.json``, the weights and, where the vocabulary has room for every byte, a ``tokenizer.json``.

    Args:
        folder: Made if need be.
        config: Of the model.
        seed: Of ``random_state``.
        dtype: Of the weights.
        num_files: With more than one, an index says which has what.

    Returns:
        ``folder``.

    Raises:
        ArgumentError: ``config`` has ``rope_factors``, or a combination of parts that no model of ``transformers`` has.
    """
    from safetensors.torch import save_file

    if config.rope_factors is not None:
        raise ArgumentError("config.json has no place for rope_factors; write a GGUF file")
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(_hf_config(config, dtype), indent=1))
    state = random_state(config, seed=seed, dtype=dtype)
    if num_files == 1:
        save_file(state, folder / "model.safetensors")
    else:
        names = sorted(state)
        weight_map = {name: f"model-{index % num_files + 1:05}-of-{num_files:05}.safetensors" for index, name in enumerate(names)}
        for file in sorted(set(weight_map.values())):
            save_file({name: state[name] for name in names if weight_map[name] == file}, folder / file)
        (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    if config.vocab_size > _BYTES:
        (folder / "tokenizer.json").write_text(_byte_tokenizer(config))
    return folder


def write_gguf_checkpoint(path: Path, config: ModelConfig, *, seed: int = 0, kind: str = "F32") -> Path:
    """Write a GGUF file of the llama or qwen3 architecture, with a byte vocabulary where there is room for every byte.

    Args:
        path: The file.
        config: Of the model.
        seed: Of ``random_state``; with ``kind="F32"`` these weights exactly.
        kind: GGML type of the matrices: F32, F16, BF16, or a quantised one such as Q8_0 or Q4_1, whose rows are multiples of 32.

    Returns:
        ``path``.

    Raises:
        ArgumentError: ``config`` has experts, which are not written in this format.
    """
    import gguf
    import gguf.quants

    if config.mixture is not None:
        raise ArgumentError("experts are written to directories only; use write_safetensors_checkpoint")
    architecture = "qwen3" if config.qk_norm else "llama"
    writer = gguf.GGUFWriter(path, architecture)
    _write_metadata(writer, config)
    matrix_type = gguf.GGMLQuantizationType[kind]
    for name, tensor in random_state(config, seed=seed).items():
        if architecture == "llama" and name.rsplit(".", 2)[-2] in ("q_proj", "k_proj"):
            tensor = _interleave(tensor, config.head_dim)
        of = matrix_type if tensor.dim() == 2 else gguf.GGMLQuantizationType.F32
        writer.add_tensor(gguf_tensor_name(name), gguf.quants.quantize(tensor.numpy(), of), raw_dtype=of)
    if config.rope_factors is not None:
        writer.add_tensor("rope_freqs.weight", torch.tensor(config.rope_factors, dtype=torch.float32).numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _interleave(tensor: Tensor, head_dim: int) -> Tensor:
    """The row order that GGUF files of the llama architecture have: the two halves of each head take turns."""
    halves = tensor.view(-1, 2, head_dim // 2, *tensor.shape[1:])
    return halves.transpose(1, 2).reshape(tensor.shape).contiguous()


def _write_metadata(writer: Any, config: ModelConfig) -> None:
    writer.add_context_length(config.max_positions)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_query_heads)
    writer.add_head_count_kv(config.num_kv_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_rope_freq_base(config.rope_theta)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    if config.bos_id is not None:
        writer.add_bos_token_id(config.bos_id)
    if config.eos_ids:
        writer.add_eos_token_id(config.eos_ids[0])
    if config.vocab_size > _BYTES:
        tokens = _byte_vocabulary(config)
        special = len(tokens) - _BYTES
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre("smollm")
        writer.add_token_list(tokens)
        writer.add_token_types([3] * special + [1] * _BYTES)


def _hf_config(config: ModelConfig, dtype: torch.dtype) -> dict[str, object]:
    model_type, architecture = _hf_names(config)
    return {
        "architectures": [architecture],
        "model_type": model_type,
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_query_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": config.rms_norm_eps,
        "rope_parameters": {"rope_type": "default", "rope_theta": config.rope_theta},
        "max_position_embeddings": config.max_positions,
        "tie_word_embeddings": config.tie_word_embeddings,
        "attention_bias": config.attention_output_bias,
        "mlp_bias": config.mlp_bias,
        "bos_token_id": config.bos_id,
        "eos_token_id": list(config.eos_ids) or None,
        "dtype": str(dtype).removeprefix("torch."),
    } | _hf_mixture(config.mixture)


def _hf_names(config: ModelConfig) -> tuple[str, str]:
    """Model type and class of the one model of ``transformers`` that has these parts."""
    mixture = config.mixture
    shared = None if mixture is None else (mixture.shared_intermediate_size > 0, mixture.shared_gate)
    match (config.qk_norm, config.attention_bias, config.attention_output_bias, config.mlp_bias, shared):
        case (False, inner, outer, _, None) if inner == outer:
            return "llama", "LlamaForCausalLM"
        case (True, inner, outer, False, None) if inner == outer:
            return "qwen3", "Qwen3ForCausalLM"
        case (True, inner, outer, False, (False, False)) if inner == outer:
            return "qwen3_moe", "Qwen3MoeForCausalLM"
        case (False, True, False, False, (True, True)):
            return "qwen2_moe", "Qwen2MoeForCausalLM"
    raise ArgumentError(f"no config.json describes a model of these parts: {config}")


def _hf_mixture(mixture: MixtureConfig | None) -> dict[str, object]:
    if mixture is None:
        return {}
    return {
        "num_experts": mixture.num_experts,
        "num_experts_per_tok": mixture.num_per_token,
        "moe_intermediate_size": mixture.intermediate_size,
        "norm_topk_prob": mixture.normalize,
        "mlp_only_layers": sorted(mixture.dense_layers),
        "shared_expert_intermediate_size": mixture.shared_intermediate_size,
    }


def _byte_vocabulary(config: ModelConfig) -> list[str]:
    """Special tokens for the first ids, so that bos and eos are among them, then one token for every byte."""
    from tokenizers.pre_tokenizers import ByteLevel

    return [f"<|{index}|>" for index in range(config.vocab_size - _BYTES)] + sorted(ByteLevel.alphabet())


def _byte_tokenizer(config: ModelConfig) -> str:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    tokens = _byte_vocabulary(config)
    backend = Tokenizer(models.BPE({token: index for index, token in enumerate(tokens)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(token, normalized=False) for token in tokens[: len(tokens) - _BYTES]])
    return backend.to_str()
