"""What only the leader of a replica does: read the front process's messages, turn them into steps, and answer."""

import logging
from collections import deque
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from typing import final

import msgspec

from parallel_runtime.errors import QueueFullError, RequestError
from parallel_runtime.serving.controls import Answer, Control, Health, Status
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
        status: Asked how the replica is doing.

    Attributes:
        controls: What the front asks of the whole replica and is not done yet, oldest first.
        num_told: Messages read so far that may bring work to some replica; in the end all leaders of one front are told as many.
        is_over: Whether the front process wants an end, or is gone.
    """

    def __init__(self, link: Connection, policy: SchedulingPolicy, *, vocab_size: int, status: Callable[[], Status]) -> None:
        self._link = link
        self._policy = policy
        self._vocab_size = vocab_size
        self._status = status
        self._logprobs: dict[str, TokenLogprobs] = {}
        self._requests: dict[str, Request] = {}
        self._aborts: dict[str, None] = {}
        self._is_front_gone = False
        self._wants_status: list[int] = []
        self.controls: deque[Control] = deque()
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
        self._requests, self._aborts = {}, {}
        for message in self._read(wait_s):
            self._handle(message)
        self.is_over = self.is_over or self._is_front_gone
        if self.is_over:
            return Step(sampled=tokens, aborts=self._policy.alive, shutdown=True)
        return Step(sampled=tokens, aborts=tuple(self._aborts), requests=tuple(self._requests.values()))

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

    def tell_status(self) -> None:
        """Answer those who have asked how the replica is doing, now that the policy knows what has arrived."""
        for number in self._wants_status:
            self.send(Answer(number=number, status=self._status()))
        self._wants_status.clear()

    def _read(self, wait_s: float) -> Iterator[FrontMessage | Unreadable]:
        try:
            while not self._is_front_gone and self._link.poll(wait_s):
                yield read_front(self._link.recv_bytes())
                wait_s = 0.0
        except (EOFError, OSError):
            self._is_front_gone = True

    def _handle(self, message: FrontMessage | Unreadable) -> None:
        self.num_told += message.brings_work if isinstance(message, Unreadable) else isinstance(message, Submit | Wake | Control)
        match message:
            case Submit(request=request):
                self._accept(request)
            case Abort(request_id=request_id):
                self._abort(request_id)
            case Control(number=number, action=Health()):
                self._wants_status.append(number)
            case Control():
                self.controls.append(message)
            case Shutdown():
                self.is_over = True
            case Wake():
                pass
            case Ping():
                self.send(Pong())
            case Unreadable():
                self._refuse(message)

    def _accept(self, request: Request) -> None:
        try:
            if (highest := max((*request.prompt, *request.made))) >= self._vocab_size:
                raise RequestError(
                    f"request {request.request_id!r} has token {highest}, but the model's tokens are 0 to {self._vocab_size - 1}"
                )
            if request.request_id in self._requests:
                raise RequestError(f"request {request.request_id!r} is alive already; every request needs an id of its own")
            self._policy.check(request, num_ahead=len(self._requests))
        except RequestError as exc:
            is_full = isinstance(exc, QueueFullError)
            self.send(Rejected(request_id=request.request_id, message=str(exc), queue_full=is_full))
        else:
            self._requests[request.request_id] = request

    def _refuse(self, message: Unreadable) -> None:
        if message.request_id is None:
            _log.warning("a message of the front process is dropped: %s", message.reason)
        else:
            self.send(Rejected(request_id=message.request_id, message=message.reason))

    def _abort(self, request_id: str | None) -> None:
        """End a request, or all; what arrived in this very step enters it no more."""
        for name in [request_id] if request_id is not None else [*self._requests, *self._policy.alive]:
            if self._requests.pop(name, None) is not None:
                self.send(StepOutput(request_id=name, finish_reason=FinishReason.ABORT))
            else:
                self._aborts[name] = None
