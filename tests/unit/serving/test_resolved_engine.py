"""An engine before it starts: who every rank is, and what this model or machine cannot have."""

import threading
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

import pytest

from parallel_runtime.config import ParallelConfig
from parallel_runtime.errors import CheckpointError, ConfigError
from parallel_runtime.layers import ExpertGroups
from parallel_runtime.models import load_model, open_checkpoint
from parallel_runtime.models.stages import split_stages
from parallel_runtime.models.tensor_shapes import tensor_shapes
from parallel_runtime.serving import Engine, EngineConfig, ServingConfig
from parallel_runtime.serving.identities import ResolvedEngine
from parallel_runtime.serving.machine import Machine, measure_machine
from parallel_runtime.serving.resolved_engine import resolve_engine
from parallel_runtime.serving.shard_memory import rank_shard
from parallel_runtime.testing.checkpoints import tiny_llama_config, tiny_moe_config, write_safetensors_checkpoint
from tests.spmd.tiny_models import write_tiny_model
from tests.unit.layers.ranks import alone

MACHINE = Machine(host="here", cores=4, memory_bytes=10**9, descriptors=1000)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_tiny_model(tmp_path_factory.mktemp("tiny"), vocab_size=300))


@pytest.fixture(scope="module")
def experts(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_safetensors_checkpoint(tmp_path_factory.mktemp("moe"), tiny_moe_config(eos_ids=())))


def resolve(model: str, machine: Machine = MACHINE, environ: dict[str, str] | None = None, **settings: Any) -> ResolvedEngine:
    return resolve_engine(EngineConfig(model=model, **settings), machine=machine, environ=environ or {})


def why(resolved: ResolvedEngine) -> dict[str, tuple[str, str]]:
    return {choice.setting: (choice.value, choice.why) for choice in resolved.choices}


def test_every_rank_of_every_replica_is_told(model: str) -> None:
    resolved = resolve(model, parallel=ParallelConfig(tp=2, pp=2), replicas=2)
    assert [(process.replica, process.rank) for process in resolved.processes] == [(r, k) for r in range(2) for k in range(4)]
    first, *_, last = resolved.processes
    assert first.coordinate == {"tp": 0, "cp": 0, "dp": 0, "pp": 0}
    assert first.channels == ("front", "steps to 3 ranks", "hidden states to stage 1")
    assert last.channels == ("steps from the leader", "hidden states from stage 0")
    assert resolved.processes[2].channels[-1] == "tokens to the leader"
    assert (last.layers[1], last.query_heads, last.kv_heads, last.device, last.host) == (3, 2, 1, "cpu", "here")
    assert any(group.startswith("pp#1 of 2") for group in last.groups)
    assert resolved.needed_bytes < MACHINE.memory_bytes


def test_choices_are_told_with_their_numbers(model: str) -> None:
    chosen = why(resolve(model, parallel=ParallelConfig(tp=2), replicas=2))
    assert chosen["parallel.device"] == ("cpu", "0 GPUs for 2 ranks")
    assert chosen["threads of a rank"] == ("1", "4 cores over 4 ranks")
    assert chosen["supervision.max_restarts"][0] == "3"
    assert chosen["serving.max_request_tokens"] == ("128", "the model's context length")
    assert chosen["serving.kv_cache_tokens"][1].startswith("all that running requests could need")
    assert why(resolve(model, parallel=ParallelConfig(dp=8)))["threads of a rank"][1].endswith("so they take turns")
    assert why(resolve(model, environ={"OMP_NUM_THREADS": "3"}))["threads of a rank"] == ("3", "OMP_NUM_THREADS says so")
    assert why(resolve(model, executor="threads"))["parallel.backend"] == ("local", "ranks are threads")
    assert why(resolve(model, parallel=ParallelConfig(pp=2)))["serving.num_microbatches"][0] == "2"


def test_on_ray_ranks_have_bundles_and_nothing_is_refused_for_this_machine(model: str) -> None:
    poor = replace(MACHINE, memory_bytes=1000, descriptors=0, has_loopback=False)
    resolved = resolve(model, poor, executor="ray", replicas=2, parallel=ParallelConfig(tp=2))
    assert [process.host for process in resolved.processes] == ["bundle 0", "bundle 1"] * 2
    chosen = why(resolved)
    assert chosen["placement"] == ("2 bundles of a placement group per replica", "Ray chooses their nodes")
    assert chosen["serving.kv_cache_tokens"][0].startswith("at most ")


def test_what_is_given_is_not_chosen(model: str) -> None:
    serving = ServingConfig(kv_cache_tokens=65, max_request_tokens=64)
    resolved = resolve(model, serving=serving, parallel=ParallelConfig(device="cpu", backend="gloo"))
    assert set(why(resolved)) == {"threads of a rank", "supervision.max_restarts"}
    assert (resolved.kv_cache_tokens, resolved.max_request_tokens) == (80, 64), "whole blocks"


def test_equal_shards_can_be_asked_for(model: str) -> None:
    serving = ServingConfig(uneven="refuse")
    resolve(model, serving=serving, parallel=ParallelConfig(tp=2))
    with pytest.raises(ConfigError, match=r"tp=3 does not split 4 query heads .2 KV heads. evenly"):
        resolve(model, serving=serving, parallel=ParallelConfig(tp=3))


def test_little_memory_gives_little_cache_and_replicas_share_it(model: str) -> None:
    small = replace(MACHINE, memory_bytes=4_000_000)
    one, two = (resolve(model, small, replicas=count).kv_cache_tokens for count in (1, 2))
    assert two == pytest.approx(one / 2, rel=0.05)
    assert why(resolve(model, small))["serving.kv_cache_tokens"][1].startswith("less than running requests could need")


@pytest.mark.parametrize("splits", [{}, {"tp": 2}, {"tp": 3}, {"pp": 2}, {"tp": 2, "pp": 2}])
def test_the_ranks_together_hold_the_model(splits: dict[str, int]) -> None:
    config = tiny_llama_config(num_layers=4, vocab_size=301)
    parallel = ParallelConfig(**splits)  # type: ignore[arg-type]  # sizes
    stages = split_stages(config, num_stages=parallel.pp)
    held = sum(rank_shard(config, parallel.layout, rank, stages).num_weights for rank in range(parallel.world_size))
    expected = sum(prod(shape) for _, shape in tensor_shapes(config))
    assert held == pytest.approx(expected, rel=0.1 if "pp" in splits or splits.get("tp", 1) > 2 else 0.02)


def test_one_rank_holds_what_is_loaded(experts: str) -> None:
    one = alone()
    with open_checkpoint(experts) as checkpoint:
        loaded = load_model(checkpoint, tp=one, experts=ExpertGroups(tp=one, ep=one, etp=one))
        stages = split_stages(checkpoint.config, num_stages=1)
        shard = rank_shard(checkpoint.config, ParallelConfig().layout, 0, stages)
    assert shard.num_weights == pytest.approx(sum(weight.numel() for weight in loaded.parameters()), rel=0.02)


def test_experts_that_span_ranks_are_told(experts: str) -> None:
    resolved = resolve(experts, parallel=ParallelConfig(tp=2, dp=2, ep=4))
    assert resolved.lockstep
    assert resolved.processes[3].coordinate["ep"] == 3
    assert why(resolved)["lockstep"][0] == "yes"


def test_gpus_are_taken_where_there_is_one_for_each_rank(model: str) -> None:
    gpus = replace(MACHINE, gpu_bytes=(10**9, 10**9))
    resolved = resolve(model, gpus, parallel=ParallelConfig(tp=2))
    assert [process.device for process in resolved.processes] == ["cuda:0", "cuda:1"]
    assert why(resolved)["parallel.backend"] == ("nccl", "tensors live on cuda")
    assert resolve(model, gpus, parallel=ParallelConfig(dp=3)).processes[0].device == "cpu"


@pytest.mark.parametrize(
    ("settings", "machine", "text"),
    [
        ({"parallel": ParallelConfig(tp=5)}, {}, "tp=5 is more than the 4 query heads"),
        ({"parallel": ParallelConfig(pp=5)}, {}, "pp=5"),
        ({"parallel": ParallelConfig(dp=-1)}, {}, "a size of -1 is filled in from the number of ranks"),
        ({"parallel": ParallelConfig(tp=2, dcp=2)}, {}, "dcp=2 spreads the tokens of a KV head over 2 neighbours"),
        ({"parallel": ParallelConfig(device="cuda")}, {}, 'device="cuda" for 1 ranks, but this machine has 0 GPUs'),
        ({"replicas": 2}, {"gpu_bytes": (10**9,)}, "replicas=2 on GPUs"),
        ({}, {"gpu_bytes": (10**5,)}, "rank 0 needs .* on cuda:0, which has 100 kB"),
        ({}, {"memory_bytes": 10**3}, "not one block of 16 tokens of KV cache fits: a rank needs"),
        (
            {"replicas": 50, "executor": "threads"},
            {"memory_bytes": 10**7},
            "50 ranks need .* for weights and .* for the KV cache, and 10 MB are free",
        ),
        ({"serving": ServingConfig(kv_cache_tokens=10**9)}, {}, "1 ranks need .* and 1 GB are free"),
        ({"replicas": 20, "parallel": ParallelConfig(dp=2)}, {"descriptors": 700}, "40 ranks need about 720 file descriptors"),
        (
            {"parallel": ParallelConfig(tp=2)},
            {"has_loopback": False},
            "meet on a port of 127.0.0.1, and none can be opened there",
        ),
    ],
)
def test_what_cannot_be_is_refused_with_its_numbers(
    model: str, settings: dict[str, Any], machine: dict[str, Any], text: str
) -> None:
    before = threading.active_count()
    with pytest.raises(ConfigError, match=text):
        resolve(model, replace(MACHINE, **machine), **settings)
    assert threading.active_count() == before


def test_an_unknown_model() -> None:
    with pytest.raises(CheckpointError, match="no model at"):
        resolve("nowhere")


def test_this_machine_is_measured() -> None:
    machine = measure_machine()
    assert machine.host
    assert machine.cores >= 1
    assert machine.memory_bytes > 10**6
    assert machine.descriptors > 10
    assert machine.has_loopback


def test_an_engine_is_what_was_resolved(model: str) -> None:
    """The ranks agree on what was worked out beforehand."""
    config = EngineConfig(
        model=model, parallel=ParallelConfig(pp=2), executor="threads", serving=ServingConfig(kv_cache_tokens=1000)
    )
    resolved = resolve_engine(config)
    with Engine(config) as engine:
        (ready,) = engine.replicas
    assert ready.num_blocks * ready.page_size == resolved.kv_cache_tokens
    assert ready.max_request_tokens == resolved.max_request_tokens
    for process, line in zip(resolved.processes, ready.ranks, strict=True):
        assert f"layers {process.layers[0]}-{process.layers[1]}, {process.query_heads} query" in line
    assert Path(resolved.model_path) == Path(model)
