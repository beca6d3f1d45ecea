"""Vocabulary-parallel embedding and head: exact, never padded, and greedy without gathering."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from parallel_runtime.comm import GroupCoordinator
from parallel_runtime.errors import ArgumentError, ConfigError
from parallel_runtime.layers import ParallelHead, VocabParallelEmbedding
from tests.unit.layers.ranks import alone, on_ranks

V, D = 11, 4
WEIGHT = torch.randn(V, D, generator=torch.Generator().manual_seed(5))


@pytest.mark.parametrize("tp", [1, 2, 3, 4])
def test_lookup_and_its_gradient_equal_the_plain_embedding(tp: int) -> None:
    plain = nn.Embedding(V, D, _weight=WEIGHT.clone())
    ids = torch.tensor([[0, 10, 5], [6, 6, 3]])
    expected = plain(ids)
    expected.square().sum().backward()

    def run(group: GroupCoordinator) -> None:
        layer = VocabParallelEmbedding(V, D, tp=group)
        layer.load(WEIGHT)
        out = layer(ids)
        assert torch.equal(out, expected)
        out.square().sum().backward()
        assert plain.weight.grad is not None
        torch.testing.assert_close(layer.weight.grad, plain.weight.grad[layer.own.start : layer.own.stop])

    on_ranks(tp, run)


@pytest.mark.parametrize("tp", [1, 2, 3, 4])
def test_logits_and_their_gradient_equal_the_plain_head(tp: int) -> None:
    hidden = torch.randn(3, D, generator=torch.Generator().manual_seed(6), requires_grad=True)
    weight = WEIGHT.clone().requires_grad_()
    expected = hidden @ weight.T
    expected.logsumexp(-1).sum().backward()  # type: ignore[no-untyped-call]  # torch

    def run(group: GroupCoordinator) -> None:
        layer = ParallelHead(V, D, tp=group)
        layer.load(WEIGHT)
        local = hidden.detach().clone().requires_grad_()
        logits = layer(local)
        assert logits.shape == (3, V)
        torch.testing.assert_close(logits, expected)
        logits.logsumexp(-1).sum().backward()
        assert weight.grad is not None
        torch.testing.assert_close(local.grad, hidden.grad)
        torch.testing.assert_close(layer.weight.grad, weight.grad[layer.own.start : layer.own.stop])

    on_ranks(tp, run)


@given(st.lists(st.lists(st.integers(-3, 3), min_size=V, max_size=V), min_size=1, max_size=4), st.sampled_from([1, 2, 3, 4]))
def test_greedy_takes_the_lowest_of_equals(rows: list[list[int]], tp: int) -> None:
    """The weight is the wanted logits, and the hidden states pick rows of it: many ties, all exact."""
    logits = torch.tensor(rows, dtype=torch.float32)

    def run(group: GroupCoordinator) -> list[int]:
        layer = ParallelHead(V, len(rows), tp=group)
        layer.load(logits.T)
        chosen: list[int] = layer.greedy(torch.eye(len(rows))).tolist()
        return chosen

    expected = [row.index(max(row)) for row in rows]
    assert on_ranks(tp, run) == [expected] * tp


def test_a_tied_head_is_the_embeddings_parameter() -> None:
    embedding, head = VocabParallelEmbedding(V, D, tp=alone()), ParallelHead(V, D, tp=alone())
    head.tie(embedding)
    embedding.load(WEIGHT)
    assert head.weight is embedding.weight
    torch.testing.assert_close(head(torch.eye(D)), WEIGHT.T)
    with pytest.raises(ArgumentError, match=r"the embedding's shard is \(11, 4\) of 11; the head's is \(12, 4\) of 12"):
        ParallelHead(V + 1, D, tp=alone()).tie(embedding)


def test_a_vocabulary_that_does_not_divide_can_be_refused() -> None:
    def run(group: GroupCoordinator) -> None:
        for layer in (VocabParallelEmbedding, ParallelHead):
            with pytest.raises(ConfigError, match="tp=2 does not split 11"):
                layer(V, D, tp=group, uneven="refuse")

    on_ranks(2, run)


def test_ids_outside_the_vocabulary_are_refused_on_one_rank_too() -> None:
    layer = VocabParallelEmbedding(V, D, tp=alone())
    with pytest.raises(ArgumentError, match="token ids reach from -1 to 3; the vocabulary has 11: 0 to 10"):
        layer(torch.tensor([3, -1]))


def test_a_weight_of_another_shape_is_refused() -> None:
    with pytest.raises(ArgumentError, match=r"weight has shape \(12, 4\); the full tensor of this layer has \(11, 4\)"):
        ParallelHead(V, D, tp=alone()).load(torch.zeros(12, 4))
