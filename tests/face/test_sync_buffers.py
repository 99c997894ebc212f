"""``sync_buffers``: every kind of buffer, both ways, in few collectives, in place; and ranks that disagree."""

from __future__ import annotations

import importlib
import re
from typing import Any

import pytest
import torch
import torch.distributed as dist
import zero_optim
from harness import run_ranks
from torch import Tensor, nn
from training_cases import assert_bitwise
from zero_optim import validate
from zero_optim.comm.collectives import Comm
from zero_optim.errors import ParameterError, RankMismatchError

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
OTHERS = (torch.int64, torch.int32, torch.uint8, torch.int16, torch.complex64)
MODES = ("broadcast", "mean")


def _values(rank: int, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    generator = torch.Generator().manual_seed(100 * rank + len(shape))
    if dtype.is_floating_point or dtype.is_complex:
        return torch.randn(shape, generator=generator).to(dtype)
    return torch.randint(0, 100, shape, generator=generator).to(dtype)


class Holder(nn.Module):
    """Buffers of every kind, their values of ``rank``."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        for dtype in (*FLOATS, *OTHERS):
            self.register_buffer(f"of_{str(dtype)[6:]}", _values(rank, dtype, (3, 5)))
        self.register_buffer("flag", torch.tensor([rank == 0, True, rank == 1]))
        self.register_buffer("scalar", torch.tensor(float(rank)))
        self.register_buffer("empty", torch.empty(0, 3))
        self.register_buffer("absent", None)
        self.register_buffer("passing", _values(rank, torch.float32, (4,)), persistent=False)
        self.register_buffer("turned", _values(rank, torch.float32, (6, 2)).t())
        self.register_buffer("repeated", _values(rank, torch.float32, (1, 4)).expand(3, 4))
        self.register_buffer("equal", torch.tensor([1 / 3, torch.finfo(torch.float32).min, -torch.inf]))
        self.child = nn.Module()
        self.child.register_buffer("shared", self.of_float32)


def _expected(how: str, name: str, of_ranks: list[Tensor]) -> Tensor:
    if how == "broadcast" or not of_ranks[0].is_floating_point():
        return of_ranks[0]
    return torch.stack([values.double() for values in of_ranks]).mean(0).to(of_ranks[0].dtype)


def _sync_all_kinds(rank: int, world_size: int) -> dict[str, Any]:
    calls: list[tuple[str, int]] = []
    record = Comm._count
    Comm._count = lambda self, kind, tensor: calls.append((kind, tensor.nbytes)) or record(self, kind, tensor)
    found: dict[str, Any] = {}
    try:
        for how in MODES:
            model = Holder(rank)
            before = dict(model.named_buffers())
            view = model.of_float32[1:]
            calls.clear()
            zero_optim.sync_buffers(model, how)
            after = dict(model.named_buffers())
            assert all(after[name] is buffer for name, buffer in before.items())
            assert model.child.shared is model.of_float32 and torch.equal(view, model.of_float32[1:])
            assert model.absent is None and not model.turned.is_contiguous()
            found[how] = ({name: buffer.clone() for name, buffer in after.items()}, list(calls))
    finally:
        Comm._count = record
    return found


@pytest.mark.parametrize("world_size", [2, 3])
def test_every_kind_of_buffer(world_size: int) -> None:
    models = [dict(Holder(rank).named_buffers()) for rank in range(world_size)]
    assert any(not torch.equal(models[0][name], models[1][name]) for name in models[0])
    for of_rank in run_ranks(world_size, _sync_all_kinds):
        for how in MODES:
            got, calls = of_rank[how]
            for name, buffer in got.items():
                expected = _expected(how, name, [model[name] for model in models])
                assert_bitwise([buffer], [expected], f"{how} of {name}")
            dtypes = {buffer.dtype for buffer in got.values()}
            assert len(calls) == len(dtypes) < len(got)  # not one for each buffer
            assert {kind for kind, _ in calls} == {"buffers"}


def test_equal_values_keep_their_bits() -> None:
    """A constant, such as a mask or the frequencies of a rotary embedding, is no average of anything."""
    constant = Holder(0).equal
    for of_rank in run_ranks(3, _sync_all_kinds):
        assert_bitwise([of_rank["mean"][0]["equal"]], [constant])


# ---- which ranks -----------------------------------------------------------------------------------------------------


class Net(nn.Module):
    """A layer, batch norm, and a layer."""

    def __init__(self, norm: Any = nn.BatchNorm1d) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(nn.Linear(6, 8), norm(8), nn.ReLU(), nn.Linear(8, 8))
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x))


def _make(stage: int, group: Any = None, norm: Any = nn.BatchNorm1d) -> tuple[nn.Module, Any]:
    model = Net(norm)
    if stage == 3:
        zero_optim.shard_module(model, (nn.Sequential,), process_group=group)
    options = {} if stage == 3 else {"stage": stage, "process_group": group}
    return model, zero_optim.ShardedAdamW(model.named_parameters(), lr=1e-2, eps=1e-6, **options)


def _in_a_part(rank: int, world_size: int, how_known: str) -> float:
    """Ranks 0 and 1 train together, and rank 2 alone; rank 2 calls nothing."""
    group = dist.new_group([0, 1])
    if rank == 2:
        return 7.0
    model, opt = nn.BatchNorm1d(1), None
    if how_known == "given":
        model.register_buffer("mark", torch.tensor(float(rank)))
        zero_optim.sync_buffers(model, "mean", process_group=group)
        return float(model.mark)
    model, opt = _make(3 if how_known == "sharded" else 2, group)
    if how_known == "sharded":
        opt.close()
    model.register_buffer("mark", torch.tensor(float(rank)))
    zero_optim.sync_buffers(model, "mean")
    return float(model.mark)


@pytest.mark.parametrize("how_known", ["given", "optimizer", "sharded"])
def test_the_ranks_are_those_that_train_the_model(how_known: str) -> None:
    assert run_ranks(3, _in_a_part, how_known) == [0.5, 0.5, 7.0]


def _of_two_groups(rank: int, world_size: int) -> str:
    groups = [dist.new_group([rank]) for rank in range(world_size)]
    model = nn.ModuleList([Net(), Net()])
    opts = [
        zero_optim.ShardedAdamW(model[0].parameters()),
        zero_optim.ShardedAdamW(model[1].parameters(), process_group=groups[rank]),
    ]
    with pytest.raises(ValueError) as caught:
        zero_optim.sync_buffers(model)
    del opts
    return str(caught.value)


def test_several_groups_are_not_guessed_between() -> None:
    assert all("process_group" in text for text in run_ranks(2, _of_two_groups))


def test_one_rank() -> None:
    model = Holder(1)
    expected = dict(Holder(1).named_buffers())
    for how in MODES:
        zero_optim.sync_buffers(model, how)
    assert_bitwise([*dict(model.named_buffers()).values()], [*expected.values()])
    with pytest.raises(ValueError, match="how must be one of"):
        zero_optim.sync_buffers(model, "median")


def test_what_cannot_be_sent() -> None:
    model = nn.Module()
    model.register_buffer("table", torch.zeros(3, device="meta"))
    with pytest.raises(ParameterError, match="'table' is on the meta device"):
        zero_optim.sync_buffers(model)
    model.register_buffer("table", torch.eye(3).to_sparse())
    with pytest.raises(ParameterError, match="'table' is torch.sparse_coo"):
        zero_optim.sync_buffers(model)


# ---- ranks that disagree ---------------------------------------------------------------------------------------------

DIFFERENCES = {
    "name": "rank 0 has 'a'.*rank 1 has 'b'",
    "shape": r"rank 0 has 'a': \(2,\).*rank 1 has 'a': \(3,\)",
    "dtype": "float32.*int64",
    "count": "nothing more",
    "how": "rank 0 has how=broadcast; rank 1 has how=mean",
    "wrong how": "how must be one of|rank 1 failed with ValueError: how",
}


def _disagree(rank: int, world_size: int, what: str) -> str:
    model = nn.Module()
    odd = rank == 1
    dtype = torch.int64 if what == "dtype" and odd else torch.float32
    values = torch.full((3 if what == "shape" and odd else 2,), 5, dtype=dtype)
    model.register_buffer("b" if what == "name" and odd else "a", values.clone())
    if what == "count" and odd:
        model.register_buffer("more", values)
    how = {"how": "mean", "wrong how": "median"}.get(what, "broadcast") if odd else "broadcast"
    kind = ValueError if what == "wrong how" and odd else RankMismatchError
    with pytest.raises(kind) as caught:
        zero_optim.sync_buffers(model, how)
    assert all(torch.equal(buffer, values) for buffer in model.buffers())
    return str(caught.value)


@pytest.mark.parametrize("what", DIFFERENCES)
def test_ranks_that_disagree_raise_on_every_rank(what: str) -> None:
    for text in run_ranks(2, _disagree, what):
        assert re.search(DIFFERENCES[what], text), text


def test_buffers_of_the_cpu_travel_by_the_gpu_of_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the group has no back-end for the CPU. The current GPU may be another one."""
    model = nn.BatchNorm1d(4)
    module = importlib.import_module("zero_optim.sync_buffers")  # the package has the function under that name
    monkeypatch.setattr(validate, "backend_of", lambda comm, device: {"cuda": "nccl"}.get(device.type))
    assert module._device(Comm(None, torch.device("cuda:1")), [*model.buffers()]) == torch.device("cuda:1")
