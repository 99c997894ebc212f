"""Buffers are lent in the size that is asked for, and wait for whoever has them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from zero_optim.comm.buffers import CommBuffers

LARGEST = 4096  # bytes


class FakeBucket:
    pending = None

    def __init__(self) -> None:
        self.waited = 0

    def wait(self) -> None:
        self.waited += 1


class WithinStorage(TorchDispatchMode):
    """No op is given a tensor that reaches beyond its memory: torch itself does not look."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for tensor in filter(torch.is_tensor, args):
            if func.overloadpacket is not torch.ops.aten.slice:
                assert (tensor.storage_offset() + tensor.numel()) * tensor.itemsize <= tensor.untyped_storage().nbytes()
        return func(*args, **(kwargs or {}))


def _lent(buffers: CommBuffers, bucket: FakeBucket, numel: int) -> Tensor:
    return buffers.take(bucket, numel, torch.bfloat16).fill_(1)


@pytest.mark.parametrize("sizes", [(16, 300), (300, 16)])
def test_what_is_allocated_is_what_is_asked_for(sizes):
    buffers, bucket = CommBuffers(LARGEST, torch.device("cpu")), FakeBucket()
    assert buffers.nbytes() == 2 * LARGEST
    buffers.deallocate()
    assert buffers.nbytes() == 0
    first, second = (_lent(buffers, bucket, size) for size in sizes)
    assert buffers.nbytes() == 2 * sum(sizes)
    assert first.untyped_storage().data_ptr() != second.untyped_storage().data_ptr()
    third = _lent(buffers, FakeBucket(), 20)
    assert bucket.waited == 1, "it had the buffer"
    assert third.untyped_storage().data_ptr() == first.untyped_storage().data_ptr()
    assert buffers.nbytes() == 2 * (max(sizes[0], 20) + sizes[1])


def test_poison_fills_what_was_lent_and_nothing_beyond(monkeypatch):
    monkeypatch.setenv("ZERO_OPTIM_DEBUG", "poison")
    buffers, bucket, other = CommBuffers(LARGEST, torch.device("cpu")), FakeBucket(), FakeBucket()
    buffers.deallocate()
    lent, others = _lent(buffers, bucket, 16), _lent(buffers, other, 16)
    with WithinStorage():
        buffers.release(bucket)
    assert lent.isnan().all()
    assert not others.isnan().any()
