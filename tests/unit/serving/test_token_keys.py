"""Keys sort like their tokens; noise is Gumbel's, and that of an id alone; seeds of neighbours are unrelated."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from parallel_runtime.serving.token_keys import LOWEST_KEY, gumbel_noise, key_ids, key_scores, make_keys, mix_seed, top_keys

INTEGERS = st.lists(st.integers(0, 2**63 - 1), min_size=1, max_size=4)
SCORES = st.lists(st.floats(width=32, allow_nan=False) | st.sampled_from([0.0, -0.0, 1.0, -1.0]), min_size=1, max_size=12)


@given(SCORES, st.integers(0, 2**32 - 20))
def test_greater_keys_are_likelier_tokens_and_of_equals_the_lower_id(scores: list[float], first_id: int) -> None:
    keys = make_keys(torch.tensor(scores), torch.arange(first_id, first_id + len(scores)))
    order = sorted(range(len(scores)), key=lambda index: (-scores[index], index))
    assert keys.argsort(descending=True).tolist() == order
    assert (key_ids(keys) - first_id).tolist() == list(range(len(scores)))
    assert key_scores(keys).tolist() == scores
    assert keys.min() > LOWEST_KEY


@given(st.lists(SCORES, min_size=1, max_size=3), st.integers(0, 14), st.integers(0, 9))
def test_the_greatest_keys_are_found_without_making_all(rows: list[list[float]], count: int, first_id: int) -> None:
    width = min(map(len, rows))
    scores = torch.tensor([row[:width] for row in rows])
    every = make_keys(scores, torch.arange(first_id, first_id + width).expand(len(rows), -1)).sort(descending=True).values
    expected = torch.nn.functional.pad(every, (0, max(0, count - width)), value=LOWEST_KEY)[:, :count]
    assert torch.equal(top_keys(scores, count=count, first_id=first_id), expected)


def test_noise_has_gumbels_distribution() -> None:
    noise = gumbel_noise(mix_seed(3), torch.arange(200_000)).double()
    assert abs(noise.mean() - 0.5772) < 0.01
    assert abs(noise.var() - 1.6449) < 0.03
    quantiles = torch.tensor([0.001, 0.1, 0.5, 0.9, 0.999], dtype=torch.float64)
    torch.testing.assert_close(noise.quantile(quantiles), -(-quantiles.log()).log(), atol=0.15, rtol=0.02)
    pairs = torch.stack((noise[:-1], noise[1:]))
    assert abs(pairs.corrcoef()[0, 1]) < 0.01


@given(st.integers(0, 2**63 - 1), st.lists(st.integers(0, 2**20), min_size=1, max_size=9))
def test_noise_of_an_id_depends_on_no_other(seed: int, ids: list[int]) -> None:
    together = gumbel_noise(seed, torch.tensor(ids))
    assert together.isfinite().all()
    for index, token in enumerate(ids):
        torch.testing.assert_close(gumbel_noise(seed, torch.tensor([token]))[0], together[index], rtol=1e-6, atol=1e-6)


@given(INTEGERS, INTEGERS)
def test_seeds_are_63_bits_and_differ(parts: list[int], others: list[int]) -> None:
    assert 0 <= mix_seed(*parts) < 2**63
    assert (mix_seed(*parts) == mix_seed(*others)) == (parts == others)


def test_order_matters_and_neighbours_are_unrelated() -> None:
    assert mix_seed(1, 2) != mix_seed(2, 1)
    bits = [bin(mix_seed(n) ^ mix_seed(n + 1)).count("1") for n in range(50)]
    assert min(bits) > 15
    assert max(bits) < 48
