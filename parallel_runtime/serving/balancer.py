"""Which worker serves the next request. Pure: it counts what it handed out, never what workers report.

A load that is counted at dispatch cannot lag, so requests never pile up on a worker whose report is late. A worker is one
data-parallel rank of one replica.
"""

from collections.abc import Collection, Sequence
from enum import StrEnum
from typing import final

from parallel_runtime.errors import ArgumentError
from parallel_runtime.serving.prefix_map import PrefixMap

__all__ = ["BalancePolicy", "Balancer"]

_MOST_AHEAD = 4
"""Requests that a worker may have more than the least loaded one and still get another for the sake of its cache."""


class BalancePolicy(StrEnum):
    """How the next worker is chosen.

    ``PREFIX_AFFINITY`` takes the worker that last had a prompt with the same beginning, unless it has some requests more than
    another; for the rest it is ``LEAST_REQUESTS``.
    """

    ROUND_ROBIN = "round_robin"
    LEAST_REQUESTS = "least_requests"
    LEAST_TOKENS = "least_tokens"
    PREFIX_AFFINITY = "prefix_affinity"


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
        self._prefixes = PrefixMap()

    @property
    def requests(self) -> tuple[int, ...]:
        """Requests under way on each worker."""
        return tuple(self._requests)

    @property
    def tokens(self) -> tuple[int, ...]:
        """Tokens under way on each worker, as given at dispatch."""
        return tuple(self._tokens)

    def assign(
        self, request_id: str, *, num_tokens: int = 1, prompt: Sequence[int] = (), among: Collection[int] | None = None
    ) -> int:
        """Choose a worker and count the request there.

        Args:
            request_id: Name of the request, not under way yet.
            num_tokens: Its weight for ``LEAST_TOKENS``: prompt tokens plus those it may make.
            prompt: Its tokens, for ``PREFIX_AFFINITY``.
            among: Workers that may be chosen; all by default.

        Returns:
            The worker's number.

        Raises:
            ArgumentError: ``request_id`` is under way already, ``num_tokens`` is negative, or no worker may be chosen.
        """
        if request_id in self._in_flight:
            raise ArgumentError(f"request {request_id!r} is under way on worker {self._in_flight[request_id][0]} already")
        if num_tokens < 0:
            raise ArgumentError(f"request {request_id!r} cannot have {num_tokens} tokens")
        candidates = range(len(self._requests)) if among is None else among
        if not candidates:
            raise ArgumentError(f"no worker may have request {request_id!r}; name at least one of {len(self._requests)}")
        worker = self._choose(candidates, prompt)
        self._chosen_at[worker] = self._num_dispatched
        self._num_dispatched += 1
        self._requests[worker] += 1
        self._tokens[worker] += num_tokens
        self._in_flight[request_id] = (worker, num_tokens)
        if self._policy is BalancePolicy.PREFIX_AFFINITY:
            self._prefixes.remember(prompt, worker)
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

    def forget(self, worker: int) -> None:
        """Note that a worker starts anew, so that nothing of any prompt is left in its cache.

        Args:
            worker: Its number.
        """
        self._prefixes.forget(worker)

    def _choose(self, candidates: Collection[int], prompt: Sequence[int]) -> int:
        if self._policy is BalancePolicy.PREFIX_AFFINITY:
            known = self._prefixes.find(prompt)
            least = min(self._requests[worker] for worker in candidates)
            if known is not None and known in candidates and self._requests[known] - least <= _MOST_AHEAD:
                return known
        return min(candidates, key=lambda worker: (self._load(worker), self._chosen_at[worker]))

    def _load(self, worker: int) -> int:
        match self._policy:
            case BalancePolicy.ROUND_ROBIN:
                return 0
            case BalancePolicy.LEAST_TOKENS:
                return self._tokens[worker]
        return self._requests[worker]
