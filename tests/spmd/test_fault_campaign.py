"""A short slice of the fault campaign: nothing hangs, nothing stays behind, and the error names the culprit."""

import pytest

from benchmarks.fault_campaign import Result, campaign, describe, table
from benchmarks.fault_trials import Outcome, Verdict, draw, judge
from parallel_runtime.testing.faults import FaultKind, Phase


@pytest.mark.processes
@pytest.mark.timeout(120)
def test_a_slice_of_the_campaign_meets_the_bar() -> None:
    results = campaign(7, range(16))
    assert "".join(describe(result) for result in results if not result.verdict.is_good) == ""
    assert {result.trial.uses_threads for result in results} == {True, False}


def test_trials_follow_from_their_seed() -> None:
    trials = [draw(7, number) for number in range(300)]
    assert trials == [draw(7, number) for number in range(300)]
    assert {trial.fault.kind for trial in trials} == set(FaultKind) - {FaultKind.LOSE}
    assert {trial.fault.phase for trial in trials} == set(Phase)
    assert {trial.config.world_size for trial in trials} == {2, 3, 4}


def test_verdicts_find_what_is_wrong() -> None:
    trial = next(
        t for t in map(draw, [7] * 300, range(300)) if t.fault.kind is FaultKind.STALL and t.fault.phase is Phase.OPERATION
    )
    victim = trial.fault.rank
    others = [rank for rank in range(trial.config.world_size) if rank != victim]
    right = {rank: Outcome(rank=rank, error="PeerTimeoutError", ranks=(victim,), seconds=2.0) for rank in others}
    assert judge(trial, right, []).is_good
    assert judge(trial, {}, []).hangs == tuple(others)
    assert judge(trial, {rank: Outcome(rank=rank) for rank in others}, []).unnoticed
    assert judge(trial, {**right, others[0]: Outcome(rank=others[0], error="KeyError", is_ours=False)}, []).untyped == (
        others[0],
    )
    assert judge(trial, {**right, others[0]: Outcome(rank=others[0], error="PeerError", ranks=(9,))}, []).wrong_blame == (
        others[0],
    )
    assert judge(trial, right, ["a file"]).leaks == ("a file",)
    assert not judge(trial, {rank: Outcome(rank=rank, error="E", ranks=(victim,), seconds=9.0) for rank in others}, []).is_good
    slow = next(t for t in map(draw, [7] * 300, range(300)) if t.fault.kind is FaultKind.SLOW and t.fault.rank != 0)
    assert judge(slow, {0: Outcome(rank=0, error="PeerError")}, []).false_alarms == (0,)
    page = table([Result(trial=trial, outcomes=right, verdict=Verdict(hangs=(1,)))], 7, 1.0)
    assert "| stall | 1 | 1 | 0 | 0 | 0 | 0 | 0 |  |  |" in page
