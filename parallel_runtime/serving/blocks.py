"""Which blocks of the paged KV cache are free. Integers only: the tensors are the runner's."""

from collections.abc import Iterable
from typing import final

from parallel_runtime.errors import ArgumentError

__all__ = ["BlockPool", "blocks_for"]


def blocks_for(num_tokens: int, page_size: int) -> int:
    """Count the blocks that ``num_tokens`` tokens need.

    Args:
        num_tokens: Tokens to hold, at least 0.
        page_size: Tokens in one block.

    Returns:
        The number of blocks, the last one perhaps partly used.
    """
    return -(-num_tokens // page_size)


@final
class BlockPool:
    """Blocks with reference counts: a block is free again once everyone who held it has released it.

    The lowest numbers are handed out first and a released block is the next one handed out, so that equal calls give equal
    blocks on every rank and memory that was touched once is used again.

    Args:
        num_blocks: Blocks in the pool, at least 1.

    Raises:
        ArgumentError: There is no block at all.
    """

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 1:
            raise ArgumentError(f"a block pool needs at least one block, got num_blocks={num_blocks}")
        self._free = list(range(num_blocks - 1, -1, -1))
        self._references = [0] * num_blocks

    @property
    def num_blocks(self) -> int:
        """Blocks in the pool, free and used."""
        return len(self._references)

    @property
    def num_free(self) -> int:
        """Blocks that nobody holds."""
        return len(self._free)

    @property
    def num_used(self) -> int:
        """Blocks that somebody holds, each counted once."""
        return len(self._references) - len(self._free)

    def allocate(self, count: int) -> list[int]:
        """Take ``count`` free blocks, each with one reference.

        Args:
            count: How many, at least 0.

        Returns:
            Their numbers.

        Raises:
            ArgumentError: ``count`` is negative or more than ``num_free``; ask ``num_free`` first.
        """
        if not 0 <= count <= len(self._free):
            raise ArgumentError(f"cannot take {count} blocks: {len(self._free)} of {self.num_blocks} are free")
        taken = [self._free.pop() for _ in range(count)]
        for block in taken:
            self._references[block] = 1
        return taken

    def share(self, blocks: Iterable[int]) -> None:
        """Hold blocks that someone else holds already.

        Args:
            blocks: Numbers of used blocks.

        Raises:
            ArgumentError: One of them is free or does not exist.
        """
        for block in self._check_used(blocks):
            self._references[block] += 1

    def release(self, blocks: Iterable[int]) -> None:
        """Give up one reference to each block; those without any left are free. All or none are released.

        Args:
            blocks: Numbers of used blocks, each at most once.

        Raises:
            ArgumentError: One of them is free, does not exist or is named twice.
        """
        held = self._check_used(blocks)
        for block in reversed(held):
            self._references[block] -= 1
            if not self._references[block]:
                self._free.append(block)

    def _check_used(self, blocks: Iterable[int]) -> list[int]:
        held = list(blocks)
        if len(set(held)) != len(held):
            raise ArgumentError(f"a block is named twice in {held}")
        for block in held:
            if not 0 <= block < self.num_blocks or not self._references[block]:
                raise ArgumentError(f"block {block} is not in use; the pool has blocks 0 to {self.num_blocks - 1}")
        return held
