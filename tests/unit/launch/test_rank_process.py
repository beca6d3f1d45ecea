"""What a launched process does first, and what becomes of it where that is not possible."""

import os
import pickle
import threading
from pathlib import Path

import pytest

from parallel_runtime.errors import ConfigError
from parallel_runtime.launch.outcome import RankFailure
from parallel_runtime.launch.rank_process import RankTask, run_rank
from parallel_runtime.launch.wires import Descriptor
from parallel_runtime.terms import Rank


def test_a_rank_that_may_not_have_a_lifeline_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Instead of ending without a word."""

    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    outcome = os.open(tmp_path / "outcome", os.O_RDWR | os.O_CREAT)
    try:
        fds = [os.open(os.devnull, os.O_RDONLY) for _ in range(2)]
        run_rank(
            RankTask(
                rank=Rank(3),
                job=Descriptor(fds[0]),
                outcome=Descriptor(outcome),
                lifeline=Descriptor(fds[1]),
                output=(),
                handles=(),
            )
        )
        for fd in fds:
            os.close(fd)
    finally:
        os.close(outcome)
    sent = (tmp_path / "outcome").read_bytes()
    failure = pickle.loads(sent[sent.index(b"\x80") :])
    assert isinstance(failure, RankFailure)
    assert failure.rank == 3
    assert ConfigError.__name__ in failure.text
    assert "to end with its parent, a thread is needed" in failure.text
