"""One engine of ours, measured in a process of its own: ``python -m benchmarks.serving_ours JOB``; see ``bench_serving``.

Standard output has one line, ``ROW`` and JSON. A job says what to measure (``what``), the layout, the dtype and the load.
"""

import json
import os
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

__all__ = ["main"]

_STARTED = time.perf_counter()


def main(job: Mapping[str, Any]) -> dict[str, Any]:
    """Measure.

    Args:
        job: What, and on what.

    Returns:
        The figures.
    """
    from parallel_runtime.config import ParallelConfig
    from parallel_runtime.serving import Engine, ServingConfig

    serving = ServingConfig(
        dtype=job["dtype"],
        kv_cache_tokens=job.get("kv_cache_tokens", 8192),
        prefix_reuse=job.get("prefix_reuse", False),
        num_microbatches=job.get("num_microbatches"),
        max_batch_tokens=job.get("max_batch_tokens", 512),
    )
    with Engine("smollm2", parallel=ParallelConfig(**job["parallel"]), serving=serving) as engine:
        return _MEASURES[job["what"]](engine, job)


def _sampling(count: int) -> Any:
    from parallel_runtime.serving import SamplingParams

    return SamplingParams(max_new_tokens=count, ignore_eos=True)


def _generate(engine: Any, prompts: list[list[int]], count: int) -> tuple[float, list[list[int]]]:
    start = time.perf_counter()
    done = engine.generate(prompts, _sampling(count))
    return time.perf_counter() - start, [list(completion.token_ids) for completion in done]


def _decode(engine: Any, job: Mapping[str, Any]) -> dict[str, Any]:
    """All runs with one new token, all with many: the difference is decoding alone."""
    prompts, count = job["prompts"], job["new"]
    _generate(engine, prompts, 2)
    firsts, alls = [], []
    tokens: list[list[int]] = []
    for _ in range(job["rounds"]):
        firsts.append(_generate(engine, prompts, 1)[0])
        seconds, tokens = _generate(engine, prompts, count)
        alls.append(seconds)
    return {"first_s": firsts, "all_s": alls, "tokens": tokens}


def _start(engine: Any, job: Mapping[str, Any]) -> dict[str, Any]:
    _generate(engine, job["prompts"], 1)
    return {"seconds": time.perf_counter() - _STARTED}


def _mixed(engine: Any, job: Mapping[str, Any]) -> dict[str, Any]:
    """Requests that arrive one by one, each read by the engine's own stream."""
    import threading

    firsts: list[float] = []
    gaps: list[float] = []
    ends: list[float] = []
    _generate(engine, [job["prompts"][0]], 2)

    def one(prompt: list[int], count: int, begun: float) -> None:
        last = begun
        for event in engine.stream([prompt], _sampling(count)):
            if not event.token_ids:
                continue
            now = time.perf_counter()
            (firsts if last == begun else gaps).append(now - last)
            last = now
        ends.append(last)

    start = time.perf_counter()
    threads = []
    for prompt, count, arrival in zip(job["prompts"], job["counts"], job["arrivals"], strict=True):
        time.sleep(max(0.0, start + arrival - time.perf_counter()))
        thread = threading.Thread(target=one, args=(prompt, count, time.perf_counter()))
        thread.start()
        threads.append(thread)
    for thread in threads:
        thread.join()
    return {"tokens": sum(job["counts"]), "seconds": max(ends) - start, "first_s": firsts, "gap_s": gaps}


def _prefix(engine: Any, job: Mapping[str, Any]) -> dict[str, Any]:
    """One prompt warms the cache; the others begin like it."""
    first, *others = job["prompts"]
    _generate(engine, [first], 1)
    start = time.perf_counter()
    for prompt in others:
        _generate(engine, [prompt], 1)
    return {"seconds": (time.perf_counter() - start) / len(others)}


def _idle(engine: Any, job: Mapping[str, Any]) -> dict[str, Any]:
    """Share of a core that the front and its ranks use while nobody asks for anything."""
    _generate(engine, job["prompts"], 2)
    time.sleep(1.0)
    before, start = _cpu_seconds(), time.perf_counter()
    time.sleep(job["seconds"])
    return {"share": (_cpu_seconds() - before) / (time.perf_counter() - start)}


def _profile(engine: Any, job: Mapping[str, Any]) -> dict[str, Any]:
    """What the ranks say about their own time while all prompts are decoded."""
    _generate(engine, job["prompts"], 2)
    engine.controls.start_profile()
    _generate(engine, job["prompts"], job["new"])
    profiles = engine.controls.stop_profile()
    return {"busy": [profile.busy for profile in profiles], "scheduling": [profile.scheduling for profile in profiles]}


def _cpu_seconds() -> float:
    """Of this process and all below it."""
    ticks = os.sysconf("SC_CLK_TCK")
    parents: dict[int, tuple[int, float]] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text(encoding="ascii", errors="replace").rsplit(")", 1)[1].split()
        except OSError:
            continue
        parents[int(path.parent.name)] = (int(fields[1]), (int(fields[11]) + int(fields[12])) / ticks)
    return sum(seconds for pid, (_, seconds) in parents.items() if _is_below(pid, os.getpid(), parents))


def _is_below(pid: int, top: int, parents: Mapping[int, tuple[int, float]]) -> bool:
    while pid in parents and pid != top:
        pid = parents[pid][0]
    return pid == top


_MEASURES: Mapping[str, Callable[[Any, Mapping[str, Any]], dict[str, Any]]] = {
    "decode": _decode,
    "start": _start,
    "mixed": _mixed,
    "prefix": _prefix,
    "idle": _idle,
    "profile": _profile,
}


if __name__ == "__main__":
    sys.stdout.write("ROW " + json.dumps(main(json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")))) + "\n")
