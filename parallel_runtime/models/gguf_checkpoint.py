"""Llama and Qwen3 models in GGUF files."""

import re
from pathlib import Path
from types import MappingProxyType
from typing import final

import torch
from torch import Tensor

from parallel_runtime.errors import CheckpointError, ConfigError
from parallel_runtime.layers.sources import TensorSource
from parallel_runtime.models.checkpoint import Checkpoint, bounds
from parallel_runtime.models.config import ModelConfig
from parallel_runtime.models.gguf import GgufFile, GgufTensor

__all__ = ["GgufCheckpoint", "gguf_tensor_name"]

_ARCHITECTURES = ("llama", "qwen3")
_TOP = MappingProxyType(
    {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"},
)
_LAYER = MappingProxyType(
    {
        "input_layernorm": "attn_norm",
        "self_attn.q_proj": "attn_q",
        "self_attn.k_proj": "attn_k",
        "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_output",
        "self_attn.q_norm": "attn_q_norm",
        "self_attn.k_norm": "attn_k_norm",
        "post_attention_layernorm": "ffn_norm",
        "mlp.gate_proj": "ffn_gate",
        "mlp.up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down",
    }
)
_LAYER_NAME = re.compile(r"model\.layers\.(\d+)\.(.+)\.(weight|bias)")


def gguf_tensor_name(name: str) -> str:
    """The name a GGUF file has for a tensor.

    Args:
        name: As in ``transformers``.

    Raises:
        CheckpointError: Neither a Llama nor a Qwen3 model has such a tensor.
    """
    module, _, kind = name.rpartition(".")
    if module in _TOP:
        return f"{_TOP[module]}.{kind}"
    if (match := _LAYER_NAME.fullmatch(name)) and match[2] in _LAYER:
        return f"blk.{match[1]}.{_LAYER[match[2]]}.{match[3]}"
    raise CheckpointError(f"a Llama or Qwen3 model has no tensor {name!r}")


@final
class GgufCheckpoint(Checkpoint):
    """A GGUF file of the llama or qwen3 architecture, quantised or not.

    Args:
        path: The file.

    Attributes:
        file: Its metadata and tensors.

    Raises:
        CheckpointError: Missing, damaged, of another architecture, or in need of what is not implemented here.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.file = GgufFile(path)
        try:
            metadata = _Metadata(self.file)
            self.config = metadata.config()
            self._interleaves = metadata.architecture == "llama"
            self.names = frozenset(_known_names(self.file, self.config.num_layers))
        except BaseException:
            self.close()
            raise

    def _open(self, name: str) -> TensorSource:
        tensor = self.file.tensors[gguf_tensor_name(name)]
        rotary = self._interleaves and name.rsplit(".", 2)[-2] in ("q_proj", "k_proj")
        return _GgufSource(self.file, tensor, self.config.head_dim if rotary else None)

    def close(self) -> None:
        self.is_open = False
        self.file.close()


class _GgufSource:
    """A tensor of the file. Where ``head_dim`` is given, its rows are put back into the order that ``transformers`` has.

    GGUF files of the llama architecture interleave the two halves of a head (row 2 j + p of a head is row p * d/2 + j elsewhere).
    The order never crosses a head, so the whole heads that cover the wanted rows are read.
    """

    def __init__(self, file: GgufFile, tensor: GgufTensor, head_dim: int | None) -> None:
        self._file = file
        self._tensor = tensor
        self._head_dim = head_dim
        self.shape = tensor.shape

    def __getitem__(self, index: slice | tuple[slice, ...], /) -> Tensor:
        part = bounds(index, self.shape)
        if self._head_dim is not None:
            return self._heads(part, self._head_dim)
        if len(part) == 1:
            return self._file.read(self._tensor.name, range(1), part[0])[0]
        return self._file.read(self._tensor.name, *part)

    def _heads(self, part: tuple[range, ...], dim: int) -> Tensor:
        rows = part[0]
        whole = range(rows.start // dim * dim, -(-rows.stop // dim) * dim)
        if len(part) == 1:
            values = self._file.read(self._tensor.name, range(1), whole)[0]
        else:
            values = self._file.read(self._tensor.name, whole, part[1])
        pairs = values.view(len(whole) // dim, dim // 2, 2, *values.shape[1:])
        ordered = pairs.transpose(1, 2).reshape(values.shape)
        return ordered[rows.start - whole.start : rows.stop - whole.start].clone()


def _known_names(file: GgufFile, num_layers: int) -> list[str]:
    layers = range(min(num_layers, len(file.tensors)))  # a damaged file may claim any number
    modules = list(_TOP) + [f"model.layers.{layer}.{module}" for layer in layers for module in _LAYER]
    names = [f"{module}.{kind}" for module in modules for kind in ("weight", "bias")]
    return [name for name in names if gguf_tensor_name(name) in file.tensors]


class _Metadata:
    """The keys of an architecture, which begin with its name."""

    def __init__(self, file: GgufFile) -> None:
        self._file = file
        architecture = file.metadata.get("general.architecture")
        if architecture not in _ARCHITECTURES:
            known = ", ".join(_ARCHITECTURES)
            raise CheckpointError(
                f"{file.path}: general.architecture is {architecture!r}, which is not implemented (known: {known})"
            )
        self.architecture = str(architecture)

    def config(self) -> ModelConfig:
        self._refuse_unsupported()
        hidden, heads = self._integer(self._key("embedding_length")), self._integer(self._key("attention.head_count"))
        tensors = self._file.tensors
        if "token_embd.weight" not in tensors:
            raise CheckpointError(f"{self._file.path}: no tensor 'token_embd.weight', the embedding")
        try:
            return ModelConfig(
                vocab_size=tensors["token_embd.weight"].shape[0],
                hidden_size=hidden,
                intermediate_size=self._integer(self._key("feed_forward_length")),
                num_layers=self._integer(self._key("block_count")),
                num_query_heads=heads,
                num_kv_heads=self._integer(self._key("attention.head_count_kv"), heads),
                head_dim=self._head_dim(hidden, heads),
                rms_norm_eps=self._real(self._key("attention.layer_norm_rms_epsilon")),
                rope_theta=self._real(self._key("rope.freq_base"), 10000.0),
                rope_factors=self._rope_factors(),
                max_positions=self._integer(self._key("context_length")),
                tie_word_embeddings="output.weight" not in tensors,
                attention_bias="blk.0.attn_q.bias" in tensors,
                attention_output_bias="blk.0.attn_output.bias" in tensors,
                qk_norm="blk.0.attn_q_norm.weight" in tensors,
                mlp_bias="blk.0.ffn_down.bias" in tensors,
                bos_id=self._token("tokenizer.ggml.bos_token_id"),
                eos_ids=self._eos_ids(),
            )
        except ConfigError as exc:
            raise CheckpointError(f"{self._file.path}: {exc}") from exc

    def _key(self, name: str) -> str:
        return f"{self.architecture}.{name}"

    def _refuse_unsupported(self) -> None:
        key = self._key("rope.scaling.type")
        if (scaling := self._file.metadata.get(key, "none")) != "none":
            raise CheckpointError(f"{self._file.path}: {key} is {scaling!r}, which is not implemented (known: none)")
        if (parts := self._integer("split.count", 1)) > 1:
            raise CheckpointError(f"{self._file.path}: one of {parts} files; join them first (llama-gguf-split --merge)")
        key = self._key("expert_count")
        if experts := self._integer(key, 0):
            raise CheckpointError(f"{self._file.path}: {key} is {experts}; experts are not implemented for this architecture")

    def _head_dim(self, hidden: int, heads: int) -> int:
        dim = self._integer(self._key("attention.key_length"), hidden // max(heads, 1))
        for key in map(self._key, ("attention.value_length", "rope.dimension_count")):
            if (other := self._integer(key, dim)) != dim:
                raise CheckpointError(
                    f"{self._file.path}: {key} is {other} and heads have {dim}; only equal ones are implemented"
                )
        return dim

    def _rope_factors(self) -> tuple[float, ...] | None:
        factors = self._file.tensors.get("rope_freqs.weight")
        if factors is None:
            return None
        values: list[float] = self._file.read(factors.name, range(1), range(factors.shape[-1]))[0].to(torch.float64).tolist()
        return tuple(values)

    def _eos_ids(self) -> tuple[int, ...]:
        found = [self._token(f"tokenizer.ggml.{kind}_token_id") for kind in ("eos", "eot")]
        return tuple(dict.fromkeys(token for token in found if token is not None))

    def _token(self, key: str) -> int | None:
        return self._integer(key) if key in self._file.metadata else None

    def _integer(self, key: str, default: int | None = None) -> int:
        value = self._file.metadata.get(key, default)
        if not isinstance(value, int) or value < 0:
            raise CheckpointError(
                f"{self._file.path}: {key} is {'missing' if value is None else repr(value)}; expected an integer"
            )
        return value

    def _real(self, key: str, default: float | None = None) -> float:
        value = self._file.metadata.get(key, default)
        if not isinstance(value, float):
            raise CheckpointError(f"{self._file.path}: {key} is {'missing' if value is None else repr(value)}; expected a number")
        return value
