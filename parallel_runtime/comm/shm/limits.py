"""From which size on an operation through shared memory goes another way: integers, measured on two cores."""

from dataclasses import dataclass
from typing import Final, final

from parallel_runtime.comm.shm.geometry import choose_geometries

__all__ = ["ALIGNMENT", "Limits"]

ALIGNMENT: Final = 64
_ONE_SHOT_BYTES: Final = 1 << 20
_ONE_SHOT_BYTES_MANY: Final = 32 << 10
_PIECE_BYTES: Final = 512 << 10  # smaller ones are still dirty in the writer's cache when they are read, which is slower
_SYMMETRIC_BYTES: Final = 16 << 10
_DIRECT_BYTES_PAIR: Final = 16 << 10  # through the slots it is a third faster at best, several times slower at worst
_DIRECT_BROADCAST_BYTES: Final = 2 << 20
_DIRECT_REDUCE_BYTES: Final = 4 << 20


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Where the ways part, in bytes of a tensor.

    Attributes:
        world_size: Members of the group.
        slot_bytes: Payload of one slot.
    """

    world_size: int
    slot_bytes: int

    @classmethod
    def of_group(cls, world_size: int) -> "Limits":
        """Those of a group that gets all the memory it asks for."""
        return cls(world_size=world_size, slot_bytes=choose_geometries(world_size)[0].slot_bytes)

    @property
    def piece(self) -> int:
        """What goes through a slot at once."""
        return min(_PIECE_BYTES, self.slot_bytes)

    @property
    def share(self) -> int:
        """What of a slot is for one reader, where each gets something else."""
        return min(self.slot_bytes // (self.world_size - 1) // ALIGNMENT * ALIGNMENT, self.piece)

    @property
    def direct(self) -> int:
        """Up to here data goes through slots; above, readers fetch it from where it lies."""
        return min(_DIRECT_BYTES_PAIR, self.slot_bytes) if self.world_size == 2 else self.slot_bytes

    @property
    def direct_broadcast(self) -> int:
        """The same for broadcasts, in which several read what one writes; with one reader, each of the two copies a half."""
        return self.direct if self.world_size == 2 else _DIRECT_BROADCAST_BYTES

    @property
    def direct_reduce(self) -> int:
        """Up to here operands go through slots; above, they are read from where they lie."""
        return _DIRECT_REDUCE_BYTES

    @property
    def symmetric(self) -> int:
        """Up to here symmetric memory is used like any other."""
        return _SYMMETRIC_BYTES

    def one_shot(self, *, is_low_precision: bool) -> int:
        """Up to where reducing everything oneself beats waiting for parts; less where arithmetic costs more than copying."""
        limit = _ONE_SHOT_BYTES if self.world_size == 2 else _ONE_SHOT_BYTES_MANY
        return min(limit // 8 if is_low_precision else limit, self.slot_bytes)

    def describe(self, *, reads_in_place: bool = True) -> str:
        """Which way which sizes take, for people.

        Args:
            reads_in_place: Whether every member can read the memory of the others.
        """
        wide, low = (self.one_shot(is_low_precision=is_low) >> 10 for is_low in (False, True))
        moves = (
            f"in place all_gather, gather and scatter above {self.direct >> 10} KiB, all_to_all above "
            f"{min(self.direct, self.share) >> 10} KiB a part, broadcast above {self.direct_broadcast >> 10} KiB, "
            f"reductions above {self.direct_reduce >> 10} KiB"
            if reads_in_place
            else f"everything else through slots, {self.piece >> 10} KiB at a time"
        )
        return (
            f"all_reduce one-shot to {wide} KiB (16-bit floats {low} KiB), two-shot above; "
            f"symmetric tensors above {self.symmetric >> 10} KiB uncopied; {moves}"
        )
