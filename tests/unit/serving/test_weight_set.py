"""Named tensors in the place of a model file."""

import pytest
import torch

from parallel_runtime.errors import CheckpointError
from parallel_runtime.serving.weight_set import WeightSet, is_of_stage
from parallel_runtime.testing.checkpoints import random_state, tiny_llama_config

CONFIG = tiny_llama_config(num_layers=4, tie_word_embeddings=True)


def test_what_is_left_out_comes_from_elsewhere() -> None:
    state = random_state(CONFIG)
    name = "model.norm.weight"
    update = WeightSet(CONFIG, {name: torch.full_like(state[name], 3)})
    assert update.missing == set(state) - {name}
    whole = update.over(state)
    assert not whole.missing
    whole.check()
    assert torch.equal(whole.tensor(name)[:], torch.full_like(state[name], 3))
    assert torch.equal(whole.tensor("model.embed_tokens.weight")[1:2], state["model.embed_tokens.weight"][1:2])


def test_tensors_of_other_stages_have_a_shape_and_no_values() -> None:
    state = random_state(CONFIG)
    shapes = {name: tuple(tensor.shape) for name, tensor in state.items()}
    update = WeightSet(CONFIG, {}, shapes=shapes)
    assert not update.missing
    update.check()
    with pytest.raises(CheckpointError, match=r"tensor 'model.norm.weight' is not on this rank"):
        update.tensor("model.norm.weight")[0:1]
    update.close()
    assert not update.is_open


def test_strangers_and_other_shapes_are_refused() -> None:
    with pytest.raises(
        CheckpointError, match=r"the update has a tensor 'model.nose', which the model has not; it has \d+ others"
    ):
        WeightSet(CONFIG, {"model.nose": torch.zeros(1)})
    with pytest.raises(CheckpointError, match=r"the update's 'model.norm.weight' has shape \(1,\); the model's has \(32,\)"):
        WeightSet(CONFIG, {"model.norm.weight": torch.zeros(1)})
    tied = WeightSet(CONFIG, {"lm_head.weight": torch.zeros(1)})
    assert "lm_head.weight" not in tied.names, "state dicts of transformers have it, though it is the embedding"


@pytest.mark.parametrize(
    ("name", "stages"),
    [
        ("model.embed_tokens.weight", (True, False, True)),
        ("model.layers.0.mlp.up_proj.weight", (True, False, False)),
        ("model.layers.2.mlp.up_proj.weight", (False, True, False)),
        ("model.norm.weight", (False, False, True)),
        ("lm_head.weight", (False, False, True)),
        ("model.layers.x.norm", (False, False, False)),
    ],
)
def test_each_stage_wants_its_own(name: str, stages: tuple[bool, ...]) -> None:
    assert tuple(is_of_stage(name, CONFIG, layers) for layers in (range(1), range(1, 3), range(3, 4))) == stages
