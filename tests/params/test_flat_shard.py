"""``FlatShard``: what passes, what survives a file. What raises is in test_remedies.py."""

import copy
import io

import torch
from zero_optim import FlatShard
from zero_optim.comm.handle import Arrivals, Handle


def _shard():
    return FlatShard(torch.arange(3.0), 2, (2, 4), "gradient of 'fc.weight'", torch.bfloat16)


def test_metadata_is_that_of_the_whole():
    shard = _shard()
    assert (shard.shape, shard.dtype, shard.ndim, shard.numel()) == ((2, 4), torch.bfloat16, 2, 8)
    assert (shard.local.dtype, shard.local.tolist(), shard.start) == (torch.float32, [0, 1, 2], 2)
    assert "[2:5] of 8" in repr(shard)


def test_new_tensors_are_plain_ones_of_its_dtype():
    shard = FlatShard(torch.zeros(3, dtype=torch.bfloat16), 2, (4, 2), "parameter 'w'")
    made = {
        "new_zeros": shard.new_zeros(3, 2),
        "new_ones": shard.new_ones((3, 2)),
        "new_full": shard.new_full((3, 2), 7.0),
        "new_empty": shard.new_empty(3, 2),
        "new_empty_strided": shard.new_empty_strided((3, 2), (2, 1)),
        "new_tensor": shard.new_tensor([[1.0, 2.0]] * 3),
    }
    for name, tensor in made.items():
        assert type(tensor) is torch.Tensor and tensor.shape == (3, 2) and tensor.dtype == torch.bfloat16, name
    assert made["new_ones"].eq(1).all() and made["new_full"].eq(7).all() and not made["new_zeros"].any()
    assert shard.new_zeros(2, dtype=torch.int64).dtype == torch.int64


def test_zero_waits_for_whoever_still_writes():
    """The one who zeroes does not wait: it may be in a backward. Whoever reads does."""
    shard, order = _shard(), []
    memory, shard.arrivals = shard.local, Arrivals()

    class Reduction:
        def wait(self) -> None:
            order.append(memory.tolist())
            memory.fill_(7)

    shard.arrivals.expect(Handle(Reduction()))
    shard.detach().zero_()
    assert order == [] and memory.tolist() == [0, 1, 2]
    assert shard.local.tolist() == [0, 0, 0]
    assert order == [[0, 1, 2]]
    shard.local.fill_(1)
    torch._foreach_zero_([shard])
    assert memory.tolist() == [0, 0, 0]


def test_file_and_deepcopy_bring_it_back():
    file = io.BytesIO()
    torch.save({"shard": _shard()}, file)
    file.seek(0)
    for again in (torch.load(file, weights_only=True)["shard"], copy.deepcopy(_shard())):
        assert isinstance(again, FlatShard)
        assert (again.shape, again.dtype, again.start) == ((2, 4), torch.bfloat16, 2)
        assert torch.equal(again.local, torch.arange(3.0))
