"""Memory by part against sums done by hand."""

from __future__ import annotations

from pathlib import Path

import pytest
from factories import make_config

from slime_rl.config import Config
from slime_rl.plan.__main__ import planned_config
from slime_rl.plan.hardware import ACCELERATORS, GIB
from slime_rl.plan.memory import critic_memory, engine_plan, training_memory, worker_parameters
from slime_rl.plan.shape import ModelShape, read_shape

TINY_PARAMETERS = 21_664


def tiny(tmp_path: Path, *flags: str) -> tuple[ModelShape, Config]:
    config = make_config(tmp_path, *flags)
    return read_shape(config.model.hf_checkpoint), config


def big(name: str, *flags: str) -> tuple[ModelShape, Config]:
    config = planned_config(name, ["--train-dtype", "bfloat16", *flags])
    return read_shape(config.model.hf_checkpoint), config


def test_one_float32_worker_by_hand(tmp_path: Path) -> None:
    shape, config = tiny(tmp_path, "--max-tokens-per-worker", "100", "--device", "cpu")
    parts = training_memory(shape, config, 1e9, num_micro_batches=1).parts
    assert parts["weights"] == parts["gradients"] == 4 * TINY_PARAMETERS
    assert parts["optimizer"] == 8 * TINY_PARAMETERS
    # two layers of 4·32 + 2·32 + 2·16 + 3·48 = 368 values
    assert parts["activations"] == 4 * 100 * 2 * 368
    assert "reference (while its pass runs)" not in parts


def test_bfloat16_has_a_master_copy_and_data_parallel_workers_share_the_optimizer(tmp_path: Path) -> None:
    shape, config = tiny(tmp_path, "--train-dtype", "bfloat16", "--train-num-workers", "4", "--kl-coef", "0.1")
    parts = training_memory(shape, config, 1e9, num_micro_batches=1).parts
    assert parts["weights"] == parts["reference (while its pass runs)"] == 2 * TINY_PARAMETERS
    assert parts["optimizer"] == 12 * TINY_PARAMETERS / 4


def test_a_critic_takes_what_training_the_policy_takes(tmp_path: Path) -> None:
    shape, config = tiny(tmp_path, "--advantage-estimator", "gae")
    parts = training_memory(shape, config, 1e9, num_micro_batches=1).parts
    assert parts["critic (weights, gradients, optimizer)"] == (4 + 4 + 8) * TINY_PARAMETERS
    shape, config = tiny(tmp_path, "--advantage-estimator", "gae", "--critic-num-workers", "2", "--use-kl-loss")
    assert (
        "critic (weights, gradients, optimizer)" not in training_memory(shape, config, 1e9, num_micro_batches=1).parts
    )
    parts = critic_memory(config, 1e9, num_micro_batches=1).parts
    assert parts["weights"] == 4 * TINY_PARAMETERS and parts["optimizer"] == 8 * TINY_PARAMETERS / 2
    assert not any("reference" in part or "logits" in part for part in parts)


def test_recomputation_keeps_one_vector_a_layer_and_one_layer(tmp_path: Path) -> None:
    shape, config = tiny(tmp_path, "--recompute-activations", "--max-tokens-per-worker", "100")
    parts = training_memory(shape, config, 1e9, num_micro_batches=1).parts
    assert parts["activations"] == 4 * 100 * (2 * 32 + 368)


def test_a_pipeline_stage_holds_its_layers_and_as_many_micro_batches_as_stages(tmp_path: Path) -> None:
    flags = ["--pp-size", "2", "--train-num-workers", "2", "--max-tokens-per-worker", "100"]
    shape, config = tiny(tmp_path, *flags)
    assert worker_parameters(shape, config).total == 7744 + 3072 + 32
    parts = training_memory(shape, config, 1e9, num_micro_batches=8).parts
    assert parts["activations"] == 4 * 100 * 2 * 368
    assert training_memory(shape, config, 1e9, num_micro_batches=1).parts["activations"] == 4 * 100 * 368


def test_experts_are_spread_over_expert_and_tensor_parallel_workers() -> None:
    flags = ["--tp-size", "4", "--pp-size", "2", "--ep-size", "8", "--sequence-parallel", "--train-num-workers", "64"]
    shape, config = big("qwen3-235b-a22b", *flags)
    own = worker_parameters(shape, config)
    assert own.expert == 47 * 128 * 3 * 4096 * 1536 / (8 * 4)
    # experts: all 64 workers hold different ones, so none shares its optimizer state
    parts = training_memory(shape, config, 1e12, num_micro_batches=8).parts
    assert parts["optimizer"] == pytest.approx(12 * (own.dense / 8 + own.expert))


def test_engine_cache_of_qwen3_8b_by_hand() -> None:
    """144 KiB a token: 36 layers x 2 x 8 heads x 128 x 2 bytes."""
    shape, config = big("qwen3-8b", "--engine-mem-fraction", "0.8")
    memory = ACCELERATORS["h100-80g"].memory_bytes
    engine = engine_plan(shape, config, memory)
    assert engine.kv_bytes_per_token == 147_456
    assert engine.weight_bytes == 2 * 8_190_735_360
    assert engine.kv_tokens == pytest.approx((0.8 * memory - 2 * 8_190_735_360) / 147_456)


def test_latent_attention_caches_one_vector_for_all_heads() -> None:
    """DeepSeek-V3: 61 layers x (512 + 64) values, whatever the tensor parallelism."""
    shape, config = big("deepseek-v3", "--rollout-num-gpus-per-engine", "16")
    assert engine_plan(shape, config, 141 * GIB).kv_bytes_per_token == 2 * 61 * 576
