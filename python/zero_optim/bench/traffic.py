"""Bytes that any code communicates, counted from the collectives that torch dispatches."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

COLLECTIVES = ("c10d", "_c10d_functional")  # namespaces of torch.distributed's collectives, and of DTensor's
NO_COLLECTIVE = ("wait_tensor", "_wrap_tensor_autograd")
OF_A_PART = ("scatter_",)  # our reduce-scatter under gloo is a scatter from each rank
TWICE = ("allreduce_", "allreduce_coalesced_", "all_reduce", "all_reduce_", "all_reduce_coalesced")


class CountedTraffic(TorchDispatchMode):
    """Count the collectives issued in this block.

    Attributes:
        bytes: sum of each collective's whole tensor, N times a rank's part. On the wire a rank sends and receives
            (N-1)/N of it. An all-reduce counts twice: it is a reduce-scatter and an all-gather.
    """

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if DTensor in types:
            return NotImplemented  # its own dispatch comes first, and calls the collectives
        result = func(*args, **(kwargs or {}))
        namespace, name = func._schema.name.split("::")
        if namespace in COLLECTIVES and name not in NO_COLLECTIVE:
            whole = _bytes_in(args[0]) if name in OF_A_PART else max(map(_bytes_in, (*args, result)))
            self.bytes += whole * (2 if name in TWICE else 1)
        return result


def _bytes_in(value: Any) -> int:
    if isinstance(value, Tensor):
        return value.nbytes
    return sum(map(_bytes_in, value)) if isinstance(value, list | tuple) else 0
