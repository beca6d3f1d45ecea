"""When a replica counts as lost, and when it is started again. Pure: the clock is handed in."""

from enum import StrEnum
from types import MappingProxyType
from typing import final

from pydantic import Field

from parallel_runtime.config.base import FrozenModel
from parallel_runtime.errors import ArgumentError
from parallel_runtime.values import LONGEST_S

__all__ = ["TRANSITIONS", "ReplicaLife", "ReplicaState", "Supervision"]

_PINGS_PER_SILENCE = 4
_LOOKS_PER_SILENCE = 20
_SHORT_S, _LONG_S = 0.1, 0.5


@final
class Supervision(FrozenModel):
    """How replicas are watched and started again.

    Attributes:
        health_s: Longest time in which a leader does not answer whether its loop turns; longer than the longest step.
        longest_control_s: The same while it does what was asked of its replica, such as an update of its weights.
        start_s: Longest time from starting a replica until it serves.
        max_restarts: Failures in a row after which a replica is started again; ``None`` is 3 where there are several replicas,
            and 0 for a single one, whose failure is at once the engine's.
        backoff_s: Pause before the first restart; every further one in a row waits twice as long.
        longest_backoff_s: Longest such pause.
        stable_s: Time of service after which earlier failures are forgotten.
        max_runs: Replicas that may be lost while they run one request, before that request is given up.

    Raises:
        ConfigError: A value breaks a rule.
    """

    health_s: float = Field(default=30.0, gt=0, le=LONGEST_S)
    longest_control_s: float = Field(default=600.0, gt=0, le=LONGEST_S)
    start_s: float = Field(default=600.0, gt=0, le=LONGEST_S)
    max_restarts: int | None = Field(default=None, ge=0)
    backoff_s: float = Field(default=0.5, ge=0, le=LONGEST_S)
    longest_backoff_s: float = Field(default=30.0, ge=0, le=LONGEST_S)
    stable_s: float = Field(default=60.0, ge=0, le=LONGEST_S)
    max_runs: int = Field(default=3, ge=1)

    def restarts_of(self, num_replicas: int) -> int:
        """Say how often a replica is started again.

        Args:
            num_replicas: Of the engine.

        Returns:
            ``max_restarts``, or what it means where it is ``None``.
        """
        return (3 if num_replicas > 1 else 0) if self.max_restarts is None else self.max_restarts


class ReplicaState(StrEnum):
    """Where a replica is."""

    STARTING = "starting"
    SERVING = "serving"
    RESTING = "resting"
    LOST = "lost"


TRANSITIONS = MappingProxyType(
    {
        ReplicaState.RESTING: frozenset({ReplicaState.STARTING}),
        ReplicaState.STARTING: frozenset({ReplicaState.SERVING, ReplicaState.RESTING, ReplicaState.LOST}),
        ReplicaState.SERVING: frozenset({ReplicaState.RESTING, ReplicaState.LOST}),
        ReplicaState.LOST: frozenset(),
    }
)
"""What may follow each state."""


@final
class ReplicaLife:
    """One replica from start to start.

    Args:
        rules: When it counts as lost.
        max_restarts: Failures in a row after which it is started again.
        num_leaders: Its leaders, each of which has to answer.

    Attributes:
        state: Where it is.
        num_failures: In a row.
    """

    def __init__(self, rules: Supervision, *, max_restarts: int, num_leaders: int = 1) -> None:
        self._rules = rules
        self._max_restarts = max_restarts
        self._num_leaders = num_leaders
        self._since = 0.0
        self._asked_at = 0.0
        self._unanswered: dict[int, float] = {}
        self.state = ReplicaState.RESTING
        self.num_failures = 0

    def start(self, now: float) -> None:
        """It is being started.

        Args:
            now: Seconds on any clock.

        Raises:
            ArgumentError: It runs already, or is lost.
        """
        self._move(ReplicaState.STARTING, now)

    def serve(self, now: float) -> None:
        """It has said that it serves.

        Args:
            now: Seconds on the same clock.

        Raises:
            ArgumentError: It was not started.
        """
        self._move(ReplicaState.SERVING, now)

    def hear(self, leader: int) -> None:
        """A leader has said something.

        Args:
            leader: Its data-parallel rank.
        """
        self._unanswered.pop(leader, None)

    def asks(self, now: float) -> bool:
        """Decide whether to ask the leaders now whether their loops turn; if so, that counts as asked.

        Args:
            now: Seconds on the same clock.

        Returns:
            Whether it serves, and nobody was asked for a quarter of ``health_s``.
        """
        if self.state is not ReplicaState.SERVING or now - self._asked_at < self._rules.health_s / _PINGS_PER_SILENCE:
            return False
        self._asked_at = now
        for leader in range(self._num_leaders):
            self._unanswered.setdefault(leader, now)
        return True

    @property
    def look_again_s(self) -> float:
        """Seconds after which to look at it again where it says nothing: not often while it serves."""
        if self.state is not ReplicaState.SERVING:
            return _SHORT_S
        return max(_SHORT_S, min(_LONG_S, self._rules.health_s / _LOOKS_PER_SILENCE))

    def problem(self, now: float, *, is_busy: bool = False) -> str:
        """Say what is wrong with its silence.

        Args:
            now: Seconds on the same clock.
            is_busy: Whether it was asked for something that may take long.

        Returns:
            Such as ``"leader 0 has not answered for 30 s (health_s)"``; ``""`` while nothing is.
        """
        rules = self._rules
        if self.state is ReplicaState.STARTING and now - self._since > rules.start_s:
            return f"it does not serve {rules.start_s:g} s after its start (start_s)"
        name = "longest_control_s" if is_busy else "health_s"
        limit_s: float = getattr(rules, name)
        late = [leader for leader, since in self._unanswered.items() if now - since > limit_s]
        return f"leader {late[0]} has not answered for {limit_s:g} s ({name})" if late else ""

    def fail(self, now: float, *, is_final: bool = False) -> float | None:
        """It has failed, or could not be started.

        Args:
            now: Seconds on the same clock.
            is_final: Whether another start would end alike.

        Returns:
            Seconds to wait before it is started again; ``None`` where it is lost.

        Raises:
            ArgumentError: It was not started.
        """
        if self.state is ReplicaState.SERVING and now - self._since >= self._rules.stable_s:
            self.num_failures = 0
        self.num_failures += 1
        if is_final or self.num_failures > self._max_restarts:
            self._move(ReplicaState.LOST, now)
            return None
        self._move(ReplicaState.RESTING, now)
        return min(self._rules.longest_backoff_s, self._rules.backoff_s * 2.0 ** min(self.num_failures - 1, 64))

    def rest(self, now: float) -> None:
        """It is ended as planned, to be started again; that is no failure.

        Args:
            now: Seconds on the same clock.

        Raises:
            ArgumentError: It was not started.
        """
        self._move(ReplicaState.RESTING, now)

    def _move(self, state: ReplicaState, now: float) -> None:
        if state not in TRANSITIONS[self.state]:
            raise ArgumentError(f"a replica that is {self.state} cannot become {state}")
        self.state = state
        self._since = self._asked_at = now
        self._unanswered.clear()
