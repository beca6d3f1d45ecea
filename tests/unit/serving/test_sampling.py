"""Drawing tokens: the right distribution, the right candidates, and the same tokens from the same integers."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from parallel_runtime.serving.sampling import mix_seed, sample_token
from parallel_runtime.serving.sampling_params import SamplingParams

LOGITS = torch.tensor([2.0, 1.0, 0.0, -1.0, -torch.inf])


def draw(sampling: SamplingParams, count: int = 4000, logits: torch.Tensor = LOGITS) -> torch.Tensor:
    tokens = [sample_token(logits, sampling, seed=5, position=position) for position in range(count)]
    return torch.bincount(torch.tensor(tokens), minlength=len(logits)) / count


def test_frequencies_follow_the_softmax_at_the_temperature() -> None:
    for temperature in (0.5, 1.0, 2.0):
        expected = (LOGITS / temperature).softmax(-1)
        assert torch.allclose(draw(SamplingParams(temperature=temperature)), expected, atol=0.03)


def test_top_k_keeps_the_most_likely() -> None:
    expected = LOGITS[:2].softmax(-1)
    frequencies = draw(SamplingParams(temperature=1.0, top_k=2))
    assert torch.allclose(frequencies[:2], expected, atol=0.03)
    assert frequencies[2:].sum() == 0
    assert draw(SamplingParams(temperature=1.0, top_k=50), 100).sum() == 1


def test_top_p_keeps_the_fewest_that_reach_it() -> None:
    probabilities = LOGITS.softmax(-1)  # 0.64 0.24 0.09 0.03 0
    for top_p, kept in ((0.5, 1), (0.64, 1), (0.65, 2), (0.9, 3), (1.0, 4)):
        frequencies = draw(SamplingParams(temperature=1.0, top_p=top_p), 1500)
        assert (frequencies > 0).sum() == kept, top_p
        assert torch.allclose(frequencies[:kept], probabilities[:kept] / probabilities[:kept].sum(), atol=0.05)


def test_extreme_values_keep_the_most_likely() -> None:
    logits = torch.tensor([0.0, 3e4, 5e4, -torch.inf])
    for sampling in (
        SamplingParams(temperature=1e-6),
        SamplingParams(temperature=1.0, top_p=1e-300),
        SamplingParams(temperature=1.0, top_p=5e-324),
    ):
        assert draw(sampling, 50, logits).tolist() == [0, 0, 1, 0], sampling
    frequencies = draw(SamplingParams(temperature=1e308), 1500)  # all equal, but what is impossible
    assert torch.allclose(frequencies, torch.tensor([0.25, 0.25, 0.25, 0.25, 0]), atol=0.05)


def test_equal_integers_give_equal_tokens_and_torch_is_left_alone() -> None:
    logits = torch.randn(1000, generator=torch.Generator().manual_seed(1))
    sampling = SamplingParams(temperature=1.0)
    before = torch.get_rng_state()
    first = [sample_token(logits, sampling, seed=3, position=position) for position in range(20)]
    torch.rand(3)
    torch.set_rng_state(before)
    assert first == [sample_token(logits, sampling, seed=3, position=position) for position in range(20)]
    assert first != [sample_token(logits, sampling, seed=4, position=position) for position in range(20)]
    assert torch.equal(torch.get_rng_state(), before)


def test_rounding_does_not_change_the_choice() -> None:
    logits = torch.randn(1000, generator=torch.Generator().manual_seed(1))
    nearly = logits + 1e-6 * torch.randn(1000, generator=torch.Generator().manual_seed(2))
    sampling = SamplingParams(temperature=0.8, top_p=0.9)
    for position in range(30):
        assert sample_token(logits, sampling, seed=1, position=position) == sample_token(
            nearly, sampling, seed=1, position=position
        )


@given(st.lists(st.integers(0, 2**63 - 1), min_size=1, max_size=4), st.lists(st.integers(0, 2**63 - 1), min_size=1, max_size=4))
def test_seeds_are_63_bits_and_differ(parts: list[int], others: list[int]) -> None:
    assert 0 <= mix_seed(*parts) < 2**63
    assert (mix_seed(*parts) == mix_seed(*others)) == (parts == others)


def test_order_matters_and_neighbours_are_unrelated() -> None:
    assert mix_seed(1, 2) != mix_seed(2, 1)
    bits = [bin(mix_seed(n) ^ mix_seed(n + 1)).count("1") for n in range(50)]
    assert min(bits) > 15
    assert max(bits) < 48
