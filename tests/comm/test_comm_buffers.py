"""Buffers are lent in the size that is asked for, and wait for whoever has them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from zero_optim.comm.handle import PATIENCE_SECONDS, CommBuffers

LARGEST = 4096  # bytes


class FakeArrivals:
    """``arrives``: when its reductions are there, in seconds; ``asked``: how long it was waited for at most."""

    def __init__(self, arrives: float = 0) -> None:
        self.waited, self.arrives, self.asked = 0, arrives, 0.0

    def wait(self) -> None:
        self.waited += 1

    def arrives_within(self, seconds: float) -> bool:
        self.asked += seconds
        return seconds >= self.arrives


class WithinStorage(TorchDispatchMode):
    """No op is given a tensor that reaches beyond its memory: torch itself does not look."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for tensor in filter(torch.is_tensor, args):
            if func.overloadpacket is not torch.ops.aten.slice:
                assert (tensor.storage_offset() + tensor.numel()) * tensor.itemsize <= tensor.untyped_storage().nbytes()
        return func(*args, **(kwargs or {}))


def _lent(buffers: CommBuffers, bucket: FakeArrivals, numel: int) -> Tensor:
    return buffers.take(bucket, numel, torch.bfloat16).fill_(1)


@pytest.mark.parametrize("sizes", [(16, 300), (300, 16)])
def test_what_is_allocated_is_what_is_asked_for(sizes):
    buffers, bucket = CommBuffers(LARGEST, torch.device("cpu")), FakeArrivals()
    assert buffers.nbytes() == 2 * LARGEST
    buffers.deallocate()
    assert buffers.nbytes() == 0
    first, second = (_lent(buffers, bucket, size) for size in sizes)
    assert buffers.nbytes() == 2 * sum(sizes)
    assert first.untyped_storage().data_ptr() != second.untyped_storage().data_ptr()
    third = _lent(buffers, FakeArrivals(), 20)
    assert bucket.waited == 1, "it had the buffer"
    assert third.untyped_storage().data_ptr() == first.untyped_storage().data_ptr()
    assert buffers.nbytes() == 2 * (max(sizes[0], 20) + sizes[1])


def test_poison_fills_what_was_lent_and_nothing_beyond(monkeypatch):
    monkeypatch.setenv("ZERO_OPTIM_DEBUG", "poison")
    buffers, bucket, other = CommBuffers(LARGEST, torch.device("cpu")), FakeArrivals(), FakeArrivals()
    buffers.deallocate()
    lent, others = _lent(buffers, bucket, 16), _lent(buffers, other, 16)
    with WithinStorage():
        buffers.give_back(lent)
    assert lent.isnan().all()
    assert not others.isnan().any()


def test_who_must_not_wait_gets_memory_of_its_own_until_it_is_released():
    buffers, bucket = CommBuffers(LARGEST, torch.device("cpu")), FakeArrivals(arrives=1e9)
    lent = [buffers.take(bucket, 16, torch.bfloat16, may_wait=False) for _ in range(3)]
    assert bucket.waited == bucket.asked == 0
    assert len({buffer.untyped_storage().data_ptr() for buffer in lent}) == 3
    assert buffers.nbytes() == 2 * LARGEST + 3 * 32
    for buffer in lent:
        buffers.give_back(buffer)
    assert buffers.nbytes() == 2 * LARGEST


def test_patience_ends_once_for_each_who_is_waited_for():
    buffers, late = CommBuffers(LARGEST, torch.device("cpu")), FakeArrivals(arrives=1e9)
    for _ in range(2):
        _lent(buffers, late, 16)
    assert late.asked == 0
    extra = [_lent(buffers, FakeArrivals(), 16) for _ in range(3)]
    assert late.asked == PATIENCE_SECONDS and late.waited == 0
    assert buffers.nbytes() == 2 * LARGEST + 3 * 32
    late.arrives = 0
    third = _lent(buffers, FakeArrivals(), 16)
    assert late.waited == 1
    assert all(third.untyped_storage().data_ptr() != one.untyped_storage().data_ptr() for one in extra)
