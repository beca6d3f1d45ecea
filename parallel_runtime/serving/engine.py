"""The front of everything: starts the ranks of a model, serves prompts on them, and closes them whatever happens."""

import itertools
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from enum import StrEnum
from functools import partial
from os import PathLike
from queue import SimpleQueue
from types import TracebackType
from typing import Self, Unpack, final

import msgspec

from parallel_runtime.config import current_environ
from parallel_runtime.errors import CheckpointError, ContextStateError, RequestError
from parallel_runtime.models import Checkpoint, Tokenizer, load_tokenizer, open_checkpoint
from parallel_runtime.serving.answers import AnswerReader, Completion, JoinedAnswers, StreamEvent
from parallel_runtime.serving.arguments import Chat, Prompt, prompt_list, sampling_list
from parallel_runtime.serving.balancer import BalancePolicy
from parallel_runtime.serving.calls import Call, call_events
from parallel_runtime.serving.controller import DataParallelController
from parallel_runtime.serving.deliveries import Delivery, Sink
from parallel_runtime.serving.engine_config import EngineConfig, EngineSettings, engine_config, shared_threads
from parallel_runtime.serving.engine_controls import EngineControls
from parallel_runtime.serving.executors import start_world
from parallel_runtime.serving.identities import ResolvedEngine
from parallel_runtime.serving.messages import Abort, Ready, Request
from parallel_runtime.serving.metrics import EngineMetrics, MetricsSnapshot
from parallel_runtime.serving.ray_executor import start_ray_world
from parallel_runtime.serving.replicas import Replicas
from parallel_runtime.serving.resolved_engine import resolve_checkpoint
from parallel_runtime.serving.sampling_params import SamplingParams
from parallel_runtime.serving.token_keys import mix_seed

__all__ = ["Engine", "EngineState"]


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
        ConfigError: A setting is wrong, or the model cannot be cut or served like this; nothing was started.
        LaunchError: The ranks could not be started.
        RankFailedError: A rank failed while starting.
    """

    def __init__(self, model: str | PathLike[str] | EngineConfig = "smollm2", **settings: Unpack[EngineSettings]) -> None:
        self.config = engine_config(model, **settings)
        self._model = self.config.model
        self.parallel = self.config.parallel
        self.serving = self.config.serving
        self._state = EngineState.NEW
        self._stack = ExitStack()
        self._names = itertools.count()
        self._metrics = EngineMetrics()
        self._eos_ids: tuple[int, ...] = ()
        self._tokenizer: Tokenizer | None = None
        self._no_tokenizer = ""
        self._ready: tuple[Ready, ...] = ()
        self._controller: DataParallelController | None = None
        self._supervised: Replicas | None = None

    def __enter__(self) -> Self:
        """Start the ranks and wait until all of them serve.

        Raises:
            ContextStateError: It was entered before.
        """
        if self._state is not EngineState.NEW:
            raise ContextStateError(f"an Engine is entered once; this one is {self._state}. Make a new one")
        self._state = EngineState.CLOSED  # stays so if a step below raises
        with ExitStack() as stack:
            checkpoint = stack.enter_context(open_checkpoint(self._model))
            resolved = resolve_checkpoint(self.config, checkpoint)
            self._eos_ids = checkpoint.config.eos_ids
            self._controller = self._start(stack, resolved)
            self._load_tokenizer(checkpoint)
            self._ready = self._controller.wait_ready()
            self._stack = stack.pop_all()
        self._state = EngineState.OPEN
        return self

    def __exit__(self, error_type: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """End every request and every rank."""
        if self._state is EngineState.OPEN:
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
    def replicas(self) -> tuple[Ready, ...]:
        """What each data-parallel rank said when it was ready: its KV cache, its limits, its ranks."""
        return self._ready

    @property
    def supervisor(self) -> Replicas:
        """The replicas: where each is, to be drained and started again.

        Raises:
            ContextStateError: The engine is not open.
        """
        self._running()
        assert self._supervised is not None
        return self._supervised

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer.

        Raises:
            RequestError: The model has none that is known here.
        """
        if self._tokenizer is None:
            raise RequestError(f"text needs a tokenizer, and this model has none: {self._no_tokenizer}; give token ids")
        return self._tokenizer

    def generate(
        self,
        prompts: Iterable[Prompt],
        sampling: SamplingParams | Iterable[SamplingParams] | None = None,
        *,
        dp_rank: int | None = None,
        priority: int = 0,
    ) -> list[Completion]:
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
        sink: SimpleQueue[Delivery] = SimpleQueue()
        answers = self.read_prompts(prompts, sampling, priority=priority)
        joined = JoinedAnswers(answers)
        for event in call_events(self.open_call(answers, sink, dp_rank=dp_rank), sink):
            joined.add(event)
        return joined.completions()

    def stream(
        self,
        prompts: Iterable[Prompt],
        sampling: SamplingParams | Iterable[SamplingParams] | None = None,
        *,
        dp_rank: int | None = None,
        priority: int = 0,
    ) -> Iterator[StreamEvent]:
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
        sink: SimpleQueue[Delivery] = SimpleQueue()
        answers = self.read_prompts(prompts, sampling, priority=priority)
        return call_events(self.open_call(answers, sink, dp_rank=dp_rank), sink)

    def read_prompts(
        self,
        prompts: Iterable[Prompt],
        sampling: SamplingParams | Iterable[SamplingParams] | None = None,
        *,
        priority: int = 0,
    ) -> list[AnswerReader]:
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
        self._running()
        each = prompt_list(prompts)
        settings = sampling_list(sampling, count=len(each), default=self.config.sampling)
        return [
            answer
            for index, (prompt, params) in enumerate(zip(each, settings, strict=True))
            for answer in self._answers(index, prompt, params, priority)
        ]

    def open_call(self, answers: Sequence[AnswerReader], sink: Sink, *, dp_rank: int | None = None) -> Call:
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
        return Call(
            self._running(),
            answers,
            sink,
            metrics=self._metrics,
            share_from=self.serving.page_size,
            dp_rank=dp_rank,
        )

    @property
    def controls(self) -> EngineControls:
        """What can be asked of all replicas beside requests: pause and resume, sleep and wake, weights, health, profiles.

        Raises:
            ContextStateError: The engine is not open.
        """
        return self._running().controls

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
        self._running().abort(Abort(request_id).request_id)

    def _running(self) -> DataParallelController:
        if self._state is not EngineState.OPEN or self._controller is None:
            hint = "enter it with `with engine:`" if self._state is EngineState.NEW else "make a new one"
            raise ContextStateError(f"this Engine is {self._state}, so it serves nothing; {hint}")
        return self._controller

    def _load_tokenizer(self, checkpoint: Checkpoint) -> None:
        try:
            self._tokenizer = load_tokenizer(checkpoint)
        except CheckpointError as exc:
            self._no_tokenizer = str(exc)
        else:
            self._eos_ids = self._tokenizer.eos_ids

    def _start(self, stack: ExitStack, resolved: ResolvedEngine) -> DataParallelController:
        serving, config = self.serving, self.config
        if config.replicas > 1 and config.executor != "ray":  # they share the memory, and none knows of the others
            serving = serving.replace(kv_cache_tokens=resolved.kv_cache_tokens)
        controller = DataParallelController(
            replicas=config.replicas,
            dp=self.parallel.dp,
            policy=BalancePolicy(serving.balance),
            max_requests=serving.max_waiting * self.parallel.dp * config.replicas,
            max_per_rank=serving.max_waiting,
            max_runs=config.supervision.max_runs,
            lockstep=resolved.lockstep,
            seed=serving.seed,
        )
        start = partial(
            start_ray_world if config.executor == "ray" else partial(start_world, as_threads=config.executor == "threads"),
            self.parallel,
            resolved.model_path,
            serving,
            num_threads=shared_threads(config, current_environ()),
        )
        replicas = Replicas(
            controller, start, count=config.replicas, rules=config.supervision, exit_s=self.parallel.deadlines.exit_s
        )
        replicas.start(stack)
        self._supervised = replicas
        return controller

    def _answers(
        self, index: int, prompt: str | tuple[int, ...] | Chat, sampling: SamplingParams, priority: int
    ) -> Iterator[AnswerReader]:
        """A reader for each answer to one prompt; the first has the seed that was given, the others seeds made of it."""
        if isinstance(prompt, Chat):
            prompt = tuple(self.tokenizer.chat(prompt.messages))
        elif isinstance(prompt, str):
            prompt = tuple(self.tokenizer.encode(prompt))
        stops = sampling.stop_token_ids if sampling.ignore_eos else (*sampling.stop_token_ids, *self._eos_ids)
        if sampling.stop and self._tokenizer is None:
            raise RequestError(f"stop={sampling.stop!r} needs a tokenizer, and this model has none; give stop_token_ids")
        for sample in range(sampling.n):
            seed = sampling.seed if sampling.seed is None or not sample else mix_seed(sampling.seed, sample)
            own = msgspec.structs.replace(sampling, stop_token_ids=tuple(dict.fromkeys(stops)), stop=(), n=1, seed=seed)
            request = Request(request_id=f"r{next(self._names)}", prompt=prompt, sampling=own, priority=priority)
            yield AnswerReader(request, index=index, sample=sample, stops=sampling.stop, tokenizer=self._tokenizer)
