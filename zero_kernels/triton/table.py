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


_recorded: list[Tensor] = []


def upload(table: Tensor, device: torch.device) -> Tensor:
    """The table on the device: one copy, for which the host does not wait."""
    if device.type != "cuda":
        return table
    if torch.cuda.is_current_stream_capturing():
        # Each replay of the graph copies again, and nothing tells when the last one has been: the source stays for
        # good. It is not pinned, since the allocator of pinned memory queries events, which a recording forbids.
        _recorded.append(table)
    else:
        table = table.pin_memory()
    return table.to(device, non_blocking=True)
