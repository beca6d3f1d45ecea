"""What the recorder costs an operation: the calls that ``GroupCore.run`` makes, beside a loop that makes none.

    python -m benchmarks.bench_recorder

Both loops run many times in turn; the fastest of each counts, so that other work on the machine does not.
"""

import sys
from time import perf_counter

import torch

from parallel_runtime.comm.recorder import Recorder

ROUNDS = 60
OPERATIONS = 5_000
BAR_US = 0.3


def empty_s() -> float:
    """Seconds of a loop around what an operation does without a recorder: its two looks at the clock."""
    start = perf_counter()
    for _ in range(OPERATIONS):
        perf_counter()
        perf_counter()
    return perf_counter() - start


def recorded_s(recorder: Recorder, tensor: torch.Tensor) -> float:
    """Seconds of the same loop with an entry made, started and finished in it."""
    start = perf_counter()
    for sequence in range(OPERATIONS):
        began = perf_counter()
        entry = ("tp#0", sequence, "all_reduce", tensor.dtype, tensor.shape, began)
        recorder.under_way = entry
        recorder.finish(entry, perf_counter() - began)
    return perf_counter() - start


def main() -> None:
    """Measure and print."""
    recorder, tensor = Recorder(), torch.zeros(8, 576)
    recorded, empty = zip(*((recorded_s(recorder, tensor), empty_s()) for _ in range(ROUNDS)), strict=True)
    cost_us = (min(recorded) - min(empty)) / OPERATIONS * 1e6
    verdict = "kept" if cost_us < BAR_US else "NOT kept"
    sys.stdout.write(f"recorder: {cost_us:.3f} us per operation; the bar of {BAR_US} us is {verdict}\n")


if __name__ == "__main__":
    main()
