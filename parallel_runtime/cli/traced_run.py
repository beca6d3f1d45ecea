"""A short run of a model that is recorded: what each rank does for ``parallel-runtime trace``."""

import threading
from dataclasses import dataclass
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from time import monotonic, perf_counter
from typing import Final, final

from parallel_runtime.context import ParallelContext
from parallel_runtime.context.trace import Recording
from parallel_runtime.models import load_tokenizer, open_checkpoint
from parallel_runtime.serving import SamplingParams, ServingConfig
from parallel_runtime.serving.controls import RankProfile
from parallel_runtime.serving.messages import Rejected, Request, Shutdown, StepOutput, Submit, decode_leader, encode
from parallel_runtime.serving.scheduler import Scheduler
from parallel_runtime.serving.worker import TpModelWorker

__all__ = ["PROMPT", "TracedRun", "run_traced"]

PROMPT: Final = "The parallel runtime under a large model has to"

_NAMES: Final = {"compute": "forward", "receive": "wait for the stage before", "schedule": "scheduler step"}.get


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class TracedRun:
    """What is run.

    Attributes:
        model: Name or path.
        serving: How it is served.
        num_requests: Requests to each data-parallel rank, all at once.
        max_new_tokens: Tokens to make for each.
        path: File of the trace.
    """

    model: str
    serving: ServingConfig
    num_requests: int
    max_new_tokens: int
    path: str


def run_traced(ctx: ParallelContext, run: TracedRun) -> RankProfile:
    """Serve the requests from one rank, and record it.

    Args:
        ctx: Open context of this rank.
        run: What to do.

    Returns:
        What this rank did when.

    Raises:
        CheckpointError: The model cannot be read.
        PeerError: Another rank failed.

    Collective: all ranks.
    """
    worker = TpModelWorker(ctx, model=run.model, config=run.serving)
    front, link = Pipe() if worker.is_leader else (None, None)
    scheduler = Scheduler(ctx, worker, link=link)
    feeder = None if front is None else threading.Thread(target=_feed, args=(front, run, _prompt(run.model)), daemon=True)
    with ctx.trace(run.path) as recording:
        worker.timeline.start()
        if feeder is not None:
            feeder.start()
        scheduler.run()
        profile = worker.timeline.stop()
        _add_spans(recording, profile, samples=ctx.pp.is_last_rank)
    if feeder is not None:
        feeder.join()
    for end in (front, link):
        if end is not None:
            end.close()
    return profile


def _prompt(model: str) -> tuple[int, ...]:
    with open_checkpoint(model) as checkpoint:
        return tuple(load_tokenizer(checkpoint).encode(PROMPT))


def _feed(front: Connection, run: TracedRun, prompt: tuple[int, ...]) -> None:
    """Be the front process of one leader: hand in every request, and end the loop once all of them are answered."""
    sampling = SamplingParams(max_new_tokens=run.max_new_tokens, ignore_eos=True)
    for number in range(run.num_requests):
        tokens = (*prompt, *prompt[1 : 2 + number % len(prompt)])  # prompts that differ
        front.send_bytes(encode(Submit(Request(request_id=f"request {number + 1}", prompt=tokens, sampling=sampling))))
    left = run.num_requests
    while left:
        message = decode_leader(front.recv_bytes())
        left -= isinstance(message, Rejected) or (isinstance(message, StepOutput) and message.finish_reason is not None)
    front.send_bytes(encode(Shutdown()))


def _add_spans(recording: Recording, profile: RankProfile, *, samples: bool) -> None:
    """Put the rank's stretches into the trace; on the last stage each forward is followed by the choice of its tokens."""
    shift_s = perf_counter() - monotonic()
    is_sampling = False
    for span in profile.spans:
        name = _NAMES(span.what, span.what)
        if span.what == "compute" and samples and span.num_tokens:
            name = "sampling" if is_sampling else name
            is_sampling = not is_sampling
        start_s, end_s = span.start_s + shift_s, span.end_s + shift_s
        recording.add(name, start_s, end_s, lane="serving", num_tokens=span.num_tokens)
