"""Buffers on the GPU: torch's SyncBatchNorm beside the optimizer's collectives, and `sync_buffers`, over NCCL.

On the CPU a stand-in takes the place of SyncBatchNorm, and gloo that of NCCL.
"""

from __future__ import annotations

import pytest
import torch
import zero_optim
from batch_norm_cases import (
    LR,
    STEPS,
    SyncBatchNormOfHost,
    make_model,
    over_ranks,
    train_in_one_process,
    train_on_ranks,
)
from nccl_ranks import on_nccl_ranks
from oracle import adamw_bound
from places import DEVICE, ON_GPU
from torch import Tensor, nn
from training_cases import assert_bitwise

pytestmark = [pytest.mark.gpu, pytest.mark.ranks]

EPS = 1e-3  # far above the rounding noise of gradients that are nearly zero, and below the others
NEAR = 64 if ON_GPU else 8  # times the bound: the oracle is on the CPU, and sums in another order


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_sync_batch_norm(stage: int) -> None:
    """As one process on the whole batch."""
    expected, statistics = train_in_one_process(2, EPS)
    (weights, buffers), (weights_1, buffers_1) = on_nccl_ranks(2, train_on_ranks, stage, DEVICE, EPS)
    assert_bitwise(weights_1, weights)
    assert_bitwise(buffers_1, buffers)
    for ours, theirs in zip(weights, expected, strict=True):
        off, bound = (ours - theirs).abs(), NEAR * adamw_bound(theirs, LR, STEPS)
        assert bool((off <= bound).all()), f"a weight is off by {float((off / bound).max()):.2g} times the bound"
    for ours, theirs in zip(buffers, statistics, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


def test_torchs_own_is_what_is_tested() -> None:
    kinds = {type(module) for module in over_ranks(make_model().to(DEVICE)).modules()}
    assert (nn.SyncBatchNorm if ON_GPU else SyncBatchNormOfHost) in kinds


def _sync(rank: int, world_size: int, how: str) -> list[Tensor]:
    """Buffers on the GPU and in host memory, of dtypes that NCCL has and has not."""
    device = torch.device("cuda", torch.cuda.current_device()) if ON_GPU else torch.device("cpu")
    model = nn.Module()
    for number, place in enumerate((device, torch.device("cpu"))):
        for dtype in (torch.float32, torch.bfloat16, torch.int64, torch.int16, torch.bool):
            values = torch.arange(5, device=place) * (rank + 1) + number
            model.register_buffer(
                f"of_{number}_{str(dtype)[6:]}", (values % 2 if dtype == torch.bool else values).to(dtype)
            )
    zero_optim.sync_buffers(model, how)
    assert {buffer.device for buffer in model.buffers()} == {device, torch.device("cpu")}
    return [buffer.cpu() for buffer in model.buffers()]


@pytest.mark.parametrize(("how", "factor"), [("broadcast", 1.0), ("mean", 1.5)])
def test_sync_buffers(how: str, factor: float) -> None:
    for buffers in on_nccl_ranks(2, _sync, how):
        for place, buffer in enumerate(buffers):
            number = place // 5
            values = torch.arange(5)
            whole = values * factor + number if buffer.is_floating_point() else values + number
            expected = whole % 2 if buffer.dtype == torch.bool else whole
            assert_bitwise([buffer], [expected.to(buffer.dtype)], f"buffer {place}")
