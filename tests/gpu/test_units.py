"""Stage 3 on the GPU: the bits of stage 2, the memory of its formula, no wait of the host, units from pinned memory."""

from __future__ import annotations

import contextlib
import copy
import gc
import os
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import RankFailure, run_ranks
from places import DEVICE, ON_GPU, why_not_nccl_ranks, within
from test_no_sync import waits_are_errors
from test_optimizer import NCCL_SECONDS
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from training_cases import assert_bitwise

pytestmark = pytest.mark.gpu

WIDTH, BLOCKS, ROWS, STEPS = 128, 4, 8, 5
LARGE = 1024  # where a unit is far larger than what a step needs besides


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(self.norm(x)).relu())


class Net(nn.Module):
    def __init__(self, width: int, *, checkpointed: bool = False) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(width) for _ in range(BLOCKS))
        self.head, self.checkpointed = nn.Linear(width, 1), checkpointed

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpointed else block(x)
        return self.head(x)


def _group(rank: int, backend: str) -> tuple[str, Any]:
    os.environ["NCCL_MULTI_RANK_GPU_ENABLE"] = "1"
    device = f"cuda:{rank % torch.cuda.device_count()}" if DEVICE == "cuda" else DEVICE
    if DEVICE == "cuda":
        torch.cuda.set_device(device)
    return device, dist.new_group(backend=backend, timeout=timedelta(seconds=NCCL_SECONDS))


def _train(
    rank: int, world_size: int, backend: str, stage: int, dtype: torch.dtype, options: dict[str, Any], guarded: bool
) -> list[Tensor]:
    """Parameters after STEPS steps, on the CPU. ``guarded``: from the third on, nothing may wait for the GPU."""
    import zero_optim

    device, group = _group(rank, backend)
    torch.manual_seed(0)
    checkpointed = options.pop("checkpointed", False)
    model = Net(WIDTH, checkpointed=checkpointed).to(device, dtype)
    if stage == 3:
        zero_optim.shard_module(model, units=(Block,), process_group=group, **options)
    opt = zero_optim.ShardedAdamW(model.parameters(), lr=1e-2, stage=stage, process_group=group, max_grad_norm=1e9)
    generator = torch.Generator().manual_seed(rank)
    for step in range(STEPS):
        x = torch.randn(ROWS, WIDTH, generator=generator).to(device, dtype)
        with waits_are_errors() if guarded and step >= 2 else contextlib.nullcontext():
            model(x).float().square().mean().backward()
            opt.step()
            opt.zero_grad()
    with zero_optim.gather_parameters(model):
        params = [p.detach().cpu().clone() for p in model.parameters()]
    opt.close()
    return params


def _on_ranks(world_size: int, fn: Any, *args: Any) -> list[Any]:
    if reason := why_not_nccl_ranks(world_size):
        pytest.skip(reason)
    try:
        return run_ranks(world_size, fn, "nccl" if ON_GPU else "gloo", *args, timeout=120)
    except RankFailure as failure:
        if ON_GPU and torch.cuda.device_count() == 1 and "Duplicate GPU" in str(failure):
            pytest.skip("one GPU, and this NCCL takes one rank a GPU")
        raise


OPTIONS = {
    "default": {},
    "kept": {"reshard_after_forward": False},
    "node": {"reshard_after_forward": 2},
    "ahead": {"prefetch": 3},
    "checkpointed": {"checkpointed": True},
}


@pytest.mark.ranks
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_two_ranks_have_the_bits_of_stage_2(dtype: torch.dtype, options: str) -> None:
    """Two terms have one sum, in whatever order a back-end adds them."""
    other = {"checkpointed": True} if options == "checkpointed" else {}
    want = _on_ranks(2, _train, 2, dtype, other, False)
    for rank, got in enumerate(_on_ranks(2, _train, 3, dtype, OPTIONS[options], False)):
        assert_bitwise(got, want[rank], f"rank {rank}")


@pytest.mark.ranks
def test_a_steady_step_waits_for_nothing() -> None:
    _on_ranks(2 if ON_GPU else 1, _train, 3, torch.bfloat16, {}, True)


def _memory(rank: int, world_size: int, backend: str) -> tuple[int, int, int]:
    """Bytes on the GPU between steps, the most within one, and of one unit's parameters."""
    import zero_optim

    device, group = _group(rank, backend)
    x = torch.ones(ROWS, LARGE, device=device, dtype=torch.bfloat16)
    x @ x.mT  # the first product takes cuBLAS's workspace from the allocator, for good: 32 MiB on a Hopper
    before = torch.cuda.memory_allocated()
    model = Net(LARGE).to(device, torch.bfloat16)
    zero_optim.shard_module(model, units=(Block,), process_group=group)
    opt = zero_optim.ShardedAdamW(model.parameters(), process_group=group)
    for _ in range(3):
        torch.cuda.synchronize()
        gc.collect()
        torch.cuda.reset_peak_memory_stats()
        steady = torch.cuda.memory_allocated() - before
        model(x).float().mean().backward()
        opt.step()
        opt.zero_grad()
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated() - before
    unit = sum(flat.full.numel() * 2 for flat in model._zero_optim_sharded.units[1].flats)
    opt.close()
    return steady, peak, unit


@pytest.mark.ranks
@pytest.mark.skipif(not ON_GPU, reason="counts what the CUDA allocator holds")
def test_memory_between_steps_and_within_one() -> None:
    """16 bytes a parameter over the ranks and two communication buffers; within a step prefetch + 2 units more, each
    with its parameters and its gradient."""
    for steady, peak, unit in _on_ranks(2, _memory):
        shards = 16 * BLOCKS * (unit // 2) // 2
        between, within_a_step = (shards + 2 * unit) * 1.02 + 2**21, 3 * 2 * unit + 2**21
        within(steady <= between, f"{steady:,} bytes between steps, {between:,.0f} expected")
        within(peak - steady <= within_a_step, f"{peak - steady:,} bytes more in a step, {within_a_step:,} expected")


def test_units_come_from_pinned_host_memory() -> None:
    """One rank, no optimizer: the model's forward with its parameters on the host."""
    import zero_optim

    torch.manual_seed(0)
    plain = Net(WIDTH).to(DEVICE)
    model = zero_optim.shard_module(copy.deepcopy(plain).cpu(), (Block,), device=DEVICE, param_offload="cpu")
    flats = [flat for unit in model._zero_optim_sharded.units for flat in unit.flats]
    assert all(flat.shard.device.type == "cpu" and flat.shard.is_pinned() == ON_GPU for flat in flats)
    x = torch.randn(ROWS, WIDTH, device=DEVICE)
    with torch.inference_mode():
        model(x)
        with waits_are_errors():
            got = model(x)
        assert torch.equal(got, plain(x))
    assert all(flat.full.untyped_storage().nbytes() == 0 for flat in flats)
