"""Fused kernels for sharded mixed-precision Adam: one pass over a flat shard, the same bits on every backend.

The ops know tensors and nothing else: no parameters, no ranks. `docs/ops.md` is the page for their users.
"""

from zero_kernels.capture import is_capturing
from zero_kernels.dispatch import BackendError, available_backends, check_backend, use_backend
from zero_kernels.hyper import HYPER_COEFFICIENTS, HYPER_COLUMNS, ROW, hyper_table
from zero_kernels.ops import adam_step, foreach_adam_step, fused_adamw_, grad_stats, pack, unpack
from zero_kernels.prepared import Prepared

__version__ = "0.1.0"

__all__ = [
    "HYPER_COEFFICIENTS",
    "HYPER_COLUMNS",
    "ROW",
    "BackendError",
    "Prepared",
    "adam_step",
    "available_backends",
    "check_backend",
    "foreach_adam_step",
    "fused_adamw_",
    "grad_stats",
    "hyper_table",
    "is_capturing",
    "pack",
    "unpack",
    "use_backend",
]
