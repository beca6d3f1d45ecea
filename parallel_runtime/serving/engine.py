"""The front of everything: starts the ranks of a model, serves prompts on them, and closes them whatever happens."""

import itertools
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from os import PathLike, fspath
from types import TracebackType
from typing import Self, Unpack, final

import msgspec

from parallel_runtime.config import current_environ
from parallel_runtime.errors import CheckpointError, ContextStateError, RequestError
from parallel_runtime.models import Checkpoint, Tokenizer, load_tokenizer, open_checkpoint, resolve_model
from parallel_runtime.serving.arguments import Prompt, prompt_list, sampling_list
from parallel_runtime.serving.balancer import BalancePolicy
from parallel_runtime.serving.controller import DataParallelController
from parallel_runtime.serving.engine_config import EngineConfig, EngineSettings, engine_config, shared_threads
from parallel_runtime.serving.executors import start_world
from parallel_runtime.serving.lockstep import needs_lockstep
from parallel_runtime.serving.messages import Abort, FinishReason, Ready, Request
from parallel_runtime.serving.replicas import Replicas
from parallel_runtime.serving.request_stream import RequestStream
from parallel_runtime.serving.sampling_params import SamplingParams
from parallel_runtime.serving.worker import check_servable
from parallel_runtime.topology.shards import split_layers

__all__ = ["Completion", "Engine", "EngineState", "StreamEvent"]


class EngineState(StrEnum):
    """Where an engine is in its life. It goes forward only."""

    NEW = "new"
    OPEN = "open"
    CLOSED = "closed"


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class StreamEvent:
    """New tokens of one prompt.

    Attributes:
        index: Position of the prompt among those of the call.
        request_id: For ``Engine.abort``.
        token_ids: New tokens.
        text: Their text; may lag behind while a character is incomplete. ``""`` where the model has no tokenizer.
        finish_reason: Why it ended; ``None`` while it goes on.
        dp_rank: The data-parallel rank that serves it.
    """

    index: int
    request_id: str
    token_ids: tuple[int, ...]
    text: str
    finish_reason: FinishReason | None
    dp_rank: int


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """What became of one prompt.

    Attributes:
        request_id: Name of its request.
        prompt_token_ids: The prompt.
        token_ids: New tokens; the one that ended it is included.
        text: Their text, without special tokens. ``""`` where the model has no tokenizer.
        finish_reason: Why it ended.
        dp_rank: The data-parallel rank that served it.
    """

    request_id: str
    prompt_token_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    text: str
    finish_reason: FinishReason
    dp_rank: int


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
        self._eos_ids: tuple[int, ...] = ()
        self._tokenizer: Tokenizer | None = None
        self._no_tokenizer = ""
        self._lockstep = False
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
            self._check_model(checkpoint)
            self._controller = self._start(stack)
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
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer.

        Raises:
            RequestError: The model has none that is known here.
        """
        if self._tokenizer is None:
            raise RequestError(f"text needs a tokenizer, and this model has none: {self._no_tokenizer}; give token ids")
        return self._tokenizer

    def generate(
        self, prompts: Iterable[Prompt], sampling: SamplingParams | Iterable[SamplingParams] | None = None
    ) -> list[Completion]:
        """Continue prompts to their end.

        Args:
            prompts: Texts or lists of token ids, from any iterable; none at all gives ``[]`` at once.
            sampling: For all prompts, or one for each; greedy by default.

        Returns:
            One completion per prompt, in the order of ``prompts``.

        Raises:
            ContextStateError: The engine is not open.
            RequestError: An argument is of another kind, or a prompt can never be served; the others are aborted.
            QueueFullError: Other calls keep the queue full.
            RankFailedError: A rank failed.
        """
        controller = self._running()
        requests = self._make_requests(prompts, sampling)
        results = controller.gather(requests)
        return [
            Completion(
                request_id=result.request_id,
                prompt_token_ids=request.prompt,
                token_ids=result.token_ids,
                text="" if self._tokenizer is None else self._tokenizer.decode(result.token_ids),
                finish_reason=result.finish_reason,
                dp_rank=result.dp_rank,
            )
            for request, result in zip(requests, results, strict=True)
        ]

    def stream(
        self, prompts: Iterable[Prompt], sampling: SamplingParams | Iterable[SamplingParams] | None = None
    ) -> Iterator[StreamEvent]:
        """Continue prompts and hand out their tokens as they come. Leaving the loop early aborts what still runs.

        Args:
            prompts: As for ``generate``.
            sampling: As for ``generate``.

        Returns:
            Events of all prompts, interleaved as they happen.

        Raises:
            ContextStateError: The engine is not open.
            RequestError: An argument is of another kind, or a prompt can never be served; the others are aborted.
            QueueFullError: Other calls keep the queue full.
            RankFailedError: A rank failed.
        """
        controller = self._running()
        requests = self._make_requests(prompts, sampling)
        return self._events(requests, controller.stream(requests))

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

    def _check_model(self, checkpoint: Checkpoint) -> None:
        config = checkpoint.config
        self._eos_ids = config.eos_ids
        shape = config.shape
        self.parallel.check_model(shape)
        split_layers(config.num_layers, num_stages=self.parallel.pp, sizes=self.serving.stage_layers)
        check_servable(self.parallel, shape)
        checkpoint.check()
        self._lockstep = needs_lockstep(self.parallel, shape)

    def _load_tokenizer(self, checkpoint: Checkpoint) -> None:
        try:
            self._tokenizer = load_tokenizer(checkpoint)
        except CheckpointError as exc:
            self._no_tokenizer = str(exc)
        else:
            self._eos_ids = self._tokenizer.eos_ids

    def _start(self, stack: ExitStack) -> DataParallelController:
        serving, config = self.serving, self.config
        controller = DataParallelController(
            replicas=config.replicas,
            dp=self.parallel.dp,
            policy=BalancePolicy(serving.balance),
            max_requests=serving.max_waiting * self.parallel.dp * config.replicas,
            max_per_rank=serving.max_waiting,
            max_runs=config.supervision.max_runs,
            lockstep=self._lockstep,
            seed=serving.seed,
        )
        start = partial(
            start_world,
            self.parallel,
            fspath(resolve_model(self._model)),
            serving,
            as_threads=config.executor == "threads",
            num_threads=shared_threads(config, current_environ()),
        )
        replicas = Replicas(
            controller, start, count=config.replicas, rules=config.supervision, exit_s=self.parallel.deadlines.exit_s
        )
        replicas.start(stack)
        self._supervised = replicas
        return controller

    def _make_requests(
        self, prompts: Iterable[Prompt], sampling: SamplingParams | Iterable[SamplingParams] | None
    ) -> list[Request]:
        each = prompt_list(prompts)
        return [self._make_request(*pair) for pair in zip(each, sampling_list(sampling, count=len(each)), strict=True)]

    def _make_request(self, prompt: str | tuple[int, ...], sampling: SamplingParams) -> Request:
        tokens = tuple(self.tokenizer.encode(prompt)) if isinstance(prompt, str) else prompt
        if not sampling.ignore_eos:
            stops = dict.fromkeys((*sampling.stop_token_ids, *self._eos_ids))
            sampling = msgspec.structs.replace(sampling, stop_token_ids=tuple(stops))
        return Request(request_id=f"r{next(self._names)}", prompt=tokens, sampling=sampling)

    def _events(self, requests: Sequence[Request], outputs: RequestStream) -> Iterator[StreamEvent]:
        indices = {request.request_id: index for index, request in enumerate(requests)}
        decoders = [None if self._tokenizer is None else self._tokenizer.stream() for _ in requests]
        try:
            for output in outputs:
                index = indices[output.request_id]
                decoder = decoders[index]
                text = ""
                if decoder is not None:
                    text = "".join(decoder.push(token) for token in output.token_ids)
                    text += "" if output.finish_reason is None else decoder.flush()
                yield StreamEvent(
                    index=index,
                    request_id=output.request_id,
                    token_ids=output.token_ids,
                    text=text,
                    finish_reason=output.finish_reason,
                    dp_rank=outputs.dp_ranks[output.request_id],
                )
        finally:
            outputs.close()
