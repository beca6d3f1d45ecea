"""What a rank decides alone."""

import pytest
import torch

from parallel_runtime.config import ParallelConfig
from parallel_runtime.config.environment import Identity
from parallel_runtime.context.choices import choose_backend, choose_device, fit_config
from parallel_runtime.errors import ConfigError
from parallel_runtime.terms import Rank

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)


def identity(rank: int = 0, world_size: int = 4) -> Identity:
    return Identity(rank=Rank(rank), world_size=world_size, local_rank=rank, local_world_size=world_size)


def test_an_open_size_is_filled_in() -> None:
    assert fit_config(ParallelConfig(tp=2, pp=-1), identity()).pp == 2


def test_sizes_that_do_not_multiply_to_the_world_are_refused() -> None:
    with pytest.raises(ConfigError, match="world"):
        fit_config(ParallelConfig(tp=3), identity())


@pytest.mark.parametrize("config", [ParallelConfig(tp=3, pp=2), ParallelConfig(tp=3, pp=2, dp=-1)])
def test_a_script_without_a_launcher_is_told_how_to_start(config: ParallelConfig) -> None:
    alone = Identity(rank=Rank(0), world_size=1, source="single")
    with pytest.raises(
        ConfigError, match=r"No launcher's variables were found.*`torchrun --nproc-per-node 6 script\.py`, or call"
    ):
        fit_config(config, alone)
    with pytest.raises(ConfigError) as launched:
        fit_config(config, identity(0, 1))
    assert "torchrun" not in str(launched.value)
    assert fit_config(ParallelConfig(), alone).world_size == 1


def test_a_part_of_the_ranks_is_entered_by_those_ranks_only() -> None:
    config = ParallelConfig(tp=2, rank_offset=2)
    assert fit_config(config, identity(3)) is config
    with pytest.raises(ConfigError, match=r"rank 1 of 4 cannot enter a config over ranks \[2, 3\]"):
        fit_config(config, identity(1))
    with pytest.raises(ConfigError, match="must be below 3"):
        fit_config(config, identity(2, 3))
    with pytest.raises(ConfigError, match="needs every size"):
        fit_config(ParallelConfig(tp=-1, rank_offset=2), identity(2))


@pytest.mark.parametrize(
    ("backend", "device", "has_hub", "expected"),
    [
        ("auto", CPU, False, "gloo"),
        ("auto", CPU, True, "local"),
        ("auto", CUDA, False, "nccl"),
        ("gloo", CPU, True, "gloo"),
        ("fake", CPU, False, "fake"),
    ],
)
def test_the_backend_follows_from_device_and_hub(backend: str, device: torch.device, has_hub: bool, expected: str) -> None:
    config = ParallelConfig.model_validate({"tp": 2, "backend": backend})
    assert choose_backend(config, device, has_hub=has_hub) == expected


def test_backends_that_cannot_work_are_refused() -> None:
    with pytest.raises(ConfigError, match="connects threads of one process; use run_threads"):
        choose_backend(ParallelConfig(tp=2, backend="local"), CPU, has_hub=False)
    with pytest.raises(ConfigError, match=r'moves tensors of GPUs only.*use backend="gloo"'):
        choose_backend(ParallelConfig(tp=2, backend="nccl"), CPU, has_hub=False)


def test_devices_are_taken_where_each_rank_has_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    assert choose_device(ParallelConfig(tp=4), identity(3), is_thread=False) == torch.device("cuda", 3)
    assert choose_device(ParallelConfig(tp=4), identity(3), is_thread=True) == CPU
    assert choose_device(ParallelConfig(tp=4, backend="gloo"), identity(3), is_thread=False) == CPU
    assert choose_device(ParallelConfig(tp=8), identity(3, 8), is_thread=False) == CPU
    assert choose_device(ParallelConfig(tp=4, device="cuda"), identity(3), is_thread=True) == torch.device("cuda", 3)
    assert choose_device(ParallelConfig(tp=4, device="cpu"), identity(3), is_thread=False) == CPU
    with pytest.raises(ConfigError, match="local rank 5 finds 4 GPUs"):
        choose_device(ParallelConfig(tp=8, device="cuda"), identity(5, 8), is_thread=False)
