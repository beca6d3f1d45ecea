"""The layers of a dense model as one loop of tensor operations, for steps of a few tokens.

Between matrix products of a few rows, calls of modules and look-ups of their parameters cost as much as the operations. This loop
does what ``DecoderLayer`` does, operation by operation, so that both give equal bits, and calls no module; hooks are not called.

Legend: T tokens of a step with padding, D hidden size, F local part of the intermediate size; of this rank: H query heads, K
key/value heads; d size of a head.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor, nn
from torch.nn import functional

from parallel_runtime.comm import GroupCoordinator
from parallel_runtime.errors import ArgumentError
from parallel_runtime.layers.attention import Attention
from parallel_runtime.layers.feed_forward import GatedFeedForward
from parallel_runtime.layers.norm import RMSNorm
from parallel_runtime.layers.packing import add_linear, apply_linear, pad_rows
from parallel_runtime.layers.rotary import RotaryAngles, rotate
from parallel_runtime.models.decoder import DecoderLayer

__all__ = ["LeanLayers"]


@final
class LeanLayers:
    """The layers of one stage.

    Args:
        layers: In order, none with experts. Borrowed.
        norm: What follows the last one; ``None`` where the stage is not the last.
        tp: Group they are split over. Borrowed.

    Raises:
        ArgumentError: A layer has experts.
    """

    def __init__(self, layers: Sequence[DecoderLayer], norm: RMSNorm | None, tp: GroupCoordinator) -> None:
        norms = [*(layer.input_layernorm for layer in layers[1:]), norm]
        self._layers = tuple(_lean(layer, following) for layer, following in zip(layers, norms, strict=True))
        heads = layers[0].self_attn.qkv_proj.heads
        self._num_query, self._num_kv = len(heads.query), len(heads.kv)
        self._tp = None if tp.world_size == 1 else tp

    def __call__(self, hidden_TD: Tensor, normed_TD: Tensor, angles: RotaryAngles, attention: Attention) -> Tensor:
        """Apply the layers. No gradients.

        Args:
            hidden_TD: ``(T, D)``, equal on every member; rows beyond those that ``angles`` has are padding.
            normed_TD: Its norm by the ``input_layernorm`` of the first layer.
            angles: Of the tokens' positions.
            attention: The step; it sees no padding.

        Returns:
            ``(T, D)``: the norm of the hidden states behind the last layer, or these where no norm follows.

        Collective: two sums of ``(T, D)`` for each layer; all members, same order.
        """
        H, K, (count, _, d) = self._num_query, self._num_kv, angles.cos.shape
        num_padding = hidden_TD.shape[0] - count
        for index, layer in enumerate(self._layers):
            heads = layer.qkv.apply(normed_TD).view(-1, H + 2 * K, d)
            if num_padding:
                heads = heads[:count]
            turning, v_TKd = heads.split_with_sizes((H + K, K), 1)
            if layer.q_norm is not None and layer.k_norm is not None:
                turning = torch.cat((layer.q_norm.by_length(turning[:, :H]), layer.k_norm.by_length(turning[:, H:])), dim=1)
            q_THd, k_TKd = rotate(turning, angles).split_with_sizes((H, K), 1)
            attended = attention.attend(index, q_THd, k_TKd, v_TKd).reshape(count, H * d)
            if num_padding:
                attended = pad_rows(attended, num_padding)
            hidden_TD = layer.out.add_to(hidden_TD, attended, self._tp)
            gate_TF, up_TF = layer.gate_up.apply(layer.inner_norm.by_length(hidden_TD)).chunk(2, -1)
            hidden_TD = layer.down.add_to(hidden_TD, functional.silu(gate_TF) * up_TF, self._tp)
            normed_TD = hidden_TD if layer.following is None else layer.following.by_length(hidden_TD)
        return normed_TD


@final
class _Linear:
    """A linear layer's parameters, in the module's own dict: what is loaded, packed or unpacked later is seen at once."""

    __slots__ = ("_parameters",)

    def __init__(self, layer: nn.Module) -> None:
        self._parameters = layer._parameters

    def apply(self, x: Tensor) -> Tensor:
        parameters = self._parameters
        return apply_linear(x, parameters["weight"], parameters.get("bias"))  # type: ignore[arg-type]  # it has a weight

    def add_to(self, residual_TD: Tensor, x: Tensor, tp: GroupCoordinator | None) -> Tensor:
        weight, bias_D = self._parameters["weight"], self._parameters.get("bias")
        if tp is None:
            return add_linear(residual_TD, x, weight, bias_D)  # type: ignore[arg-type]  # it has a weight
        sum_TD = tp.all_reduce_(apply_linear(x, weight))  # type: ignore[arg-type]  # it has a weight
        return residual_TD + (sum_TD if bias_D is None else sum_TD + bias_D)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class _Layer:
    qkv: _Linear
    q_norm: RMSNorm | None
    k_norm: RMSNorm | None
    out: _Linear
    inner_norm: RMSNorm
    gate_up: _Linear
    down: _Linear
    following: RMSNorm | None


def _lean(layer: DecoderLayer, following: RMSNorm | None) -> _Layer:
    attention, mlp = layer.self_attn, layer.mlp
    if not isinstance(mlp, GatedFeedForward):
        raise ArgumentError("a layer with experts has no lean form; call its module")
    return _Layer(
        qkv=_Linear(attention.qkv_proj),
        q_norm=attention.q_norm,
        k_norm=attention.k_norm,
        out=_Linear(attention.o_proj),
        inner_norm=layer.post_attention_layernorm,
        gate_up=_Linear(mlp.gate_up_proj),
        down=_Linear(mlp.down_proj),
        following=following,
    )
