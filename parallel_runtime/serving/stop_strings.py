"""Finding the texts that end a request in text that comes in pieces."""

from collections.abc import Sequence
from typing import final

__all__ = ["StopStrings"]


@final
class StopStrings:
    """Watches text for the first of several stop texts. What it gives out does not depend on how the text was cut into pieces.

    Only the longest end of the text that may still become a stop text is held back.

    Args:
        stops: Texts that are not empty.

    Attributes:
        found: The stop text that has come; ``None`` until then. Where several end at once, the longest.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self.found: str | None = None
        self._stops = tuple(stops)
        self._longest = max(map(len, stops), default=0)
        self._held = ""

    def push(self, text: str) -> str:
        """Take more text.

        Args:
            text: What comes next.

        Returns:
            What is certain to lie before any stop text; ``""`` once one was found.
        """
        if self.found is not None or not self._stops:
            return "" if self.found is not None else text
        known, self._held = len(self._held), self._held + text
        if (match := self._first_match(known)) is not None:
            before, self.found = match
            out, self._held = self._held[:before], ""
            return out
        certain = len(self._held) - self._num_pending()
        out, self._held = self._held[:certain], self._held[certain:]
        return out

    def flush(self) -> str:
        """The text has ended: what was held back, none of which is a stop text."""
        rest, self._held = self._held, ""
        return rest

    def _first_match(self, known: int) -> tuple[int, str] | None:
        """Where the stop text that ends first begins; none ends within the ``known`` characters."""
        found = [
            (start + len(stop), start, stop)
            for stop in self._stops
            if (start := self._held.find(stop, max(0, known - len(stop) + 1))) >= 0
        ]
        return min(found)[1:] if found else None

    def _num_pending(self) -> int:
        longest = min(len(self._held), self._longest - 1)
        ends = (self._held[-count:] for count in range(longest, 0, -1))
        return next((len(end) for end in ends if any(stop.startswith(end) for stop in self._stops)), 0)
