"""Which ranks shard the optimizer: a part of the default group, a 1-D mesh; which backend a GPU needs."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from harness import run_ranks
from oracle import Hyper, MasterAdamW, averages
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from training_cases import SHAPES, TINY_CAP_MB, assert_bitwise, copies, linear_backward, make_gradients, make_parameters

LR = 1e-2


def _expected(ranks: tuple[int, ...], seed: int) -> list[Tensor]:
    """Training by the gradients of ``ranks``, from the parameters of the first of them."""
    oracle = MasterAdamW(make_parameters(SHAPES, torch.bfloat16, seed=seed), Hyper(lr=LR))
    for step in range(3):
        oracle.step(averages([make_gradients(oracle.params, rank, step) for rank in ranks]))
    return oracle.params


def _train(rank: int, **options) -> tuple[list[Tensor], int]:
    import zero_optim

    params = make_parameters(SHAPES, torch.bfloat16, seed=rank)
    opt = zero_optim.ShardedAdamW(params, lr=LR, bucket_cap_mb=TINY_CAP_MB, **options)
    for step in range(3):
        linear_backward(params, make_gradients(params, rank, step))
        opt.step()
        opt.zero_grad()
    world_size = opt.stats()["world_size"]
    opt.close()
    return copies(params), world_size


def _in_a_part(rank: int, world_size: int, stage: int) -> tuple[list[Tensor], int]:
    """Ranks 0 and 2 train together, rank 1 alone, at the same time."""
    groups = [dist.new_group([0, 2]), dist.new_group([1])]
    return _train(rank, stage=stage, process_group=groups[rank % 2])


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_a_part_of_the_ranks(stage):
    """The source of the broadcast is the first rank of the group, whatever its number in the world."""
    zero, one, two = run_ranks(3, _in_a_part, stage)
    together, alone = _expected((0, 2), seed=0), _expected((1,), seed=1)
    assert [world for _, world in (zero, one, two)] == [2, 1, 2]
    assert_bitwise(zero[0], together, "rank 0")
    assert_bitwise(two[0], together, "rank 2")
    assert_bitwise(one[0], alone, "rank 1")


def _without_rank_zero(rank: int, world_size: int) -> list[Tensor]:
    group = dist.new_group([1, 2])
    return _train(rank, process_group=group)[0] if rank else []


def test_a_group_without_rank_zero():
    _, one, two = run_ranks(3, _without_rank_zero)
    expected = _expected((1, 2), seed=1)
    assert_bitwise(one, expected, "rank 1")
    assert_bitwise(two, expected, "rank 2")


def _both(rank: int, world_size: int) -> str:
    mesh = init_device_mesh("cpu", (world_size,))
    try:
        _train(rank, mesh=mesh, process_group=mesh.get_group())
    except ValueError as error:
        return str(error)
    return ""


def test_a_group_and_a_mesh_together_are_an_error():
    assert all("mesh" in text and "process_group" in text for text in run_ranks(2, _both))


def _gloo_for_a_gpu(rank: int, world_size: int) -> list[str]:
    from zero_optim.comm.collectives import make_comm
    from zero_optim.validate import check_backend

    comm, texts = make_comm(), []
    check_backend(comm, torch.device("cpu"))
    for group in (comm, make_comm(dist.new_group())):
        try:
            check_backend(group, torch.device("cuda", 0))
        except ValueError as error:
            texts.append(str(error))
    dist.barrier()  # else a rank leaves while the other is still connecting the new group, which then fails (seen)
    return texts


def test_gloo_is_refused_for_parameters_on_a_gpu():
    """It has no reduce-scatter there."""
    for texts in run_ranks(2, _gloo_for_a_gpu, simulated=""):
        assert len(texts) == 2
        assert all("cuda:0, for which the process group has gloo" in text and "cuda:nccl" in text for text in texts)
