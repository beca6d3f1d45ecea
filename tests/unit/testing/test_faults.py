"""Breaking one rank on purpose."""

from collections.abc import Sequence

import pytest

from parallel_runtime.comm.communicator import Communicator
from parallel_runtime.config import ParallelConfig
from parallel_runtime.context import ParallelContext
from parallel_runtime.errors import ArgumentError, PeerError, PeerTimeoutError, RankFailedError
from parallel_runtime.launch import run_threads
from parallel_runtime.testing import faults
from parallel_runtime.testing.faults import OPERATIONS, Fault, FaultKind, FaultProbe, InjectedError, Phase, Step, run_steps, spoil

FOUR = ParallelConfig(tp=2, dp=2)
STEPS = (
    Step(group="tp", operation="all_reduce"),
    Step(group="dp", operation="barrier"),
    Step(group="tp", operation="barrier"),
    Step(group="world", operation="all_gather", size=3),
)


def play(ctx: ParallelContext, fault: Fault, steps: Sequence[Step] = STEPS) -> int:
    probe = FaultProbe(fault, ctx.layout, ctx.rank)
    with ParallelContext(ctx.config, identity=ctx.identity, store=ctx.store, hub=ctx.hub, probe=probe) as broken:
        return run_steps(broken, spoil(steps, fault) if ctx.rank == fault.rank else steps)


def test_every_operation_can_be_a_step() -> None:
    steps = [Step(group=group, operation=operation) for group in ("world", "tp", "pp") for operation in OPERATIONS]
    slow = Fault(kind=FaultKind.SLOW, rank=9)
    assert run_threads(play, FOUR, slow, steps, timeout_s=30) == [len(steps)] * 4
    with pytest.raises(RankFailedError, match="a step cannot 'dance'; use one of all_reduce"):
        run_threads(play, FOUR, slow, [Step(group="tp", operation="dance")], timeout_s=30)


@pytest.mark.parametrize(
    ("kind", "number", "expected"),
    [
        (FaultKind.SKIP, 2, (STEPS[0], STEPS[1], STEPS[3])),
        (FaultKind.CLOSE_EARLY, 2, STEPS[:2]),
        (FaultKind.WRONG_SHAPE, 1, (Step(group="tp", operation="all_reduce", size=7), *STEPS[1:])),
        (FaultKind.WRONG_OP, 1, (Step(group="tp", operation="barrier"), *STEPS[1:])),
        (FaultKind.WRONG_OP, 2, (*STEPS[:2], Step(group="tp", operation="all_gather"), STEPS[3])),
        (FaultKind.WRONG_ORDER, 1, (STEPS[1], STEPS[0], *STEPS[2:])),
        (FaultKind.SLOW, 1, (Step(group="tp", operation="all_reduce", pause_s=0.5), *STEPS[1:])),
        (FaultKind.RAISE, 1, STEPS),
    ],
)
def test_what_the_calling_code_does_instead(kind: FaultKind, number: int, expected: tuple[Step, ...]) -> None:
    assert spoil(STEPS, Fault(kind=kind, rank=0, group="tp", number=number, seconds=0.5)) == expected


def test_faults_that_cannot_be_are_refused() -> None:
    with pytest.raises(ArgumentError, match="a fault of kind skip happens among operations, not while joining"):
        Fault(kind=FaultKind.SKIP, rank=0, phase=Phase.JOINING)
    with pytest.raises(ArgumentError, match="a fault of kind lose happens among operations, not while closing"):
        Fault(kind=FaultKind.LOSE, rank=0, phase=Phase.CLOSING)
    with pytest.raises(ArgumentError, match="numbered from 1, got number=0"):
        Fault(kind=FaultKind.RAISE, rank=0, number=0)
    with pytest.raises(ArgumentError, match="there are 2 steps of group tp, so number=3 never comes"):
        spoil(STEPS, Fault(kind=FaultKind.SKIP, rank=0, group="tp", number=3))
    with pytest.raises(ArgumentError, match="needs a step of another group after step 1 of world"):
        spoil(STEPS, Fault(kind=FaultKind.WRONG_ORDER, rank=0, group="world"))


@pytest.mark.parametrize("phase", list(Phase))
def test_a_fault_strikes_in_its_phase_and_on_its_rank_only(phase: Phase) -> None:
    errors: dict[int, BaseException] = {}

    def work(ctx: ParallelContext) -> None:
        config = FOUR.replace(deadlines=ctx.config.deadlines.replace(join_s=0.5))
        fault = Fault(kind=FaultKind.RAISE, rank=2, phase=phase, group="tp", number=2)
        probe = FaultProbe(fault, config.layout, ctx.rank)
        try:
            with ParallelContext(config, identity=ctx.identity, store=ctx.store, hub=ctx.hub, probe=probe) as broken:
                run_steps(broken, STEPS)
        except (InjectedError, PeerError) as error:
            errors[ctx.rank] = error

    run_threads(work, FOUR, timeout_s=30)
    assert str(errors.pop(2)) == f"injected: raise while {phase.value}"
    assert set(errors) == (set() if phase is Phase.CLOSING else {0, 1, 3})
    assert all(isinstance(error, PeerError) for error in errors.values())


def test_a_stall_ends_in_the_deadline_of_the_others() -> None:
    def work(ctx: ParallelContext) -> tuple[int, ...]:
        config = FOUR.replace(deadlines=ctx.config.deadlines.replace(collective_s=0.3))
        with ParallelContext(config, identity=ctx.identity, store=ctx.store, hub=ctx.hub) as broken:
            fault = Fault(kind=FaultKind.STALL, rank=1, group="world", seconds=1.5)
            try:
                run_steps(broken, spoil(STEPS[3:], fault) if ctx.rank == 1 else STEPS[3:])
            except PeerTimeoutError as error:
                return error.ranks
            except PeerError:
                return ()
        return ()

    assert (1,) in run_threads(work, FOUR, timeout_s=30)


def test_a_message_that_is_lost_is_a_deadlock_at_once_among_threads() -> None:
    def work(ctx: ParallelContext) -> str:
        probe = FaultProbe(Fault(kind=FaultKind.LOSE, rank=0, group="tp", number=2), ctx.layout, ctx.rank)
        with ParallelContext(ctx.config, identity=ctx.identity, store=ctx.store, hub=ctx.hub, probe=probe) as broken:
            broken.tp.barrier()
            try:
                if ctx.rank == 0:
                    broken.tp.send_object("first")
                    broken.tp.send_object("second")  # its only frame is the second one that rank 0 sends
                    broken.tp.barrier()
                else:
                    assert broken.tp.recv_object() == "first"
                    broken.tp.recv_object()
            except PeerError as error:
                return str(error)
        return ""

    for said in run_threads(work, ParallelConfig(tp=2), timeout_s=30):
        assert "rank 0 in barrier of tp#0 waits for rank 1" in said
        assert "rank 1 in recv from member 0 with tag 0 of tp#0 waits for rank 0" in said


def test_the_trap_passes_everything_on() -> None:
    """A method that is missing would run in a way of its own, beside the other members."""
    own = {name for name in vars(Communicator) if not name.startswith("_") and callable(vars(Communicator)[name])}
    assert own <= set(vars(faults._Trap))
