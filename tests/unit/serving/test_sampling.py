"""Choosing tokens: what ``transformers`` leaves to draw from, on any number of ranks; log-probabilities as in plain torch."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from parallel_runtime.comm import GroupCoordinator
from parallel_runtime.serving.batch import Chunk
from parallel_runtime.serving.messages import Sampled
from parallel_runtime.serving.sampling import TokenSampler
from parallel_runtime.serving.sampling_params import SamplingParams
from parallel_runtime.serving.token_keys import gumbel_noise, mix_seed
from parallel_runtime.topology.shards import split_vocabulary
from tests.unit.layers.ranks import alone, on_ranks

V = 300  # more than a rank sends of its own accord
SEED = 5


def chunk(sampling: SamplingParams, *, name: str = "a", length: int = 7, history: Sequence[int] = (), num_new: int = 0) -> Chunk:
    return Chunk(
        request_id=name,
        arrival=3,
        start=length - 1,
        token_ids=(0,),
        blocks=(0,),
        is_sampled=True,
        sampling=sampling,
        num_new_tokens=num_new,
        history=tuple(history),
    )


def choose(chunks: Sequence[Chunk], logits: Tensor, tp: int = 1) -> Sampled:
    """What every one of ``tp`` ranks chooses; they agree."""
    shards = split_vocabulary(logits.shape[-1], parts=tp)

    def run(group: GroupCoordinator) -> Sampled:
        own = shards[group.rank_in_group]
        return TokenSampler(group, shards, base_seed=SEED).choose(chunks, logits[:, own.start : own.stop])

    results = [run(alone())] if tp == 1 else on_ranks(tp, run)
    assert all(result == results[0] for result in results)
    return results[0]


def reference_scores(item: Chunk, logits_V: Tensor) -> Tensor:
    """The scores that ``transformers`` draws from, in its order."""
    from transformers.generation import logits_process as theirs

    sampling = item.sampling
    history = torch.tensor([item.history], dtype=torch.int64)
    scores = logits_V.double().unsqueeze(0)
    if sampling.repetition_penalty != 1:
        scores = theirs.RepetitionPenaltyLogitsProcessor(sampling.repetition_penalty)(history, scores)
    for token in item.history[len(item.history) - item.num_new_tokens :]:
        scores[0, token] -= sampling.frequency_penalty
    for token in set(item.history[len(item.history) - item.num_new_tokens :]):
        scores[0, token] -= sampling.presence_penalty
    if item.num_new_tokens < sampling.min_new_tokens:
        scores[0, list(sampling.stop_token_ids)] = -torch.inf
    if sampling.is_greedy:
        return scores[0]
    steps: list[Any] = [theirs.TemperatureLogitsWarper(sampling.temperature)]
    if sampling.top_k is not None:
        steps.append(theirs.TopKLogitsWarper(sampling.top_k))
    if sampling.top_p < 1:
        steps.append(theirs.TopPLogitsWarper(sampling.top_p))
    if sampling.min_p > 0:
        steps.append(theirs.MinPLogitsWarper(sampling.min_p))
    for step in steps:
        scores = step(history, scores)
    return scores[0]


@st.composite
def chunks_of(draw: st.DrawFn) -> Chunk:
    unit = st.floats(0.05, 0.999)
    sampling = SamplingParams(
        temperature=draw(st.sampled_from([0.0, 0.3, 1.0, 4.0])),
        top_k=draw(st.none() | st.sampled_from([1, 2, 40, 127, 128, 129, 250, 2000])),
        top_p=draw(st.just(1.0) | unit),
        min_p=draw(st.just(0.0) | unit | st.just(1e-4)),
        repetition_penalty=draw(st.sampled_from([1.0, 1.0, 0.7, 1.5])),
        presence_penalty=draw(st.sampled_from([0.0, 0.0, 1.5, -2.0])),
        frequency_penalty=draw(st.sampled_from([0.0, 0.0, 0.5, -1.0])),
        seed=draw(st.none() | st.integers(0, 9)),
        logprobs=draw(st.none() | st.integers(0, 5)),
        min_new_tokens=draw(st.integers(0, 3)),
        stop_token_ids=draw(st.sampled_from([(), (1, 250)])),
    )
    history = draw(st.lists(st.integers(0, V - 1), min_size=1, max_size=8))
    num_new = draw(st.integers(0, len(history) - 1))
    return chunk(sampling, length=draw(st.integers(1, 99)), history=history, num_new=num_new)


@settings(max_examples=60)
@given(st.lists(chunks_of(), min_size=1, max_size=4), st.integers(0, 99), st.sampled_from([0.3, 3.0]), st.sampled_from([1, 2, 3]))
def test_tokens_are_drawn_from_what_transformers_leaves(items: list[Chunk], number: int, width: float, tp: int) -> None:
    """The same noise on its scores picks the same token, so both leave the same tokens with the same odds."""
    items = [chunk_named(item, str(index)) for index, item in enumerate(items)]
    logits = width * torch.randn(len(items), V, generator=torch.Generator().manual_seed(number))
    sampled = choose(items, logits, tp)
    for item, logits_V, token in zip(items, logits, sampled.token_ids, strict=True):
        scores = reference_scores(item, logits_V)
        if not item.sampling.is_greedy:
            seed = mix_seed(SEED, item.arrival) if item.sampling.seed is None else item.sampling.seed
            scores = scores + gumbel_noise(mix_seed(seed, item.length), torch.arange(V))
        assert scores[token] >= scores.max() - 1e-4  # one of two that rounding cannot tell apart
        check_logprobs(item, logits_V, token, sampled)


def chunk_named(item: Chunk, name: str) -> Chunk:
    return chunk(item.sampling, name=name, length=item.length, history=item.history, num_new=item.num_new_tokens)


def check_logprobs(item: Chunk, logits_V: Tensor, token: int, sampled: Sampled) -> None:
    told = sampled.logprobs.get(item.request_id)
    assert (told is None) == (item.sampling.logprobs is None)
    if told is not None:
        expected = logits_V.double().log_softmax(-1)
        assert told.logprob == pytest.approx(float(expected[token]), abs=1e-6)
        values, ids = expected.topk(item.sampling.logprobs or 0)
        assert [top[0] for top in told.top] == ids.tolist()
        assert [top[1] for top in told.top] == pytest.approx(values.tolist(), abs=1e-6)


@pytest.mark.parametrize("tp", [1, 2])
def test_equal_logits_are_cut_at_the_lower_ids_on_every_layout(tp: int) -> None:
    logits = torch.zeros(1, V)
    for sampling, num_kept in (
        (SamplingParams(temperature=1.0, top_k=3), 3),
        (SamplingParams(temperature=1.0, top_p=0.5), V // 2),
    ):
        tokens = {choose([chunk(sampling, length=length)], logits, tp).token_ids[0] for length in range(1, 60)}
        assert max(tokens) < num_kept
        assert len(tokens) >= min(num_kept, 10)


def test_frequencies_follow_the_softmax_at_the_temperature() -> None:
    logits = torch.tensor([[2.0, 1.0, 0.0, -1.0, -torch.inf]])
    for temperature, top_p in ((0.5, 1.0), (1.0, 1.0), (2.0, 0.9)):
        item = chunk(SamplingParams(temperature=temperature, top_p=top_p))
        expected = reference_scores(item, logits[0]).softmax(-1)
        items = [chunk(item.sampling, length=length) for length in range(1, 3001)]
        tokens = choose(items, logits.expand(3000, -1)).token_ids
        frequencies = torch.bincount(torch.tensor(tokens), minlength=5).double() / 3000
        assert torch.allclose(frequencies, expected, atol=0.03)


def test_extreme_values_keep_the_most_likely() -> None:
    logits = torch.tensor([[0.0, 3e4, 5e4, -torch.inf]])
    for sampling in (
        SamplingParams(temperature=1e-6),
        SamplingParams(temperature=1.0, top_p=1e-300),
        SamplingParams(temperature=1.0, top_p=5e-324),
        SamplingParams(temperature=1.0, min_p=1.0),
        SamplingParams(temperature=1e300, top_k=1),
    ):
        assert choose([chunk(sampling)], logits).token_ids == (2,), sampling
    tokens = {choose([chunk(SamplingParams(temperature=1e308), length=length)], logits).token_ids[0] for length in range(1, 60)}
    assert tokens == {0, 1, 2}  # all equal, but what is impossible


def test_only_rows_whose_candidates_do_not_suffice_are_gathered() -> None:
    """Few likely tokens: no row of logits travels. Equal ones: the row does."""
    flat, steep = torch.zeros(1, V), torch.linspace(90, 0, V).unsqueeze(0)
    sampling = SamplingParams(temperature=1.0, top_p=0.95, seed=1)

    def run(group: GroupCoordinator) -> list[list[str]]:
        shards = split_vocabulary(V, parts=2)
        own, told = shards[group.rank_in_group], []
        for logits in (steep, flat):
            before = len(group.recent())
            TokenSampler(group, shards, base_seed=SEED).choose([chunk(sampling)], logits[:, own.start : own.stop])
            told.append([record.operation for record in group.recent()[before:]])
        return told

    for few, many in on_ranks(2, run):
        assert few == ["all_gather"]
        assert many == ["all_gather", "all_gatherv"]


def test_equal_integers_give_equal_tokens_and_torch_is_left_alone() -> None:
    logits = torch.randn(1, V, generator=torch.Generator().manual_seed(1))
    before = torch.get_rng_state()

    def tokens(seed: int) -> list[tuple[int, ...]]:
        return [choose([chunk(SamplingParams(temperature=1.0, seed=seed), length=n)], logits).token_ids for n in range(1, 20)]

    assert tokens(3) == tokens(3)
    assert tokens(3) != tokens(4)
    assert torch.equal(torch.get_rng_state(), before)


def test_rounding_does_not_change_the_choice() -> None:
    logits = torch.randn(1, 1000, generator=torch.Generator().manual_seed(1))
    nearly = logits + 1e-6 * torch.randn(1, 1000, generator=torch.Generator().manual_seed(2))
    for length in range(1, 30):
        item = chunk(SamplingParams(temperature=0.8, top_p=0.9, seed=1), length=length)
        assert choose([item], logits).token_ids == choose([item], nearly).token_ids
