"""Ranks as actors of a real Ray cluster, whose one node is this machine; several nodes are in the unit test of ``seat_ranks``."""

import logging
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client
from pathlib import Path
from typing import Self

import pytest
import torch

from parallel_runtime.config import Deadlines, ParallelConfig
from parallel_runtime.context import ParallelContext
from parallel_runtime.errors import LaunchError, PeerTimeoutError, RankFailedError
from parallel_runtime.launch import launch_on_ray
from parallel_runtime.serving import Engine, SamplingParams
from parallel_runtime.serving.ray_executor import FrontDesk
from tests.spmd.tiny_models import write_tiny_model

ray = pytest.importorskip("ray")
pytestmark = [pytest.mark.processes, pytest.mark.timeout(180), pytest.mark.filterwarnings("default")]


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    quiet = {"include_dashboard": False, "log_to_driver": False, "logging_level": logging.ERROR}
    ray.init("local", num_cpus=4, _node_ip_address="127.0.0.1", **quiet)
    yield
    ray.shutdown()


def who(ctx: ParallelContext, scale: int) -> tuple[int, int, int, float]:
    total = ctx.tp.all_reduce(torch.tensor(float(scale**ctx.rank))).item()
    ctx.world.barrier()
    with ParallelContext(ParallelConfig(dp=4)) as second:
        assert second.rank == ctx.rank
    return ctx.rank, ctx.identity.local_rank, ctx.identity.host_rank or 0, total


def test_four_ranks_and_nothing_left(cluster: None) -> None:
    results = launch_on_ray(who, ParallelConfig(tp=2, pp=2), 10, timeout_s=120)
    assert results == [(rank, rank, 0, [11.0, 1100.0][rank // 2]) for rank in range(4)]
    assert all(group["state"] == "REMOVED" for group in ray.util.placement_group_table().values())


def fails(ctx: ParallelContext, how: str) -> None:
    if ctx.rank == 1:
        if how == "exit":
            os._exit(3)
        raise ValueError("boom")
    ctx.tp.barrier()


@pytest.mark.parametrize(("how", "text"), [("raise", "ValueError: boom"), ("exit", "its actor ended")])
def test_a_rank_that_fails_is_named(cluster: None, how: str, text: str) -> None:
    with pytest.raises(RankFailedError, match=f"rank 1 of 2 failed in .*fails: {text}") as caught:
        launch_on_ray(fails, ParallelConfig(tp=2), how, timeout_s=120)
    assert caught.value.rank == 1


def test_what_the_cluster_cannot_hold_is_told(cluster: None) -> None:
    config = ParallelConfig(tp=5, deadlines=Deadlines(join_s=0.5))
    with pytest.raises(LaunchError, match=r"1 bundles of \{'CPU': 5\.0\} .*never split over nodes.* within 0\.5 s"):
        launch_on_ray(fails, config, "raise")


def test_an_engine_on_ray(cluster: None, tmp_path: Path) -> None:
    """The same tokens as from ranks that are threads."""
    model, prompts = write_tiny_model(tmp_path), [[1, 2, 3], [4, 5, 6, 7]]
    tokens = []
    for executor in ("ray", "threads"):
        with Engine(model, parallel=ParallelConfig(tp=2, dp=2), executor=executor) as engine:
            results = engine.generate(prompts, SamplingParams(max_new_tokens=6, ignore_eos=True))
            tokens.append([result.token_ids for result in results])
    assert tokens[0] == tokens[1]
    assert all(group["state"] == "REMOVED" for group in ray.util.placement_group_table().values())


def test_strangers_are_sent_away() -> None:
    desk = FrontDesk("127.0.0.1")
    front = desk.address
    with ThreadPoolExecutor(2) as pool:
        link = pool.submit(desk.accept, NoRanks(), 30.0)
        with pytest.raises(AuthenticationError):
            Client((front.host, front.port), authkey=b"guess")
        with Client((front.host, front.port), authkey=front.key) as leader, link.result(30) as accepted:
            leader.send_bytes(b"hello")
            assert accepted.recv_bytes() == b"hello"
    with pytest.raises(PeerTimeoutError, match=r"no leader dialled 127\.0\.0\.1:\d+ within 0\.1 s"):
        desk.accept(NoRanks(), 0.1)
    desk.close()


class NoRanks:
    """Ranks that never fail."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None: ...

    def check(self) -> bool:
        return False

    def wait(self, timeout_s: float | None = None) -> None: ...
