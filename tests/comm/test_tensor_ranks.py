"""Which ranks have the same slices of parameters; and what is told where meshes do not go together."""

from __future__ import annotations

import pytest
import torch
from harness import run_ranks
from tensor_cases import Block, Way, make_mesh, make_model
from torch import nn


def _summed(rank: int, world_size: int, reduce_dtype: torch.dtype | None) -> float:
    """The sum of four terms, of which bf16 loses the small ones beside the large."""
    from zero_optim.comm.collectives import make_comm
    from zero_optim.comm.sharding import make_sharding
    from zero_optim.comm.topology import read_row, read_topology

    mesh = make_mesh(1, 4)
    group, topology = read_topology(mesh["dp"].get_group(), read_row(None, mesh["tp"]), explicit_tp=False)
    world = make_comm(group)
    world.separate()
    sharding = make_sharding(world, 2, torch.device("cpu"), topology, grad_reduce_dtype=reduce_dtype)
    term = torch.tensor([(256.0, -255.0, 1 / 128, 1 / 128)[rank]], dtype=torch.bfloat16)
    sharding.sum_over_slices([term])
    return float(term)


def test_terms_are_added_up_in_the_dtype_of_reductions():
    assert run_ranks(4, _summed, torch.float32) == [1 + 1 / 64] * 4


def _told(kind: type[Exception], *params: nn.Parameter, **given: object) -> str:
    import zero_optim

    with pytest.raises(kind) as caught:
        zero_optim.ShardedAdamW(params, **given)
    return str(caught.value)


def _refused(rank: int, world_size: int) -> dict[str, str]:
    import torch.distributed as dist
    import zero_optim
    from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import DTensor, Partial, Shard

    mesh = make_mesh(2, 2)
    tp, four = mesh["tp"], init_device_mesh("cpu", (4,), mesh_dim_names=("four",))

    def slices(of: DeviceMesh, placement: object = None, rows: int = 2) -> nn.Parameter:
        return nn.Parameter(DTensor.from_local(torch.ones(rows, 3), of, [placement or Shard(0)], run_check=False))

    told = {
        "the default group": _told(ValueError, slices(tp)),
        "the whole mesh": _told(ValueError, slices(tp), mesh=mesh),
        "the wrong dimension": _told(ValueError, slices(tp), mesh=tp),
        "two meshes": _told(zero_optim.ParameterError, slices(tp), slices(four), mesh=mesh["dp"]),
        "a term": _told(zero_optim.ParameterError, slices(tp, Partial()), mesh=mesh["dp"]),
        "a mesh of two": _told(
            zero_optim.ParameterError,
            nn.Parameter(DTensor.from_local(torch.ones(2, 3), mesh, [Shard(0), Shard(1)], run_check=False)),
            mesh=mesh["dp"],
        ),
    }
    model = fully_shard(make_model(Way()), mesh=mesh["dp"])
    told["fully_shard"] = _told(ValueError, *model.parameters(), mesh=mesh["dp"])
    model = fully_shard(make_model(Way(), tp), mesh=mesh["dp"])
    told["fully_shard of slices"] = _told(zero_optim.ParameterError, *model.parameters(), mesh=mesh["dp"])
    with pytest.raises(ValueError, match="several of the same"):
        zero_optim.shard_module(make_model(Way(), tp), (Block,))
    turned = DeviceMesh("cpu", torch.tensor([[1, 0], [3, 2]]), mesh_dim_names=("dp", "tp"))
    told["descending"] = _told(ValueError, slices(turned["tp"]), mesh=turned["dp"])
    alone = [dist.new_group([other], use_local_synchronization=False) for other in range(4)]
    group = mesh["dp"].get_group() if rank % 2 == 0 else alone[rank]
    told["ranks missing"] = _told(ValueError, slices(tp), process_group=group)
    some = slices(tp) if rank < 2 else nn.Parameter(torch.ones(4, 3))
    told["plain on some"] = _told(zero_optim.RankMismatchError, some, mesh=mesh["dp"])
    opt = zero_optim.ShardedAdamW([slices(tp)], mesh=mesh["dp"])
    with pytest.raises(zero_optim.ParameterError, match="over the same"):
        opt.add_param_group({"params": [slices(four)]})
    opt.close()
    sizes = slices(tp, rows=2 + rank % 2)  # 5 rows or so: torch puts the larger slice first
    told["other sizes"] = _told(zero_optim.ZeroOptimError, sizes, mesh=mesh["dp"])
    return told


def test_meshes_that_do_not_go_together_are_told_by_dimension_and_remedy():
    for told in run_ranks(4, _refused):
        for case in ("the default group", "the whole mesh", "the wrong dimension"):
            assert "dimension 'tp'" in told[case] and "mesh=world_mesh['dp']" in told[case], case
        assert "fully_shard" in told["fully_shard"] and "dimension 'dp'" in told["fully_shard"]
        assert "('dp', 'tp')" in told["fully_shard of slices"] and "mesh['tp']" in told["fully_shard of slices"]
        assert "('dp', 'tp')" in told["a mesh of two"]
        assert "over the same tensor-parallel ranks" in told["two meshes"] and "[0, 1, 2, 3]" in told["two meshes"]
        assert "Shard(dim) and Replicate()" in told["a term"]
        assert "ascending" in told["descending"]
        assert "same dimension of one mesh" in told["ranks missing"]
        assert "DTensors" in told["plain on some"]


def _swapped(rank: int, world_size: int) -> list[list[int]]:
    """A mesh with tensor parallelism first."""
    import zero_optim
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("tp", "dp"))
    opt = zero_optim.ShardedAdamW(make_model(Way(), mesh["tp"]).parameters(), mesh=mesh["dp"])
    sharding = opt.engine.sharding
    opt.close()
    return [sharding.data_parallel.ranks, sharding.tensor_ranks.slices.ranks]


def test_tensor_parallelism_may_be_the_first_dimension():
    assert run_ranks(4, _swapped) == [[[0, 1], [0, 2]], [[0, 1], [1, 3]], [[2, 3], [0, 2]], [[2, 3], [1, 3]]]
