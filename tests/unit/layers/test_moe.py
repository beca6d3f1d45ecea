"""Router, experts and their mixture: equal to a plain loop over tokens, whoever holds tokens and experts."""

from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from parallel_runtime.config import ParallelConfig
from parallel_runtime.context import ParallelContext
from parallel_runtime.errors import ArgumentError, ConfigError
from parallel_runtime.launch import run_threads
from parallel_runtime.layers import (
    ExpertGroups,
    Experts,
    GatedFeedForward,
    MixtureOfExperts,
    Router,
    RowParallelLinear,
    SharedExpert,
)
from tests.unit.layers.ranks import alone, sizes_of

pytestmark = pytest.mark.timeout(60)

D, E, K, F = 6, 8, 3, 5

LAYOUTS = (
    ParallelConfig(),
    ParallelConfig(tp=2, etp=1),
    ParallelConfig(tp=2),
    ParallelConfig(tp=2, ep=2),
    ParallelConfig(tp=4, ep=2, etp=2),
    ParallelConfig(tp=4, ep=2, etp=1),
    ParallelConfig(dp=2, ep=2),
    ParallelConfig(dp=3, etp=3),
    ParallelConfig(tp=2, dp=2, ep=2),
    ParallelConfig(tp=2, dp=2, ep=4),
    ParallelConfig(tp=2, dp=3, etp=3, ep=2),
    ParallelConfig(tp=2, dp=2, ep=2, order=("dp", "tp", "cp", "pp")),
)


@dataclass
class Weights:
    """A whole mixture, and what it says about tokens, computed one token and one expert at a time."""

    normalize: bool = True
    seed: int = 0
    router: Tensor = field(init=False)
    experts: list[tuple[Tensor, Tensor, Tensor]] = field(init=False)
    shared: tuple[Tensor, Tensor, Tensor] = field(init=False)
    gate: Tensor = field(init=False)

    def __post_init__(self) -> None:
        generator = torch.Generator().manual_seed(self.seed)

        def matrix(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator)

        self.router = matrix(E, D)
        self.experts = [(matrix(F, D), matrix(F, D), matrix(D, F)) for _ in range(E)]
        self.shared = (matrix(F, D), matrix(F, D), matrix(D, F))
        self.gate = matrix(1, D)

    def routed(self, x_TD: Tensor) -> Tensor:
        rows = []
        for x_D in x_TD:
            scores = (self.router @ x_D).softmax(-1)
            chosen = sorted(range(E), key=lambda expert: (-float(scores[expert]), expert))[:K]
            total = sum(float(scores[expert]) for expert in chosen) if self.normalize else 1.0
            rows.append(sum(float(scores[expert]) / total * answer(self.experts[expert], x_D) for expert in chosen))
        return torch.stack(rows) if rows else torch.zeros(0, D)  # type: ignore[arg-type]  # sums of tensors

    def shared_part(self, x_TD: Tensor) -> Tensor:
        return (x_TD @ self.gate.T).sigmoid() * answer(self.shared, x_TD)


def answer(expert: tuple[Tensor, Tensor, Tensor], x: Tensor) -> Tensor:
    gate, up, down = expert
    return (functional.silu(x @ gate.T) * (x @ up.T)) @ down.T


def build(ctx: ParallelContext, weights: Weights) -> MixtureOfExperts:
    router = Router(D, E, num_per_token=K, normalize=weights.normalize)
    router.load(weights.router)
    experts = Experts(D, E, intermediate_size=F, ep=ctx.ep, etp=ctx.etp)
    experts.load([weights.experts[expert] for expert in experts.own])
    shared = SharedExpert(GatedFeedForward(D, F, tp=ctx.tp), gate_size=D)
    shared.ffn.gate_up_proj.load(weights.shared[:2])
    shared.ffn.down_proj.load(weights.shared[2])
    shared.load_gate(weights.gate)
    return MixtureOfExperts(router, experts, groups=ExpertGroups(tp=ctx.tp, ep=ctx.ep, etp=ctx.etp), shared=shared)


def tokens_of(dp: int, *, counts: tuple[int, ...] = (5, 0, 2)) -> Tensor:
    return torch.randn(counts[dp], D, generator=torch.Generator().manual_seed(dp))


def check(parallel: ParallelConfig, weights: Weights, counts: tuple[int, ...]) -> None:
    def run(ctx: ParallelContext) -> None:
        x_TD = tokens_of(ctx.coordinate.dp, counts=counts)
        before = x_TD.clone()
        with torch.inference_mode():
            found = build(ctx, weights)(x_TD)
        torch.testing.assert_close(found, weights.routed(x_TD) + weights.shared_part(x_TD), atol=1e-5, rtol=1e-4)
        assert torch.equal(x_TD, before)

    run_threads(run, parallel)


@pytest.mark.parametrize("parallel", LAYOUTS, ids=sizes_of)
def test_a_mixture_equals_the_plain_loop(parallel: ParallelConfig) -> None:
    for normalize in (True, False):
        check(parallel, Weights(normalize=normalize), (5, 0, 2))


@pytest.mark.parametrize("parallel", LAYOUTS, ids=sizes_of)
def test_nothing_is_dropped_when_all_tokens_want_the_same_experts(parallel: ParallelConfig) -> None:
    weights = Weights()
    weights.router.zero_()  # all experts are equally likely, so the first ones win every token
    check(parallel, weights, (40, 1, 17))


@pytest.mark.parametrize("parallel", LAYOUTS, ids=sizes_of)
def test_no_tokens_anywhere_are_a_step_as_well(parallel: ParallelConfig) -> None:
    check(parallel, Weights(), (0, 0, 0))


@pytest.mark.parametrize("parallel", LAYOUTS, ids=sizes_of)
def test_full_state_is_what_was_loaded(parallel: ParallelConfig) -> None:
    weights = Weights()

    def run(ctx: ParallelContext) -> None:
        state = build(ctx, weights).experts.full_state()
        assert len(state) == 3 * E
        for expert, (gate, up, down) in enumerate(weights.experts):
            assert torch.equal(state[f"{expert}.gate_proj.weight"], gate)
            assert torch.equal(state[f"{expert}.up_proj.weight"], up)
            assert torch.equal(state[f"{expert}.down_proj.weight"], down)

    run_threads(run, parallel)


def test_ranks_hold_their_experts_and_columns_only() -> None:
    def run(ctx: ParallelContext) -> tuple[range, int]:
        experts = Experts(D, E, intermediate_size=F, ep=ctx.ep, etp=ctx.etp)
        return experts.own, experts.down.shape[2]

    assert run_threads(run, ParallelConfig(tp=4, ep=2)) == [
        (range(4), 3),
        (range(4), 2),
        (range(4, 8), 3),
        (range(4, 8), 2),
    ]


def test_equally_likely_experts_are_chosen_by_number() -> None:
    router = Router(D, E, num_per_token=K, normalize=True)
    weight = torch.zeros(E, D)
    weight[5], weight[2] = 1.0, 1.0
    router.load(weight)
    routing = router(torch.stack([torch.ones(D), torch.zeros(D), -torch.ones(D)]))
    assert routing.experts.tolist() == [[2, 5, 0], [0, 1, 2], [0, 1, 3]]
    torch.testing.assert_close(routing.weights.sum(-1), torch.ones(3))
    assert Router(D, E, num_per_token=K, normalize=False)(torch.zeros(1, D)).weights.dtype == torch.float32


def test_equal_choices_are_equal_on_every_rank_and_in_every_batch() -> None:
    router = Router(D, 128, num_per_token=K, normalize=True)
    router.load(torch.ones(128, D))
    for count in (1, 2, 33, 500):
        assert router(torch.ones(count, D)).experts.tolist() == [[0, 1, 2]] * count


def test_gradients_pass_on_one_rank_and_are_refused_on_several() -> None:
    weights = Weights()

    def run(ctx: ParallelContext) -> None:
        moe, x_TD = build(ctx, weights), tokens_of(0)
        if ctx.world_size == 1:
            moe(x_TD).sum().backward()
            assert moe.router.weight.grad is not None
            assert all(float(grad.abs().sum()) for parameter in moe.parameters() if (grad := parameter.grad) is not None)
        else:
            with pytest.raises(ArgumentError, match="experts carry no gradients between ranks"):
                moe(x_TD)

    for parallel in (ParallelConfig(), ParallelConfig(tp=2), ParallelConfig(dp=2, ep=2)):
        run_threads(run, parallel)


def test_wrong_numbers_are_refused() -> None:
    one = alone()
    for count in (0, 9):
        with pytest.raises(ArgumentError, match=f"num_per_token={count} of 8 experts; choose 1 to 8"):
            Router(D, E, num_per_token=count, normalize=True)
    experts = Experts(D, E, intermediate_size=F, ep=one, etp=one)
    with pytest.raises(ArgumentError, match=r"7 experts were given to load; this rank holds 8: range\(0, 8\)"):
        experts.load(Weights().experts[:7])
    wrong = [(gate, up.T, down) for gate, up, down in Weights().experts]
    with pytest.raises(ArgumentError, match=r"experts\.0\.up_proj\.weight has shape \(6, 5\); the full tensor .* \(5, 6\)"):
        experts.load(wrong)
    with pytest.raises(ArgumentError, match=r"gate\.weight has shape \(8, 7\)"):
        Router(D, E, num_per_token=K, normalize=True).load(torch.zeros(E, D + 1))
    ffn = GatedFeedForward(D, F, tp=one)
    with pytest.raises(ArgumentError, match="no gate to load"):
        SharedExpert(ffn).load_gate(torch.zeros(1, D))
    with pytest.raises(ArgumentError, match=r"shared_expert_gate\.weight has shape \(2, 6\)"):
        SharedExpert(ffn, gate_size=D).load_gate(torch.zeros(2, D))


def test_experts_that_do_not_divide_are_refused() -> None:
    def run(ctx: ParallelContext) -> None:
        with pytest.raises(ConfigError, match="ep=3 does not split 8 experts evenly"):
            Experts(D, E, intermediate_size=F, ep=ctx.ep, etp=ctx.etp)

    run_threads(run, ParallelConfig(dp=3, ep=3))


def test_a_shared_expert_without_a_gate() -> None:
    weights = Weights()
    ffn = GatedFeedForward(D, F, tp=alone())
    ffn.gate_up_proj.load(weights.shared[:2])
    ffn.down_proj.load(weights.shared[2])
    x_TD = tokens_of(0)
    torch.testing.assert_close(SharedExpert(ffn).partial(x_TD), answer(weights.shared, x_TD))
    torch.testing.assert_close(ffn(x_TD), answer(weights.shared, x_TD))


def test_a_partial_leaves_the_bias_out() -> None:
    layer = RowParallelLinear(4, 2, tp=alone(), bias=True)
    layer.load(torch.ones(2, 4), torch.full((2,), 7.0))
    assert layer.partial(torch.ones(1, 4)).tolist() == [[4.0, 4.0]]
    assert layer(torch.ones(1, 4)).tolist() == [[11.0, 11.0]]
