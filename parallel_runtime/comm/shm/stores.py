"""A torch store as the small store that opening shared memory asks for."""

from datetime import timedelta
from typing import Protocol, final

__all__ = ["StoreAdapter", "TorchStore"]


class TorchStore(Protocol):
    """The part of ``torch.distributed.Store`` that is used here."""

    def set(self, key: str, value: str, /) -> None:
        """Publish ``value`` under ``key``."""

    def wait(self, keys: list[str], timeout: timedelta, /) -> None:
        """Wait until all ``keys`` are published; a ``RuntimeError`` after ``timeout``."""

    def get(self, key: str, /) -> bytes:
        """The value of ``key``."""


@final
class StoreAdapter:
    """``set`` and ``get`` with a deadline per call, over any torch store.

    Args:
        store: Borrowed.
    """

    def __init__(self, store: TorchStore) -> None:
        self._store = store

    def set(self, key: str, value: bytes) -> None:
        """Publish ``value``, which is text, under ``key``."""
        self._store.set(key, value.decode())

    def get(self, key: str, timeout_s: float) -> bytes:
        """Wait for ``key``.

        Args:
            key: What another member publishes.
            timeout_s: Seconds.

        Returns:
            Its value.

        Raises:
            TimeoutError: Nobody published it in time, or the store is gone.
        """
        try:
            self._store.wait([key], timedelta(seconds=timeout_s))
            return self._store.get(key)
        except RuntimeError as exc:
            raise TimeoutError(f"the store had no {key!r} after {timeout_s:g} s: {exc}") from exc
