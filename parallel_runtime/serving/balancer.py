"""Which data-parallel rank serves the next request. Pure: it counts what it handed out, never what workers report.

A load that is counted at dispatch cannot lag, so requests never pile up on a rank whose report is late.
"""

from enum import StrEnum
from typing import final

from parallel_runtime.errors import ArgumentError

__all__ = ["BalancePolicy", "Balancer"]


class BalancePolicy(StrEnum):
    """How the next rank is chosen."""

    ROUND_ROBIN = "round_robin"
    LEAST_REQUESTS = "least_requests"
    LEAST_TOKENS = "least_tokens"


@final
class Balancer:
    """Hands requests to workers and remembers who has what.

    Among equals the worker that was chosen longest ago comes first, so light load rotates too.

    Args:
        num_workers: Workers, at least 1.
        policy: How the next one is chosen.

    Raises:
        ArgumentError: There is no worker.
    """

    def __init__(self, num_workers: int, *, policy: BalancePolicy = BalancePolicy.LEAST_REQUESTS) -> None:
        if num_workers < 1:
            raise ArgumentError(f"a balancer needs at least one worker, got num_workers={num_workers}")
        self._policy = policy
        self._requests = [0] * num_workers
        self._tokens = [0] * num_workers
        self._chosen_at = list(range(-num_workers, 0))
        self._num_dispatched = 0
        self._in_flight: dict[str, tuple[int, int]] = {}

    @property
    def requests(self) -> tuple[int, ...]:
        """Requests under way on each worker."""
        return tuple(self._requests)

    @property
    def tokens(self) -> tuple[int, ...]:
        """Tokens under way on each worker, as given at dispatch."""
        return tuple(self._tokens)

    def assign(self, request_id: str, *, num_tokens: int = 1) -> int:
        """Choose a worker and count the request there.

        Args:
            request_id: Name of the request, not under way yet.
            num_tokens: Its weight for ``LEAST_TOKENS``: prompt tokens plus those it may make.

        Returns:
            The worker's number.

        Raises:
            ArgumentError: ``request_id`` is under way already, or ``num_tokens`` is negative.
        """
        if request_id in self._in_flight:
            raise ArgumentError(f"request {request_id!r} is under way on worker {self._in_flight[request_id][0]} already")
        if num_tokens < 0:
            raise ArgumentError(f"request {request_id!r} cannot have {num_tokens} tokens")
        worker = min(range(len(self._requests)), key=lambda index: (self._load(index), self._chosen_at[index]))
        self._chosen_at[worker] = self._num_dispatched
        self._num_dispatched += 1
        self._requests[worker] += 1
        self._tokens[worker] += num_tokens
        self._in_flight[request_id] = (worker, num_tokens)
        return worker

    def worker_of(self, request_id: str) -> int | None:
        """Find the worker of a request.

        Args:
            request_id: Name of the request.

        Returns:
            The worker's number, or ``None`` where the request is not under way.
        """
        entry = self._in_flight.get(request_id)
        return None if entry is None else entry[0]

    def release(self, request_id: str) -> bool:
        """Count a request as ended. A second call, or an unknown id, changes nothing.

        Args:
            request_id: Name of the request.

        Returns:
            Whether it was under way.
        """
        entry = self._in_flight.pop(request_id, None)
        if entry is None:
            return False
        worker, num_tokens = entry
        self._requests[worker] -= 1
        self._tokens[worker] -= num_tokens
        return True

    def _load(self, worker: int) -> int:
        match self._policy:
            case BalancePolicy.LEAST_REQUESTS:
                return self._requests[worker]
            case BalancePolicy.LEAST_TOKENS:
                return self._tokens[worker]
        return 0
