"""What Prometheus reads: the engine's counts and times, the replicas, and the HTTP responses, as text."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Final

from parallel_runtime.context.prometheus import family
from parallel_runtime.context.statistics import Statistics, operation_lines
from parallel_runtime.serving.controls import Status
from parallel_runtime.serving.metrics import Histogram, MetricsSnapshot
from parallel_runtime.serving.supervision import ReplicaState

__all__ = ["METRICS_TYPE", "metrics_text"]

METRICS_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"
"""Content type of the text."""

_PREFIX: Final = "parallel_runtime_"
_BLOCK_GAUGES: Final = (
    ("rank_requests_waiting", "gauge", "Requests that wait, by data-parallel rank.", "num_waiting"),
    ("rank_requests_running", "gauge", "Requests that hold blocks, by data-parallel rank.", "num_running"),
    ("kv_blocks_free", "gauge", "Blocks of KV cache that no request holds.", "num_free_blocks"),
    ("prompt_tokens_reused_total", "counter", "Prompt tokens that were known already.", "num_reused_tokens"),
    ("preemptions_total", "counter", "Times a request was put back, to be computed again.", "num_preemptions"),
)


def metrics_text(
    snapshot: MetricsSnapshot,
    *,
    states: Iterable[ReplicaState],
    ranks: Mapping[int, Status],
    responses: Mapping[tuple[str, int], int],
    num_live: int,
    counted: Iterable[tuple[Mapping[str, str], Statistics]] = (),
) -> str:
    """Write metrics down.

    Args:
        snapshot: Of the engine's front.
        states: Of the replicas.
        ranks: Of the data-parallel ranks that have answered, by number.
        responses: HTTP responses so far, by path and status.
        num_live: HTTP requests for answers under way.
        counted: Labels of a rank, and what its groups did, of ranks that count it.

    Returns:
        Prometheus's text format.
    """
    lines: list[str] = []
    add = lines.extend
    add(_family("requests_running", "gauge", "Requests that have made a token and go on.", [({}, snapshot.num_running)]))
    add(_family("requests_waiting", "gauge", "Requests that have made no token yet.", [({}, snapshot.num_waiting)]))
    finished = [({"reason": reason}, count) for reason, count in sorted(snapshot.num_finished.items())]
    add(_family("requests_finished_total", "counter", "Requests that ended.", finished))
    add(_family("prompt_tokens_total", "counter", "Tokens of all prompts.", [({}, snapshot.num_prompt_tokens)]))
    add(_family("new_tokens_total", "counter", "Tokens made.", [({}, snapshot.num_new_tokens)]))
    add(_histogram("time_to_first_token_seconds", "From submission, per request.", snapshot.time_to_first_token))
    add(_histogram("time_between_tokens_seconds", "Per token after the first.", snapshot.time_between_tokens))
    add(_histogram("request_seconds", "From submission to the end, per request.", snapshot.request_time))
    up = [({"replica": str(number)}, int(state is ReplicaState.SERVING)) for number, state in enumerate(states)]
    add(_family("replica_up", "gauge", "Whether a replica serves.", up))
    for name, kind, text, attribute in _BLOCK_GAUGES:
        add(
            _family(
                name, kind, text, [({"dp_rank": str(rank)}, getattr(each, attribute)) for rank, each in sorted(ranks.items())]
            )
        )
    add(_family("http_requests_live", "gauge", "HTTP requests for answers under way.", [({}, num_live)]))
    counts = [({"path": path, "status": str(status)}, count) for (path, status), count in sorted(responses.items())]
    add(_family("http_responses_total", "counter", "HTTP responses.", counts))
    if counted := list(counted):
        add(operation_lines(counted, prefix=_PREFIX))
    return "\n".join(lines) + "\n"


def _family(name: str, kind: str, text: str, samples: Iterable[tuple[Mapping[str, str], float]]) -> Iterator[str]:
    return family(f"{_PREFIX}{name}", kind, text, samples)


def _histogram(name: str, text: str, histogram: Histogram) -> Iterator[str]:
    yield f"# HELP {_PREFIX}{name} {text}"
    yield f"# TYPE {_PREFIX}{name} histogram"
    total = 0
    for bound, count in zip((*map(str, histogram.bounds_s), "+Inf"), histogram.counts, strict=True):
        total += count
        yield f'{_PREFIX}{name}_bucket{{le="{bound}"}} {total}'
    yield f"{_PREFIX}{name}_sum {histogram.sum_s}"
    yield f"{_PREFIX}{name}_count {total}"
