"""An engine that runs: its ranks, its tokenizer, and the calls of those who use it."""

import itertools
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from queue import SimpleQueue
from typing import final

import msgspec

from parallel_runtime.config import current_environ
from parallel_runtime.errors import CheckpointError, RequestError
from parallel_runtime.models import Checkpoint, Tokenizer, load_tokenizer, open_checkpoint
from parallel_runtime.serving.answers import AnswerReader, Completion, JoinedAnswers, StreamEvent
from parallel_runtime.serving.arguments import Chat, Prompt, prompt_list, sampling_list
from parallel_runtime.serving.balancer import BalancePolicy
from parallel_runtime.serving.calls import Call, call_events
from parallel_runtime.serving.controller import DataParallelController
from parallel_runtime.serving.deliveries import Delivery, Sink
from parallel_runtime.serving.engine_config import EngineConfig, shared_threads
from parallel_runtime.serving.executors import start_world
from parallel_runtime.serving.identities import ResolvedEngine
from parallel_runtime.serving.messages import Request
from parallel_runtime.serving.metrics import EngineMetrics
from parallel_runtime.serving.ray_executor import start_ray_world
from parallel_runtime.serving.replicas import Replicas
from parallel_runtime.serving.resolved_engine import resolve_checkpoint
from parallel_runtime.serving.sampling_params import SamplingParams
from parallel_runtime.serving.token_keys import mix_seed

__all__ = ["Front"]


@final
class Front:
    """What ``Engine`` opens. Returns from its constructor when every rank serves.

    Args:
        config: Every setting.
        metrics: Kept up to date.
        stack: Ends the ranks.

    Attributes:
        controller: Spreads requests over the replicas.
        replicas: Keeps the replicas.

    Raises:
        ParallelRuntimeError: As for ``Engine``.
    """

    def __init__(self, config: EngineConfig, metrics: EngineMetrics, stack: ExitStack) -> None:
        self._config = config
        self._metrics = metrics
        self._names = itertools.count()
        self._tokenizer: Tokenizer | None = None
        self._no_tokenizer = ""
        with open_checkpoint(config.model) as checkpoint:
            resolved = resolve_checkpoint(config, checkpoint)
            self.controller = _make_controller(resolved)
            self.replicas = _start(self.controller, resolved, stack)
            self._eos_ids = checkpoint.config.eos_ids
            self._load_tokenizer(checkpoint)
        self.controller.wait_ready()

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
        sampling: SamplingParams | Iterable[SamplingParams] | None,
        *,
        dp_rank: int | None,
        priority: int,
    ) -> list[Completion]:
        """As ``Engine.generate``."""
        sink: SimpleQueue[Delivery] = SimpleQueue()
        answers = self.read_prompts(prompts, sampling, priority=priority)
        joined = JoinedAnswers(answers)
        for event in call_events(self.open_call(answers, sink, dp_rank=dp_rank), sink):
            joined.add(event)
        return joined.completions()

    def stream(
        self,
        prompts: Iterable[Prompt],
        sampling: SamplingParams | Iterable[SamplingParams] | None,
        *,
        dp_rank: int | None,
        priority: int,
    ) -> Iterator[StreamEvent]:
        """As ``Engine.stream``."""
        sink: SimpleQueue[Delivery] = SimpleQueue()
        answers = self.read_prompts(prompts, sampling, priority=priority)
        return call_events(self.open_call(answers, sink, dp_rank=dp_rank), sink)

    def read_prompts(
        self, prompts: Iterable[Prompt], sampling: SamplingParams | Iterable[SamplingParams] | None, *, priority: int
    ) -> list[AnswerReader]:
        """As ``Engine.read_prompts``."""
        each = prompt_list(prompts)
        settings = sampling_list(sampling, count=len(each), default=self._config.sampling)
        return [
            answer
            for index, (prompt, params) in enumerate(zip(each, settings, strict=True))
            for answer in self._answers(index, prompt, params, priority)
        ]

    def open_call(self, answers: Sequence[AnswerReader], sink: Sink, *, dp_rank: int | None) -> Call:
        """As ``Engine.open_call``."""
        share_from = self._config.serving.page_size
        return Call(self.controller, answers, sink, metrics=self._metrics, share_from=share_from, dp_rank=dp_rank)

    def _load_tokenizer(self, checkpoint: Checkpoint) -> None:
        try:
            self._tokenizer = load_tokenizer(checkpoint)
        except CheckpointError as exc:
            self._no_tokenizer = str(exc)
        else:
            self._eos_ids = self._tokenizer.eos_ids

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


def _make_controller(resolved: ResolvedEngine) -> DataParallelController:
    config = resolved.config
    serving, dp = config.serving, config.parallel.dp
    return DataParallelController(
        replicas=config.replicas,
        dp=dp,
        policy=BalancePolicy(serving.balance),
        max_requests=serving.max_waiting * dp * config.replicas,
        max_per_rank=serving.max_waiting,
        max_runs=config.supervision.max_runs,
        lockstep=resolved.lockstep,
        seed=serving.seed,
    )


def _start(controller: DataParallelController, resolved: ResolvedEngine, stack: ExitStack) -> Replicas:
    config, serving = resolved.config, resolved.config.serving
    if config.replicas > 1 and config.executor != "ray":  # they share the memory, and none knows of the others
        serving = serving.replace(kv_cache_tokens=resolved.kv_cache_tokens)
    start = partial(
        start_ray_world if config.executor == "ray" else partial(start_world, as_threads=config.executor == "threads"),
        config.parallel,
        resolved.model_path,
        serving,
        num_threads=shared_threads(config, current_environ()),
    )
    exit_s = config.parallel.deadlines.exit_s
    replicas = Replicas(controller, start, count=config.replicas, rules=config.supervision, exit_s=exit_s)
    replicas.start(stack)
    return replicas
