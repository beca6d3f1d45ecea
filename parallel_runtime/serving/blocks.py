"""Which blocks of the paged KV cache are free, held or remembered. Integers only: the tensors are the runner's.

A full block is named by a chain of hashes: its key covers its own tokens and, through the key of the block before, everything
ahead of them. Two prompts that begin alike have equal keys for as many blocks as they share.
"""

from array import array
from collections.abc import Iterable, Sequence
from hashlib import blake2b
from typing import final

from parallel_runtime.errors import ArgumentError

__all__ = ["BlockPool", "blocks_for", "chain_keys"]


def blocks_for(num_tokens: int, page_size: int) -> int:
    """Count the blocks that ``num_tokens`` tokens need.

    Args:
        num_tokens: Tokens to hold, at least 0.
        page_size: Tokens in one block.

    Returns:
        The number of blocks, the last one perhaps partly used.
    """
    return -(-num_tokens // page_size)


def chain_keys(tokens: Sequence[int], page_size: int, *, known: Sequence[bytes] = ()) -> list[bytes]:
    """Name the full blocks of a sequence by their contents.

    Args:
        tokens: The sequence, from its beginning.
        page_size: Tokens in one block.
        known: Keys of its first blocks, where they were computed before.

    Returns:
        One key of 16 bytes per full block, ``known`` included; equal keys, equal tokens up to the end of the block.
    """
    keys = list(known)
    for end in range((len(keys) + 1) * page_size, len(tokens) + 1, page_size):
        before = keys[-1] if keys else b""
        keys.append(blake2b(before + array("q", tokens[end - page_size : end]).tobytes(), digest_size=16).digest())
    return keys


@final
class BlockPool:
    """Blocks with reference counts, whose contents may be remembered for others that begin alike.

    A block is *used* while someone holds it, *cached* when nobody does but its contents are remembered, and *free* otherwise.
    Free blocks are handed out first, the lowest numbers and the latest released ones foremost; then cached ones, the one that was
    used longest ago foremost. So equal calls give equal blocks on every rank.

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
        self._keys: list[bytes | None] = [None] * num_blocks
        self._by_key: dict[bytes, int] = {}
        self._cached: dict[int, None] = {}  # the one used longest ago first

    @property
    def num_blocks(self) -> int:
        """Blocks in the pool: free, cached and used."""
        return len(self._references)

    @property
    def num_free(self) -> int:
        """Blocks that nobody holds and whose contents nobody can ask for."""
        return len(self._free)

    @property
    def num_cached(self) -> int:
        """Blocks that nobody holds and whose contents are remembered."""
        return len(self._cached)

    @property
    def num_available(self) -> int:
        """Blocks that ``allocate`` can hand out: free and cached ones."""
        return len(self._free) + len(self._cached)

    @property
    def num_used(self) -> int:
        """Blocks that somebody holds, each counted once."""
        return len(self._references) - self.num_available

    def allocate(self, count: int) -> list[int]:
        """Take ``count`` blocks, each with one reference; the contents of cached ones among them are forgotten.

        Args:
            count: How many, at least 0.

        Returns:
            Their numbers.

        Raises:
            ArgumentError: ``count`` is negative or more than ``num_available``; ask that first.
        """
        if not 0 <= count <= self.num_available:
            raise ArgumentError(f"cannot take {count} blocks: {self.num_available} of {self.num_blocks} are free or cached")
        taken = [self._free.pop() if self._free else self._evict() for _ in range(count)]
        for block in taken:
            self._references[block] = 1
        return taken

    def share(self, blocks: Iterable[int]) -> None:
        """Hold blocks whose contents are there already.

        Args:
            blocks: Numbers of used or cached blocks, each at most once.

        Raises:
            ArgumentError: One of them is free, does not exist or is named twice.
        """
        for block in self._checked(blocks, cached_too=True):
            self._references[block] += 1
            self._cached.pop(block, None)

    def release(self, blocks: Iterable[int]) -> None:
        """Give up one reference to each block; those without any left are cached or free. All or none are released.

        Args:
            blocks: Numbers of used blocks, each at most once, in the order of their sequence: of a chain that is forgotten little
                by little the end goes first.

        Raises:
            ArgumentError: One of them is not used, does not exist or is named twice.
        """
        for block in reversed(self._checked(blocks, cached_too=False)):
            self._references[block] -= 1
            if not self._references[block]:
                if self._keys[block] is None:
                    self._free.append(block)
                else:
                    self._cached[block] = None

    def remember(self, block: int, key: bytes) -> None:
        """Let others find what a block holds. Where another block holds the same, that one stays the one to find.

        Args:
            block: Number of a used block that nobody will write again.
            key: Of its contents, from ``chain_keys``.

        Raises:
            ArgumentError: The block is not used or does not exist.
        """
        self._checked([block], cached_too=False)
        if self._by_key.setdefault(key, block) == block:
            self._keys[block] = key

    def find(self, keys: Sequence[bytes]) -> list[int]:
        """Look up how much of a sequence is there.

        Args:
            keys: Of its blocks, from the first on.

        Returns:
            The blocks of the longest beginning that is remembered; ``share`` them before anything is allocated.
        """
        found = []
        for key in keys:
            block = self._by_key.get(key)
            if block is None:
                break
            found.append(block)
        return found

    def num_cached_among(self, blocks: Iterable[int]) -> int:
        """How many of some blocks nobody holds."""
        return sum(not self._references[block] for block in blocks)

    def forget(self) -> int:
        """Forget all contents, those of used blocks too; cached ones are free.

        Returns:
            Blocks that became free.
        """
        freed = sorted(self._cached, reverse=True)
        self._free += freed
        self._cached.clear()
        self._by_key.clear()
        self._keys = [None] * self.num_blocks
        return len(freed)

    def _evict(self) -> int:
        block = next(iter(self._cached))
        del self._cached[block]
        key, self._keys[block] = self._keys[block], None
        assert key is not None
        del self._by_key[key]
        return block

    def _checked(self, blocks: Iterable[int], *, cached_too: bool) -> list[int]:
        held = list(blocks)
        if len(set(held)) != len(held):
            raise ArgumentError(f"a block is named twice in {held}")
        for block in held:
            is_there = 0 <= block < self.num_blocks
            if not is_there or not (self._references[block] or (cached_too and block in self._cached)):
                raise ArgumentError(f"block {block} is not in use; the pool has blocks 0 to {self.num_blocks - 1}")
        return held
