"""A context as torch's ``DeviceMesh``: DTensor, tensor parallelism and FSDP2 on our groups, without a default process group."""

import threading
from collections.abc import Callable, Sequence
from typing import Literal

import pytest
import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from parallel_runtime import ParallelConfig, ParallelContext, launch, run_threads
from parallel_runtime.interop import device_mesh

pytestmark = pytest.mark.filterwarnings("ignore:FSDP2-wrapped module .* returned a view tensor")


class _Net(nn.Module):
    """Equal on every rank: made without the random stream that threads share."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.linspace(-1, 1, parameter.numel()).sin().view(parameter.shape))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(torch.relu(self.up(x)))
        return out.clone()  # fully_shard warns of views


def _batches() -> Tensor:
    return torch.linspace(-2, 2, 3 * 8 * 16).cos().view(3, 8, 16)


def _train(net: nn.Module, share: Callable[[Tensor], Tensor]) -> None:
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    for batch in _batches():
        net(share(batch)).pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def _one_process() -> dict[str, Tensor]:
    net = _Net()
    _train(net, lambda batch: batch)
    return net.state_dict()


def _fsdp_times_tp(ctx: ParallelContext) -> dict[str, Tensor]:
    mesh = device_mesh(ctx, "dp", "tp")
    net = _Net()
    parallelize_module(net, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()}, src_data_rank=None)
    for layer in (net.up, net.down, net):
        fully_shard(layer, mesh=mesh["dp"])
    _train(net, lambda batch: batch.chunk(ctx.dp.world_size)[ctx.dp.rank_in_group])
    assert not dist.is_initialized()
    assert isinstance(net.up.weight, DTensor)
    assert net.up.weight.to_local().shape == (32 // ctx.tp.world_size // ctx.dp.world_size, 16)
    return {name: tensor.full_tensor() for name, tensor in net.state_dict().items()}


def _check(results: Sequence[dict[str, Tensor]]) -> None:
    reference = _one_process()
    assert (reference["up.weight"] - _Net().up.weight).abs().max() > 0.01  # it learned something
    for state in results:
        assert state.keys() == reference.keys()
        for name, tensor in reference.items():
            assert torch.allclose(state[name], tensor, atol=1e-5), name


@pytest.mark.parametrize("backend", ["local", "gloo"])
def test_fsdp2_times_tensor_parallel_trains_like_one_process(backend: Literal["local", "gloo"]) -> None:
    _check(run_threads(_fsdp_times_tp, ParallelConfig(tp=2, dp=2, backend=backend), timeout_s=100))


@pytest.mark.processes
@pytest.mark.timeout(100)
def test_it_does_so_through_shared_memory() -> None:
    _check(launch(_through_shared_memory, ParallelConfig(tp=2, dp=2), timeout_s=90))


def _through_shared_memory(ctx: ParallelContext) -> dict[str, Tensor]:
    assert "tensors over shm" in ctx.tp.describe()
    return _fsdp_times_tp(ctx)


def test_fsdp2_alone_and_hybrid() -> None:
    def train(ctx: ParallelContext) -> dict[str, Tensor]:
        net = _Net()
        fully_shard(net, mesh=device_mesh(ctx, "pp", "dp"))  # pp stands in for replicas: a mesh of two dims is hybrid sharding
        _train(net, lambda batch: batch.chunk(4)[ctx.rank])
        return {name: tensor.full_tensor() for name, tensor in net.state_dict().items()}

    _check(run_threads(train, ParallelConfig(dp=2, pp=2), timeout_s=60))


def test_two_contexts_at_once_without_cross_talk() -> None:
    """Meshes of equal shape, used in turn: each DTensor stays on its own context's groups, also after the other is gone."""

    def use(ctx: ParallelContext) -> None:
        child = ctx.duplicate("other")
        first = device_mesh(ctx, "tp")
        whole = torch.arange(8.0).view(4, 2)
        mine = distribute_tensor(whole, first, [Shard(0)], src_data_rank=None)
        with child:
            second = device_mesh(child, "tp")
            assert first != second
            assert hash(first) != hash(second)
            other = distribute_tensor(whole, second, [Shard(0)], src_data_rank=None)
            before = [len(group.recent(1000)) for group in (ctx.tp, child.tp)]
            assert torch.equal(mine.full_tensor(), whole)
            assert torch.equal(other.full_tensor(), whole)
            assert torch.equal(other.full_tensor(), whole)
            after = [len(group.recent(1000)) for group in (ctx.tp, child.tp)]
            assert [b - a for a, b in zip(before, after, strict=True)] == [1, 2]
            with pytest.raises(Exception, match="mesh"):
                mine + other
        assert torch.equal(mine.full_tensor(), whole)
        with pytest.raises(RuntimeError, match="Could not resolve the process group"):
            other.full_tensor()

    run_threads(use, ParallelConfig(tp=2), timeout_s=60)


def test_slices_joints_and_flattened_dims_know_their_rank() -> None:
    def look(ctx: ParallelContext) -> None:
        mesh = device_mesh(ctx, "dp", "cp", "tp")
        here = ctx.coordinate
        assert mesh.get_rank() == ctx.rank
        assert mesh.get_coordinate() == (here.dp, here.cp, here.tp)
        assert mesh["tp"].get_local_rank() == mesh.get_local_rank("tp") == here.tp
        assert tuple(mesh["tp"].mesh.tolist()) == ctx.tp.ranks
        assert tuple(mesh["dp", "cp"].mesh.flatten().tolist()) == ctx.layout.group_of(ctx.rank, "dp", "cp")
        both = mesh["dp", "cp"]._flatten("data")
        assert tuple(both.mesh.tolist()) == ctx.layout.group_of(ctx.rank, "dp", "cp")
        assert both.get_group().size() == 4
        assert mesh["dp", "cp"]._flatten("data") is both
        total = DTensor.from_local(torch.ones(1), both, [Shard(0)]).redistribute(placements=[Replicate()])
        assert total.to_local().sum() == 4
        with pytest.raises(ValueError, match=r"^'tp' is a dim of .* already; choose another name$"):
            mesh["dp", "cp"]._flatten("tp")

    run_threads(look, ParallelConfig(tp=2, cp=2, dp=2), timeout_s=60)


def test_the_expert_view() -> None:
    def look(ctx: ParallelContext) -> None:
        mesh = device_mesh(ctx, "edp", "ep", "etp")
        assert mesh.shape == (ctx.edp.world_size, ctx.ep.world_size, ctx.etp.world_size)
        for axis in ("edp", "ep", "etp"):
            assert tuple(mesh[axis].mesh.tolist()) == ctx.group(axis).ranks
        experts = distribute_tensor(torch.arange(8.0).view(4, 2), mesh["ep"], [Shard(0)], src_data_rank=None)
        assert experts.to_local()[0, 0] == 2 * ctx.ep.rank_in_group * (4 // ctx.ep.world_size)
        assert torch.equal(experts.full_tensor(), torch.arange(8.0).view(4, 2))

    run_threads(look, ParallelConfig(tp=2, dp=2, ep=2), timeout_s=60)


def test_torch_makes_other_meshes_as_before() -> None:
    run_threads(lambda ctx: device_mesh(ctx).shape, ParallelConfig(tp=2), timeout_s=60)
    alone = dist.device_mesh.DeviceMesh("cpu", [0], _init_backend=False, _rank=0)
    assert type(alone) is dist.device_mesh.DeviceMesh


@pytest.mark.parametrize("axes", [("tp", "ep"), ("tp", "tp"), ("stage",), ("rows",)])
def test_axes_that_make_no_mesh_are_refused(axes: tuple[str, ...]) -> None:
    lock = threading.Lock()
    said: list[str] = []

    def make(ctx: ParallelContext) -> None:
        with pytest.raises(ValueError, match="name each axis once, of tp, cp, dp, pp") as caught:
            device_mesh(ctx, *axes)
        with lock:
            said.append(str(caught.value))

    run_threads(make, ParallelConfig(tp=2), timeout_s=60)
    assert said[0].startswith(f"no mesh over {', '.join(axes)}: ")
