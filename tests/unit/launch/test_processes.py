"""What is refused before a process exists, and how cores are shared."""

import multiprocessing
import os
import sys

import pytest

from parallel_runtime.config import ParallelConfig
from parallel_runtime.errors import ArgumentError, ConfigError, ContextStateError, LaunchError
from parallel_runtime.launch import LocalRanks, launch
from parallel_runtime.launch.guards import refuse_launched_rank, refuse_unguarded_main
from parallel_runtime.launch.processes import threads_per_rank


def nothing(*args: object) -> None:
    """Does nothing."""


@pytest.mark.parametrize(
    ("config", "text"),
    [
        (ParallelConfig(tp=-1), "needs a number of ranks"),
        (ParallelConfig(tp=2, rank_offset=2), r"numbered 0\.\.1, but the config numbers them \[2, 3\]"),
        (ParallelConfig(tp=2, backend="local"), "backend='local' does not fit here; use one of auto, gloo, nccl"),
    ],
)
def test_a_config_that_does_not_fit_is_refused(config: ParallelConfig, text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        launch(nothing, config)


def test_what_cannot_be_called_is_refused() -> None:
    with pytest.raises(ArgumentError, match="got a int"):
        launch(3, ParallelConfig(tp=2))  # type: ignore[arg-type]  # what is tested


def test_a_rank_does_not_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "1", "WORLD_SIZE": "4", "LOCAL_RANK": "1"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(LaunchError, match=r"already rank 1 of 4 \(torchrun\)"):
        launch(nothing, ParallelConfig(tp=2))


def test_leftovers_of_a_launcher_do_not_stop_a_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    refuse_launched_rank()


def test_a_main_script_that_is_no_file_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    main = sys.modules["__main__"]
    monkeypatch.setattr(main, "__spec__", None)
    monkeypatch.setattr(main, "__file__", "<stdin>")
    with pytest.raises(LaunchError, match="'<stdin>' is not a file"):
        refuse_unguarded_main()


def test_ranks_are_used_inside_their_block() -> None:
    ranks = LocalRanks(nothing, ParallelConfig())
    with pytest.raises(ContextStateError, match="inside its `with` block"):
        ranks.wait()
    assert ranks.pids == ()


@pytest.mark.parametrize(
    ("world_size", "omp", "expected"),
    [
        (2, None, max(1, len(os.sched_getaffinity(0)) // 2)),
        (10_000, None, 1),
        (1, None, len(os.sched_getaffinity(0))),
        (2, "3", 3),
        (1, "3", 3),
        (10_000, "4,2", 4),
        (10_000, "", 1),
        (10_000, "0", 1),
        (10_000, "many", 1),
    ],
)
def test_cores_are_shared_unless_the_user_says_otherwise(world_size: int, omp: str | None, expected: int) -> None:
    assert threads_per_rank(world_size, {} if omp is None else {"OMP_NUM_THREADS": omp}) == expected


def test_refusals_start_nothing() -> None:
    before = multiprocessing.active_children()
    with pytest.raises(LaunchError, match="<lambda>"):
        launch(lambda ctx: 1, ParallelConfig(tp=2))
    assert multiprocessing.active_children() == before
