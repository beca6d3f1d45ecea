"""The trace of an engine: all ranks of all replicas in one document, on one clock."""

import json
from collections import Counter
from pathlib import Path

import pytest

from parallel_runtime.config import ParallelConfig
from parallel_runtime.context.trace_document import Clock, Operation, RankTrace
from parallel_runtime.serving import Engine, SamplingParams
from parallel_runtime.serving.controls import ReplicaTrace
from parallel_runtime.serving.tracing import engine_trace
from tests.spmd.tiny_models import write_tiny_model
from tests.unit.context.test_trace import check_document


def test_two_replicas_of_two_stages_and_two_data_ranks_are_one_document(tmp_path: Path) -> None:
    model, path = write_tiny_model(tmp_path / "tiny", vocab_size=300), tmp_path / "trace.json"
    with Engine(model, parallel=ParallelConfig(pp=2, dp=2), replicas=2, executor="threads") as engine:
        engine.controls.start_trace()
        engine.generate([[1, 2, 3]] * 8, SamplingParams(max_new_tokens=3))
        profiles = engine.controls.stop_trace(path)
        assert engine.controls.stop_profile()[0].spans == ()  # nothing goes on being written down
    assert sorted(profile.rank for profile in profiles) == [0, 0, 1, 1, 2, 2, 3, 3]
    document = json.loads(path.read_text(encoding="utf-8"))
    arrows = Counter(check_document(document, num_ranks=8, num_worlds=2))
    stages = {(0, 2), (1, 3), (4, 6), (5, 7)}
    assert stages <= set(arrows)
    assert all((src // 4, src % 2) == (dst // 4, dst % 2) for src, dst in arrows)  # no replica speaks to another
    names = [event["args"]["name"] for event in document["traceEvents"] if event["name"] == "process_name"]
    assert sum("replica 1" in name for name in names) == 4
    work = Counter((event["pid"], event["name"]) for event in document["traceEvents"] if event.get("cat") == "work")
    assert all(work[rank, "forward"] for rank in range(8))
    assert document["metadata"]["dropped"] == {}


def test_a_trace_that_was_not_begun_is_empty_and_a_second_one_begins_anew(tmp_path: Path) -> None:
    model, path = write_tiny_model(tmp_path / "tiny", vocab_size=300), tmp_path / "trace.json"
    with Engine(model, executor="threads") as engine:
        engine.controls.stop_trace(path)
        assert json.loads(path.read_text(encoding="utf-8"))["traceEvents"] == []
        engine.controls.start_trace()
        engine.controls.start_trace()
        engine.generate([[1, 2]], SamplingParams(max_new_tokens=2))
        (profile,) = engine.controls.stop_trace(path)
    assert profile.busy > 0


def _part(rank: int, start_s: float) -> RankTrace:
    operation = Operation("tp#0", (0, 1), 1, "barrier", "", (), start_s + 0.5, 0.1, None)
    return RankTrace(rank=rank, who="", pid=1, start_s=start_s, num_dropped=0, operations=[operation], stretches=[])


def test_leaders_on_other_machines_are_brought_to_the_clock_of_the_front() -> None:
    """The second replica's leader is 1,000 s ahead, and its second rank 5 s ahead of that."""
    own = ReplicaTrace([_part(0, 10.0), _part(1, 10.0)], [Clock(0.0, 0.0), Clock(0.0, 0.001)], told_s=20.0)
    far = ReplicaTrace([_part(0, 1010.0), _part(1, 1015.0)], [Clock(0.0, 0.0), Clock(5.0, 0.001)], told_s=1020.0)
    document = engine_trace([(0, own), (1, far)], ranks_per_replica=2, asked_s=19.9, heard_s=20.1)
    check_document(document, num_ranks=4, num_worlds=2)
    assert [event["ts"] for event in document["traceEvents"] if event["ph"] == "X"] == pytest.approx([0.5e6] * 4)
