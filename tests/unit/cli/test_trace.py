"""``parallel-runtime trace``: a model on two stages, its trace, its picture and its shares."""

import json
from pathlib import Path

import pytest

from parallel_runtime.cli.main import main
from tests.unit.context.test_trace import check_document


@pytest.mark.model
def test_two_stages_are_traced(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, picture = tmp_path / "trace.json", tmp_path / "trace.svg"
    command = f"trace --pp 2 --executor threads --requests 2 --max-new-tokens 2 -o {path} --picture {picture} --json"
    assert main(command.split()) == 0
    told = json.loads(capsys.readouterr().out)
    assert [rank["stage"] for rank in told["ranks"]] == [0, 1]
    assert all(0 < rank["busy"] <= 1 for rank in told["ranks"])
    document = json.loads(path.read_text(encoding="utf-8"))
    check_document(document, 2)
    work = [(event["pid"], event["name"]) for event in document["traceEvents"] if event.get("cat") == "work"]
    assert {(0, "forward"), (1, "forward"), (1, "sampling"), (0, "scheduler step")} <= set(work)
    assert (0, "sampling") not in work
    assert work.count((1, "forward")) == work.count((1, "sampling"))
    assert "rank 1, stage 1" in picture.read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [("--requests 0", "--requests 0: at least 1"), ("--picture a.gif", "--picture a.gif: name a file that ends in .svg or .png")],
)
def test_what_cannot_be_traced_is_refused(arguments: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["trace", *arguments.split()]) == 2
    assert message in capsys.readouterr().err
