"""The pipes to the leaders of one running world."""

import select
import threading
from collections import deque
from collections.abc import Sequence
from multiprocessing.connection import Connection, wait
from typing import Protocol, final

from parallel_runtime.serving.messages import FrontMessage, LeaderMessage, decode_leader, encode

__all__ = ["LeaderLines", "LeaderLinks"]


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

    def admit(self, replica: int) -> None:
        """Give a replica requests from now on."""
        ...


@final
class LeaderLinks:
    """Messages to leaders, in order and without waiting for one that does not read; and what the leaders say.

    ``post`` and ``flush`` may be called from any thread, ``read`` from one.

    Args:
        links: One per data-parallel rank, in that order. Only bytes are exchanged over them. Borrowed.

    Attributes:
        open: Data-parallel ranks whose leaders have not hung up.
    """

    def __init__(self, links: Sequence[Connection]) -> None:
        self._links = list(links)
        self._boxes: list[deque[FrontMessage]] = [deque() for _ in links]
        self._locks = [threading.Lock() for _ in links]
        self.open = set(range(len(self._links)))

    @property
    def has_lost_some(self) -> bool:
        """Whether a leader has hung up."""
        return len(self.open) < len(self._links)

    @property
    def has_unsent(self) -> bool:
        """Whether a message waits for a leader that reads."""
        return any(self._boxes)

    def post(self, dp_rank: int, message: FrontMessage) -> None:
        """Queue a message. ``flush`` sends it, in the order of posting.

        Args:
            dp_rank: Whose leader.
            message: The message.
        """
        self._boxes[dp_rank].append(message)

    def flush(self) -> None:
        """Send what can be sent now. A broken pipe is left to ``read``, which sees the same."""
        for box, lock, link in zip(self._boxes, self._locks, self._links, strict=True):
            while box and _takes_more(link):
                if not lock.acquire(blocking=False):
                    break  # whoever has it looks again once it has let go
                try:
                    link.send_bytes(encode(box.popleft()))
                except IndexError:
                    pass  # the other one has sent it
                except OSError:
                    box.clear()
                finally:
                    lock.release()

    def read(self, timeout_s: float) -> list[tuple[int, LeaderMessage]]:
        """Take what the leaders have said.

        Args:
            timeout_s: Longest wait for a first message.

        Returns:
            Data-parallel ranks and messages, in the order of each rank.

        Raises:
            SerializationError: Bytes are no message.
        """
        links = {self._links[dp_rank]: dp_rank for dp_rank in self.open}
        return [
            (links[link], message)
            for link in wait(list(links), timeout_s)
            if isinstance(link, Connection)
            for message in self._drain(link, links[link])
        ]

    def _drain(self, link: Connection, dp_rank: int) -> list[LeaderMessage]:
        messages = []
        try:
            while link.poll():
                messages.append(decode_leader(link.recv_bytes()))
        except (EOFError, OSError):
            self.open.discard(dp_rank)
        return messages


def _takes_more(link: Connection) -> bool:
    """Whether a message of usual size would not have to wait. A broken pipe takes everything, and says so."""
    try:
        poll = select.poll()
        poll.register(link.fileno(), select.POLLOUT)
        return bool(poll.poll(0))
    except OSError:
        return True
