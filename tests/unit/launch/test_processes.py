"""What is refused before a process exists, and how cores are shared."""

import multiprocessing
import os
import pickle
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from parallel_runtime.config import ParallelConfig
from parallel_runtime.context import ParallelContext
from parallel_runtime.errors import ArgumentError, ConfigError, ContextStateError, LauncherEnvironmentError, LaunchError
from parallel_runtime.launch import LocalRanks, launch, run_threads, supervise
from parallel_runtime.launch.guards import refuse_launched_rank, refuse_unguarded_main
from parallel_runtime.launch.processes import threads_per_rank
from parallel_runtime.launch.rank_process import Result


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
        (10_000, " 01024", 1024),
    ],
)
def test_cores_are_shared_unless_the_user_says_otherwise(world_size: int, omp: str | None, expected: int) -> None:
    assert threads_per_rank(world_size, {} if omp is None else {"OMP_NUM_THREADS": omp}) == expected


@pytest.mark.parametrize("omp", ["0", "many", "-1", "1025", "99999", "9" * 5000, "²", "4x"])
def test_thread_counts_that_make_no_sense_are_refused(omp: str) -> None:
    with pytest.raises(
        LauncherEnvironmentError, match=r"OMP_NUM_THREADS='.* is not a number of threads of one rank; use 1 to 1024"
    ):
        threads_per_rank(2, {"OMP_NUM_THREADS": omp})


@pytest.mark.parametrize("config", [None, {"tp": 2}, 2])
def test_what_is_no_config_is_refused(config: ParallelConfig) -> None:
    for start in (launch, run_threads):
        with pytest.raises(
            ArgumentError, match=r"config must be a ParallelConfig, got .*; use one such as ParallelConfig\(tp=2\)"
        ):
            start(nothing, config)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.1", "node1", "", None])
def test_a_host_that_others_could_reach_is_refused(host: str) -> None:
    with pytest.raises(ArgumentError, match=r"host=.*: ranks started here meet on loopback only"):
        launch(nothing, ParallelConfig(tp=2), host=host)


@pytest.mark.parametrize("timeout_s", [0, -1, float("nan"), True, "3"])
def test_what_is_no_limit_is_refused(timeout_s: float) -> None:
    for start in (launch, run_threads):
        with pytest.raises(ArgumentError, match=r"timeout_s=.* must be a number of seconds .*; None sets no limit"):
            start(nothing, ParallelConfig(tp=2), timeout_s=timeout_s)


def test_a_working_directory_that_was_removed_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    with pytest.raises(LaunchError, match="the working directory of this process, which was removed; change to one"):
        launch(nothing, ParallelConfig())


def test_too_few_descriptors_are_told_at_once() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + 5, hard))
    try:
        with pytest.raises(ConfigError, match=r"to start 2 ranks, 32 free file descriptors are needed, .* by ulimit -n"):
            launch(nothing, ParallelConfig(tp=2), timeout_s=5)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


class Leave:
    def __reduce__(self) -> tuple[object, ...]:
        return sys.exit, (5,)


def test_a_result_that_exits_when_it_is_unpacked_ends_nobody() -> None:
    with pytest.raises(LaunchError, match="the result of rank 1 came back but cannot be unpickled here: SystemExit: 5"):
        supervise._unpack(1, Result(pickle.dumps(Leave())))


def fork(ctx: ParallelContext, way: str) -> tuple[int, int]:
    pid = os.fork()
    if pid == 0:
        if way == "raise":
            raise ValueError("of the child")
        if way == "exit":
            sys.exit(3)
        return -1, -1
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    return ctx.rank, status


@pytest.mark.processes
@pytest.mark.timeout(60)
@pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning")
@pytest.mark.parametrize(("way", "status"), [("return", 0), ("raise", 1), ("exit", 3)])
def test_a_process_forked_inside_a_rank_does_not_speak_for_it(way: str, status: int) -> None:
    assert launch(fork, ParallelConfig(tp=2), way, timeout_s=50) == [(0, status), (1, status)]
    assert run_threads(fork, ParallelConfig(), way, timeout_s=50) == [(0, status)]


BARE = """
import os, sys
from parallel_runtime import ParallelConfig, launch
from tests.unit.launch.test_processes import rank_of

if __name__ == "__main__":
    file = os.dup2(os.open(sys.argv[1], os.O_WRONLY | os.O_CREAT), 50)
    os.closerange(0, 3)
    os.write(file, repr(launch(rank_of, ParallelConfig(tp=2), timeout_s=50)).encode())
    for fd in range(3):
        try:
            os.fstat(fd)
        except OSError:
            continue
        os.write(file, b"left open")
"""


def rank_of(ctx: ParallelContext) -> int:
    return ctx.rank


@pytest.mark.processes
@pytest.mark.timeout(100)
def test_closed_standard_descriptors_do_not_stop_a_launch(tmp_path: Path) -> None:
    script = tmp_path / "bare.py"
    script.write_text(BARE)
    told = tmp_path / "told"
    root = Path(__file__).parents[3]
    subprocess.run([sys.executable, script, told], check=True, env={**os.environ, "PYTHONPATH": str(root)}, timeout=90)
    assert told.read_text() == "[0, 1]"


def test_refusals_start_nothing() -> None:
    before = multiprocessing.active_children()
    with pytest.raises(LaunchError, match="<lambda>"):
        launch(lambda ctx: 1, ParallelConfig(tp=2))
    assert multiprocessing.active_children() == before
