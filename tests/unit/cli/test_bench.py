"""``parallel-runtime bench``: right results, the bandwidths nccl-tests means, and refusals."""

import json

import pytest

from parallel_runtime.cli.bench import OPERATIONS, BenchJob, bench_rank
from parallel_runtime.cli.main import main
from parallel_runtime.config import ParallelConfig
from parallel_runtime.launch import run_threads


def test_every_operation_is_right_on_three_members() -> None:
    job = BenchJob(group="tp", operations=tuple(OPERATIONS), sizes=(8, 96), iterations=1, warmup=0, checks=True)
    results = run_threads(bench_rank, ParallelConfig(tp=3, pp=2), job)
    rows, described = results[0]
    assert all(result[0] == rows for result in results)
    assert described.startswith("tp#0 ranks (0, 1, 2): tensors over local")
    assert [(row.operation, row.nbytes) for row in rows[:2]] == [("all_reduce", 12), ("all_reduce", 96)]
    assert {row.operation for row in rows} == set(OPERATIONS)
    assert {row.num_wrong for row in rows if row.operation != "barrier"} == {0}
    factors = {row.operation: row.bus_gb_s / row.algorithm_gb_s for row in rows if row.nbytes}
    parted = dict.fromkeys(("all_gather", "reduce_scatter", "all_to_all", "gather", "scatter"), 2 / 3)
    whole = dict.fromkeys(("broadcast", "reduce", "sendrecv"), 1.0)
    assert factors == pytest.approx({"all_reduce": 4 / 3, **parted, **whole})


def test_the_command_writes_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main("bench --tp 2 --pp 2 --backend local --group tp -b 8 -e 1K -f 8 -n 1 -w 0 -c --json".split()) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["group"] == "tp"
    assert [row["nbytes"] for row in told["rows"]] == [8, 64, 512]
    assert {row["num_wrong"] for row in told["rows"]} == {0}


def test_the_command_shows_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert main("bench --tp 2 --backend local -b 8 -e 8 -n 2 -w 1".split()) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("world#0 ranks (0, 1): tensors over local")
    assert lines[2] == "world: 1 x 2 ranks, 2 calls after 1"
    assert lines[3].split() == ["operation", "bytes", "us", "algbw", "GB/s", "busbw", "GB/s", "wrong"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--tp 2 --group pp", "--group pp: its groups have one member"),
        ("--tp 2 --factor 1", "--factor 1: at least 2"),
        ("--tp 2 -b 64 -e 8", "--end 8 is less than --begin 64"),
    ],
)
def test_what_cannot_be_measured_is_refused(arguments: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", *arguments.split()]) == 2
    assert message in capsys.readouterr().err


def test_a_size_is_a_number_of_bytes(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["bench", "--tp", "2", "-b", "many"])
    assert caught.value.code == 2
    assert "'many' is no number of bytes such as 8, 64K or 1M" in capsys.readouterr().err
