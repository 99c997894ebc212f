"""Tables by which one launch reaches many tensors: addresses and dtypes as int64, copied to the device at each call."""

import torch
import triton
import triton.language as tl
from torch import Tensor

DTYPES = {torch.float16: 0, torch.bfloat16: 1, torch.float32: 2}
"""Codes of the dtypes in a table."""

FP16, BF16, FP32 = map(tl.constexpr, DTYPES.values())


@triton.jit
def elements(address, at, dtype: tl.constexpr, ALIGNED: tl.constexpr):
    """Pointers to the elements `at` of what starts at an address; ALIGNED promises 16 bytes."""
    pointer = address.to(tl.pointer_type(dtype))
    if ALIGNED:
        pointer = tl.multiple_of(pointer, 16)
    return pointer + at


def upload(table: Tensor, device: torch.device) -> Tensor:
    """The table on the device: one copy, for which the host does not wait.

    It cannot be recorded into a CUDA graph: ops with tables run the reference then, at the price of more passes.
    """
    return table.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else table
