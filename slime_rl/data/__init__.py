from slime_rl.data.batches import Field, RolloutBatch, rollout_batch_from_groups, split_for_data_parallel
from slime_rl.data.packing import estimate_flops, fixed, pack
from slime_rl.data.proto import DataProto, DataProtoItem, object_array
from slime_rl.data.ragged import Ragged

__all__ = [
    "DataProto",
    "DataProtoItem",
    "Field",
    "Ragged",
    "RolloutBatch",
    "estimate_flops",
    "fixed",
    "object_array",
    "pack",
    "rollout_batch_from_groups",
    "split_for_data_parallel",
]
