"""``Transport``, which is NCCL's, given a group of gloo."""

from __future__ import annotations

import pytest
import torch
from harness import run_ranks
from torch import Tensor


def _reduce(rank: int, world_size: int, accumulate: bool, dtype: torch.dtype) -> Tensor:
    from zero_optim.comm.transport import Reduction, Transport

    full = torch.arange(4 * world_size, dtype=torch.bfloat16) + rank
    out = torch.full((4,), 256.5, dtype=dtype)
    reduction = Reduction(full, full.chunk(world_size)[rank], out, accumulate)
    Transport().reduce_scatter(reduction, None, torch.empty).wait()
    return out


@pytest.mark.parametrize("accumulate", [False, True])
def test_a_sum_is_stored_in_another_dtype_than_it_is_sent_in(accumulate: bool) -> None:
    of_both = (2 * torch.arange(8.0) + 1).chunk(2)
    before = 256.5 if accumulate else 0.0  # of which bf16 would keep 256
    for rank, out in enumerate(run_ranks(2, _reduce, accumulate, torch.float32)):
        assert torch.equal(out, of_both[rank] + before)
