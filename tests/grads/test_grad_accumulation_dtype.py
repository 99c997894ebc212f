"""Gradients that accumulate in fp32: of micro-batches in ``.grad`` and ``main_grad``, of reductions in shards."""

from __future__ import annotations

from contextlib import nullcontext
from itertools import product
from typing import Any

import pytest
import torch
import zero_optim
from harness import run_ranks
from torch import Tensor, nn

ROUNDS = 5
SHAPE = (3, 100)


def _gradient(rank: int, number: int) -> Tensor:
    """[3, 100] bf16, of round ``number``. The later ones are too small to change a sum of 16 bits."""
    generator = torch.Generator().manual_seed(10 * number + rank)
    return ((torch.rand(SHAPE, generator=generator) + 1) / 4**number).bfloat16()


def _sums(world_size: int) -> tuple[Tensor, Tensor]:
    """The averages, each rounded to bf16, added up in fp32 and in bf16."""
    exact, rounded = torch.zeros(SHAPE), torch.zeros(SHAPE, dtype=torch.bfloat16)
    for number in range(ROUNDS):
        terms = [(_gradient(rank, number).float() / world_size).bfloat16().float() for rank in range(world_size)]
        average = sum(terms[1:], terms[0]).bfloat16()
        exact += average
        rounded += average
    return exact, rounded


class _Fused(torch.autograd.Function):
    """A product that adds its weight's gradient to ``main_grad``, and returns a dummy of NaN."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, gradient: Tensor) -> Tensor:
        ctx.weight, ctx.gradient = weight, gradient
        return (weight * gradient).sum()

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor, None]:
        ctx.weight.main_grad.add_(ctx.gradient)
        ctx.weight.grad_added_to_main_grad = True
        return torch.full_like(ctx.weight, torch.nan), None


class _Product(nn.Module):
    """Its weight's gradient is what it is called with."""

    def __init__(self, dtype: torch.dtype = torch.bfloat16, fused: bool = False, shape: Any = SHAPE) -> None:
        super().__init__()
        self.fused, self.weight = fused, nn.Parameter(torch.zeros(shape, dtype=dtype))
        if fused:
            self.weight.grad_added_to_main_grad = False

    def forward(self, gradient: Tensor) -> Tensor:
        return _Fused.apply(self.weight, gradient) if self.fused else (self.weight * gradient).sum()


def _train(rank: int, world_size: int, stage: int, options: dict[str, object]) -> tuple[Tensor, Tensor, int]:
    """This rank's part of the reduced gradient, flat; the master after a step of SGD by 1; bytes that were reduced."""
    model = nn.Sequential(_Product())
    if stage == 3:
        zero_optim.shard_module(model, units=[_Product])
    opt = zero_optim.ShardedSGD(model.parameters(), lr=1.0, stage=stage, **options)
    for number in range(ROUNDS):
        model(_gradient(rank, number)).backward()
    grad = model[0].weight.grad.local.clone()
    opt.step()
    sent = opt.stats()["collectives"]["reduce_scatter"]["bytes"]
    state = zero_optim.full_state_dict(opt, rank=None)["state"][0]
    opt.close()
    return grad, state["master"], sent


@pytest.mark.parametrize("options", [{}, {"state_offload": "cpu"}], ids=["device", "cpu"])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_shards_add_up_in_fp32_what_is_sent_in_bf16(stage: int, options: dict[str, object]) -> None:
    exact, rounded = _sums(2)
    assert not torch.equal(exact, rounded.float())
    wide = {"grad_accumulation_dtype": torch.float32, **options}
    found = run_ranks(2, _train, stage, wide)
    assert torch.equal(torch.cat([grad for grad, _, _ in found]), exact.view(-1))
    narrow = run_ranks(2, _train, stage, options)
    assert torch.equal(torch.cat([grad for grad, _, _ in narrow]), rounded.view(-1))
    for (_, master, sent), (_, of_narrow, as_before) in zip(found, narrow, strict=True):
        for found_master, sums in ((master, exact), (of_narrow, rounded.float())):  # a tie is a unit off
            assert ((found_master + sums).abs() <= 2.0**-23 * sums.abs()).all()
        assert sent == as_before == ROUNDS * 2 * 512  # in bf16; two shards of whole rows


# -- micro-batches of one rank -----------------------------------------------------------------------------------------

MICROS, STEPS, LR = 6, 3, 1e-2
ROWS = (4, 128)  # for 2 ranks whole rows: in fp32 it is reduced without a copy


def _micro(rank: int, step: int, number: int, shape: tuple[int, int] = SHAPE) -> Tensor:
    """[shape] fp32: 256 and then ones, times what differs by element and step. Their sums in 16 bits are off."""
    scale = torch.arange(shape[0] * shape[1]).view(shape) % 7 + 1.0
    return (256.0 if number == 0 else 1.0 + rank) * scale / 2 ** (step + 4 + 2 * (step == 1))


def _oracle(world_size: int, wire: torch.dtype, shape: tuple[int, int]) -> tuple[list[Tensor], Tensor]:
    """The averages of each step, by fp32 sums of the micro-batches; the weights of torch's AdamW in fp32."""
    averages, weight = [], torch.zeros(shape, requires_grad=True)
    theirs = torch.optim.AdamW([weight], lr=LR)
    for step in range(STEPS):
        sums = [sum(_micro(rank, step, number, shape) for number in range(MICROS)) for rank in range(world_size)]
        terms = [(of_rank / world_size).to(wire).float() for of_rank in sums]
        averages.append(sum(terms[1:], terms[0]).to(wire).float())
        weight.grad = averages[-1].clone()
        theirs.step()
    return averages, weight.detach()


def _make(stage: int, dtype: torch.dtype, fused: bool, shape: Any = SHAPE, **options: Any) -> tuple[nn.Module, Any]:
    model = nn.Sequential(_Product(dtype, fused, shape))
    if stage == 3:
        zero_optim.shard_module(model, units=[_Product])
    options = {"grad_accumulation_dtype": torch.float32, "lr": LR, "stage": stage, **options}
    return model, zero_optim.ShardedAdamW(model.named_parameters(), **options)


def _accumulate(rank: int, world_size: int, stage: int) -> None:
    either = (False, True)
    for dtype, fused, early, reduced in product((torch.bfloat16, torch.float16), either, either, (None, torch.float32)):
        options = {"overlap_grad_reduce": early, "grad_reduce_dtype": reduced}
        shape = SHAPE if reduced is None else ROWS
        averages, theirs = _oracle(world_size, torch.float32 if world_size == 1 else reduced or dtype, shape)
        model, opt = _make(stage, dtype, fused, shape, **options)
        weight = model[0].weight
        for step in range(STEPS):
            own = torch.zeros(shape)
            for number in range(MICROS):
                own += (gradient := _micro(rank, step, number, shape))
                with nullcontext() if number == MICROS - 1 else opt.no_sync():
                    model(gradient.to(dtype)).backward()
                if number < MICROS - 1:
                    assert torch.equal(weight.grad, own)
            average = own if stage == 1 and not early else averages[step]
            local = getattr(weight.grad, "local", weight.grad).view(-1)
            assert weight.grad.dtype == local.dtype == torch.float32
            assert torch.equal(local, average.view(-1)[getattr(weight.grad, "start", 0) :][: local.numel()])
            assert not fused or not (weight.main_grad.any() or weight.grad_added_to_main_grad)
            opt.step()
            opt.zero_grad()
        master = zero_optim.full_state_dict(opt, rank=None)["state"][0]["master"]
        torch.testing.assert_close(master, theirs.cpu(), rtol=1e-5, atol=1e-7)
        opt.close()
        assert weight.grad_dtype == dtype and not hasattr(weight, "main_grad")


@pytest.mark.parametrize("simulated", ["", "late"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("world_size", [1, 2])
def test_micro_batches_add_up_in_fp32(world_size: int, stage: int, simulated: str) -> None:
    run_ranks(world_size, _accumulate, stage, simulated=simulated)


PROGRAMS = ("rrrs.", "rlzs.", "rzzs.", "lrslrs", "ll.lrs.rl.zs", "rlprlps.plpls.")
"""r: a synchronised backward; l: one within ``no_sync``; z: the same, of zeros; p: the same, by autograd; s: step, and
``zero_grad`` unless another step follows; .: ``zero_grad``."""


def _programs(rank: int, world_size: int, stage: int) -> None:
    for program in PROGRAMS:
        found = []
        for fused in (False, True):
            model, opt = _make(stage, torch.bfloat16, fused)
            for number, act in enumerate(program):
                model[0].fused = fused and act != "p"
                gradient = _micro(rank, 0, number % 3).bfloat16() * (act != "z")
                if act in "rlzp":
                    with nullcontext() if act == "r" else opt.no_sync():
                        model(gradient).backward()
                elif act == "s":
                    opt.step()
                else:
                    opt.zero_grad()
            found.append(zero_optim.full_state_dict(opt, rank=None)["state"][0]["master"])
            opt.close()
        assert found[0].any() and torch.equal(*found), program


@pytest.mark.parametrize(("world_size", "stage"), [(1, 2), (2, 0), (2, 1), (2, 2), (2, 3)])
def test_main_grad_gives_the_bits_of_grad(world_size: int, stage: int) -> None:
    run_ranks(world_size, _programs, stage)


def test_main_grad_is_counted_and_sleeps() -> None:
    held = []
    for fused, dtype in ((False, torch.bfloat16), (True, torch.bfloat16), (True, torch.float32)):
        model, opt = _make(2, dtype, fused, grad_accumulation_dtype=None if dtype == torch.float32 else torch.float32)
        held.append(opt.stats()["memory"]["gradients"])
        opt.sleep()
        assert opt.stats()["memory"]["gradients"] == 0
        opt.wake()
        model(torch.ones(SHAPE, dtype=dtype)).backward()
        assert model[0].weight.grad.eq(1).all()
        opt.close()
    assert held == [4 * 300, 2 * 4 * 300, 2 * 4 * 300]
    with pytest.raises(
        zero_optim.ParameterError, match="'0.weight' .* optimizer grad_accumulation_dtype=torch.float32"
    ):
        _make(2, torch.bfloat16, True, grad_accumulation_dtype=None)


def _own_grad_dtype(rank: int, world_size: int, stage: int) -> list[str]:
    """What is raised where only the last rank sets ``grad_dtype`` before, and where it is fp64."""
    # Before: the same as grad_accumulation_dtype, for all parameters.
    model = nn.ModuleDict({name: _Product() for name in "ab"})
    model["b"].weight.grad_dtype = torch.float32
    opt = zero_optim.ShardedSGD(model.named_parameters(), lr=1.0, stage=stage)
    for gradient in (_micro(0, 0, 0).bfloat16(), _micro(0, 0, 1).bfloat16()):
        with opt.no_sync():
            (model["a"](gradient) + model["b"](gradient)).backward()
    assert all(torch.equal(layer.weight.grad, _micro(0, 0, 0) + _micro(0, 0, 1)) for layer in model.values())
    opt.close()
    assert [layer.weight.grad_dtype for layer in model.values()] == [torch.bfloat16, torch.float32]
    # Later: packed as it is into what is sent, and then shown as without.
    fine = torch.full(SHAPE, 1 + 2.0**-20)  # as 16 bits, 1
    model = _Product()
    opt = zero_optim.ShardedSGD(model.named_parameters(), stage=stage, grad_reduce_dtype=torch.float32)
    for dtype in (torch.float32, None):
        model.weight.grad_dtype = dtype
        if dtype is None:
            model.weight.grad = fine.clone()
        else:
            model(fine).backward()
        opt.step()
        assert stage == 0 or world_size == 1 or model.weight.grad.local.eq(1 + 2.0**-20).all()
        assert model.weight.grad.dtype == torch.bfloat16
        opt.zero_grad()
    model.weight.grad_dtype = torch.float64
    with pytest.raises(zero_optim.GradientError, match="torch.float64 .* a dense torch.bfloat16 or torch.float32"):
        model(fine).backward()
        opt.step(), opt.step()  # on a GPU the second raises
    opt.close()
    raised = []
    for dtype, by in ((torch.float32, world_size - 1), (torch.float64, rank)):
        model = _Product()
        if rank == by:
            model.weight.grad_dtype = dtype
        try:
            zero_optim.ShardedSGD(model.named_parameters(), stage=stage).close()
        except zero_optim.ZeroOptimError as error:
            raised.append(f"{type(error).__name__}: {error}")
    return raised


@pytest.mark.parametrize(("world_size", "stage"), [(1, 2), (2, 0), (2, 1), (2, 2)])
def test_a_grad_dtype_of_ones_own(world_size: int, stage: int) -> None:
    for *other, fp64 in run_ranks(world_size, _own_grad_dtype, stage):
        assert (
            fp64 == "GradientError: grad_dtype of 'weight' must be torch.bfloat16 or torch.float32, got torch.float64"
        )
        assert len(other) == world_size - 1
        assert all(text.startswith("RankMismatchError") and "grad_dtype=torch.float32" in text for text in other)


def _tied(rank: int, world_size: int, stage: int) -> Tensor:
    """A fused layer and another one have the weight: with ``zero_out_wgrad``, as in Megatron, the dummy is zero."""
    model = _Product(fused=True)
    model.weight.zero_out_wgrad = True
    opt = zero_optim.ShardedSGD(model, lr=1.0, stage=stage, grad_accumulation_dtype=torch.float32)
    (_ZeroDummy.apply(model.weight, _gradient(0, 0)) + (model.weight * _gradient(0, 1)).sum()).backward()
    opt.step()
    return zero_optim.full_state_dict(opt, rank=None)["state"][0]["master"]


class _ZeroDummy(_Fused):
    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor, None]:
        return _Fused.backward(ctx, grad_output)[0].zero_(), None


@pytest.mark.parametrize(("world_size", "stage"), [(1, 2), (2, 0), (2, 2)])
def test_a_tied_weight_has_both_of_its_gradients(world_size: int, stage: int) -> None:
    expected = -(_gradient(0, 0).float() + _gradient(0, 1).float())
    for master in run_ranks(world_size, _tied, stage):
        torch.testing.assert_close(master, expected, rtol=2**-8, atol=0)
