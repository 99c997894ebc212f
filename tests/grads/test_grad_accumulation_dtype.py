"""``grad_accumulation_dtype``: reductions of a step are sent in bf16, and added up in fp32."""

from __future__ import annotations

import contextlib
import warnings

import pytest
import torch
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


class _Product(nn.Module):
    """Its weight's gradient is what it is called with."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(SHAPE, dtype=torch.bfloat16))

    def forward(self, gradient: Tensor) -> Tensor:
        return (self.weight * gradient).sum()


def _train(rank: int, world_size: int, stage: int, options: dict[str, object]) -> tuple[Tensor, Tensor, int]:
    """This rank's part of the reduced gradient, flat; the master after a step of SGD by 1; bytes that were reduced."""
    import zero_optim

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


def _on_a_grid(rank: int, world_size: int) -> Tensor:
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    return _train(rank, world_size, 2, {"mesh": mesh, "grad_accumulation_dtype": torch.float32})[1]


def test_on_a_grid() -> None:
    """Both legs of a reduction are in bf16."""
    exact = torch.zeros(SHAPE)
    for number in range(ROUNDS):
        terms = [(_gradient(rank, number).float() / 4).bfloat16().float() for rank in range(4)]
        rows = [(terms[0] + terms[1]).bfloat16().float(), (terms[2] + terms[3]).bfloat16().float()]
        exact += (rows[0] + rows[1]).bfloat16()
    for master in run_ranks(4, _on_a_grid):
        assert torch.equal(master, -exact)


def test_stage_0_adds_up_in_grad() -> None:
    import zero_optim

    parameter = nn.Parameter(torch.zeros(2, dtype=torch.bfloat16))
    with pytest.raises(ValueError, match="grad_accumulation_dtype: at stage 0 gradients add up in .grad"):
        zero_optim.ShardedAdamW([parameter], stage=0, grad_accumulation_dtype=torch.float32)
    with pytest.raises(ValueError, match="at stage 1 with overlap_grad_reduce=False gradients add up in .grad"):
        zero_optim.ShardedAdamW([parameter], stage=1, overlap_grad_reduce=False, grad_accumulation_dtype=torch.float32)
    with pytest.raises(ValueError, match="grad_accumulation_dtype must be None or torch.float32, got torch.float16"):
        zero_optim.ShardedAdamW([parameter], grad_accumulation_dtype=torch.float16)


# -- where gradients add up in 16 bits all the same --------------------------------------------------------------------


def _warnings(rank: int, world_size: int, dtype: torch.dtype, local: bool) -> list[str]:
    import zero_optim

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model = _Product().to(dtype)
        opt = zero_optim.ShardedSGD(model.parameters(), lr=1.0, grad_accumulation_dtype=torch.float32)
        for _ in range(2):
            with opt.no_sync() if local else contextlib.nullcontext():
                model(_gradient(rank, 0)).backward()
            model(_gradient(rank, 1)).backward()
            opt.step()
        opt.close()
    return [str(warning.message) for warning in caught if "grad_accumulation_dtype" in str(warning.message)]


@pytest.mark.parametrize(
    ("world_size", "dtype", "local", "where"),
    [
        (2, torch.bfloat16, True, "within no_sync"),
        (2, torch.bfloat16, False, None),
        (2, torch.float32, True, None),
        (1, torch.bfloat16, False, "on one rank"),
        (1, torch.float32, True, None),
    ],
)
def test_sums_in_16_bits_are_warned_of_once(
    world_size: int, dtype: torch.dtype, local: bool, where: str | None
) -> None:
    for found in run_ranks(world_size, _warnings, dtype, local):
        assert len(found) == (where is not None)
        assert all(f"has no effect {where}" in text and "torch.bfloat16" in text for text in found)


def _other_grad_dtype(rank: int, world_size: int, stage: int) -> list[str]:
    """What the constructor raises where ``grad_dtype`` was set before, and ``step`` where one rank sets it later."""
    import zero_optim

    raised = []
    for later in (False, True):
        model = _Product()
        opt = zero_optim.ShardedSGD(model.named_parameters(), lr=1.0, stage=stage) if later else None
        if rank == world_size - 1:
            model.weight.grad_dtype = torch.float32
        try:
            opt = opt or zero_optim.ShardedSGD(model.named_parameters(), lr=1.0, stage=stage)
            model(_gradient(rank, 0)).backward()
            opt.step()
        except zero_optim.ZeroOptimError as error:
            raised.append(f"{type(error).__name__}: {error}")
    opt.zero_grad()  # and it goes on
    model.weight.grad_dtype = torch.bfloat16
    model(_gradient(rank, 0)).backward()
    opt.step()
    assert model.weight.any()
    return raised


@pytest.mark.parametrize(("world_size", "stage"), [(1, 2), (2, 0), (2, 1), (2, 2)])
def test_a_grad_dtype_of_ones_own_is_an_error_that_names_the_parameter(world_size: int, stage: int) -> None:
    reports = run_ranks(world_size, _other_grad_dtype, stage)
    before, later = reports[-1]
    assert before.startswith("GradientError: 'weight' is torch.bfloat16 and has grad_dtype = torch.float32")
    assert later.startswith("GradientError: the gradient of 'weight' is torch.float32") and "grad_dtype" in later
    for before, later in reports[:-1]:
        assert before.startswith("RankMismatchError") and "grad_dtype" in before
        assert later.startswith("GradientError: the gradient of 'weight' on another rank")
