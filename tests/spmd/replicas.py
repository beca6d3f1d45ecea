"""Replicas as threads behind a controller, with every batch of every rank on record."""

import threading
from collections.abc import Callable
from contextlib import ExitStack
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from queue import SimpleQueue
from types import TracebackType
from typing import Self, final

from parallel_runtime.config import ParallelConfig
from parallel_runtime.context import ParallelContext
from parallel_runtime.errors import ContextStateError
from parallel_runtime.launch import run_threads
from parallel_runtime.models import open_checkpoint
from parallel_runtime.serving import (
    Batch,
    DataParallelController,
    Request,
    SamplingParams,
    Scheduler,
    ServingConfig,
    TpModelWorker,
)
from parallel_runtime.serving.balancer import BalancePolicy
from parallel_runtime.serving.deliveries import Delivery
from parallel_runtime.serving.lockstep import needs_lockstep
from parallel_runtime.serving.messages import Shutdown, StepOutput, encode

__all__ = ["Replicas"]

_LIMIT_S = 20.0


@final
class Replicas:
    """The world of ``parallel`` serving ``model``; requests go round the data-parallel ranks, beginning with 0.

    Args:
        model: Directory of a model.
        parallel: Sizes of the world.
        serving: How to serve.
        at_batch: Called with a rank and a batch before it runs.
        at_end: Called with the context of every rank that leaves its loop well.

    Attributes:
        batches: Tokens of each batch, for each rank.
        workers: Of each rank.
        errors: What the loop of each rank raised.
        failure: What ``run_threads`` raised.
    """

    def __init__(
        self,
        model: Path,
        parallel: ParallelConfig,
        *,
        serving: ServingConfig | None = None,
        at_batch: Callable[[int, Batch], None] = lambda rank, batch: None,
        at_end: Callable[[ParallelContext], None] = lambda ctx: None,
    ) -> None:
        self.batches: dict[int, list[int]] = {rank: [] for rank in range(parallel.world_size)}
        self.errors: dict[int, BaseException] = {}
        self.failure: BaseException | None = None
        self._model, self._parallel = model, parallel
        self._serving = serving or ServingConfig(page_size=4)
        self.workers: dict[int, TpModelWorker] = {}
        self._at_batch, self._at_end = at_batch, at_end
        self._stack = ExitStack()
        self._fronts, self._leaders = self._open_links()
        self.controller = DataParallelController(self._fronts, policy=BalancePolicy.ROUND_ROBIN, lockstep=_spans(model, parallel))
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._pump = threading.Thread(target=self._attend, daemon=True)
        self._names = iter(range(1000))

    def __enter__(self) -> Self:
        self._thread.start()
        self._pump.start()
        self.controller.wait_ready(_LIMIT_S)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.controller.shutdown()
        self.join()
        self.controller.fail(ContextStateError("closed"))
        self._stack.close()

    def generate(self, *prompts: tuple[int, ...], new: int) -> list[tuple[int, ...]]:
        """What becomes of prompts that arrive together; the next rank in turn gets the first."""
        return [self.tokens(sink) for sink in [self.submit(prompt, new) for prompt in prompts]]

    def request(self, prompt: tuple[int, ...], new: int) -> Request:
        """A greedy request with a name of its own."""
        return Request(request_id=f"r{next(self._names)}", prompt=prompt, sampling=SamplingParams(max_new_tokens=new))

    def submit(self, prompt: tuple[int, ...], new: int) -> "SimpleQueue[Delivery]":
        """Send one request; its deliveries come in the queue."""
        sink: SimpleQueue[Delivery] = SimpleQueue()
        self.controller.submit(self.request(prompt, new), sink)
        return sink

    def close(self, dp_rank: int) -> None:
        """Tell one leader alone that it may leave."""
        self._fronts[dp_rank].send_bytes(encode(Shutdown()))

    def join(self) -> None:
        """Wait until every rank has left its loop."""
        self._thread.join(_LIMIT_S)
        assert not self._thread.is_alive(), "the ranks do not end"
        self._pump.join(_LIMIT_S)

    @staticmethod
    def tokens(sink: "SimpleQueue[Delivery]") -> tuple[int, ...]:
        """All tokens of a request, once it has ended."""
        tokens: tuple[int, ...] = ()
        while True:
            _, output = sink.get(timeout=_LIMIT_S)
            assert isinstance(output, StepOutput), output
            tokens += output.token_ids
            if output.finish_reason is not None:
                return tokens

    def _open_links(self) -> tuple[list[Connection], list[Connection]]:
        pairs = [Pipe() for _ in range(self._parallel.dp)]
        for front, leader in pairs:
            self._stack.callback(front.close)
            self._stack.callback(leader.close)
        return [front for front, _ in pairs], [leader for _, leader in pairs]

    def _run(self) -> None:
        try:
            run_threads(self._serve, self._parallel)
        except BaseException as error:
            self.failure = error

    def _serve(self, ctx: ParallelContext) -> None:
        place = ctx.coordinate
        link = self._leaders[place.dp] if place.tp == place.pp == 0 else None
        worker = TpModelWorker(ctx, model=self._model, config=self._serving)
        self.workers[ctx.rank] = worker
        try:
            Scheduler(ctx, worker, link=link, observer=lambda batch: self._observe(ctx.rank, batch)).run()
        except BaseException as error:
            self.errors[ctx.rank] = error
            raise
        self._at_end(ctx)

    def _observe(self, rank: int, batch: Batch) -> None:
        self.batches[rank].append(batch.num_tokens)
        self._at_batch(rank, batch)

    def _attend(self) -> None:
        while self._thread.is_alive():
            self.controller.pump(0.05)
        self.controller.pump(0)


def _spans(model: Path, parallel: ParallelConfig) -> bool:
    with open_checkpoint(model) as checkpoint:
        return needs_lockstep(parallel, checkpoint.config.shape)
