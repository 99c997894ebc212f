"""A bucket of one gradient is reduced out of ``.grad``, without a copy: when, with the bits of a packed one."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any
from unittest import mock

import pytest
import torch
import zero_optim
from harness import run_ranks
from torch import Tensor, nn
from training_cases import assert_bitwise
from zero_optim.grads.bucket import Bucket
from zero_optim.grads.packing import Packing

STEPS = 3


class Model(nn.Module):
    """Buckets of one matrix each, at CAP_MB, and one of the vectors. The matrix of ``odd`` is no multiple of rows."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = (nn.Linear(64, 64, dtype=dtype) for _ in range(2))
        self.odd = nn.Linear(64, 61, bias=False, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        return self.odd(torch.tanh(self.second(torch.tanh(self.first(x)))))


CAP_MB = 64 * 64 * 2 / 2**20


def _train(
    rank: int, world_size: int, dtype: torch.dtype, options: dict[str, Any], may: bool, micro: int = 1
) -> tuple[list[Tensor], list[str], list[Tensor]]:
    """Parameters, the names of those that were packed in the last backward, and this rank's averages in it."""
    packed: list[str] = []
    plain = Packing.pack

    def pack(self: Packing, sources: Any, *args: Any) -> Any:
        packed.extend(self._labels[self._layout.slots[index].param] for index, _ in sources)
        return plain(self, sources, *args)

    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(Packing, "pack", pack)
        if not may:
            monkeypatch.setattr(Bucket, "_may_be_zero_copy", lambda self: False)
        model = Model(dtype)
        opt = zero_optim.ShardedAdamW(model, lr=1e-2, bucket_cap_mb=CAP_MB, max_grad_norm=1.0, **options)
        for step in range(STEPS):
            packed.clear()
            for part in range(micro):
                draw = torch.Generator().manual_seed(100 * rank + 10 * step + part)
                x = torch.randn(4, 64, generator=draw).to(dtype)
                (model(x).float().square().mean() * 100).backward()
            shards = [parameter.grad for parameter in model.parameters()]
            averages = [shard.local.clone() for shard in shards if isinstance(shard, zero_optim.FlatShard)]
            opt.step()
            opt.zero_grad()
        weights = [parameter.detach().clone() for parameter in model.parameters()]
        opt.close()
    return weights, sorted({name.strip("'") for name in packed}), averages


MATRICES = {"first.weight", "second.weight"}


WIDE = {"grad_accumulation_dtype": torch.float32, "grad_reduce_dtype": torch.float32}


@pytest.mark.parametrize(
    ("world_size", "dtype", "options"),
    [
        *((world_size, dtype, {}) for world_size in (2, 4) for dtype in (torch.float32, torch.bfloat16)),
        *((2, dtype, WIDE) for dtype in (torch.bfloat16, torch.float16)),
    ],
)
def test_the_bits_are_those_of_packed_gradients(world_size: int, dtype: torch.dtype, options: Any) -> None:
    unpacked = run_ranks(world_size, _train, dtype, options, True)
    packed = run_ranks(world_size, _train, dtype, options, False)
    for (weights, left, averages), (same, names, same_averages) in zip(unpacked, packed, strict=True):
        assert_bitwise(weights, same)
        assert_bitwise(averages, same_averages)
        assert {*names} > MATRICES and {*left} == {*names} - MATRICES


@pytest.mark.parametrize(
    "why, dtype, world_size, options",
    [
        ("the sum of three could be divided only with rounding", torch.bfloat16, 3, {}),
        ("the sum could overflow", torch.float16, 2, {}),
        ("it is cast", torch.bfloat16, 2, {"grad_reduce_dtype": torch.float32}),
        ("its sum is cast", torch.bfloat16, 2, {"grad_accumulation_dtype": torch.float32}),
        ("gradients stay whole", torch.float32, 2, {"stage": 1}),
        ("the host takes the sum as it arrives", torch.float32, 2, {"state_offload": "cpu"}),
    ],
)
def test_other_gradients_are_packed(why: str, dtype: torch.dtype, world_size: int, options: Any) -> None:
    for _, names, _ in run_ranks(world_size, _train, dtype, options, True):
        assert {*names} > MATRICES, why


def test_sums_of_several_reductions_are_packed_from_the_second_on() -> None:
    unpacked = run_ranks(2, _train, torch.float32, {}, True, 2)
    packed = run_ranks(2, _train, torch.float32, {}, False, 2)
    for (weights, names, averages), (same, _, same_averages) in zip(unpacked, packed, strict=True):
        assert_bitwise(weights, same)
        assert_bitwise(averages, same_averages)
        assert {*names} > MATRICES


def _one_is_absent(rank: int, world_size: int, may: bool) -> list[Tensor]:
    model = Model(torch.float32)
    with nullcontext() if may else mock.patch.object(Bucket, "_may_be_zero_copy", lambda self: False):
        return _train_without_one(rank, model)


def _train_without_one(rank: int, model: Model) -> list[Tensor]:
    opt = zero_optim.ShardedAdamW(model, lr=1e-2, bucket_cap_mb=CAP_MB)
    for step in range(3):
        x = torch.full((4, 64), 1.0 + step)
        hidden = torch.tanh(model.first(x))
        (model.odd(torch.tanh(model.second(hidden))) if rank == 0 or step == 0 else model.odd(hidden)).sum().backward()
        opt.step()
        opt.zero_grad()
    opt.close()
    return [parameter.detach().clone() for parameter in model.parameters()]


def test_a_rank_without_the_gradient_sends_zeros() -> None:
    first, second = run_ranks(2, _one_is_absent, True)
    assert_bitwise(first, second)
    assert_bitwise(first, run_ranks(2, _one_is_absent, False)[0])
