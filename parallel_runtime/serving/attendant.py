"""The one thread of an engine: it hands out what the leaders say, and notices when a rank fails."""

import threading
import time
from contextlib import ExitStack
from typing import final

from parallel_runtime.errors import ContextStateError, ParallelRuntimeError, PeerLostError
from parallel_runtime.serving.controller import DataParallelController
from parallel_runtime.serving.executors import RankExecutor

__all__ = ["Attendant"]

_POLL_S = 0.1


@final
class Attendant:
    """Keeps a controller supplied for as long as its ranks run.

    Args:
        controller: Gets the leaders' messages, and the error when a rank fails. Borrowed.
        ranks: Watched. Borrowed.
        exit_s: Seconds that ranks have to leave by themselves once they were told to.
        verdict_s: Seconds from a leader hanging up until the executor says which rank failed.
    """

    def __init__(self, controller: DataParallelController, ranks: RankExecutor, *, exit_s: float, verdict_s: float = 5.0) -> None:
        self._controller = controller
        self._ranks = ranks
        self._exit_s = exit_s
        self._verdict_s = verdict_s
        self._is_closing = threading.Event()
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._attend, name="engine-front", daemon=True)

    def start(self, stack: ExitStack) -> None:
        """Begin.

        Args:
            stack: Ends it.
        """
        stack.callback(self._stop)
        self._thread.start()

    def _stop(self) -> None:
        """Let the ranks leave by themselves; their executor ends those that do not."""
        self._is_closing.set()
        self._controller.shutdown()
        if self._controller.is_ready:
            self._thread.join(self._exit_s)
        self._is_over.set()
        self._thread.join()
        self._controller.fail(ContextStateError("the engine was closed"))

    def _attend(self) -> None:
        try:
            self._serve()
        except ParallelRuntimeError as exc:
            self._controller.fail(exc)
        except Exception as exc:  # a rank's own error where ranks are threads, or a bug: those who wait have to hear of it
            self._controller.fail(PeerLostError(f"serving ended by {type(exc).__name__}: {exc}"))

    def _serve(self) -> None:
        hung_up_at: float | None = None
        while not self._is_over.is_set():
            if self._ranks.check():
                self._say_farewell()
                return
            if self._controller.num_open_links:
                self._controller.pump(_POLL_S)
            else:
                self._is_over.wait(_POLL_S)
            if self._controller.has_lost_links and not self._is_closing.is_set():
                hung_up_at = hung_up_at or time.monotonic()
                if time.monotonic() - hung_up_at > self._verdict_s:
                    raise PeerLostError("the leader of a replica hung up without a word, though no rank is known to have failed")

    def _say_farewell(self) -> None:
        """Every rank has returned: hand out their last words."""
        while self._controller.num_open_links and not self._is_over.is_set():
            self._controller.pump(_POLL_S)
        if not self._is_closing.is_set():
            raise PeerLostError("every rank has ended its loop, though the engine is open")
        self._ranks.wait(self._exit_s)
