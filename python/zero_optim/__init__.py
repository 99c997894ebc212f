"""ZeRO for PyTorch: a drop-in ``torch.optim.AdamW`` that shards its state and gradients over data-parallel ranks."""

from .errors import (
    ClosedError,
    CollectiveError,
    GradientError,
    ParameterError,
    RankMismatchError,
    ShardAccessError,
    StateMismatchError,
    ZeroOptimError,
)
from .full_state import full_state_dict, load_full_state_dict
from .gather_parameters import gather_parameters
from .grad_scaler import GradScaler
from .optimizer import ShardedAdamW
from .params.flat_shard import FlatShard
from .shard_module import shard_module
from .verify import Verifier, VerifyReport, verify

__all__ = [
    "ClosedError",
    "CollectiveError",
    "FlatShard",
    "GradScaler",
    "GradientError",
    "ParameterError",
    "RankMismatchError",
    "ShardAccessError",
    "ShardedAdamW",
    "StateMismatchError",
    "Verifier",
    "VerifyReport",
    "ZeroOptimError",
    "full_state_dict",
    "gather_parameters",
    "load_full_state_dict",
    "shard_module",
    "verify",
]
