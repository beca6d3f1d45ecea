"""The router of a mixture, and the experts that one rank holds.

Legend: T tokens, k experts per token, N rows (a token once for each of its experts), D hidden size, E experts of a layer, F this
rank's part of an expert's intermediate size.
"""

from collections.abc import Sequence
from typing import NamedTuple, final

import torch
from torch import Tensor, nn
from torch.nn import functional

from parallel_runtime.comm import GroupCoordinator
from parallel_runtime.errors import ArgumentError
from parallel_runtime.layers.sources import TensorSource, check_shape, span
from parallel_runtime.topology.shards import Uneven, split_experts, split_intermediate

__all__ = ["Experts", "Router", "Routing"]


@final
class Routing(NamedTuple):
    """Where tokens go.

    Attributes:
        experts: ``(T, k)`` int64, the best expert of each token first.
        weights: ``(T, k)`` of the dtype of the tokens, what each expert's answer is multiplied by.
    """

    experts: Tensor
    weights: Tensor


@final
class Router(nn.Module):
    """Chooses ``k`` experts for each token: the largest of a softmax over all. Every rank holds all of it.

    Uninitialised until ``load``.

    Args:
        hidden_size: D.
        num_experts: E.
        num_per_token: k.
        normalize: Whether the weights of the chosen ones are scaled to add up to 1.
        dtype: Of the weight.
        device: Of the weight.

    Raises:
        ArgumentError: ``num_per_token`` is not between 1 and ``num_experts``.
    """

    def __init__(
        self,
        hidden_size: int,
        num_experts: int,
        *,
        num_per_token: int,
        normalize: bool,
        dtype: torch.dtype | None = None,
        device: torch.device | None = None,
    ) -> None:
        super().__init__()
        if not 1 <= num_per_token <= num_experts:
            raise ArgumentError(f"num_per_token={num_per_token} of {num_experts} experts; choose 1 to {num_experts}")
        self.num_per_token = num_per_token
        self.normalize = normalize
        self.weight = nn.Parameter(torch.empty(num_experts, hidden_size, dtype=dtype, device=device))

    def forward(self, x_TD: Tensor) -> Routing:
        """Choose.

        Args:
            x_TD: ``(T, D)``.

        Returns:
            The choice. Among equally likely experts the one with the lowest number is the better one.
        """
        scores_TE = functional.linear(x_TD, self.weight).softmax(dim=-1, dtype=torch.float32)
        ranked = scores_TE.sort(dim=-1, descending=True, stable=True)  # topk leaves open which of equals it takes
        experts_Tk, weights_Tk = ranked.indices[:, : self.num_per_token], ranked.values[:, : self.num_per_token]
        if self.normalize:
            weights_Tk = weights_Tk / weights_Tk.sum(dim=-1, keepdim=True)
        return Routing(experts=experts_Tk, weights=weights_Tk.to(x_TD.dtype))

    @torch.no_grad()
    def load(self, weight: TensorSource) -> None:
        """Take the weight ``(E, D)``.

        Raises:
            ArgumentError: It has another shape.
        """
        check_shape("gate.weight", weight, tuple(self.weight.shape))
        self.weight.copy_(weight[:])

    def full_state(self) -> dict[str, Tensor]:
        """The parameter, ``"weight"``; every rank holds it already."""
        return {"weight": self.weight.detach().clone()}


@final
class Experts(nn.Module):
    """Gated feed-forward parts, of which this rank holds some, with some of their columns. Uninitialised until ``load``.

    Args:
        hidden_size: D.
        num_experts: E; a multiple of the size of ``ep``.
        intermediate_size: Of one full expert.
        ep: Group the experts are spread over. Borrowed.
        etp: Group the columns of each expert are spread over. Borrowed.
        uneven: ``"refuse"`` wants slices of equal size.
        dtype: Of the parameters.
        device: Of the parameters.

    Attributes:
        num_experts: E.
        shards: The experts of every member of ``ep``.
        own: Those of this one.
        gate_up: ``(len(own), 2 F, D)``, the rows of gate before those of up.
        down: ``(len(own), D, F)``.

    Raises:
        ConfigError: The experts do not divide, a slice would be empty, or slices would differ where that is refused.
    """

    def __init__(
        self,
        hidden_size: int,
        num_experts: int,
        *,
        intermediate_size: int,
        ep: GroupCoordinator,
        etp: GroupCoordinator,
        uneven: Uneven = "allow",
        dtype: torch.dtype | None = None,
        device: torch.device | None = None,
    ) -> None:
        super().__init__()
        self.ep, self.etp = ep, etp
        self.num_experts, self.intermediate_size = num_experts, intermediate_size
        self.shards = split_experts(num_experts, ep=ep.world_size)
        self.own = self.shards[ep.rank_in_group]
        self._columns = split_intermediate(intermediate_size, parts=etp.world_size, uneven=uneven, axis="etp")
        width = len(self._columns[etp.rank_in_group])
        self.gate_up = nn.Parameter(torch.empty(len(self.own), 2 * width, hidden_size, dtype=dtype, device=device))
        self.down = nn.Parameter(torch.empty(len(self.own), hidden_size, width, dtype=dtype, device=device))

    def forward(self, rows_ND: Tensor, counts: Sequence[int]) -> Tensor:
        """Apply each expert to its rows.

        Args:
            rows_ND: The rows of the first local expert, then those of the next, and so on.
            counts: Rows of each local expert, 0 included.

        Returns:
            ``(N, D)``, this rank's summand: its columns' part of every row.
        """
        out_ND = torch.empty_like(rows_ND)
        first = 0
        for expert, count in enumerate(counts):
            if not count:
                continue
            rows = slice(first, first + count)
            gate_NF, up_NF = functional.linear(rows_ND[rows], self.gate_up[expert]).chunk(2, dim=-1)
            out_ND[rows] = functional.linear(functional.silu(gate_NF) * up_NF, self.down[expert])
            first = rows.stop
        return out_ND

    @torch.no_grad()
    def load(self, sources: Sequence[tuple[TensorSource, TensorSource, TensorSource]]) -> None:
        """Take this rank's columns out of its own experts.

        Args:
            sources: Full gate and up ``(intermediate size, D)`` and down ``(D, intermediate size)`` of each of ``own``, in order.

        Raises:
            ArgumentError: A shape is wrong, or there are too few or too many.
        """
        if len(sources) != len(self.own):
            raise ArgumentError(f"{len(sources)} experts were given to load; this rank holds {len(self.own)}: {self.own}")
        columns = span(self._columns[self.etp.rank_in_group])
        inner, outer = (self.intermediate_size, self.down.shape[1]), (self.down.shape[1], self.intermediate_size)
        for place, (expert, (gate, up, down)) in enumerate(zip(self.own, sources, strict=True)):
            for kind, source, shape in (("gate", gate, inner), ("up", up, inner), ("down", down, outer)):
                check_shape(f"experts.{expert}.{kind}_proj.weight", source, shape)
            for target, source in zip(self.gate_up[place].chunk(2), (gate, up), strict=True):
                target.copy_(source[columns])
            self.down[place].copy_(down[:, columns])

    def full_state(self) -> dict[str, Tensor]:
        """The full parameters of every expert, equal on every rank.

        Returns:
            ``"<expert>.gate_proj.weight"`` and so on.

        Collective: three all_gathervs over ``etp``, then three all_gathers over ``ep``; all members, same order.
        """
        widths = [len(part) for part in self._columns]
        gate, up = self.gate_up.detach().chunk(2, dim=1)
        state: dict[str, Tensor] = {}
        for name, local, dim in (("gate_proj", gate, 1), ("up_proj", up, 1), ("down_proj", self.down.detach(), 2)):
            every = self.ep.all_gather(self.etp.all_gatherv(local.contiguous(), widths, dim=dim), dim=0)
            state |= {f"{expert}.{name}.weight": every[expert].clone() for expert in range(self.num_experts)}
        return state
