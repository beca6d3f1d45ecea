"""What the sizes of all other projects have in common."""

from abc import abstractmethod
from typing import Self

from pydantic import model_validator

from parallel_runtime.config.base import FrozenModel
from parallel_runtime.topology.rules import check_sizes

__all__ = ["PeerSizes"]


class PeerSizes(FrozenModel):
    """Another project's sizes, by its own names.

    Raises:
        ConfigError: A size is not a positive integer, or the project refuses the combination.
    """

    @model_validator(mode="after")
    def _check(self) -> Self:
        check_sizes(**{name: value for name, value in self if type(value) is int})
        self._check_peer()
        return self

    @abstractmethod
    def _check_peer(self) -> None:
        """Refuse what the project refuses."""

    @abstractmethod
    def settings(self) -> dict[str, object]:
        """Read the sizes as a ``ParallelConfig`` would be written.

        Returns:
            Its arguments.
        """
