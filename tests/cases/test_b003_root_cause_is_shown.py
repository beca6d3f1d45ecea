"""B003: the root cause of a failed rank is what the caller sees."""

import os
import signal
import sys

import pytest
import torch

from parallel_runtime.config import ParallelConfig
from parallel_runtime.context import ParallelContext
from parallel_runtime.errors import LaunchError, RankFailedError
from parallel_runtime.launch import launch

pytestmark = [pytest.mark.processes, pytest.mark.timeout(60)]


class TwoArgumentsError(Exception):
    """Cannot be unpickled: its constructor wants more than its text."""

    def __init__(self, what: str, where: str) -> None:
        super().__init__(f"{what} in {where}")


def explode(ctx: ParallelContext, how: str) -> None:
    if ctx.rank == 1:
        if how == "raise":
            raise ValueError("boom-42")
        if how == "unpicklable":
            raise TwoArgumentsError("boom-43", "the engine room")
        if how == "sys.exit":
            sys.exit(3)
        if how == "os._exit":
            os._exit(4)
        if how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
    ctx.world.barrier()


def unsendable(ctx: ParallelContext) -> object:
    return lambda: ctx.rank


@pytest.mark.parametrize(
    ("how", "exitcode", "texts"),
    [
        ("raise", None, ["rank 1 of 2 failed in", "explode", "ValueError: boom-42", "traceback of rank 1"]),
        ("unpicklable", None, ["rank 1 of 2 failed in", "TwoArgumentsError: boom-43 in the engine room"]),
        ("sys.exit", 3, ["rank 1 of 2 called sys.exit(3) in", "explode"]),
        ("os._exit", 4, ["rank 1 of 2 exited with status 4", "explode"]),
        ("kill", -9, ["rank 1 of 2 was killed by SIGKILL (9)", "explode"]),
    ],
)
def test_b003_the_failed_rank_is_named_first(how: str, exitcode: int | None, texts: list[str]) -> None:
    with pytest.raises(RankFailedError) as caught:
        launch(explode, ParallelConfig(tp=2), how, timeout_s=30)
    error = caught.value
    message = str(error)
    assert (error.rank, error.exitcode) == (1, exitcode)
    for text in texts:
        assert text in message.partition("follow-ups")[0]
    assert message.startswith("rank 1")
    if "rank 0" in message:
        assert message.index("follow-ups") < message.index("rank 0")


def test_b003_a_result_that_cannot_be_sent_back_is_named() -> None:
    with pytest.raises(RankFailedError, match=r"SerializationError: the result, a function, cannot be sent back"):
        launch(unsendable, ParallelConfig(tp=2), timeout_s=30)


class OneWay:
    """Can be pickled, and never unpickled."""

    def __reduce__(self) -> tuple[type[int], tuple[str]]:
        return int, ("not a number",)


def one_way(ctx: ParallelContext) -> OneWay | None:
    return OneWay() if ctx.rank == 1 else None


def test_b003_a_result_that_cannot_be_read_is_named() -> None:
    with pytest.raises(
        LaunchError, match="the result of rank 1 came back but cannot be unpickled here: ValueError: invalid literal"
    ):
        launch(one_way, ParallelConfig(tp=2), timeout_s=30)


def many(ctx: ParallelContext) -> tuple[int, bytes, torch.Tensor]:
    return ctx.rank, bytes(5_000_000), torch.full((1000, 100), ctx.rank)


def test_b003_results_bigger_than_a_pipe_come_in_rank_order() -> None:
    results = launch(many, ParallelConfig(tp=2), timeout_s=30)
    assert [rank for rank, _, _ in results] == [0, 1]
    assert all(len(data) == 5_000_000 and (tensor == rank).all() for rank, data, tensor in results)
