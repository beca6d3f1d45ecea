"""SmolLM2 on every layout of at most eight ranks that it can be cut into: greedy tokens equal to those of one rank.

``python -m benchmarks.layout_matrix --ranks 8 --write PAGE`` runs an engine with ranks as threads for each layout over tp, pp,
dp, cp and dcp, and writes the page. A layout that the engine refuses for this model is listed with the reason.
"""

import argparse
import sys
import time
from collections.abc import Iterator, Sequence
from itertools import product
from pathlib import Path

from benchmarks.measuring import write_page
from parallel_runtime.config import ParallelConfig
from parallel_runtime.errors import ConfigError
from parallel_runtime.serving import Engine, SamplingParams, ServingConfig

__all__ = ["layouts", "main"]

PROMPTS = ("The capital of France is", "Once upon a time, in a village by the sea,", "2, 4, 8, 16,")
SAMPLING = SamplingParams(max_new_tokens=12, ignore_eos=True)
SERVING = ServingConfig(kv_cache_tokens=512)


def layouts(most: int) -> Iterator[dict[str, int]]:
    """Every product of sizes up to a number of ranks, smallest first; dcp where there is anything to spread.

    Args:
        most: Ranks of the largest.

    Yields:
        Sizes for ``ParallelConfig``.
    """
    sizes = range(1, most + 1)
    every = [cut for cut in product(sizes, repeat=4) if cut[0] * cut[1] * cut[2] * cut[3] <= most]
    for tp, pp, dp, cp in sorted(every, key=lambda cut: (cut[0] * cut[1] * cut[2] * cut[3], cut)):
        for dcp in (1, *(part for part in range(2, tp * cp + 1) if (tp * cp) % part == 0)):
            yield {"tp": tp, "pp": pp, "dp": dp, "cp": cp, "dcp": dcp}


def tokens_of(sizes: dict[str, int]) -> list[tuple[int, ...]] | str:
    """Greedy tokens of all prompts on a layout, or why there are none."""
    try:
        engine = Engine("smollm2", parallel=ParallelConfig(**sizes), serving=SERVING, executor="threads")  # type: ignore[arg-type]  # sizes
        with engine:
            return [completion.token_ids for completion in engine.generate(PROMPTS, SAMPLING)]
    except ConfigError as error:
        return str(error)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run all, and write the page.

    Args:
        arguments: Of the command line.

    Returns:
        0 where every layout gives the tokens of one rank, 1 elsewhere.
    """
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=8, help="of the largest layout")
    parser.add_argument("--write", type=Path, help="page to write")
    options = parser.parse_args(arguments)
    expected = tokens_of({"tp": 1})
    rows, same, differ, refused = [], 0, 0, []
    for sizes in layouts(options.ranks):
        start, found = time.perf_counter(), tokens_of(sizes)
        name = " ".join(f"{axis}={size}" for axis, size in sizes.items() if size > 1) or "one rank"
        if isinstance(found, str):
            refused.append(f"| {name} | {found} |")
            continue
        same, differ = same + (found == expected), differ + (found != expected)
        rows.append(f"| {name} | {'identical' if found == expected else 'different'} |")
        sys.stdout.write(f"{rows[-1]} {time.perf_counter() - start:.1f} s\n")
        sys.stdout.flush()
    text = f"Up to {options.ranks} ranks: {same} layouts give tokens of one rank, {differ} others; {len(refused)} refused.\n\n"
    text += "\n".join(["| layout | greedy tokens |", "|---|---|", *rows, "", "| refused | why |", "|---|---|", *refused]) + "\n"
    if options.write is None:
        sys.stdout.write(text)
    else:
        write_page(options.write, "SmolLM2 on every layout", text)
    return int(differ > 0)


if __name__ == "__main__":
    sys.exit(main())
