"""What is offered over HTTP, and how it is doing: the one object that the endpoints share."""

import asyncio
import time
from collections.abc import Mapping
from enum import StrEnum
from pathlib import PurePath
from typing import final

from parallel_runtime.context.control import Address, ask_all
from parallel_runtime.context.reports import Report
from parallel_runtime.context.statistics import Statistics
from parallel_runtime.errors import ParallelRuntimeError
from parallel_runtime.serving.async_engine import AsyncEngine
from parallel_runtime.serving.controls import Status
from parallel_runtime.serving.engine import EngineState
from parallel_runtime.serving.http.live import LiveRequests, TokenRates
from parallel_runtime.serving.http.refusals import RefusedError
from parallel_runtime.serving.http.settings import HttpSettings
from parallel_runtime.serving.supervision import ReplicaState

__all__ = ["Service", "ServiceState", "model_name"]

_FRESH_S = 1.0
_ANSWER_S = 1.0


class ServiceState(StrEnum):
    """What a service can do for a new request."""

    STARTING = "starting"
    SERVING = "serving"
    DEGRADED = "degraded"
    DRAINING = "draining"
    FAILED = "failed"
    CLOSED = "closed"


@final
class Service:
    """A model behind HTTP. For one event loop.

    Args:
        engine: Serves it; it may still be starting. Borrowed.
        settings: Of the server.

    Attributes:
        engine: Serves it.
        settings: Of the server.
        model: What requests call the model.
        live: Requests under way.
        rates: Tokens per second, lately.
        started_s: When it was made, by ``time.monotonic``.
        created: When it was made, in seconds since 1970.
        is_draining: Whether it takes no more requests.
    """

    def __init__(self, engine: AsyncEngine, settings: HttpSettings) -> None:
        self.engine = engine
        self.settings = settings
        self.model = settings.served_model_name or model_name(engine.engine.config.model)
        self.live = LiveRequests(settings.max_requests)
        self.rates = TokenRates()
        self.started_s = time.monotonic()
        self.created = int(time.time())
        self.is_draining = False
        self._was_open = False
        self._ranks: Mapping[int, Status] = {}
        self._asked_s = -_FRESH_S
        self._asking: asyncio.Task[None] | None = None
        self._reports: Mapping[tuple[int, int], Report] = {}
        self._reported_s = -_FRESH_S
        self._reporting: asyncio.Task[None] | None = None

    @property
    def replicas(self) -> tuple[ReplicaState, ...]:
        """Where each replica is."""
        if self.engine.state is EngineState.OPEN:
            return self.engine.engine.supervisor.states
        state = ReplicaState.LOST if self._was_open else ReplicaState.STARTING
        return (state,) * self.engine.engine.config.replicas

    @property
    def state(self) -> ServiceState:
        """What it can do for a new request."""
        is_open = self.engine.state is EngineState.OPEN
        self._was_open = self._was_open or is_open
        if not is_open:
            return ServiceState.CLOSED if self._was_open else ServiceState.STARTING
        states = self.replicas
        if all(state is ReplicaState.LOST for state in states):
            return ServiceState.FAILED
        if self.is_draining:
            return ServiceState.DRAINING
        num_up = sum(state is ReplicaState.SERVING for state in states)
        return ServiceState.SERVING if num_up == len(states) else ServiceState.DEGRADED if num_up else ServiceState.STARTING

    @property
    def is_up(self) -> bool:
        """Whether a new request is taken and served now."""
        return self.state in (ServiceState.SERVING, ServiceState.DEGRADED)

    def check_open(self) -> None:
        """Refuse a request where there is nobody to serve it.

        Raises:
            RefusedError: It starts, is told to stop, or has failed.
        """
        state = self.state
        if state is ServiceState.STARTING and self.engine.state is not EngineState.OPEN:
            raise RefusedError(503, "the model is being loaded; try again later", code="starting", retry_s=5)
        if state is ServiceState.DRAINING:
            message = "the server is shutting down and takes no new requests; try another one"
            raise RefusedError(503, message, code="draining", retry_s=5, hangs_up=True)
        if state in (ServiceState.FAILED, ServiceState.CLOSED):
            raise RefusedError(503, "no replica is left to serve this", code=str(state), hangs_up=True)

    def check_model(self, name: object) -> None:
        """Refuse a request for another model.

        Args:
            name: What it calls the model.

        Raises:
            RefusedError: This server has another one.
        """
        if name != self.model:
            message = f"there is no model {str(name)[:100]!r}; this server has {self.model!r}"
            raise RefusedError(404, message, param="model", code="model_not_found")

    async def ranks(self) -> Mapping[int, Status]:
        """How the data-parallel ranks are doing, at most a second old.

        Returns:
            Their answers, by number through all replicas; none for those that do not serve or do not answer.
        """
        if self.engine.state is EngineState.OPEN and time.monotonic() - self._asked_s >= _FRESH_S:
            if self._asking is None or self._asking.done():
                self._asking = asyncio.create_task(self._ask())
            await asyncio.wait((self._asking,), timeout=_ANSWER_S)
        return self._ranks

    async def reports(self) -> Mapping[tuple[int, int], Report]:
        """What the ranks say of themselves, at most a second old; also of those that hang.

        Returns:
            By data-parallel rank through all replicas, and place in what its leader leads; none for those that do not answer.
        """
        if time.monotonic() - self._reported_s >= _FRESH_S:
            if self._reporting is None or self._reporting.done():
                self._reporting = asyncio.create_task(self._collect_reports())
            await asyncio.wait((self._reporting,), timeout=_ANSWER_S)
        return self._reports

    async def counted(self) -> list[tuple[Mapping[str, str], Statistics]]:
        """What the groups of each rank did, with a label that tells its replica; nothing where ranks do not count."""
        config = self.engine.engine.config
        if not config.serving.count_operations:
            return []
        reports, dp = await self.reports(), config.parallel.dp
        told = ((place // dp, report.counted) for (place, _), report in sorted(reports.items()))
        return [({"replica": str(replica)}, counted) for replica, counted in told if counted is not None]

    def tick(self) -> None:
        """Note how fast tokens come; to be called a few times a second."""
        self.rates.note(self.engine.metrics().num_new_tokens, time.monotonic())

    async def close(self) -> None:
        """Wait for questions that are under way."""
        for task in (self._asking, self._reporting):
            if task is not None:
                await asyncio.wait((task,))

    async def _collect_reports(self) -> None:
        addresses = {
            (place, index): Address.from_json(address)
            for place, ready in enumerate(self.engine.replicas)
            for index, address in enumerate(ready.addresses)
            if address
        }
        self._reports = await asyncio.to_thread(ask_all, addresses, _ANSWER_S)
        self._reported_s = time.monotonic()

    async def _ask(self) -> None:
        dp = self.engine.engine.parallel.dp
        up = [number for number, state in enumerate(self.replicas) if state is ReplicaState.SERVING]
        ranks = [number * dp + rank for number in up for rank in range(dp)]
        try:
            told = await self.engine.ask(lambda controls: controls.health(_ANSWER_S))
            self._ranks = dict(zip(ranks, told, strict=True))
        except (ParallelRuntimeError, ValueError):  # a replica came or went meanwhile
            self._ranks = {}
        self._asked_s = time.monotonic()


def model_name(model: str) -> str:
    """Say what requests call a model.

    Args:
        model: Name or path.

    Returns:
        The name; of a path its last part, without ``.gguf``.
    """
    return PurePath(model).name.removesuffix(".gguf") or model
