"""Fused kernels for sharded mixed-precision optimizers: one pass over a flat shard, the same bits on every backend.

The ops know tensors and nothing else: no parameters, no ranks. `docs/ops.md` is the page for their users.
"""

from zero_kernels import codecs
from zero_kernels.capture import is_capturing
from zero_kernels.dispatch import BackendError, available_backends, check_backend, use_backend
from zero_kernels.hyper import HYPER_COEFFICIENTS, HYPER_COLUMNS, ROW, columns_of, hyper_table
from zero_kernels.ops import adam_step, ema, foreach_step, fused_adamw_, grad_stats, pack, unpack
from zero_kernels.prepared import Prepared
from zero_kernels.reference import update_rows
from zero_kernels.rules import RULES, Rule
from zero_kernels.symmetric import symmetric_product, why_no_symmetric_product

__version__ = "0.1.0"

__all__ = [
    "HYPER_COEFFICIENTS",
    "HYPER_COLUMNS",
    "ROW",
    "RULES",
    "BackendError",
    "Prepared",
    "Rule",
    "adam_step",
    "available_backends",
    "check_backend",
    "codecs",
    "columns_of",
    "ema",
    "foreach_step",
    "fused_adamw_",
    "grad_stats",
    "hyper_table",
    "is_capturing",
    "pack",
    "symmetric_product",
    "unpack",
    "update_rows",
    "use_backend",
    "why_no_symmetric_product",
]
