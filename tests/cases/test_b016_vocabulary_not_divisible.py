"""B016: a vocabulary that tp does not divide. Nothing is padded, so no padded row can take part."""

from pathlib import Path

import pytest
import torch

from parallel_runtime.comm import GroupCoordinator
from parallel_runtime.config import ParallelConfig
from parallel_runtime.errors import ArgumentError, RequestError
from parallel_runtime.layers import ParallelHead, VocabParallelEmbedding
from parallel_runtime.models import load_model, open_checkpoint
from parallel_runtime.serving import Engine, SamplingParams
from parallel_runtime.testing.checkpoints import tiny_llama_config, write_safetensors_checkpoint
from tests.spmd.tiny_models import greedy_reference
from tests.unit.layers.ranks import on_ranks, outcomes

V, D = 101, 8
WEIGHT = torch.randn(V, D, generator=torch.Generator().manual_seed(1))


def test_b016_embeddings_and_logits_equal_one_rank() -> None:
    ids = torch.tensor([0, 50, 51, 100])
    hidden = torch.randn(4, D, generator=torch.Generator().manual_seed(2))

    def run(tp: GroupCoordinator) -> None:
        embedding, head = VocabParallelEmbedding(V, D, tp=tp), ParallelHead(V, D, tp=tp)
        embedding.load(WEIGHT)
        head.load(WEIGHT)
        assert torch.equal(embedding(ids), WEIGHT[ids])
        logits = head(hidden)
        assert logits.shape == (4, 101)
        torch.testing.assert_close(logits.log_softmax(-1), (hidden @ WEIGHT.T).log_softmax(-1))

    on_ranks(2, run)


def test_b016_there_is_no_padded_row_to_win() -> None:
    """Every logit is -100 and worse than anything a padded row could give; the last real id still wins where it should."""
    weight = torch.full((V, 1), -100.0)
    weight[100] = -99.0

    def run(tp: GroupCoordinator) -> int:
        head = ParallelHead(V, 1, tp=tp)
        head.load(weight)
        hidden = torch.ones(3, 1)
        assert head.greedy(hidden).tolist() == head(hidden).argmax(-1).tolist() == [100] * 3
        torch.manual_seed(0)
        assert int(head(hidden).softmax(-1).multinomial(1000, replacement=True).max()) <= 100
        return head.weight.shape[0]

    assert sum(on_ranks(2, run)) == 101


def test_b016_full_weights_saved_and_loaded_again_are_bit_equal(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    folder = write_safetensors_checkpoint(tmp_path / "model", tiny_llama_config(vocab_size=V))

    def run(tp: GroupCoordinator) -> dict[str, torch.Tensor]:
        with open_checkpoint(folder) as checkpoint:
            return load_model(checkpoint, tp=tp).full_state()

    original = load_file(folder / "model.safetensors")
    save_file(on_ranks(2, run)[0], folder / "model.safetensors")
    again = load_file(folder / "model.safetensors")
    assert again["model.embed_tokens.weight"].shape[0] == again["lm_head.weight"].shape[0] == 101
    assert original.keys() == again.keys()
    assert all(torch.equal(again[name], original[name]) for name in original)
    for state in on_ranks(3, run):
        assert all(torch.equal(state[name], original[name]) for name in original)


@pytest.mark.timeout(30)
def test_b016_an_id_outside_the_vocabulary_is_an_error_on_every_rank() -> None:
    def run(tp: GroupCoordinator) -> None:
        embedding = VocabParallelEmbedding(V, D, tp=tp)
        embedding.load(WEIGHT)
        embedding(torch.tensor([3, 101]))

    for outcome in outcomes(2, run):
        assert isinstance(outcome, ArgumentError)
        assert "token ids reach from 3 to 101; the vocabulary has 101: 0 to 100" in str(outcome)


def test_b016_an_engine_refuses_such_an_id_and_draws_none(tmp_path: Path) -> None:
    model = write_safetensors_checkpoint(tmp_path / "model", tiny_llama_config(vocab_size=V, eos_ids=()))
    prompts = [(0, 50, 51, 100), (7,)]
    with Engine(model, parallel=ParallelConfig(tp=2), executor="threads") as engine:
        with pytest.raises(RequestError, match="101"):
            engine.generate([(3, 101)])
        greedy = engine.generate(prompts, SamplingParams(max_new_tokens=8))
        drawn = engine.generate(prompts, SamplingParams(max_new_tokens=50, temperature=50.0))
    assert [completion.token_ids for completion in greedy] == greedy_reference(model, prompts, 8)
    assert all(token < V for completion in drawn for token in completion.token_ids)
