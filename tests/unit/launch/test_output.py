"""Where ranks write, without ranks."""

import os
from pathlib import Path

import pytest

from parallel_runtime.config import ParallelConfig
from parallel_runtime.errors import ArgumentError, LaunchError
from parallel_runtime.launch import launch
from parallel_runtime.launch import output as room
from parallel_runtime.launch.output import RankOutput, log_path


def test_by_default_ranks_write_where_the_caller_does() -> None:
    with RankOutput(2) as output:
        assert output.of(1) == (1, 2)


def test_a_file_for_each_rank(tmp_path: Path) -> None:
    folder = tmp_path / "new" / "logs"
    for text in (b"old and longer", b"out "):
        with RankOutput(2, log_dir=folder) as output:
            out, err = output.of(1)
            os.write(out, text)
            os.write(err, b"err")
    assert log_path(folder, 1).read_bytes() == b"out err"
    assert log_path(folder, 0).read_bytes() == b""


def test_every_line_begins_with_its_rank(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    before = set(os.listdir("/proc/self/fd"))
    with RankOutput(2, log_dir=tmp_path, prefix_output=True) as output:
        first, second = os.dup(output.of(0)[0]), os.dup(output.of(1)[1])
        output.handed_over()
        os.write(first, b"one\ntwo")
        os.write(second, b"\n" + b"x" * 70_000)
        os.close(first)
        os.close(second)
    out, err = capfd.readouterr()
    assert out == "[rank 0] one\n[rank 0] two\n"
    assert err.splitlines()[0] == "[rank 1] "
    assert "".join(line.removeprefix("[rank 1] ") for line in err.splitlines()) == "x" * 70_000
    assert log_path(tmp_path, 0).read_bytes() == b"one\ntwo"
    assert set(os.listdir("/proc/self/fd")) == before


def test_a_stream_that_somebody_keeps_open_holds_up_nobody(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(room, "_DRAIN_S", 0.2)
    with RankOutput(1, prefix_output=True) as output:
        kept = os.dup(output.of(0)[0])
    os.close(kept)


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with (
        pytest.raises(LaunchError, match=r"the output of rank 0 cannot be kept in .*file/rank-0.log"),
        RankOutput(1, log_dir=tmp_path / "file"),
    ):
        pass


def test_an_unknown_pin_is_refused() -> None:
    with pytest.raises(ArgumentError, match='pin is "none" or "auto", got \'numa\''):
        launch(print, ParallelConfig(), pin="numa")  # type: ignore[arg-type]  # on purpose
