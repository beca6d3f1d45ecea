"""What only the leader of a replica does: read the front process's messages, turn them into steps, and answer."""

import logging
from collections.abc import Iterator
from multiprocessing.connection import Connection
from typing import final

import msgspec

from parallel_runtime.errors import QueueFullError, RequestError
from parallel_runtime.serving.messages import (
    Abort,
    FinishReason,
    FrontMessage,
    LeaderMessage,
    Ping,
    Pong,
    Rejected,
    Request,
    Sampled,
    Shutdown,
    Step,
    StepOutput,
    Submit,
    TokenLogprobs,
    Unreadable,
    Wake,
    encode,
    read_front,
)
from parallel_runtime.serving.policy import SchedulingPolicy

__all__ = ["LeaderDesk"]

_log = logging.getLogger(__name__)


@final
class LeaderDesk:
    """The leader's end of the link to the front process.

    Args:
        link: To the front process. Only bytes are exchanged over it. Borrowed.
        policy: Asked whether it would take a request; never changed here.
        vocab_size: Token ids below this exist.

    Attributes:
        num_told: Messages read so far that may bring work to some replica; in the end all leaders of one front are told as many.
        is_over: Whether the front process wants an end, or is gone.
    """

    def __init__(self, link: Connection, policy: SchedulingPolicy, *, vocab_size: int) -> None:
        self._link = link
        self._policy = policy
        self._vocab_size = vocab_size
        self._logprobs: dict[str, TokenLogprobs] = {}
        self._is_front_gone = False
        self.num_told = 0
        self.is_over = False

    def collect(self, sampled: Sampled | None, *, wait_s: float) -> Step:
        """Read what has arrived and make it the next step. What can never be served is refused here and enters no step.

        Bytes that are no message end nothing: the request they are about is refused, or else they are dropped with a warning.

        Args:
            sampled: What became of the batch that is complete now. Its log-probabilities leave with its tokens and enter no step.
            wait_s: Longest wait for a first message.

        Returns:
            The step; its ``shutdown`` is ``is_over``.
        """
        tokens = None if sampled is None else sampled.token_ids
        self._logprobs = {} if sampled is None else sampled.logprobs
        requests: dict[str, Request] = {}
        aborts: dict[str, None] = {}
        for message in self._read(wait_s):
            self.num_told += message.brings_work if isinstance(message, Unreadable) else isinstance(message, Submit | Wake)
            match message:
                case Submit(request=request):
                    self._accept(request, requests)
                case Abort(request_id=None):
                    self._drop(list(requests), requests)
                    aborts.update(dict.fromkeys(self._policy.alive))
                case Abort(request_id=str() as request_id):
                    if not self._drop([request_id], requests):
                        aborts[request_id] = None
                case Shutdown():
                    self.is_over = True
                case Wake():
                    pass
                case Ping():
                    self.send(Pong())
                case Unreadable():
                    self._refuse(message)
        self.is_over = self.is_over or self._is_front_gone
        if self.is_over:
            return Step(sampled=tokens, aborts=self._policy.alive, shutdown=True)
        return Step(sampled=tokens, aborts=tuple(aborts), requests=tuple(requests.values()))

    def send(self, message: LeaderMessage) -> None:
        """Answer the front process. If it is gone, the next step ends the loop.

        Args:
            message: The answer.
        """
        if isinstance(message, StepOutput) and message.token_ids and message.request_id in self._logprobs:
            message = msgspec.structs.replace(message, logprobs=(self._logprobs[message.request_id],))
        try:
            self._link.send_bytes(encode(message))
        except OSError:
            self._is_front_gone = True

    def _read(self, wait_s: float) -> Iterator[FrontMessage | Unreadable]:
        try:
            while not self._is_front_gone and self._link.poll(wait_s):
                yield read_front(self._link.recv_bytes())
                wait_s = 0.0
        except (EOFError, OSError):
            self._is_front_gone = True

    def _accept(self, request: Request, requests: dict[str, Request]) -> None:
        try:
            if (highest := max((*request.prompt, *request.made))) >= self._vocab_size:
                raise RequestError(
                    f"request {request.request_id!r} has token {highest}, but the model's tokens are 0 to {self._vocab_size - 1}"
                )
            if request.request_id in requests:
                raise RequestError(f"request {request.request_id!r} is alive already; every request needs an id of its own")
            self._policy.check(request, num_ahead=len(requests))
        except RequestError as exc:
            is_full = isinstance(exc, QueueFullError)
            self.send(Rejected(request_id=request.request_id, message=str(exc), queue_full=is_full))
        else:
            requests[request.request_id] = request

    def _refuse(self, message: Unreadable) -> None:
        if message.request_id is None:
            _log.warning("a message of the front process is dropped: %s", message.reason)
        else:
            self.send(Rejected(request_id=message.request_id, message=message.reason))

    def _drop(self, names: list[str], requests: dict[str, Request]) -> bool:
        """Abort requests that arrived in this very step; whether all of ``names`` were such."""
        for name in names:
            if requests.pop(name, None) is None:
                return False
            self.send(StepOutput(request_id=name, finish_reason=FinishReason.ABORT))
        return True
