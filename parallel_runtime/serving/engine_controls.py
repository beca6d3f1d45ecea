"""What the owner of an engine can ask of all its replicas at once, beside requests."""

import itertools
import tempfile
import threading
from collections.abc import Callable, Mapping
from os import PathLike, fspath
from pathlib import Path
from typing import Protocol, final

import torch
from torch import Tensor

from parallel_runtime.errors import ParallelRuntimeError, PeerFailedError, PeerLostError, PeerTimeoutError
from parallel_runtime.serving.controls import (
    Answer,
    Control,
    ControlAction,
    FlushCache,
    Health,
    LoadWeights,
    Pause,
    Profile,
    RankProfile,
    ReceiveWeights,
    Resume,
    Sleep,
    Status,
    SwapWeights,
    WakeUp,
)
from parallel_runtime.serving.messages import FrontMessage

__all__ = ["EngineControls", "LeaderLines"]


class LeaderLines(Protocol):
    """The ways to the leaders, as the controller has them."""

    @property
    def leaders(self) -> tuple[tuple[int, int], ...]:
        """Replica and data-parallel rank of each leader that serves, in order."""
        ...

    def num_ranks(self, replica: int) -> int:
        """Ranks of a replica that serves."""
        ...

    def tell(self, replica: int, message: FrontMessage) -> None:
        """Send a message to every leader of a replica."""
        ...


@final
class EngineControls:
    """Questions to every leader, one after the other, and their answers.

    Any thread may ask; it waits until all have answered. Requests wait while a control is done; none fails. A control that fails
    somewhere changes nothing there.

    Args:
        lines: Ways to the leaders. Borrowed.

    Attributes:
        version: Of the weights that serve; 0 are those the engine began with.
    """

    def __init__(self, lines: LeaderLines) -> None:
        self._lines = lines
        self._numbers = itertools.count()
        self._one_at_a_time = threading.RLock()
        self._news = threading.Condition()
        self._number = -1
        self._missing: set[tuple[int, int]] = set()
        self._answers: dict[tuple[int, int], Answer] = {}
        self._lost: ParallelRuntimeError | None = None
        self._sources: list[str] = []
        self._handed_over: list[tempfile.TemporaryDirectory[str]] = []
        self.version = 0

    def pause(self) -> None:
        """Compute nothing until ``resume``, once the batches under way are through. Requests are still taken, and wait.

        Raises:
            PeerError: A replica could not, or is lost.
        """
        self._ask(Pause())

    def resume(self) -> None:
        """Go on after ``pause``.

        Raises:
            PeerError: A replica could not, or is lost.
        """
        self._ask(Resume())

    def flush_cache(self) -> None:
        """Forget the beginnings of earlier prompts; what runs goes on.

        Raises:
            PeerError: A replica could not, or is lost.
        """
        self._ask(FlushCache())

    def sleep(self) -> None:
        """Give back the memory of weights and KV cache. Requests wait until ``wake``.

        Raises:
            PeerError: A replica could not, or is lost.
        """
        self._ask(Sleep())

    def wake(self) -> None:
        """Take the memory again, with the weights of before.

        Raises:
            PeerError: A replica could not, or is lost.
        """
        self._ask(WakeUp())

    def health(self, timeout_s: float | None = None) -> tuple[Status, ...]:
        """How every data-parallel rank of every replica is doing.

        Args:
            timeout_s: Longest wait for all of them; a leader answers once in each turn of its loop.

        Returns:
            One status each, in their order.

        Raises:
            PeerTimeoutError: One has not answered in time.
            PeerError: A replica is lost.
        """
        return tuple(answer.status for answer in self._ask(Health(), timeout_s=timeout_s))

    def start_profile(self) -> None:
        """Begin to write down what every rank does when.

        Raises:
            PeerError: A replica could not, or is lost.
        """
        self._ask(Profile(is_on=True))

    def stop_profile(self) -> tuple[RankProfile, ...]:
        """End the profile.

        Returns:
            What each rank did since ``start_profile``, replica by replica.

        Raises:
            PeerError: A replica could not, or is lost.
        """
        return tuple(rank for answer in self._ask(Profile(is_on=False)) for rank in answer.profile)

    def update_weights(self, source: str | PathLike[str] | Mapping[str, Tensor], *, version: int | None = None) -> int:
        """Serve with other weights, on all replicas or on none.

        Requests that run are computed again from their first token with the new weights, and keep the tokens they have made.

        Args:
            source: A model of the same config on disk; or full tensors under the names of ``transformers``, all or some of them,
                handed over or in a file of ``torch.save`` (``.pt``). Every rank reads its shard.
            version: Of the new weights; one more than before by default.

        Returns:
            Their version, which outputs are marked with.

        Raises:
            PeerError: A replica could not, or is lost. The weights that serve are as before.
        """
        with self._one_at_a_time:
            path = self._hand_over(source) if isinstance(source, Mapping) else fspath(source)
            version = self._exchange(lambda replica: LoadWeights(path=path), version)
            if not path.endswith(".pt"):
                self._forget_sources()
            self._sources.append(path)
            return version

    def receive_weights(self, host: str, port: int, *, num_senders: int = 1, version: int | None = None) -> int:
        """Serve with weights that a trainer's ranks send meanwhile: ``weight_context`` and ``send_weights`` on each of them.

        Args:
            host: Where the trainer's first rank listens.
            port: Its TCP port.
            num_senders: The trainer's ranks, numbers 0 and up of the common context; the engine's ranks follow.
            version: Of the new weights; one more than before by default.

        Returns:
            Their version.

        Raises:
            PeerError: A replica could not, or is lost, or a sender failed. The weights that serve are as before.
        """
        with self._one_at_a_time:
            ranks = {replica: self._lines.num_ranks(replica) for replica, _ in self._lines.leaders}

            def action(replica: int) -> ControlAction:
                return ReceiveWeights(
                    host=host,
                    port=port,
                    num_senders=num_senders,
                    num_receivers=sum(ranks.values()),
                    first_receiver=sum(count for other, count in ranks.items() if other < replica),
                )

            version = self._exchange(action, version)
            self._forget_sources()
            return version

    def catch_up(self, replica: int) -> None:
        """Give a replica that was started again the weights that the others serve with, as far as they are in files.

        Args:
            replica: Its number; it serves nothing yet.
        """
        for path in self._sources:
            self._lines.tell(replica, Control(number=next(self._numbers), action=LoadWeights(path=path)))
            self._lines.tell(replica, Control(number=next(self._numbers), action=SwapWeights(version=self.version)))

    def take(self, replica: int, dp_rank: int, answer: Answer) -> None:
        """Note an answer.

        Args:
            replica: Whose.
            dp_rank: Which of its leaders'.
            answer: What it says.
        """
        with self._news:
            if answer.number == self._number:
                self._answers[replica, dp_rank] = answer
                self._missing.discard((replica, dp_rank))
                self._news.notify_all()

    def lose(self, replica: int | None, error: ParallelRuntimeError) -> None:
        """Wait for no answer of a replica any more.

        Args:
            replica: Its number; ``None`` for all of them, for good.
            error: What happened.
        """
        if replica is None:
            self._forget_sources()
        with self._news:
            gone = {leader for leader in self._missing if replica is None or leader[0] == replica}
            if gone:
                self._lost = error
                self._missing -= gone
                self._news.notify_all()

    def _exchange(self, action: Callable[[int], ControlAction], version: int | None) -> int:
        version = self.version + 1 if version is None else version
        try:
            self._ask(action)
        except ParallelRuntimeError:
            self._ask(SwapWeights(version=None))
            raise
        self._ask(SwapWeights(version=version))
        self.version = version
        return version

    def _ask(
        self, action: ControlAction | Callable[[int], ControlAction], *, timeout_s: float | None = None
    ) -> tuple[Answer, ...]:
        with self._one_at_a_time:
            asked = self._lines.leaders
            with self._news:
                self._number, self._missing = next(self._numbers), set(asked)
                self._answers, self._lost = {}, None
            for replica in sorted({replica for replica, _ in asked}):
                what = action(replica) if callable(action) else action
                self._lines.tell(replica, Control(number=self._number, action=what))
            return self._wait(asked, timeout_s)

    def _wait(self, asked: tuple[tuple[int, int], ...], timeout_s: float | None) -> tuple[Answer, ...]:
        with self._news:
            if not self._news.wait_for(lambda: not self._missing, timeout_s):
                late = ", ".join(f"replica {replica} dp {dp_rank}" for replica, dp_rank in sorted(self._missing))
                raise PeerTimeoutError(f"no answer within {timeout_s:g} s from {late}")
            if self._lost is not None:
                raise PeerLostError(f"a replica was lost before it answered: {self._lost}") from self._lost
            answers = tuple(self._answers[leader] for leader in asked)
        errors = {leader: answer.error for leader, answer in zip(asked, answers, strict=True) if answer.error is not None}
        if errors:
            told = "; ".join(f"replica {replica} dp {dp_rank}: {error}" for (replica, dp_rank), error in errors.items())
            raise PeerFailedError(told)
        return answers

    def _hand_over(self, tensors: Mapping[str, Tensor]) -> str:
        folder = tempfile.TemporaryDirectory(prefix="parallel-runtime-weights-")
        self._handed_over.append(folder)
        path = Path(folder.name) / "tensors.pt"
        torch.save({name: tensor.detach().cpu() for name, tensor in tensors.items()}, path)
        return str(path)

    def _forget_sources(self) -> None:
        self._sources.clear()
        for folder in self._handed_over:
            folder.cleanup()
        self._handed_over.clear()
