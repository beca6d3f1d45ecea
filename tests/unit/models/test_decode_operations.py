"""A decode step stays lean: the operations of each layer are counted."""

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from parallel_runtime.layers.packing import can_pack
from parallel_runtime.models import load_model, open_checkpoint
from parallel_runtime.serving.batch import Batch, Chunk
from parallel_runtime.serving.kv_cache import PagedKvCache
from parallel_runtime.serving.sampling_params import SamplingParams
from parallel_runtime.testing.checkpoints import tiny_llama_config, write_safetensors_checkpoint
from tests.unit.layers.ranks import alone

VIEWS = ("slice", "split_with_sizes", "chunk", "view", "reshape", "unsqueeze", "transpose")
"""Operations that move no data here; they cost a dispatch all the same, so all together are limited, too."""


class Counting(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch
    """Counts what the model asks torch for."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


def step_counts(folder: Path, num_layers: int) -> Counter[str]:
    folder.mkdir()
    config = tiny_llama_config(num_layers=num_layers)
    write_safetensors_checkpoint(folder, config)
    with open_checkpoint(folder) as checkpoint:
        model = load_model(checkpoint, tp=alone(), pack=True)
    cache = PagedKvCache(
        num_layers=num_layers, num_kv_heads=model.num_kv_heads, head_dim=model.head_dim, num_blocks=4, page_size=16
    )
    chunk = Chunk(
        request_id="a",
        arrival=0,
        start=20,
        token_ids=(5,),
        blocks=(0, 1),
        is_sampled=True,
        sampling=SamplingParams(max_new_tokens=1),
    )
    cache.keys.zero_()
    cache.values.zero_()
    counting = Counting()
    with torch.inference_mode(), counting:
        model.greedy(model(torch.tensor([5]), torch.tensor([20]), cache.step(Batch(chunks=(chunk,)))))
    return counting.counts


@pytest.mark.skipif(not can_pack(torch.zeros(2, 2)), reason="this machine has no packed products")
def test_operations_of_one_layer_at_batch_one(tmp_path: Path) -> None:
    added = step_counts(tmp_path / "three", 3) - step_counts(tmp_path / "two", 2)
    computing = {name: count for name, count in added.items() if name not in VIEWS}
    assert computing["_linear_pointwise"] == 4
    assert sum(computing.values()) < 22, computing
    assert added.total() < 36, added
