"""Trials of the fault campaign as data: drawn from a seed, and judged by what every rank reported. Nothing runs here."""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from parallel_runtime.config import Deadlines, ParallelConfig
from parallel_runtime.errors import PeerError
from parallel_runtime.testing.faults import Fault, FaultKind, Phase, Step

__all__ = ["DEADLINES", "GRACE_S", "PATIENT", "Outcome", "Trial", "Verdict", "blamed", "draw", "judge"]

DEADLINES = Deadlines(join_s=2.0, collective_s=1.5, control_s=1.5, p2p_s=1.5, exit_s=1.0)
PATIENT = Deadlines(join_s=2.0, collective_s=20.0, control_s=20.0, p2p_s=20.0, exit_s=1.0)
"""Where a rank ends in the middle: whoever waits for it is to be let go long before."""
GRACE_S = 5.0
"""Beyond the deadline, an error is late."""

_GROUPS = ("world", "tp", "dp", "pp")
_TENSOR_OPERATIONS = ("all_reduce", "all_gather", "reduce_scatter", "broadcast")
_WAITING_OPERATIONS = ("all_reduce", "all_gather", "reduce_scatter", "barrier")
"""In which every member waits for every other."""
_ANY_OPERATION = (*_TENSOR_OPERATIONS, "barrier", "broadcast_object")
_IN_A_PROCESS = (FaultKind.EXIT, FaultKind.OS_EXIT, FaultKind.SIGKILL, FaultKind.SIGSTOP)
_KINDS = tuple(kind for kind in FaultKind if kind is not FaultKind.LOSE)
"""No step is a send, so there is none to lose."""
_ENDS = frozenset({FaultKind.RAISE, FaultKind.EXIT, FaultKind.OS_EXIT, FaultKind.SIGKILL, FaultKind.CLOSE_EARLY})
"""After which a rank is gone, and known to be."""
_ENDLESS_S = 3600.0
_THREAD_STALL_S = 4.0
"""Long enough to be noticed; a thread cannot be killed, so it has to end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """One world in which one rank goes wrong.

    Attributes:
        number: Of the trial.
        backend: ``"gloo"`` and ``"shm"`` are processes, ``"local"`` and ``"gloo threads"`` are threads.
        config: Of the context.
        steps: What its ranks do.
        fault: What goes wrong.
    """

    number: int
    backend: str
    config: ParallelConfig
    steps: tuple[Step, ...]
    fault: Fault

    @property
    def uses_threads(self) -> bool:
        """Whether its ranks are threads of one process."""
        return self.backend in ("local", "gloo threads")

    @property
    def releases(self) -> bool:
        """Whether those who wait for the victim are to be let go at once, and not by a deadline."""
        return self.fault.kind in _ENDS and self.fault.phase is Phase.OPERATION

    @property
    def deadline_s(self) -> float:
        """The deadline that ends the longest wait the fault can cause: of meeting, or of one operation."""
        is_start = self.fault.phase in (Phase.JOINING, Phase.OPENING)
        return self.config.deadlines.join_s if is_start else self.config.deadlines.collective_s

    def __str__(self) -> str:
        fault, config = self.fault, self.config
        where = f"{fault.phase}" + (f" {fault.number} of {fault.group}" if fault.phase is Phase.OPERATION else "")
        sizes = " ".join(f"{axis}={getattr(config, axis)}" for axis in ("tp", "dp", "pp"))
        world = f"{self.backend} {sizes}{' checked' if config.checked is True else ''}"
        return f"trial {self.number}: {world}: {fault.kind} on rank {fault.rank}, {where}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How one rank of a trial ended.

    Attributes:
        rank: Who.
        error: Name of the type of its exception; ``""`` if it went well.
        is_ours: Whether the exception is one of this library's.
        ranks: Whom it blames.
        text: Of the exception.
        seconds: From the start of the trial.
        open_s: Those of them since its context was open.
        leaks: What the rank's process had more of than before, like ``"threads 5 -> 6"``.
    """

    rank: int
    error: str = ""
    is_ours: bool = True
    ranks: tuple[int, ...] = ()
    text: str = ""
    seconds: float = 0.0
    open_s: float = 0.0
    leaks: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What is wrong with the outcomes of a trial; all empty is good.

    Attributes:
        hangs: Ranks that never came back.
        wrong_blame: Ranks whose error names neither the victim nor, in a wrong order, the rank it deadlocked with.
        untyped: Ranks whose error is not one of the library's.
        unnoticed: Whether nobody noticed a fault that has to be noticed.
        false_alarms: Ranks with an error where nothing went wrong.
        late_s: Seconds beyond the deadline, of the latest rank with an error; ``None`` where there is none, or no deadline.
        release_s: Where the victim was gone in the middle: seconds that the latest of the others was in its open context.
        leaks: Everything that was left behind.
    """

    hangs: tuple[int, ...] = ()
    wrong_blame: tuple[int, ...] = ()
    untyped: tuple[int, ...] = ()
    unnoticed: bool = False
    false_alarms: tuple[int, ...] = ()
    late_s: float | None = None
    release_s: float | None = None
    leaks: tuple[str, ...] = ()

    @property
    def is_good(self) -> bool:
        """Whether the trial meets the bar."""
        is_wrong = self.hangs or self.wrong_blame or self.untyped or self.unnoticed or self.false_alarms or self.leaks
        return not is_wrong and (self.late_s or 0.0) <= GRACE_S and (self.release_s or 0.0) <= GRACE_S


def draw(seed: int, number: int) -> Trial:
    """One trial.

    Args:
        seed: Of the campaign.
        number: Of the trial; the same two numbers give the same trial.

    Returns:
        The trial.
    """
    rng = random.Random(f"{seed}/{number}")
    backend = rng.choice(("gloo", "gloo", "shm", "shm", "local", "gloo threads"))
    in_threads = backend in ("local", "gloo threads")
    kind = rng.choice([kind for kind in _KINDS if not (in_threads and kind in _IN_A_PROCESS)])
    sizes = _draw_sizes(rng, needs_two_groups=kind is FaultKind.WRONG_ORDER)
    own = {"local": {"backend": "local"}, "gloo threads": {"backend": "gloo", "shm": "off"}}
    settings = own.get(backend, {"backend": "gloo", "shm": "on" if backend == "shm" else "off"})
    checked = True if rng.random() < 0.25 else "auto"
    config = ParallelConfig.model_validate({**sizes, **settings, "checked": checked, "deadlines": DEADLINES})
    victim = rng.randrange(config.world_size)
    groups = [name for name in _GROUPS if len(config.layout.group_of(victim, name)) > 1]
    steps = [_draw_step(rng, groups) for _ in range(rng.randint(5, 10))]
    fault, steps = _draw_fault(rng, kind, victim, steps, config)
    if kind is FaultKind.STALL and in_threads:
        fault = Fault(kind=kind, rank=victim, phase=fault.phase, group=fault.group, number=fault.number, seconds=_THREAD_STALL_S)
    steps = [*steps, Step(group="world", operation="barrier")]
    trial = Trial(number=number, backend=backend, config=config, steps=tuple(steps), fault=fault)
    return replace(trial, config=config.replace(deadlines=PATIENT)) if trial.releases else trial


def judge(trial: Trial, outcomes: Mapping[int, Outcome], leaks: Sequence[str]) -> Verdict:
    """Compare what the ranks reported with what should happen.

    Args:
        trial: What was done.
        outcomes: Of the ranks that came back.
        leaks: Found outside of the ranks.

    Returns:
        The verdict.
    """
    fault = trial.fault
    others = [rank for rank in range(trial.config.world_size) if rank != fault.rank]
    failed = [outcomes[rank] for rank in others if rank in outcomes and outcomes[rank].error]
    is_harmless = fault.kind is FaultKind.SLOW
    must_be_noticed = not is_harmless and fault.phase is not Phase.CLOSING
    culprits = _culprits(trial)
    return Verdict(
        hangs=tuple(rank for rank in others if rank not in outcomes),
        wrong_blame=tuple(outcome.rank for outcome in failed if not is_harmless and not culprits & {*outcome.ranks}),
        untyped=tuple(outcome.rank for outcome in failed if not outcome.is_ours),
        unnoticed=must_be_noticed and not failed and all(rank in outcomes for rank in others),
        false_alarms=tuple(outcome.rank for outcome in failed) if is_harmless else (),
        late_s=None if trial.releases else max((outcome.seconds - trial.deadline_s for outcome in failed), default=None),
        release_s=max((outcome.open_s for outcome in failed), default=None) if trial.releases else None,
        leaks=(*leaks, *(f"rank {outcome.rank}: {leak}" for outcome in outcomes.values() for leak in outcome.leaks)),
    )


def _culprits(trial: Trial) -> set[int]:
    """Whom an error may name. In a wrong order two ranks wait for each other; no rank can see which of them was wrong."""
    fault = trial.fault
    if fault.kind is not FaultKind.WRONG_ORDER:
        return {fault.rank}
    return {*trial.config.layout.group_of(fault.rank, fault.group)}


def blamed(error: BaseException) -> tuple[int, ...]:
    """Whom an error blames.

    Args:
        error: Of any kind.

    Returns:
        World ranks.
    """
    return error.ranks if isinstance(error, PeerError) else ()


def _draw_sizes(rng: random.Random, *, needs_two_groups: bool) -> dict[str, int]:
    first, second = rng.sample(("tp", "dp", "pp"), 2)
    if needs_two_groups or rng.random() < 0.4:
        return {first: 2, second: 2}
    return {first: rng.choice((2, 3, 4))}


def _draw_step(rng: random.Random, groups: Sequence[str]) -> Step:
    return Step(group=rng.choice(groups), operation=rng.choice(_ANY_OPERATION), size=rng.choice((1, 4, 100, 5000)))


def _draw_fault(
    rng: random.Random, kind: FaultKind, victim: int, steps: list[Step], config: ParallelConfig
) -> tuple[Fault, list[Step]]:
    number, group = 1, steps[0].group
    if Fault(kind=kind, rank=victim).is_of_the_caller or rng.random() < 0.5:
        place = rng.randrange(len(steps))
        if kind is FaultKind.WRONG_SHAPE:
            steps[place] = Step(group=steps[place].group, operation=rng.choice(_TENSOR_OPERATIONS), size=4)
        if kind is FaultKind.WRONG_ORDER:
            small = rng.choice([name for name in _GROUPS if len(config.layout.group_of(victim, name)) == 2])
            pair = (small, "world")  # groups with two ranks in common, which then wait for each other
            steps[place : place + 1] = [Step(group=name, operation=rng.choice(_WAITING_OPERATIONS)) for name in pair]
        group = steps[place].group
        number = sum(step.group == group for step in steps[: place + 1])
        return Fault(kind=kind, rank=victim, group=group, number=number, seconds=_seconds(kind)), steps
    phase = rng.choice((Phase.JOINING, Phase.OPENING, Phase.CLOSING))
    return Fault(kind=kind, rank=victim, phase=phase, group=group, number=number, seconds=_seconds(kind)), steps


def _seconds(kind: FaultKind) -> float:
    return 0.3 if kind is FaultKind.SLOW else _ENDLESS_S
