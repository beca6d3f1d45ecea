"""Which worker has lately computed a prompt that begins alike. Pure, and bounded."""

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from typing import final

from parallel_runtime.errors import ArgumentError

__all__ = ["PrefixMap"]


@final
class PrefixMap:
    """Remembers for every beginning of a prompt, in whole blocks, the worker that had it last.

    A beginning is known by the hash of its tokens, so two of them may in rare cases pass for one; then a request goes to a worker
    that has nothing of it, which costs time and changes no token.

    Args:
        block_tokens: Tokens of one block.
        most: Beginnings remembered; those not met for longest are forgotten first.

    Raises:
        ArgumentError: A number is below 1.
    """

    def __init__(self, *, block_tokens: int = 16, most: int = 65536) -> None:
        if block_tokens < 1 or most < 1:
            raise ArgumentError(f"block_tokens={block_tokens} and most={most} must be at least 1")
        self._block_tokens = block_tokens
        self._most = most
        self._workers: OrderedDict[int, int] = OrderedDict()

    def __len__(self) -> int:
        return len(self._workers)

    def find(self, prompt: Sequence[int]) -> int | None:
        """Find the worker that had the longest known beginning.

        Args:
            prompt: Token ids.

        Returns:
            The worker's number, or ``None`` where not even one block is known.
        """
        found = None
        for key in self._keys(prompt):
            worker = self._workers.get(key)
            if worker is None:
                break
            found = worker
        return found

    def remember(self, prompt: Sequence[int], worker: int) -> None:
        """Note that a worker gets a prompt.

        Args:
            prompt: Token ids.
            worker: Its number.
        """
        for key in self._keys(prompt):
            self._workers[key] = worker
            self._workers.move_to_end(key)
        while len(self._workers) > self._most:
            self._workers.popitem(last=False)

    def forget(self, worker: int) -> None:
        """Note that a worker has lost what it had.

        Args:
            worker: Its number.
        """
        for key in [key for key, owner in self._workers.items() if owner == worker]:
            del self._workers[key]

    def _keys(self, prompt: Sequence[int]) -> Iterator[int]:
        size, key = self._block_tokens, 0
        for start in range(0, len(prompt) - size + 1, size):
            key = hash((key, *prompt[start : start + size]))
            yield key
