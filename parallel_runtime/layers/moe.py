"""A mixture of experts, spread over ranks that may hold different tokens. Nothing is ever dropped or padded.

Legend: T tokens, k experts per token, N = T k rows (a token once for each of its experts), D hidden size, E experts of the layer,
L experts of this rank.
"""

from typing import NamedTuple, final

import torch
from torch import Tensor, nn
from torch.nn import functional

from parallel_runtime.errors import ArgumentError
from parallel_runtime.layers.expert_groups import ExpertGroups
from parallel_runtime.layers.experts import Experts, Router, Routing
from parallel_runtime.layers.feed_forward import GatedFeedForward
from parallel_runtime.layers.regions import reduce_from_group
from parallel_runtime.layers.sources import TensorSource, check_shape

__all__ = ["MixtureOfExperts", "SharedExpert"]


@final
class SharedExpert(nn.Module):
    """A feed-forward part that every token visits, spread over ``tp``; with a gate, scaled by a number between 0 and 1.

    Args:
        ffn: The feed-forward part.
        gate_size: D, where there is a gate; ``None`` for none. Every rank holds all of it.

    Attributes:
        gate: ``(1, D)`` or ``None``. Uninitialised until ``load_gate``.
    """

    def __init__(self, ffn: GatedFeedForward, *, gate_size: int | None = None) -> None:
        super().__init__()
        self.ffn = ffn
        like = ffn.down_proj.weight
        self.gate = None if gate_size is None else nn.Parameter(torch.empty(1, gate_size, dtype=like.dtype, device=like.device))

    def partial(self, x_TD: Tensor) -> Tensor:
        """This member's summand for every token; the sum over ``tp`` is the shared expert's answer, once.

        Args:
            x_TD: ``(T, D)``, equal on every member of ``tp``.
        """
        out_TD = self.ffn.partial(x_TD)
        return out_TD if self.gate is None else functional.linear(x_TD, self.gate).sigmoid() * out_TD

    @torch.no_grad()
    def load_gate(self, weight: TensorSource) -> None:
        """Take the gate's weight ``(1, D)``.

        Raises:
            ArgumentError: There is no gate, or the weight has another shape.
        """
        if self.gate is None:
            raise ArgumentError("this shared expert has no gate to load")
        check_shape("shared_expert_gate.weight", weight, tuple(self.gate.shape))
        self.gate.copy_(weight[:])


@final
class MixtureOfExperts(nn.Module):
    """Sends every token to the ``k`` experts its router chooses and adds up their weighted answers, and a shared expert's.

    Args:
        router: Chooses; equal on every rank.
        experts: Those of this rank.
        groups: Who holds what. The experts are spread over its ``ep`` and ``etp``.
        shared: Visited by every token, spread over ``tp``.
    """

    def __init__(self, router: Router, experts: Experts, *, groups: ExpertGroups, shared: SharedExpert | None = None) -> None:
        super().__init__()
        self.router = router
        self.experts = experts
        self.shared = shared
        self.groups = groups

    def forward(self, x_TD: Tensor) -> Tensor:
        """Apply the layer. Ranks of other data-parallel replicas may hold other tokens, any number of them, none included.

        Args:
            x_TD: ``(T, D)``, equal on every member of ``tp``.

        Returns:
            ``(T, D)``, equal on every member of ``tp``.

        Raises:
            ArgumentError: A gradient is wanted on several ranks; experts carry none between ranks.

        Collective: one all_reduce of ``(T, D)`` over ``tp``. Where ``groups.must_exchange``, before it over ``ep`` one all_gather
            of E counts and two all_to_allvs of rows; where ``groups.must_gather``, around these over ``etp`` one all_gather of a
            count, one all_gatherv and one reduce_scatterv. All members, same order, those without tokens included.
        """
        self._check_gradient(x_TD)
        share = self.groups.share(x_TD.shape[0])
        routed = self._gathered(x_TD[share.start : share.stop])
        if len(share) == x_TD.shape[0]:
            out_TD = routed
        else:
            out_TD = torch.zeros_like(x_TD)
            out_TD[share.start : share.stop] = routed
        if self.shared is not None:
            out_TD = out_TD + self.shared.partial(x_TD)
        return reduce_from_group(out_TD, self.groups.tp)

    def _gathered(self, x_TD: Tensor) -> Tensor:
        """The routed summand of this rank's share, with the columns of ``etp`` summed where its members gather their tokens."""
        if not self.groups.must_gather:
            return self._routed(x_TD)
        etp = self.groups.etp
        sizes: list[int] = etp.all_gather(torch.tensor([x_TD.shape[0]], device=x_TD.device)).tolist()
        partial = self._routed(etp.all_gatherv(x_TD, sizes))
        return etp.reduce_scatterv(partial, sizes)

    def _routed(self, x_TD: Tensor) -> Tensor:
        """The weighted answers of all experts in reach, this rank's columns of them."""
        routing: Routing = self.router(x_TD)
        rows = _Rows.of(routing, self.experts.num_experts)
        answers_ND = self._exchanged(x_TD, rows) if self.groups.must_exchange else self._local(x_TD, rows)
        answers_TkD = answers_ND.view(*routing.weights.shape, x_TD.shape[1])
        return (answers_TkD * routing.weights.unsqueeze(-1)).sum(dim=1)

    def _local(self, x_TD: Tensor, rows: "_Rows") -> Tensor:
        """Answers of this rank's experts; zero for the rows of others, which members of ``tp`` compute."""
        own = self.experts.own
        counts: list[int] = rows.counts.tolist()
        first, local = sum(counts[: own.start]), counts[own.start : own.stop]
        mine = rows.order[first : first + sum(local)]
        answers_ND = x_TD.new_zeros(len(rows.order), x_TD.shape[1])
        answers_ND[mine] = self.experts(x_TD[rows.token_of(mine)], local)
        return answers_ND

    def _exchanged(self, x_TD: Tensor, rows: "_Rows") -> Tensor:
        """Answers of all experts: rows go to the ranks of ``ep`` that hold them, and come back."""
        ep, own = self.groups.ep, self.experts.own
        counts_RE = ep.all_gather(rows.counts.unsqueeze(0))
        sent: list[int] = counts_RE[ep.rank_in_group].view(ep.world_size, -1).sum(dim=1).tolist()
        counts_RL = counts_RE[:, own.start : own.stop]
        received: list[int] = counts_RL.sum(dim=1).tolist()
        arrived_ND = ep.all_to_allv(x_TD[rows.token_of(rows.order)], sent, output_splits=received)
        local_N = torch.arange(len(own), device=x_TD.device).repeat(ep.world_size).repeat_interleave(counts_RL.flatten())
        by_expert_N = local_N.argsort(stable=True)
        computed_ND = torch.empty_like(arrived_ND)
        computed_ND[by_expert_N] = self.experts(arrived_ND[by_expert_N], counts_RL.sum(dim=0).tolist())
        answers_ND = torch.empty(len(rows.order), x_TD.shape[1], dtype=x_TD.dtype, device=x_TD.device)
        answers_ND[rows.order] = ep.all_to_allv(computed_ND, received, output_splits=sent)
        return answers_ND

    def _check_gradient(self, x_TD: Tensor) -> None:
        groups = self.groups
        is_alone = groups.tp.world_size == groups.ep.world_size == groups.etp.world_size == 1
        if torch.is_grad_enabled() and not is_alone and (x_TD.requires_grad or self.router.weight.requires_grad):
            raise ArgumentError("experts carry no gradients between ranks; run them under torch.inference_mode() or no_grad()")


class _Rows(NamedTuple):
    """The rows of some tokens, sorted by expert.

    Attributes:
        order: Which row, numbered ``token * k + choice``, stands where.
        counts: Rows of each expert.
        num_per_token: k.
    """

    order: Tensor
    counts: Tensor
    num_per_token: int

    @classmethod
    def of(cls, routing: Routing, num_experts: int) -> "_Rows":
        expert_N = routing.experts.flatten()
        counts_E = torch.bincount(expert_N, minlength=num_experts)
        return cls(expert_N.argsort(stable=True), counts_E, routing.experts.shape[1])

    def token_of(self, rows_N: Tensor) -> Tensor:
        return rows_N.div(self.num_per_token, rounding_mode="floor")
