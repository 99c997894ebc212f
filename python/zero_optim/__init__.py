"""ZeRO for PyTorch: a drop-in ``torch.optim.AdamW`` that shards its state and gradients over data-parallel ranks."""

from .errors import (
    ClosedError,
    GradientError,
    ParameterError,
    RankMismatchError,
    ShardAccessError,
    StateMismatchError,
    ZeroOptimError,
)
from .flat_shard import FlatShard
from .grad_scaler import GradScaler
from .optimizer import ShardedAdamW

__all__ = [
    "ClosedError",
    "FlatShard",
    "GradScaler",
    "GradientError",
    "ParameterError",
    "RankMismatchError",
    "ShardAccessError",
    "ShardedAdamW",
    "StateMismatchError",
    "ZeroOptimError",
]
