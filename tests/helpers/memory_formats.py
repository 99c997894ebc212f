"""Models in channels_last, for the tests of memory formats."""

from __future__ import annotations

import torch
from sharded_cases import GivenNet
from torch import Tensor, nn

# Convolutions of two and three dimensions, 1x1 and depthwise ones, one without elements, and what has no such format.
# Rows of 128 cut the slices of 36, 144 and 9 elements that the first dimension has.
RUNS: tuple[tuple[tuple[int, ...], ...], ...] = (
    ((8, 4, 3, 3), (8,), (16, 8, 1, 1)),
    ((24, 1, 3, 3), (4, 8, 2, 3, 3), (5, 7)),
    ((12, 16, 3, 3), (0, 8, 3, 3), (1,)),
)
_FORMATS = {4: torch.channels_last, 5: torch.channels_last_3d}


def to_channels_last(model: nn.Module) -> nn.Module:
    """In place, as ``model.to(memory_format=...)``, which does not take 4-D and 5-D tensors together."""
    for parameter in model.parameters():
        if parameter.dim() in _FORMATS:
            parameter.data = parameter.data.to(memory_format=_FORMATS[parameter.dim()])
    return model


def given_net(channels_last: bool, dtype: torch.dtype = torch.float32, seed: int = 0) -> GivenNet:
    net = GivenNet(RUNS, dtype, seed)
    return to_channels_last(net) if channels_last else net


def strides(model: nn.Module) -> dict[str, tuple[int, ...]]:
    return {name: parameter.stride() for name, parameter in model.named_parameters()}


def strides_of(tensors: dict[str, Tensor]) -> dict[str, tuple[int, ...]]:
    return {name: tensor.stride() for name, tensor in tensors.items()}


def same_layout(one: Tensor, other: Tensor) -> bool:
    """Whether their elements lie alike: the stride of a dimension of size 1 says nothing."""
    strided = zip(one.shape, one.stride(), other.stride(), strict=True)
    return one.shape == other.shape and all(size == 1 or here == there for size, here, there in strided)
