"""The parameters of a ``CausalLM`` under the names of ``transformers``: which part of which a rank holds, and views of them."""

from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple, final

import torch
from torch import Tensor

from parallel_runtime.comm import FakeCommunicator, GroupCoordinator, GroupSpec, open_coordinator
from parallel_runtime.errors import ArgumentError
from parallel_runtime.interop.moves import Box, TensorPlacement
from parallel_runtime.layers import (
    ExpertGroups,
    Experts,
    GatedFeedForward,
    MixtureOfExperts,
    ParallelColumns,
    ParallelHead,
    RowParallelLinear,
    VocabParallelEmbedding,
)
from parallel_runtime.models import CausalLM, ModelConfig, split_stages
from parallel_runtime.models.decoder import DecoderLayer
from parallel_runtime.terms import Rank
from parallel_runtime.topology import Layout
from parallel_runtime.topology.shards import split_intermediate

__all__ = ["local_state", "model_placement"]


@final
class _Part(NamedTuple):
    """A part of one full tensor, as a view of the parameter that holds it."""

    name: str
    shape: tuple[int, ...]
    box: Box
    view: Tensor


def local_state(model: CausalLM) -> dict[str, Tensor]:
    """This rank's parameters by the names of ``full_state``, nothing copied: writing to them changes the model.

    Args:
        model: One rank's part of a model.

    Returns:
        Views. A tied head has no name of its own; the last stage holds it as ``"model.embed_tokens.weight"``.

    Raises:
        ArgumentError: The model is packed.
    """
    if any(parameter.is_mkldnn for parameter in model.parameters()):
        raise ArgumentError("packed weights cannot be written in place; call unpack() on the model first, and pack() afterwards")
    return {part.name: part.view for part in _model_parts(model)}


def model_placement(config: ModelConfig, layout: Layout, *, dtype: torch.dtype = torch.float32) -> dict[str, TensorPlacement]:
    """Which rank holds which part of every parameter when ``load_model`` splits a model over a layout.

    Args:
        config: Of the model.
        layout: Of the ranks; its stages hold layers of about equal weight, see ``split_stages``.
        dtype: Of the parameters.

    Returns:
        For ``reshard``. Worked out by building every rank's part without memory.

    Raises:
        ConfigError: The model cannot be split that far.
    """
    placement: dict[str, TensorPlacement] = {}
    stages = split_stages(config, num_stages=layout.pp)
    for rank in map(Rank, layout.ranks):
        tp, ep, etp = (_pretended(layout, rank, axis) for axis in ("tp", "ep", "etp"))
        experts = ExpertGroups(tp=tp, ep=ep, etp=etp) if config.mixture else None
        layers = stages[layout.coordinate(rank).pp]
        model = CausalLM(config, tp=tp, experts=experts, layers=layers, dtype=dtype, device=torch.device("meta"))
        for part in _model_parts(model):
            known = placement.get(part.name) or TensorPlacement(part.shape, dtype.itemsize, {})
            placement[part.name] = replace(known, boxes={**known.boxes, rank: part.box})
    return placement


def _pretended(layout: Layout, rank: Rank, axis: str) -> GroupCoordinator:
    ranks = layout.group_of(rank, axis)
    spec = GroupSpec(name=axis, key=axis, ranks=ranks, rank=rank)
    return open_coordinator(spec, FakeCommunicator(spec.rank_in_group, len(ranks)))


def _model_parts(model: CausalLM) -> Iterator[_Part]:
    embedding, head = "model.embed_tokens.weight", "lm_head.weight"
    if model.embed_tokens is not None:
        yield _rows(embedding, model.embed_tokens)
    for number, layer in zip(model.layers, model.decoder, strict=True):
        assert isinstance(layer, DecoderLayer)
        yield from _layer_parts(f"model.layers.{number}.", layer)
    if model.norm is not None:
        yield _whole("model.norm.weight", model.norm.weight)
    if model.lm_head is not None and not (model.config.tie_word_embeddings and model.is_first_stage):
        yield _rows(embedding if model.config.tie_word_embeddings else head, model.lm_head)


def _layer_parts(prefix: str, layer: DecoderLayer) -> Iterator[_Part]:
    attention = layer.self_attn
    yield _whole(f"{prefix}input_layernorm.weight", layer.input_layernorm.weight)
    yield _whole(f"{prefix}post_attention_layernorm.weight", layer.post_attention_layernorm.weight)
    yield from _columns(f"{prefix}self_attn.", attention.qkv_proj)
    yield from _inputs(f"{prefix}self_attn.o_proj.", attention.o_proj)
    for name, norm in (("q_norm", attention.q_norm), ("k_norm", attention.k_norm)):
        if norm is not None:
            yield _whole(f"{prefix}self_attn.{name}.weight", norm.weight)
    if isinstance(layer.mlp, MixtureOfExperts):
        yield from _mixture_parts(f"{prefix}mlp.", layer.mlp)
    else:
        yield from _feed_forward_parts(f"{prefix}mlp.", layer.mlp)


def _feed_forward_parts(prefix: str, ffn: GatedFeedForward) -> Iterator[_Part]:
    yield from _columns(prefix, ffn.gate_up_proj)
    yield from _inputs(f"{prefix}down_proj.", ffn.down_proj)


def _mixture_parts(prefix: str, moe: MixtureOfExperts) -> Iterator[_Part]:
    yield _whole(f"{prefix}gate.weight", moe.router.weight)
    yield from _expert_parts(f"{prefix}experts.", moe.experts)
    if moe.shared is not None:
        yield from _feed_forward_parts(f"{prefix}shared_expert.", moe.shared.ffn)
        if moe.shared.gate is not None:
            yield _whole(f"{prefix}shared_expert_gate.weight", moe.shared.gate)


def _expert_parts(prefix: str, experts: Experts) -> Iterator[_Part]:
    size, hidden = experts.intermediate_size, experts.down.shape[1]
    columns = split_intermediate(size, parts=experts.etp.world_size, axis="etp")[experts.etp.rank_in_group]
    every = range(hidden)
    for place, number in enumerate(experts.own):
        gate, up = experts.gate_up.detach()[place].chunk(2)
        yield _Part(f"{prefix}{number}.gate_proj.weight", (size, hidden), (columns, every), gate)
        yield _Part(f"{prefix}{number}.up_proj.weight", (size, hidden), (columns, every), up)
        yield _Part(f"{prefix}{number}.down_proj.weight", (hidden, size), (every, columns), experts.down.detach()[place])


def _whole(name: str, parameter: Tensor) -> _Part:
    shape = tuple(parameter.shape)
    return _Part(name, shape, tuple(map(range, shape)), parameter.detach())


def _rows(name: str, vocabulary: VocabParallelEmbedding | ParallelHead) -> _Part:
    hidden = vocabulary.weight.shape[1]
    return _Part(name, (vocabulary.vocab_size, hidden), (vocabulary.own, range(hidden)), vocabulary.weight.detach())


def _columns(prefix: str, layer: ParallelColumns) -> Iterator[_Part]:
    for kind, parameter in layer.named_parameters(recurse=False):
        others = tuple(parameter.shape[1:])
        for piece, view in zip(layer.pieces, torch.split(parameter.detach(), layer.local_sizes), strict=True):
            box = (piece.shards[layer.tp.rank_in_group], *map(range, others))
            yield _Part(f"{prefix}{piece.name}.{kind}", (piece.size, *others), box, view)


def _inputs(prefix: str, layer: RowParallelLinear) -> Iterator[_Part]:
    outputs = layer.weight.shape[0]
    box = (range(outputs), layer.shards[layer.tp.rank_in_group])
    yield _Part(f"{prefix}weight", (outputs, layer.in_features), box, layer.weight.detach())
    if layer.bias is not None:
        yield _whole(f"{prefix}bias", layer.bias)
