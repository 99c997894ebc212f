"""``Transport``, which is NCCL's, given a group of gloo, and gloo's own."""

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


def _gather(rank: int, world_size: int, transport: str, elsewhere: bool) -> tuple[Tensor, Tensor]:
    from zero_optim.comm import transport as transports

    full = torch.full((4 * world_size,), torch.nan)
    own = torch.empty(4) if elsewhere else full.chunk(world_size)[rank]
    own.fill_(rank)
    getattr(transports, transport)().all_gather(full, own, None).wait()
    return full, own


@pytest.mark.parametrize("elsewhere", [False, True], ids=["in place", "from other memory"])
@pytest.mark.parametrize("transport", ["Transport", "GlooTransport"])
def test_a_shard_is_gathered_from_where_it_is(transport: str, elsewhere: bool) -> None:
    for rank, (full, own) in enumerate(run_ranks(3, _gather, transport, elsewhere)):
        assert torch.equal(full, torch.arange(3.0).repeat_interleave(4))
        assert torch.equal(own, torch.full((4,), float(rank)))
