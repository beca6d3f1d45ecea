"""A row-parallel product into the residual and the norm: the fused way beside the all-reduce, in turn, in the same processes.

Two ranks, one thread each, the sizes of SmolLM2's feed-forward part. Every repetition times both ways one after the other, so
that what disturbs the machine disturbs both; a figure is the median over repetitions, the ratio is that of the pairs.

Run ``python -m benchmarks.bench_fused [--repetitions N] [--write PAGE]``.
"""

import argparse
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from time import perf_counter

import torch

from benchmarks.measuring import machine, write_page
from parallel_runtime.config import ParallelConfig
from parallel_runtime.context import ParallelContext
from parallel_runtime.launch import launch
from parallel_runtime.layers import ResidualSum, RMSNorm, RowParallelLinear

__all__ = ["main"]

_INPUTS, _SIZE = 1536, 576
_COUNTS = (1, 8, 32, 128, 512, 2048)
_KINDS = (("float32", False), ("float32", True), ("bfloat16", True))
_TIMEOUT_S = 140.0

Figures = dict[tuple[str, bool, int], tuple[float, float, float]]


def measure(ctx: ParallelContext, repetitions: int) -> Figures:
    """Both ways at every size.

    Args:
        ctx: Of a rank.
        repetitions: Pairs per size; a pair is several calls of each.

    Returns:
        Microseconds of the plain way, of the fused one, and the median of the pairs' ratios, by dtype, packed or not, tokens.
    """
    figures: Figures = {}
    for name, is_packed in _KINDS:
        dtype = getattr(torch, name)
        layer = RowParallelLinear(_INPUTS, _SIZE, tp=ctx.tp, dtype=dtype)
        layer.load(torch.randn(_SIZE, _INPUTS, generator=torch.Generator().manual_seed(1)).to(dtype) / 40)
        if is_packed:
            layer.pack()
        norm, add = RMSNorm(_SIZE, eps=1e-5, dtype=dtype), ResidualSum(ctx.tp, fused=True)
        for count in _COUNTS:
            x = torch.randn(count, layer.weight.shape[1]).to(dtype)
            residual = torch.randn(count, _SIZE, generator=torch.Generator().manual_seed(2)).to(dtype)
            calls = max(2, 64 // count)
            ways = [partial(way, layer, x, residual, norm) for way in (add.plain, add)]
            with torch.inference_mode():
                pairs = [[_seconds(way, calls, ctx) for way in ways] for _ in range(repetitions + 2)][2:]
            plain, fused = (median(pair[way] for pair in pairs) * 1e6 for way in (0, 1))
            figures[name, is_packed, count] = (plain, fused, median(pair[0] / pair[1] for pair in pairs))
    return figures


def _seconds(way: Callable[[], object], calls: int, ctx: ParallelContext) -> float:
    ctx.tp.barrier()
    start = perf_counter()
    for _ in range(calls):
        way()
    return (perf_counter() - start) / calls


def page(figures: Figures) -> str:
    """The tables.

    Args:
        figures: Of one rank.
    """
    lines = [
        f"`down_proj` of SmolLM2 ({_INPUTS} to {_SIZE}) on two ranks of one thread each, with residual and norm. {machine()}.",
        "",
        "Median microseconds of a call; the last column is the median over pairs of calls made one after the other.",
        "",
        "| dtype | weight | tokens | all-reduce, add, norm | fused | times as fast |",
        "|---|---|---|---|---|---|",
    ]
    for (dtype, is_packed, count), (plain, fused, ratio) in figures.items():
        kind = "packed" if is_packed else "plain"
        lines.append(f"| {dtype} | {kind} | {count} | {plain:.0f} | {fused:.0f} | {ratio:.2f} |")
    lines += [
        "",
        "Both ways give equal bits. The product takes most of a long call. The load says whether the cores were free: a rank",
        "that has to wait for one costs both ways hundreds of microseconds, and ratios then spread by a tenth or more.",
    ]
    return "\n".join(lines)


def main(arguments: list[str]) -> None:
    """Measure and report.

    Args:
        arguments: Of the command line.
    """
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repetitions", type=int, default=15)
    parser.add_argument("--write", type=Path)
    options = parser.parse_args(arguments)
    figures = launch(measure, ParallelConfig(tp=2), options.repetitions, timeout_s=_TIMEOUT_S)[0]
    text = page(figures)
    if options.write is None:
        sys.stdout.write(text + "\n")
    else:
        write_page(options.write, "Sums straight into the residual and the norm", text)


if __name__ == "__main__":
    main(sys.argv[1:])
