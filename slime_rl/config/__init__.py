from slime_rl.config.algorithm import AlgorithmConfig
from slime_rl.config.cluster import ClusterConfig, ParallelConfig
from slime_rl.config.config import SECTIONS, Config, make_parser, parse_config, recorded_config
from slime_rl.config.critic import CriticConfig
from slime_rl.config.model import ModelConfig
from slime_rl.config.rollout import BufferConfig, DataConfig, EvalConfig, RewardConfig, RolloutConfig, SamplingConfig
from slime_rl.config.run import CheckpointConfig, LoggingConfig
from slime_rl.config.serving import EngineConfig, RouterConfig, WeightSyncConfig
from slime_rl.config.training import OptimizerConfig, TrainConfig

__all__ = [
    "SECTIONS",
    "AlgorithmConfig",
    "BufferConfig",
    "CheckpointConfig",
    "ClusterConfig",
    "Config",
    "CriticConfig",
    "DataConfig",
    "EngineConfig",
    "EvalConfig",
    "LoggingConfig",
    "ModelConfig",
    "OptimizerConfig",
    "ParallelConfig",
    "RewardConfig",
    "RolloutConfig",
    "RouterConfig",
    "SamplingConfig",
    "TrainConfig",
    "WeightSyncConfig",
    "make_parser",
    "parse_config",
    "recorded_config",
]
