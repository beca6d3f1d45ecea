"""For tests of code that stands on this library: strategies, tiny checkpoints, faults, and a device that pretends to have graphs.

Each is imported from its own module, because each needs something else.
"""

__all__: list[str] = []
