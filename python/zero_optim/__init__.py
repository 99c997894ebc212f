"""ZeRO for PyTorch: a drop-in ``torch.optim.AdamW`` that shards its state and gradients over data-parallel ranks."""

from zero_kernels import __version__

from . import checkpoint, memory, rules
from .checkpoint.hugging_face import load_safetensors
from .drop_ins import ShardedAdam, ShardedAdamW, ShardedLion, ShardedMuon, ShardedSGD
from .errors import (
    CheckpointError,
    ClosedError,
    CollectiveError,
    GradientError,
    OffloadError,
    OutOfMemoryError,
    ParameterError,
    RankMismatchError,
    ShardAccessError,
    StateMismatchError,
    ZeroOptimError,
)
from .full_parameters import full_model_state_dict, iter_full_parameters
from .full_state import full_state_dict, load_full_state_dict, state_for_muon
from .grad_scaler import GradScaler
from .optimizer import ShardedOptimizer
from .param_groups import param_groups
from .params.flat_shard import FlatShard
from .shard_module import gather_parameters, register_forward_method, shard_module
from .sync_buffers import check_replicas, sync_buffers

__all__ = [
    "CheckpointError",
    "ClosedError",
    "CollectiveError",
    "FlatShard",
    "GradScaler",
    "GradientError",
    "OffloadError",
    "OutOfMemoryError",
    "ParameterError",
    "RankMismatchError",
    "ShardAccessError",
    "ShardedAdam",
    "ShardedAdamW",
    "ShardedLion",
    "ShardedMuon",
    "ShardedOptimizer",
    "ShardedSGD",
    "StateMismatchError",
    "ZeroOptimError",
    "__version__",
    "check_replicas",
    "checkpoint",
    "full_model_state_dict",
    "full_state_dict",
    "gather_parameters",
    "iter_full_parameters",
    "load_full_state_dict",
    "load_safetensors",
    "memory",
    "param_groups",
    "register_forward_method",
    "rules",
    "shard_module",
    "state_for_muon",
    "sync_buffers",
]
