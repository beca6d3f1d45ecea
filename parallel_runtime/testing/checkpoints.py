"""Tiny Llama checkpoints with random weights, in both formats: real files to load in tests, made in milliseconds."""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from parallel_runtime.errors import ArgumentError
from parallel_runtime.models.config import LlamaConfig
from parallel_runtime.models.gguf_checkpoint import gguf_tensor_name

__all__ = ["random_llama_state", "tiny_llama_config", "write_gguf_checkpoint", "write_safetensors_checkpoint"]

_BYTES = 256


def tiny_llama_config(**changes: object) -> LlamaConfig:
    """A model with 2 layers, 4 query and 2 key/value heads of 8, hidden size 32 and a vocabulary of 101.

    Args:
        changes: Fields of ``LlamaConfig`` that are to differ.

    Raises:
        ConfigError: The sizes do not fit.
    """
    config = LlamaConfig(
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
    return replace(config, **changes)  # type: ignore[arg-type]  # LlamaConfig judges the values


def random_llama_state(config: LlamaConfig, *, seed: int = 0, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """Random weights whose logits spread widely, so that greedy choices are clear.

    Args:
        config: Of the model.
        seed: Equal seeds give equal weights.
        dtype: Of the weights.

    Returns:
        Every parameter under the names of ``transformers``; a tied head is left out.
    """
    generator = torch.Generator().manual_seed(seed)

    def matrix(*shape: int) -> Tensor:
        return (torch.randn(shape, generator=generator) / math.sqrt(shape[-1])).to(dtype)

    def norm() -> Tensor:
        return (1 + 0.1 * torch.randn(config.hidden_size, generator=generator)).to(dtype)

    hidden, heads, kv = config.hidden_size, config.num_query_heads * config.head_dim, config.num_kv_heads * config.head_dim
    attention = {"q_proj": (heads, hidden), "k_proj": (kv, hidden), "v_proj": (kv, hidden), "o_proj": (hidden, heads)}
    mlp = dict.fromkeys(("gate_proj", "up_proj"), (config.intermediate_size, hidden)) | {
        "down_proj": (hidden, config.intermediate_size)
    }
    state = {"model.embed_tokens.weight": matrix(config.vocab_size, hidden) * hidden**0.5}
    for layer in range(config.num_layers):
        prefix = f"model.layers.{layer}"
        state |= {f"{prefix}.{name}.weight": norm() for name in ("input_layernorm", "post_attention_layernorm")}
        for part, shapes, bias in (("self_attn", attention, config.attention_bias), ("mlp", mlp, config.mlp_bias)):
            for name, shape in shapes.items():
                state[f"{prefix}.{part}.{name}.weight"] = 2 * matrix(*shape)
                if bias:
                    state[f"{prefix}.{part}.{name}.bias"] = matrix(shape[0])
    state["model.norm.weight"] = norm()
    if not config.tie_word_embeddings:
        state["lm_head.weight"] = 2 * matrix(config.vocab_size, hidden)
    return state


def write_safetensors_checkpoint(
    folder: Path, config: LlamaConfig, *, seed: int = 0, dtype: torch.dtype = torch.float32, num_files: int = 1
) -> Path:
    """Write ``config.json``, the weights and, where the vocabulary has room for every byte, a ``tokenizer.json``.

    Args:
        folder: Made if need be.
        config: Of the model.
        seed: Of ``random_llama_state``.
        dtype: Of the weights.
        num_files: With more than one, an index says which has what.

    Returns:
        ``folder``.

    Raises:
        ArgumentError: ``config`` has ``rope_factors``, which this format cannot hold as such.
    """
    from safetensors.torch import save_file

    if config.rope_factors is not None:
        raise ArgumentError("config.json has no place for rope_factors; write a GGUF file")
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(_hf_config(config, dtype), indent=1))
    state = random_llama_state(config, seed=seed, dtype=dtype)
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


def write_gguf_checkpoint(path: Path, config: LlamaConfig, *, seed: int = 0, kind: str = "F32") -> Path:
    """Write a GGUF file of the llama architecture, with a byte vocabulary where there is room for every byte.

    Args:
        path: The file.
        config: Of the model.
        seed: Of ``random_llama_state``; with ``kind="F32"`` these weights exactly.
        kind: GGML type of the matrices: F32, F16, BF16, or a quantised one such as Q8_0 or Q4_1, whose rows are multiples of 32.

    Returns:
        ``path``.
    """
    import gguf
    import gguf.quants

    writer = gguf.GGUFWriter(path, "llama")
    _write_metadata(writer, config)
    matrix_type = gguf.GGMLQuantizationType[kind]
    for name, tensor in random_llama_state(config, seed=seed).items():
        if name.rsplit(".", 2)[-2] in ("q_proj", "k_proj"):
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
    """The row order that GGUF files of this architecture have: the two halves of each head take turns."""
    halves = tensor.view(-1, 2, head_dim // 2, *tensor.shape[1:])
    return halves.transpose(1, 2).reshape(tensor.shape).contiguous()


def _write_metadata(writer: Any, config: LlamaConfig) -> None:
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


def _hf_config(config: LlamaConfig, dtype: torch.dtype) -> dict[str, object]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
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
        "attention_bias": config.attention_bias,
        "mlp_bias": config.mlp_bias,
        "bos_token_id": config.bos_id,
        "eos_token_id": list(config.eos_ids) or None,
        "dtype": str(dtype).removeprefix("torch."),
    }


def _byte_vocabulary(config: LlamaConfig) -> list[str]:
    """Special tokens for the first ids, so that bos and eos are among them, then one token for every byte."""
    from tokenizers.pre_tokenizers import ByteLevel

    return [f"<|{index}|>" for index in range(config.vocab_size - _BYTES)] + sorted(ByteLevel.alphabet())


def _byte_tokenizer(config: LlamaConfig) -> str:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    tokens = _byte_vocabulary(config)
    backend = Tokenizer(models.BPE({token: index for index, token in enumerate(tokens)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(token, normalized=False) for token in tokens[: len(tokens) - _BYTES]])
    return backend.to_str()
