"""What can be asked of replicas beside requests: every rank does it in the same turn, and requests wait meanwhile."""

import socket
import threading
import weakref
from pathlib import Path

import pytest
import torch
from torch import Tensor

from parallel_runtime.config import ParallelConfig
from parallel_runtime.errors import PeerFailedError
from parallel_runtime.models import ModelConfig
from parallel_runtime.serving import Engine, SamplingParams, ServingConfig, TpModelWorker
from parallel_runtime.serving.messages import StepOutput
from parallel_runtime.serving.weight_transfer import send_weights, weight_context
from parallel_runtime.testing.checkpoints import random_state, tiny_llama_config, tiny_moe_config, write_safetensors_checkpoint
from tests.spmd.replicas import Replicas
from tests.spmd.tiny_models import PROMPTS, greedy_reference
from tests.unit.layers.ranks import sizes_of

pytestmark = pytest.mark.timeout(60)

NEW = 8
DENSE = tiny_llama_config(num_layers=4, eos_ids=())
TIED = tiny_llama_config(num_layers=4, eos_ids=(), tie_word_embeddings=True)
EXPERTS = tiny_moe_config(shared=True, num_layers=4, eos_ids=())
LAYOUTS = [
    pytest.param(DENSE, ParallelConfig(), id="one"),
    pytest.param(DENSE, ParallelConfig(tp=3), id="tp3"),
    pytest.param(TIED, ParallelConfig(tp=2, pp=2), id="tp2-pp2-tied"),
    pytest.param(DENSE, ParallelConfig(pp=3, dp=2), id="pp3-dp2"),
    pytest.param(EXPERTS, ParallelConfig(tp=2, ep=2), id="ep2"),
    pytest.param(EXPERTS, ParallelConfig(tp=2, etp=2), id="etp2"),
    pytest.param(EXPERTS, ParallelConfig(dp=2, ep=2), id="dp2-ep2"),
    pytest.param(EXPERTS, ParallelConfig(pp=2, dp=2, ep=2), id="pp2-dp2-ep2"),
]


def two_models(folder: Path, config: ModelConfig) -> tuple[Path, Path]:
    """The same model with two sets of weights."""
    return write_safetensors_checkpoint(folder / "0", config), write_safetensors_checkpoint(folder / "1", config, seed=1)


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


@pytest.mark.parametrize(("config", "parallel"), [LAYOUTS[1], LAYOUTS[2], LAYOUTS[6], LAYOUTS[7]])
def test_paused_replicas_take_requests_and_compute_nothing(config: ModelConfig, parallel: ParallelConfig, tmp_path: Path) -> None:
    model, _ = two_models(tmp_path, config)
    expected = greedy_reference(model, PROMPTS, NEW)
    with Replicas(model, parallel) as replicas:
        controls = replicas.controller.controls
        controls.pause()
        sinks = [replicas.submit(prompt, NEW) for prompt in PROMPTS]
        statuses = controls.health(timeout_s=20)
        assert sum(status.num_waiting for status in statuses) == len(PROMPTS)
        assert all(status.is_paused for status in statuses)
        assert not any(any(batches) for batches in replicas.batches.values())
        controls.resume()
        assert [replicas.tokens(sink) for sink in sinks] == expected
        assert not any(status.is_paused for status in controls.health())
    assert replicas.failure is None


@pytest.mark.parametrize(("config", "parallel"), LAYOUTS)
def test_weights_from_disk_on_every_layout(config: ModelConfig, parallel: ParallelConfig, tmp_path: Path) -> None:
    old, new = two_models(tmp_path, config)
    with Replicas(old, parallel) as replicas:
        assert replicas.generate(*PROMPTS, new=NEW) == greedy_reference(old, PROMPTS, NEW)
        assert replicas.controller.controls.update_weights(new) == 1
        assert replicas.generate(*PROMPTS, new=NEW) == greedy_reference(new, PROMPTS, NEW)
    assert replicas.failure is None


@pytest.mark.parametrize(("config", "parallel"), LAYOUTS)
def test_tensors_that_are_handed_over(config: ModelConfig, parallel: ParallelConfig, tmp_path: Path) -> None:
    """Some of them: every rank keeps the rest."""
    old, _ = two_models(tmp_path, config)
    mixed = random_state(config)
    other = {name: tensor for name, tensor in random_state(config, seed=5).items() if "q_proj" in name or ".mlp." in name}
    expected = greedy_reference(write_state(tmp_path / "mixed", config, mixed | other), PROMPTS, NEW)
    with Replicas(old, parallel) as replicas:
        assert replicas.controller.controls.update_weights(other, version=7) == 7
        assert replicas.generate(*PROMPTS, new=NEW) == expected
        replicas.controller.controls.sleep()
        replicas.controller.controls.wake()
        assert replicas.generate(*PROMPTS, new=NEW) == expected
        assert {status.weights_version for status in replicas.controller.controls.health()} == {7}
    assert replicas.failure is None


def write_state(folder: Path, config: ModelConfig, state: dict[str, Tensor]) -> Path:
    """A checkpoint with just these tensors."""
    from safetensors.torch import save_file

    write_safetensors_checkpoint(folder, config)
    save_file(state, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize(
    ("config", "parallel", "num_senders"),
    [(*case.values, 1) for case in LAYOUTS] + [(*LAYOUTS[2].values, 3), (*LAYOUTS[7].values, 2)],
)
def test_weights_from_the_ranks_of_a_trainer(
    config: ModelConfig, parallel: ParallelConfig, num_senders: int, tmp_path: Path
) -> None:
    old, new = two_models(tmp_path, config)
    state = list(random_state(config, seed=1).items())
    port = free_port()

    def train(rank: int) -> None:
        with weight_context(rank, num_senders + parallel.world_size, host="127.0.0.1", port=port) as ctx:
            send_weights(ctx.world, dict(state[rank::num_senders]), num_senders=num_senders)

    trainers = [threading.Thread(target=train, args=(rank,)) for rank in range(num_senders)]
    with Replicas(old, parallel) as replicas:
        sinks = [replicas.submit(prompt, 20) for prompt in PROMPTS]
        for trainer in trainers:
            trainer.start()
        assert replicas.controller.controls.receive_weights("127.0.0.1", port, num_senders=num_senders) == 1
        for trainer in trainers:
            trainer.join(20)
        assert all(len(replicas.tokens(sink)) == 20 for sink in sinks), "requests wait, none fails"
        assert replicas.generate(*PROMPTS, new=NEW) == greedy_reference(new, PROMPTS, NEW)
    assert replicas.failure is None


@pytest.mark.parametrize("parallel", [ParallelConfig(tp=2), ParallelConfig(pp=2)], ids=sizes_of)
def test_a_request_goes_on_with_the_new_weights(parallel: ParallelConfig, tmp_path: Path) -> None:
    """Its tokens say which weights chose them, and those of each part are what these weights say."""
    old, new = two_models(tmp_path, DENSE)
    prompt, reached = PROMPTS[2], threading.Event()
    with Replicas(old, parallel, at_batch=lambda rank, batch: reached.set()) as replicas:
        sink = replicas.submit(prompt, 60)
        assert reached.wait(20)
        replicas.controller.controls.update_weights(new)
        made: dict[int, list[int]] = {0: [], 1: []}
        while True:
            _, output = sink.get(timeout=20)
            assert isinstance(output, StepOutput)
            made[output.weights_version] += output.token_ids
            if output.finish_reason is not None:
                break
    assert len(made[0]) + len(made[1]) == 60
    assert made[1], "the update came too late to be seen"
    assert [tuple(made[0])] == greedy_reference(old, [prompt], len(made[0]))
    assert [tuple(made[1])] == greedy_reference(new, [(*prompt, *made[0])], len(made[1]))


@pytest.mark.parametrize(("config", "parallel"), [LAYOUTS[1], LAYOUTS[2], LAYOUTS[6]])
def test_an_update_that_fails_leaves_the_old_weights(config: ModelConfig, parallel: ParallelConfig, tmp_path: Path) -> None:
    old, _ = two_models(tmp_path, config)
    other = write_safetensors_checkpoint(tmp_path / "other", tiny_llama_config(num_layers=2, eos_ids=()))
    expected = greedy_reference(old, PROMPTS, NEW)
    with Replicas(old, parallel) as replicas:
        controls = replicas.controller.controls
        with pytest.raises(PeerFailedError, match="no model at '/nowhere'"):
            controls.update_weights("/nowhere")
        with pytest.raises(PeerFailedError, match="is of another model: "):
            controls.update_weights(other)
        with pytest.raises(PeerFailedError, match=r"has a tensor 'model.layer.0.q', which the model has not"):
            controls.update_weights({"model.layer.0.q": torch.zeros(3)})
        with pytest.raises(PeerFailedError, match=r"'model.norm.weight' has shape \(3,\); the model's has"):
            controls.update_weights({"model.norm.weight": torch.zeros(3)})
        (tmp_path / "junk.pt").write_bytes(b"junk")
        with pytest.raises(PeerFailedError, match="cannot be read as a file of tensors"):
            controls.update_weights(tmp_path / "junk.pt")
        assert replicas.generate(*PROMPTS, new=NEW) == expected
        assert {status.weights_version for status in controls.health()} == {controls.version} == {0}
    assert replicas.failure is None


@pytest.mark.parametrize(("config", "parallel"), [LAYOUTS[1], LAYOUTS[3], LAYOUTS[7]])
def test_sleep_gives_the_memory_back_and_wake_takes_it_again(
    config: ModelConfig, parallel: ParallelConfig, tmp_path: Path
) -> None:
    model, _ = two_models(tmp_path, config)
    expected = greedy_reference(model, PROMPTS, NEW)
    with Replicas(model, parallel) as replicas:
        controls = replicas.controller.controls
        assert replicas.generate(*PROMPTS, new=NEW) == expected
        held = [rank for worker in replicas.workers.values() for rank in storages(worker)]
        controls.sleep()
        assert [tuple(tensor.shape) for reference in held if (tensor := reference()) is not None] == []
        sinks = [replicas.submit(prompt, NEW) for prompt in PROMPTS]
        assert all(status.is_asleep for status in controls.health())
        with pytest.raises(PeerFailedError, match="the weights are asleep"):
            controls.update_weights(model)
        controls.sleep()
        controls.wake()
        controls.wake()
        assert [replicas.tokens(sink) for sink in sinks] == expected
    assert replicas.failure is None


def storages(worker: TpModelWorker) -> list[weakref.ReferenceType[Tensor]]:
    """Every parameter."""
    return [weakref.ref(tensor) for tensor in worker.weights.model.parameters()]


def test_memory_of_processes_goes_back_to_the_system(tmp_path: Path) -> None:
    """And all the rest over processes: weights from disk, from tensors, sleep and wake."""
    config = tiny_llama_config(num_layers=2, eos_ids=(), vocab_size=60_000, hidden_size=128)
    old, new = two_models(tmp_path, config)
    with Engine(old, parallel=ParallelConfig(tp=2)) as engine:
        pids = [int(line.split("pid ")[1].split()[0]) for line in engine.replicas[0].ranks]

        def tokens() -> list[tuple[int, ...]]:
            return [answer.token_ids for answer in engine.generate(PROMPTS[:2], SamplingParams(max_new_tokens=4))]

        assert tokens() == greedy_reference(old, PROMPTS[:2], 4)
        engine.controls.update_weights(random_state(config, seed=1))
        assert tokens() == (expected := greedy_reference(new, PROMPTS[:2], 4))
        before = [resident_bytes(pid) for pid in pids]
        engine.controls.sleep()
        freed = [was - resident_bytes(pid) for was, pid in zip(before, pids, strict=True)]
        assert min(freed) > 0.8 * config.vocab_size * config.hidden_size * 4, "half of two matrices on each rank"
        engine.controls.wake()
        assert tokens() == expected


def resident_bytes(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * 4096


def test_known_beginnings_are_used_and_forgotten(tmp_path: Path) -> None:
    model, _ = two_models(tmp_path, DENSE)
    prompt = PROMPTS[2]
    (expected,) = greedy_reference(model, [prompt], NEW)
    with Replicas(model, ParallelConfig(tp=2)) as replicas:
        controls = replicas.controller.controls
        reused = []
        for flush in (False, True, False):
            assert replicas.generate(prompt, new=NEW) == [expected]
            if flush:
                controls.flush_cache()
                assert controls.health()[0].num_cached_blocks == 0
            reused.append(controls.health()[0].num_reused_tokens)
        assert reused == [0, 16, 16]
        assert replicas.generate(prompt, prompt, new=NEW) == [expected] * 2


@pytest.mark.parametrize("prefix_reuse", [True, False])
def test_a_shared_beginning_in_one_batch(prefix_reuse: bool, tmp_path: Path) -> None:
    """The second request reads blocks that the first one writes in the very same batch."""
    model, _ = two_models(tmp_path, DENSE)
    shared = PROMPTS[2]
    prompts = [shared, (*shared, 4), (*shared[:9], 50, 51), shared]
    with Replicas(model, ParallelConfig(pp=2), serving=ServingConfig(page_size=4, prefix_reuse=prefix_reuse)) as replicas:
        replicas.controller.controls.pause()
        sinks = [replicas.submit(prompt, NEW) for prompt in prompts]
        replicas.controller.controls.resume()
        assert [replicas.tokens(sink) for sink in sinks] == greedy_reference(model, prompts, NEW)
        (status,) = replicas.controller.controls.health()
        assert (status.num_reused_tokens > 0) == prefix_reuse


def test_a_profile_tells_what_every_rank_did(tmp_path: Path) -> None:
    model, _ = two_models(tmp_path, DENSE)
    with Replicas(model, ParallelConfig(tp=2, pp=2)) as replicas:
        controls = replicas.controller.controls
        controls.start_profile()
        replicas.generate(*PROMPTS, new=NEW)
        profile = controls.stop_profile()
        assert [(rank.rank, rank.stage) for rank in profile] == [(0, 0), (1, 0), (2, 1), (3, 1)]
        for rank in profile:
            assert 0 < rank.busy <= 1
            assert 0 < rank.scheduling < 1
            kinds = {span.what for span in rank.spans}
            assert kinds == {"compute", "schedule"} | ({"receive"} if rank.stage else set())
            assert all(first.end_s <= second.start_s for first, second in zip(rank.spans, rank.spans[1:], strict=False))
        assert all(not rank.spans and rank.busy == rank.seconds == 0 for rank in controls.stop_profile())
