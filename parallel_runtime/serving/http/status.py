"""What the status page shows, as data; there are no prompts and no answers in it."""

import time
from typing import Any

from parallel_runtime.context.reports import Report
from parallel_runtime.serving.http.live import LiveRequest
from parallel_runtime.serving.http.service import Service
from parallel_runtime.serving.metrics import Histogram

__all__ = ["status_report"]

_MOST_GROUPS = 64
_MOST_REQUESTS = 100


async def status_report(service: Service) -> dict[str, Any]:
    """Collect what goes on.

    Args:
        service: Of the server.

    Returns:
        JSON values: state, model, sizes, replicas with their ranks, groups, requests, rates and times.
    """
    engine = service.engine.engine
    metrics, parallel = engine.metrics(), engine.parallel
    return {
        "state": service.state,
        "model": service.model,
        "uptime_s": time.monotonic() - service.started_s,
        "sizes": {name: getattr(parallel, name) for name in ("tp", "pp", "dp", "cp", "ep")},
        "executor": engine.config.executor,
        "replicas": await _replicas(service),
        "groups": _groups(service),
        "num_live": len(service.live),
        "requests": [_request(entry) for entry in list(service.live)[:_MOST_REQUESTS]],
        "num_running": metrics.num_running,
        "num_waiting": metrics.num_waiting,
        "num_finished": dict(metrics.num_finished),
        "num_prompt_tokens": metrics.num_prompt_tokens,
        "num_new_tokens": metrics.num_new_tokens,
        "rates": service.rates.rates,
        "times": {
            "first token": _times(metrics.time_to_first_token),
            "between tokens": _times(metrics.time_between_tokens),
            "whole request": _times(metrics.request_time),
        },
    }


async def _replicas(service: Service) -> list[dict[str, Any]]:
    told, ready, reports = await service.ranks(), service.engine.replicas, await service.reports()
    dp = service.engine.engine.parallel.dp
    replicas = []
    for number, state in enumerate(service.replicas):
        leaders = []
        for place in range(number * dp, (number + 1) * dp):
            said = ready[place] if place < len(ready) else None
            status = told.get(place)
            leaders.append(
                {
                    "dp_rank": place,
                    "ranks": said.ranks if said else (),
                    "doing": [
                        _doing(reports.get((place, index))) if address else None for index, address in enumerate(said.addresses)
                    ]
                    if said
                    else (),
                    "num_blocks": said.num_blocks if said else None,
                    "page_size": said.page_size if said else None,
                    "max_request_tokens": said.max_request_tokens if said else None,
                    "num_running": status.num_running if status else None,
                    "num_waiting": status.num_waiting if status else None,
                    "num_free_blocks": status.num_free_blocks if status else None,
                    "num_cached_blocks": status.num_cached_blocks if status else None,
                    "num_reused_tokens": status.num_reused_tokens if status else None,
                    "num_preemptions": status.num_preemptions if status else None,
                    "weights_version": status.weights_version if status else None,
                }
            )
        replicas.append({"number": number, "state": state, "leaders": leaders})
    return replicas


def _doing(report: Report | None) -> dict[str, Any]:
    """Which operation a rank is in right now, or where its program is."""
    if report is None:
        return {"is_silent": True, "operation": None, "seconds": None, "place": None, "failures": ()}
    current = next((each.current for each in report.connections if each.current is not None), None)
    return {
        "is_silent": False,
        "operation": report.inside or None,
        "seconds": None if current is None or not report.inside else current.seconds,
        "place": report.stack[-1] if report.stack else None,
        "failures": report.failures,
    }


def _groups(service: Service) -> list[dict[str, Any]]:
    """Groups of several ranks in one replica; all replicas have the same."""
    plan = service.engine.engine.parallel.plan()
    return [
        {"names": family.names, "ranks": plan.layout.groups(family.names[0])[:_MOST_GROUPS]}
        for family in plan.families
        if family.group_size > 1
    ]


def _request(entry: LiveRequest) -> dict[str, Any]:
    return {
        "name": entry.name,
        "path": entry.path,
        "age_s": time.monotonic() - entry.started_s,
        "is_streamed": entry.is_streamed,
        "num_answers": entry.num_answers,
        "num_prompt_tokens": entry.num_prompt_tokens,
        "num_new_tokens": entry.num_new_tokens,
        "dp_ranks": sorted(entry.dp_ranks),
    }


def _times(histogram: Histogram) -> dict[str, float]:
    return {"count": histogram.count, "p50_s": histogram.quantile(0.5), "p99_s": histogram.quantile(0.99)}
