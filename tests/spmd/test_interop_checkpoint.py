"""``torch.distributed.checkpoint`` across layouts, over contexts."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from parallel_runtime import ParallelConfig, ParallelContext, PeerError, run_threads
from parallel_runtime.interop import device_mesh, load_checkpoint, save_checkpoint

BIG, UNEVEN = torch.arange(64.0).view(8, 8), torch.arange(14.0).view(7, 2)


def _state(ctx: ParallelContext, *, filled: bool) -> dict[str, Any]:
    mesh, scale = device_mesh(ctx, "pp", "tp"), float(filled)
    return {
        "model": {
            "rows": distribute_tensor(BIG * scale, mesh, [Replicate(), Shard(0)], src_data_rank=None),
            "both": distribute_tensor(BIG * scale, mesh, [Shard(0), Shard(1)], src_data_rank=None),
            "uneven": distribute_tensor(UNEVEN * scale, mesh, [Replicate(), Shard(0)], src_data_rank=None),
            "plain": torch.arange(3.0) * scale,
        },
        "step": 41 if filled else 0,
    }


def _save(ctx: ParallelContext, folder: Path) -> None:
    save_checkpoint(ctx, _state(ctx, filled=True), folder)


def _load(ctx: ParallelContext, folder: Path) -> None:
    state = _state(ctx, filled=False)
    load_checkpoint(ctx, state, folder)
    model = state["model"]
    assert isinstance(model["both"], DTensor)
    assert torch.equal(model["both"].full_tensor(), BIG)
    assert torch.equal(model["rows"].full_tensor(), BIG)
    assert torch.equal(model["uneven"].full_tensor(), UNEVEN)
    assert torch.equal(model["plain"], torch.arange(3.0))
    assert state["step"] == 41


@pytest.mark.parametrize("target", [ParallelConfig(tp=4), ParallelConfig(tp=2, pp=2), ParallelConfig()], ids=str)
def test_what_one_layout_saved_another_loads(tmp_path: Path, target: ParallelConfig) -> None:
    run_threads(_save, ParallelConfig(tp=2), tmp_path, timeout_s=60)
    run_threads(_load, target, tmp_path, timeout_s=60)
    assert len(list(tmp_path.glob("*.distcp"))) == 2  # both ranks wrote
    written = sum(file.stat().st_size for file in tmp_path.glob("*.distcp"))
    assert written < 3 * BIG.nbytes + 10 * 2048  # every shard once


def test_torch_itself_reads_it(tmp_path: Path) -> None:
    run_threads(_save, ParallelConfig(tp=2, pp=2), tmp_path, timeout_s=60)
    state = {"model": {"both": torch.zeros(8, 8)}, "step": 0}
    with pytest.warns(UserWarning, match="assuming the intent is to load in a single process"):
        load(state, checkpoint_id=tmp_path, no_dist=True)
    assert torch.equal(state["model"]["both"], BIG)  # type: ignore[index]  # a dict
    assert state["step"] == 41


def test_a_rank_that_cannot_read_fails_on_all(tmp_path: Path) -> None:
    def load(ctx: ParallelContext) -> None:
        folder = tmp_path if ctx.rank == 0 else tmp_path / "nowhere"
        with pytest.raises(PeerError if ctx.rank == 0 else Exception, match=r"nowhere"):
            load_checkpoint(ctx, _state(ctx, filled=False), folder)

    run_threads(_save, ParallelConfig(tp=2), tmp_path, timeout_s=60)
    run_threads(load, ParallelConfig(tp=2), timeout_s=60)
