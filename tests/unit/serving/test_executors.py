"""Ranks as threads behind the face of processes."""

from collections.abc import Iterator
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from parallel_runtime.config import Deadlines, ParallelConfig
from parallel_runtime.errors import LaunchError, RankFailedError
from parallel_runtime.serving.executors import ThreadRanks
from parallel_runtime.serving.messages import Ready, Shutdown, decode_leader, encode
from parallel_runtime.serving.serving_config import ServingConfig
from tests.spmd.tiny_models import write_tiny_model

pytestmark = pytest.mark.timeout(30)


@pytest.fixture
def link() -> Iterator[tuple[Connection, Connection]]:
    front, leader = Pipe()
    with front, leader:
        yield front, leader


def test_they_serve_until_they_are_told_to_stop(link: tuple[Connection, Connection], tmp_path: Path) -> None:
    front, leader = link
    model = str(write_tiny_model(tmp_path))
    with ThreadRanks(ParallelConfig(tp=2), args=(model, ServingConfig(), [leader])) as ranks:
        assert isinstance(decode_leader(front.recv_bytes()), Ready)
        assert not ranks.check()
        front.send_bytes(encode(Shutdown()))
        ranks.wait()
        assert ranks.check()
    with pytest.raises(EOFError):
        front.recv_bytes()


def test_a_failure_is_raised_by_the_check(link: tuple[Connection, Connection], tmp_path: Path) -> None:
    with ThreadRanks(ParallelConfig(), args=(str(tmp_path / "none"), ServingConfig(), [link[1]])) as ranks:
        ranks.wait()
        with pytest.raises(RankFailedError, match="no model at"):
            ranks.check()


def test_threads_that_go_on_are_told_of(link: tuple[Connection, Connection], tmp_path: Path) -> None:
    front, leader = link
    config = ParallelConfig(deadlines=Deadlines(exit_s=0.05))
    ranks = ThreadRanks(config, args=(str(write_tiny_model(tmp_path)), ServingConfig(), [leader]))
    with pytest.raises(LaunchError, match=r"cannot be ended by force, and these still run 0\.05 s"), ranks:
        front.recv_bytes()
    front.send_bytes(encode(Shutdown()))
    ranks.wait()
    assert ranks.check()
