"""Whose turn it is among threads that run one at a time: drawn by a seeded generator, so that a run can be repeated."""

from collections.abc import Iterable, Mapping, Set
from random import Random
from time import monotonic
from typing import Final, final

from parallel_runtime.comm.local.waits import Wait

__all__ = ["Turns"]

_PATIENCE_S: Final = 1.0
"""How long the others wait for a thread that is at no communication point; it may itself wait for one of them elsewhere."""


@final
class Turns:
    """Lets one thread go on, once all of them are at a communication point. Used under the lock of the hub.

    Args:
        seed: Equal seeds give equal turns to equal programs.
    """

    def __init__(self, seed: int) -> None:
        self._random = Random(seed)
        self._chosen: Wait | None = None
        self._resumed: dict[int, float] = {}
        self._opened: float | None = None

    def is_chosen(self, wait: Wait) -> bool:
        """Whether the turn is that of ``wait``."""
        return self._chosen is wait

    def choose(self, waits: Iterable[Wait], threads: Mapping[int, Set[int]]) -> bool:
        """Draw who goes on, if it is time to.

        Args:
            waits: Everybody who is at a communication point.
            threads: Per rank that has not left, its living threads.

        Returns:
            Whether somebody was chosen now.
        """
        waits = list(waits)
        self._opened = self._opened or monotonic()
        if self._chosen is not None or not self._is_complete({wait.thread for wait in waits}, threads):
            return False
        able = sorted((wait for wait in waits if wait.can_end()), key=lambda wait: (wait.rank, wait.what))
        if able:
            self._chosen = self._random.choice(able)
        return bool(able)

    def resume(self, wait: Wait) -> None:
        """Note that the thread of ``wait`` runs again; its turn lasts until it comes back."""
        self._resumed[wait.thread] = monotonic()
        if self._chosen is wait:
            self._chosen = None

    def _is_complete(self, here: Set[int], threads: Mapping[int, Set[int]]) -> bool:
        """Whether nobody is away whom the others still wait for."""
        latest = monotonic() - _PATIENCE_S
        opened = self._opened or latest
        for known in threads.values():
            away = [self._resumed.get(thread, opened) for thread in known - here] if known else [opened]
            if any(since > latest for since in away):
                return False
        return True
