"""The front of everything: starts the ranks of a model, serves prompts on them, and closes them whatever happens.

Nothing here imports torch before an engine is entered: the ranks' fork server imports it at the same time as this process does.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from enum import StrEnum
from os import PathLike
from types import TracebackType
from typing import TYPE_CHECKING, Self, Unpack, final

from parallel_runtime.errors import ContextStateError, ParallelRuntimeError
from parallel_runtime.launch.fork_server import begin_fork_server
from parallel_runtime.serving.engine_config import EngineConfig, EngineSettings, engine_config
from parallel_runtime.serving.messages import Abort, Ready
from parallel_runtime.serving.metrics import EngineMetrics, MetricsSnapshot
from parallel_runtime.serving.sampling_params import SamplingParams

if TYPE_CHECKING:
    from parallel_runtime.models import Tokenizer
    from parallel_runtime.serving.answers import AnswerReader, Completion, StreamEvent
    from parallel_runtime.serving.arguments import Prompt
    from parallel_runtime.serving.calls import Call
    from parallel_runtime.serving.deliveries import Sink
    from parallel_runtime.serving.engine_controls import EngineControls
    from parallel_runtime.serving.front import Front
    from parallel_runtime.serving.replicas import Replicas

__all__ = ["Engine", "EngineState"]

_PRELOADED = "parallel_runtime.serving.preloaded"


class EngineState(StrEnum):
    """Where an engine is in its life. It goes forward only."""

    NEW = "new"
    OPEN = "open"
    CLOSED = "closed"


@final
class Engine:
    """A model on several ranks, ready for prompts, for as long as a ``with`` block lasts.

    Methods may be called from several threads. When a rank fails, every call under way and every later one raises its error.

    Args:
        model: ``"smollm2"``, a GGUF file, or a directory with ``config.json`` and safetensors; or an ``EngineConfig``, which says
            everything, so that nothing else is given.
        **settings: Of ``EngineConfig``: ``parallel``, ``replicas``, ``executor``, ``serving``, ``supervision``, ``sampling``.

    Attributes:
        config: Every setting.
        parallel: Sizes of the world.
        serving: How it serves.

    Raises:
        ArgumentError: The model is neither a name nor a path, or an ``EngineConfig`` comes with further settings.
        CheckpointError: There is no such model, it cannot be read, or its tensors are not what its config says.
        ConfigError: A setting is wrong, or the model cannot be cut or served like this; no rank was started.
        LaunchError: The ranks could not be started.
        RankFailedError: A rank failed while starting.
    """

    def __init__(self, model: str | PathLike[str] | EngineConfig = "smollm2", **settings: Unpack[EngineSettings]) -> None:
        self.config = engine_config(model, **settings)
        self.parallel = self.config.parallel
        self.serving = self.config.serving
        self._state = EngineState.NEW
        self._stack = ExitStack()
        self._metrics = EngineMetrics()
        self._front: Front | None = None
        self._failure: ParallelRuntimeError | None = None

    def __enter__(self) -> Self:
        """Start the ranks and wait until all of them serve.

        Raises:
            ContextStateError: It was entered before.
        """
        if self._state is not EngineState.NEW:
            raise ContextStateError(f"an Engine is entered once; this one is {self._state}. Make a new one")
        self._state = EngineState.CLOSED  # stays so if a step below raises
        if self.config.executor == "processes":
            begin_fork_server(_PRELOADED)
        from parallel_runtime.serving.front import Front

        with ExitStack() as stack:
            self._front = Front(self.config, self._metrics, stack)
            self._stack = stack.pop_all()
        self._state = EngineState.OPEN
        return self

    def __exit__(self, error_type: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """End every request and every rank."""
        if self._state is EngineState.OPEN:
            self._failure = self.failure
            self._state = EngineState.CLOSED
            self._stack.__exit__(error_type, error, trace)

    def close(self) -> None:
        """End every request and every rank, for owners that do not use ``with``. Twice is nothing."""
        self.__exit__(None, None, None)

    @property
    def state(self) -> EngineState:
        """Where it is in its life."""
        return self._state

    @property
    def failure(self) -> ParallelRuntimeError | None:
        """What has ended it, though nobody closed it; ``None`` where nothing has."""
        if self._state is not EngineState.OPEN or self._front is None:
            return self._failure
        return self._front.controller.failure

    @property
    def replicas(self) -> tuple[Ready, ...]:
        """What each data-parallel rank said when it was last ready: its KV cache, its limits, its ranks."""
        return () if self._front is None else self._front.controller.ready

    @property
    def supervisor(self) -> "Replicas":
        """The replicas: where each is, to be drained and started again.

        Raises:
            ContextStateError: The engine is not open.
        """
        return self._running().replicas

    @property
    def tokenizer(self) -> "Tokenizer":
        """The model's tokenizer.

        Raises:
            ContextStateError: The engine is not open.
            RequestError: The model has none that is known here.
        """
        return self._running().tokenizer

    def generate(
        self,
        prompts: "Iterable[Prompt]",
        sampling: SamplingParams | Iterable[SamplingParams] | None = None,
        *,
        dp_rank: int | None = None,
        priority: int = 0,
    ) -> "list[Completion]":
        """Continue prompts to their end.

        Args:
            prompts: Texts, lists of token ids or chats (lists of messages), from any iterable; none at all gives ``[]`` at once.
            sampling: For all prompts, or one for each; by default that of the engine's config.
            dp_rank: The data-parallel rank that has to serve them, counted through all replicas; ``None`` leaves the choice open.
            priority: From -8 to 8. Each step up is worth 64 places in the queue.

        Returns:
            ``n`` completions per prompt, those of one prompt together, in the order of ``prompts``.

        Raises:
            ContextStateError: The engine is not open.
            RequestError: An argument is of another kind, or a prompt can never be served; the others are aborted.
            QueueFullError: Other calls keep the queue full.
            RankFailedError: A rank failed.
        """
        return self._running().generate(prompts, sampling, dp_rank=dp_rank, priority=priority)

    def stream(
        self,
        prompts: "Iterable[Prompt]",
        sampling: SamplingParams | Iterable[SamplingParams] | None = None,
        *,
        dp_rank: int | None = None,
        priority: int = 0,
    ) -> "Iterator[StreamEvent]":
        """Continue prompts and hand out their tokens as they come. Leaving the loop early aborts what still runs.

        Args:
            prompts: As for ``generate``.
            sampling: As for ``generate``.
            dp_rank: As for ``generate``.
            priority: As for ``generate``.

        Returns:
            Events of all prompts, interleaved as they happen.

        Raises:
            ContextStateError: The engine is not open.
            RequestError: An argument is of another kind, or a prompt can never be served; the others are aborted.
            QueueFullError: Other calls keep the queue full.
            RankFailedError: A rank failed.
        """
        return self._running().stream(prompts, sampling, dp_rank=dp_rank, priority=priority)

    def read_prompts(
        self,
        prompts: "Iterable[Prompt]",
        sampling: SamplingParams | Iterable[SamplingParams] | None = None,
        *,
        priority: int = 0,
    ) -> "list[AnswerReader]":
        """Make requests of prompts, without sending any; for fronts of their own such as ``AsyncEngine``.

        Args:
            prompts: As for ``generate``.
            sampling: As for ``generate``.
            priority: As for ``generate``.

        Returns:
            One reader for each answer that is wanted.

        Raises:
            ContextStateError: The engine is not open.
            RequestError: An argument is of another kind, or a chat is refused by the model's template.
        """
        return self._running().read_prompts(prompts, sampling, priority=priority)

    def open_call(self, answers: "Sequence[AnswerReader]", sink: "Sink", *, dp_rank: int | None = None) -> "Call":
        """Prepare to serve requests, without sending any; for fronts of their own such as ``AsyncEngine``.

        Args:
            answers: From ``read_prompts``.
            sink: Where deliveries go; called from the engine's threads.
            dp_rank: As for ``generate``.

        Returns:
            The call. It is to be closed.

        Raises:
            ContextStateError: The engine is not open.
        """
        return self._running().open_call(answers, sink, dp_rank=dp_rank)

    @property
    def controls(self) -> "EngineControls":
        """What can be asked of all replicas beside requests: pause and resume, sleep and wake, weights, health, profiles.

        Raises:
            ContextStateError: The engine is not open.
        """
        return self._running().controller.controls

    def metrics(self) -> MetricsSnapshot:
        """Requests, tokens and times since the engine was opened, as its front sees them."""
        return self._metrics.snapshot()

    def abort(self, request_id: str | None = None) -> None:
        """End a request, or all of them; what it made so far is delivered with the reason ``abort``. Unknown ones are nothing.

        Args:
            request_id: As events and completions name it; ``None`` for all.

        Raises:
            ContextStateError: The engine is not open.
            RequestError: ``request_id`` is no text.
        """
        self._running().controller.abort(Abort(request_id).request_id)

    def _running(self) -> "Front":
        if self._state is not EngineState.OPEN or self._front is None:
            hint = "enter it with `with engine:`" if self._state is EngineState.NEW else "make a new one"
            raise ContextStateError(f"this Engine is {self._state}, so it serves nothing; {hint}")
        return self._front
