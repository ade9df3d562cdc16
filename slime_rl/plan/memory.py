"""Memory of one training worker and of one engine, part by part.

Weights, gradients, optimizer: bytes per parameter of this worker's share (ZeRO, arXiv:1910.02054, stage 1)

    weights    2 (bfloat16) or 4 (float32)
    gradients  4: Megatron reduces them in float32 buffers
    optimizer  8 (two float32 moments), and 4 for the float32 master copy of bfloat16 weights, over the data-parallel
               workers that share them

A worker holds 1/tp of the matrices of 1/pp of the layers; experts also over ep, their tensor parallelism being tp.
Activations: tensors that the backward pass needs, counted from the layer of a pre-norm decoder (as arXiv:2205.05198,
section 4, counts GPT's; attention's own matrix is never stored):

    values a token and layer = 4·h + 2·a·d + 2·g·d + 3·f (+ 2·h a routed expert), /tp for what the matrices make, and
    for all of it with --sequence-parallel; with recomputation only h a layer, and one layer whole.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from slime_rl.config import Config
from slime_rl.config.quantization import quantization_entry
from slime_rl.engine.arguments import engine_dtype
from slime_rl.plan.hardware import GIB
from slime_rl.plan.shape import ModelShape, read_shape

# Assumptions, each printed with the plan.
TRAIN_RESERVED_BYTES = 3 * GIB  # CUDA context, NCCL buffers, workspaces, fragmentation
ENGINE_RESERVED_BYTES = 4 * GIB  # CUDA graphs and activations of the largest prefill chunk
ENGINE_FRACTION = 0.85  # of SGLang's mem_fraction_static where --engine-mem-fraction is not given
LOGIT_BYTES = 256 * 1024**2  # most float32 logits that the loss keeps for its backward pass
LOGIT_TILE_BYTES, LOGIT_TILES = 64 * 1024**2, 3  # those that are worked on, on a GPU
CPU_PROCESS_BYTES = 1.1 * GIB  # imports of one worker or engine process on a CPU


@dataclass(frozen=True)
class Memory:
    """Bytes by part, in the order shown, against what there is."""

    parts: dict[str, float]
    available_bytes: float

    @property
    def total_bytes(self) -> float:
        return sum(self.parts.values())

    @property
    def fits(self) -> bool:
        return self.total_bytes <= self.available_bytes


@dataclass(frozen=True)
class WorkerParameters:
    """Parameters on the fullest pipeline stage of one worker."""

    dense: float
    expert: float

    @property
    def total(self) -> float:
        return self.dense + self.expert


def worker_parameters(shape: ModelShape, config: Config) -> WorkerParameters:
    """Parameters of the fullest stage: the last one (output matrix), the first one where they are tied or alone."""
    p = config.parallel
    tp, pp, ep = p.tensor_model_parallel_size, p.pipeline_model_parallel_size, p.expert_model_parallel_size
    layers = math.ceil(shape.num_layers / pp)
    moe = min(shape.num_moe_layers, layers)  # dense layers come first, so some stage has experts in all its layers
    per_layer = shape.attention / tp + shape.norms
    dense = layers * per_layer + (layers - moe) * shape.dense_mlp / tp
    dense += moe * (shape.shared_mlp / tp + shape.router)
    ends = shape.embedding + (shape.output if pp == 1 else 0)
    dense += ends / tp + shape.last_norm
    return WorkerParameters(dense, moe * shape.num_experts * shape.expert / (ep * tp))


def activation_values(shape: ModelShape, config: Config, *, moe: bool) -> float:
    """Values that one layer keeps for one token, on one worker."""
    tp, spread = config.parallel.tensor_model_parallel_size, 1
    if config.parallel.sequence_parallel:
        spread = tp
    width = shape.moe_mlp_width if moe else shape.mlp_width
    routed = 2 * shape.hidden_size * shape.experts_per_token if moe else 0
    made_by_matrices = 2 * shape.query_width + 2 * shape.kv_width + 3 * width
    return (4 * shape.hidden_size + routed) / spread + made_by_matrices / tp


def training_memory(shape: ModelShape, config: Config, available_bytes: float, *, num_micro_batches: int) -> Memory:
    """One training worker with full micro-batches of --max-tokens-per-worker (over context parallelism)."""
    p = config.parallel
    own = worker_parameters(shape, config)
    bf16 = config.model.train_dtype == "bfloat16"
    size = 2 if bf16 else 4
    sharing = config.data_parallel_size * p.context_parallel_size
    expert_sharing = max(1.0, sharing / p.expert_model_parallel_size)
    state = 12 if bf16 else 8
    parts = {
        "weights": size * own.total,
        "gradients": 4 * own.total,
        "optimizer": state * (own.dense / sharing + own.expert / expert_sharing),
    }
    if config.needs_critic and not config.critic_is_apart:
        critic = worker_parameters(read_shape(config.critic.critic_load or config.model.hf_checkpoint), config)
        held = critic.dense / sharing + critic.expert / expert_sharing
        parts["critic (weights, gradients, optimizer)"] = (size + 4) * critic.total + state * held
    if config.algorithm.needs_reference:
        parts["reference (while its pass runs)"] = size * own.total
    elif config.model.teacher_load is not None:
        parts["teacher (while its pass runs)"] = size * own.total
    parts["activations"] = _activations(shape, config, size, num_micro_batches)
    rows = shape.vocab_size / p.tensor_model_parallel_size
    parts["logits, at most"] = LOGIT_BYTES + LOGIT_TILES * max(LOGIT_TILE_BYTES, 4 * rows)
    parts["reserve"] = TRAIN_RESERVED_BYTES if config.cluster.device != "cpu" else CPU_PROCESS_BYTES
    return Memory(parts, available_bytes)


def critic_memory(config: Config, available_bytes: float, *, num_micro_batches: int) -> Memory:
    """One worker of a critic that has a train group of its own: as a policy's, without reference, teacher or logits."""
    cluster, algorithm = config.cluster, config.algorithm
    alone = config.with_sections(
        parallel=config.critic_parallel,
        cluster=replace(
            cluster,
            train_num_workers=config.critic.critic_num_workers,
            num_nodes=None,
            num_workers_per_node=None,
            colocate=False,
        ),
        algorithm=replace(algorithm, kl_coef=0.0, kl_target=None, use_kl_loss=False, kl_loss_coef=0.0),
        model=replace(config.model, teacher_load=None),
    )
    shape = read_shape(config.critic.critic_load or config.model.hf_checkpoint)
    memory = training_memory(shape, alone, available_bytes, num_micro_batches=num_micro_batches)
    return replace(memory, parts={part: size for part, size in memory.parts.items() if not part.startswith("logits")})


def _activations(shape: ModelShape, config: Config, size: int, num_micro_batches: int) -> float:
    """Bytes of the micro-batches that are on their way through the first stage at once (1F1B keeps `pp` of them)."""
    p = config.parallel
    tokens = config.train.max_tokens_per_worker
    layers = math.ceil(shape.num_layers / p.pipeline_model_parallel_size)
    moe = min(shape.num_moe_layers, layers)
    one_dense = activation_values(shape, config, moe=False)
    one_moe = activation_values(shape, config, moe=True) if moe else 0.0
    on_the_way = min(p.pipeline_model_parallel_size, max(1, num_micro_batches))
    if config.model.recompute_activations:
        kept = layers * shape.hidden_size / (p.tensor_model_parallel_size if p.sequence_parallel else 1)
        return size * tokens * (on_the_way * kept + max(one_dense, one_moe))
    return size * tokens * on_the_way * (moe * one_moe + (layers - moe) * one_dense)


@dataclass(frozen=True)
class EnginePlan:
    """Memory of one GPU of an engine, and what its cache holds."""

    memory: Memory
    kv_bytes_per_token: float  # on one GPU
    kv_tokens: float  # in the whole engine's cache
    weight_bytes: float  # on one GPU
    num_gpus: int  # of one engine


def engine_plan(shape: ModelShape, config: Config, available_bytes: float) -> EnginePlan:
    """The cache takes what --engine-mem-fraction (or ENGINE_FRACTION) leaves beside the weights."""
    tp = config.cluster.rollout_num_gpus_per_engine
    size = 4 if engine_dtype(config, config.cluster.device) == "float32" else 2
    plain = shape.parameters
    if quantization_entry(config.model.hf_checkpoint) is not None:  # fp8, but for the embedding and the output
        plain = shape.embedding + shape.output
    weights = (size * plain + shape.parameters - plain) / tp
    per_token = size * shape.num_layers * shape.kv_per_token
    if shape.kv_splits:
        per_token /= min(tp, shape.kv_heads)  # heads are repeated where there are more workers than heads
    room = (config.engine.engine_mem_fraction or ENGINE_FRACTION) * available_bytes - weights
    tokens = max(0.0, room / per_token)
    reserve = float(ENGINE_RESERVED_BYTES)
    if config.cluster.device == "cpu":
        tokens, reserve = float(config.engine.engine_max_total_tokens or 32768), CPU_PROCESS_BYTES
    elif config.engine.engine_max_total_tokens is not None:
        tokens = min(tokens, config.engine.engine_max_total_tokens)
    parts = {"weights": weights, "KV cache": tokens * per_token, "reserve": reserve}
    return EnginePlan(Memory(parts, available_bytes), per_token, tokens, weights, tp)
