"""Somebody from another project finds the own word."""

from pathlib import Path

import pytest

PAGE = (Path(__file__).parents[2] / "docs" / "words_of_others.md").read_text(encoding="utf-8")

WORDS = (
    "tensor_model_parallel_size tensor_parallel_size pipeline_parallel_size pipeline_model_parallel_size data_parallel_size "
    "context_parallel_size decode_context_parallel_size prefill_context_parallel_size expert_model_parallel_size moe_ep moe_tp "
    "enable_expert_parallel expert_tensor_parallel_size dp_attention attn_tp TP0 tp_rank pp_rank rank_in_group local_rank "
    "RankGenerator node_rank dist_init_addr DeviceMesh virtual_pipeline_model_parallel_size pipeline_model_parallel_split_rank "
    "embedding_group sequence_parallel parallel_state get_tp_group get_pp_group ProcessGroupCollection GroupCoordinator "
    "init_process_group init_distributed_environment initialize_model_parallel ensure_model_parallel_initialized "
    "destroy_model_parallel destroy_distributed_environment patch_tensor_parallel_group graph_capture device_group cpu_group "
    "pynccl custom_all_reduce shm_broadcast message_queue broadcast_tensor_dict collective_rpc ColumnParallelLinear "
    "RowParallelLinear QKVParallelLinear MergedColumnParallelLinear ParallelLMHead FusedMoE EPLB RadixAttention TokenizerManager "
    "EngineCore Scheduler TpModelWorker ModelRunner DataParallelController max_num_seqs max_num_batched_tokens "
    "gpu_memory_utilization mem_fraction_static block_size enable_prefix_caching abort_request release_memory_occupation "
    "update_weights_from_disk update_weights_from_distributed start_profile"
).split()


@pytest.mark.parametrize("word", WORDS)
def test_the_word_is_there(word: str) -> None:
    assert word in PAGE
