"""How a rank's end is told."""

import signal

import pytest

from parallel_runtime.errors import PeerLostError
from parallel_runtime.launch.outcome import RankFailure, describe_exit, failure_of, find_root, rank_failed_error


def caught(error: BaseException) -> BaseException:
    try:
        raise error
    except BaseException as again:
        return again


def test_a_failure_keeps_type_text_and_traceback() -> None:
    failure = failure_of(3, caught(ValueError("boom-42")))
    assert failure.text == "ValueError: boom-42"
    assert "in caught" in failure.traceback
    assert failure.exitcode is None
    assert not failure.blames_peer


def test_skipped_frames_are_left_out_but_never_all() -> None:
    error = caught(ValueError("x"))
    assert "in caught" in failure_of(0, error, skip_frames=5).traceback


def test_an_error_whose_text_fails_is_still_told() -> None:
    class UnspeakableError(Exception):
        def __str__(self) -> str:
            raise RuntimeError("no text")

    assert "UnspeakableError" in failure_of(0, caught(UnspeakableError())).text


@pytest.mark.parametrize(("code", "exitcode"), [(3, 3), ("bad", 1)])
def test_sys_exit_names_its_code(code: object, exitcode: int) -> None:
    failure = failure_of(1, caught(SystemExit(code)))
    assert failure.exitcode == exitcode
    assert f"sys.exit({code!r})" in failure.text


@pytest.mark.parametrize(
    ("exitcode", "text"),
    [
        (4, "exited with status 4"),
        (-signal.SIGKILL, "killed by SIGKILL (9)"),
        (-signal.SIGSEGV, "killed by SIGSEGV (11)"),
        (-200, "killed by signal 200"),
    ],
)
def test_an_exit_without_a_word_is_described(exitcode: int, text: str) -> None:
    assert text in describe_exit(exitcode)


def test_signals_with_a_usual_reason_have_it_beside_them() -> None:
    for number, hint in ((signal.SIGKILL, "when memory runs out"), (signal.SIGABRT, "with checked=False gloo does this")):
        failure = RankFailure(rank=0, text=describe_exit(-number), exitcode=-number)
        assert hint in str(rank_failed_error([failure], world_size=2, what="work"))


def test_the_cause_comes_first_and_the_rest_is_marked() -> None:
    lost = failure_of(0, caught(PeerLostError("connection reset")))
    boom = failure_of(1, caught(ValueError("boom-42")))
    assert find_root([lost]) is None
    assert find_root([lost, boom]) is boom
    error = rank_failed_error([lost, boom], world_size=2, what="train.step")
    text = str(error)
    assert text.startswith("rank 1 of 2 failed in train.step: ValueError: boom-42")
    assert text.index("boom-42") < text.index("follow-ups") < text.index("connection reset")
    assert (error.rank, error.exitcode) == (1, None)
    assert "in caught" in error.remote_traceback


def test_of_failures_that_all_blame_peers_the_first_is_told() -> None:
    failures = [RankFailure(rank=rank, text="lost", blames_peer=True) for rank in (2, 0)]
    assert rank_failed_error(failures, world_size=3, what="f").rank == 2


def test_the_hint_at_memory_comes_after_the_place() -> None:
    failure = RankFailure(rank=1, text=describe_exit(-signal.SIGKILL), exitcode=-signal.SIGKILL)
    assert str(rank_failed_error([failure], world_size=2, what="app.run")) == (
        "rank 1 of 2 was killed by SIGKILL (9) in app.run; the kernel does this when memory runs out"
    )


def test_an_exit_is_told_as_one() -> None:
    error = rank_failed_error([RankFailure(rank=1, text="exited with status 4", exitcode=4)], world_size=2, what="app.run")
    assert str(error) == "rank 1 of 2 exited with status 4 in app.run"
    assert error.exitcode == 4
