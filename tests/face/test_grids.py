"""Hybrid sharding: bits across stages, traffic over either link, which meshes fit, and which groups are made."""

from __future__ import annotations

from contextlib import nullcontext
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import zero_optim
from cells import slow_after
from grid_cases import make_mesh, on_mesh
from harness import run_ranks
from sharded_cases import ON_DISK, Block, Net, Outcome, Run, loss_of, losses_and_state, make, tokens
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from training_cases import DTYPES, assert_bitwise, linear_backward, make_gradients, make_parameters
from zero_optim import memory
from zero_optim.comm.handle import SecondLegs
from zero_optim.comm.topology import read_rows

ACCUMULATIONS = ((1, False), (3, True), (2, False))  # micro-batches; whether all but the last are under no_sync


# -- stage 3 -----------------------------------------------------------------------------------------------------


def _outcomes(rank: int, world_size: int, runs: list[Run], state_over: str) -> list[Outcome]:
    mesh = make_mesh(2, world_size // 2)
    return [losses_and_state(rank, world_size, on_mesh(run, mesh, state_over=state_over)) for run in runs]


def _stage_3_runs(ranks: int) -> list[Run]:
    """On eight ranks those that gather a unit again within two of the four that shard it."""
    runs = []
    ways = ({}, {"reshard_after_forward": False}, {"reshard_after_forward": 2, "prefetch": 2}, {"param_offload": "cpu"})
    ways = (*ways, {"param_offload": ON_DISK}, {"param_offload": ON_DISK, "reshard_after_forward": 2})
    for number, shard in enumerate(ways):
        micro, no_sync = ACCUMULATIONS[number % 3]
        options = {"state_offload": "cpu"} if shard == {"param_offload": "cpu"} else {}
        run = Run(dtype=DTYPES[number % 3], steps=2, micro=micro, no_sync=no_sync, shard=shard, options=options)
        if (ranks == 8) is (shard.get("reshard_after_forward") == 2):
            runs += [run.at(2), run]
    return runs


@pytest.mark.parametrize(("ranks", "state_over"), [(4, "shard"), (8, "shard"), (4, "all"), (8, "all")])
def test_stage_3_equals_stage_2_bit_for_bit(ranks, state_over):
    runs = _stage_3_runs(ranks)
    for outcomes in run_ranks(ranks, _outcomes, runs, state_over, timeout=180):
        for stage_2, stage_3 in zip(outcomes[::2], outcomes[1::2], strict=True):
            assert stage_3.losses == stage_2.losses
            assert_bitwise([*stage_3.parameters.values()], [*stage_2.parameters.values()])
            for index, state in stage_2.state.items():
                assert_bitwise([*stage_3.state[index].values()], [*state.values()], f"state of {index}")


# -- traffic, memory ---------------------------------------------------------------------------------------------


Found = tuple[dict[str, int], dict[str, int], dict[str, int], dict[str, int]]


def _sent(rank: int, world_size: int, stage: int, state_over: str) -> Found:
    """Bytes of one step, and what was planned; bytes held, and planned."""
    torch.manual_seed(0)
    model, opt = make(on_mesh(Run(stage=stage), make_mesh(2, world_size // 2), state_over=state_over), Net(width=128))

    def step() -> dict[str, int]:
        loss_of(model, tokens(rank, 0)).backward()
        opt.step()
        opt.zero_grad()
        return {kind: of["bytes"] for kind, of in opt.stats()["collectives"].items()}

    step()
    before, after = step(), step()
    planned = memory.plan_of(opt)
    kinds = ("parameters", "exp_avg", "exp_avg_sq", "gradients", "padding")
    held = {kind: opt.stats()["memory"][kind] for kind in kinds}
    opt.close()
    sent = {kind: after[kind] - before[kind] for kind in planned.traffic}
    return sent, planned.traffic, held, {kind: planned.memory[kind] for kind in kinds}


def _as_planned(found: Found, stage: int) -> None:
    sent, planned, held, memory = found
    assert sent == planned
    if stage < 3:  # gradients of stage 3 are freed after the step
        assert held == memory
    assert held["exp_avg"] == memory["exp_avg"]


@pytest.mark.parametrize("stage", slow_after(2, (1, 3, 2)))
def test_traffic_over_either_link_and_memory_are_as_planned(stage):
    for found in run_ranks(6, _sent, stage, "shard"):
        _as_planned(found, stage)
        sent, *_ = found
        assert sent["all_reduce"] * 3 == sent["reduce_scatter"], "across go the shards alone"


@pytest.mark.parametrize("stage", slow_after(2, (2, 3, 1)))
def test_state_over_all_sends_as_many_bytes_over_either_link(stage):
    """Across a reduce-scatter and an all-gather send the bytes of an all-reduce. State is a part of that of a replica,
    and so are the gradients that rest."""
    hybrid, over_all = (run_ranks(6, _sent, stage, state_over) for state_over in ("shard", "all"))
    numel = sum(parameter.numel() for parameter in Net(width=128).parameters())
    for (before, _, held, _), found in zip(hybrid, over_all, strict=True):
        _as_planned(found, stage)
        sent, _, own, _ = found
        assert sent["replica_reduce_scatter"] == sent["replica_all_gather"] == sent["reduce_scatter"] / 3
        # But for padding, as buckets are a multiple of six rows, and not of three.
        assert sent["replica_all_gather"] == pytest.approx(before["all_reduce"], rel=0.03)
        for kind in ("reduce_scatter", "all_gather"):
            assert sent[kind] == pytest.approx(before[kind], rel=0.03)
        assert own["parameters"] == pytest.approx(held["parameters"], rel=0.03)
    for kind in ("exp_avg", "exp_avg_sq"):
        assert sum(own[kind] for _, _, own, _ in over_all) == 4 * numel
        most = max(own[kind] for _, _, own, _ in over_all)
        assert most == pytest.approx(4 * numel / 6, rel=0.03)


def _gathered_behind_reductions(rank: int, world_size: int) -> list[float]:
    """Ranks differ in which second legs of the reductions they have issued as they gather over the same group."""
    _, opt = make(on_mesh(Run(stage=2), make_mesh(2, 2), state_over="all"), model := Net())
    for step in range(2):
        late = mock.patch.object(SecondLegs, "issue_arrived", lambda legs, seconds: None)
        with late if rank < 2 else nullcontext():
            loss_of(model, tokens(rank, step)).backward()
            opt.engine.sharding.second_legs.issue_arrived(5.0)
            zero_optim.full_state_dict(opt)
        opt.step()
        opt.zero_grad()
    return [float(parameter.sum()) for parameter in model.parameters()]


def test_a_gather_comes_after_the_second_legs_of_all_reductions():
    first, *others = run_ranks(4, _gathered_behind_reductions)
    assert others == [first] * 3


def _evaluated_alone(rank: int, world_size: int) -> list[float]:
    """Second legs of gathers leave at other times on other ranks, and rank 0 alone goes on with what it has then."""
    import torch.distributed as dist
    from zero_optim.comm.handle import SecondLegs

    _, opt = make(on_mesh(Run(stage=2), make_mesh(2, 2), state_over="all", bucket_cap_mb=0.01), model := Net())
    opt.attach(model)
    losses = []
    late = mock.patch.object(SecondLegs, "issue_arrived", lambda legs, seconds: None)
    for step in range(4):
        loss_of(model, tokens(rank, step)).backward()
        with late if rank % 2 == step % 2 else nullcontext():
            opt.step()
        if rank == 0:
            losses.append(float(loss_of(model, tokens(0, 0))))
        dist.barrier()
        opt.zero_grad()
    losses.append(float(loss_of(model, tokens(0, 0))))
    return losses[-1:] if rank else losses


def test_after_a_step_one_rank_can_go_on_alone():
    first, *others = run_ranks(4, _evaluated_alone)
    assert first[0] > first[1] > first[2] > first[3] == first[4]
    assert others == [first[4:]] * 3


# -- what does not fit -------------------------------------------------------------------------------------------


def _refused(rank: int, world_size: int) -> list[str]:
    def told(mesh: object, stage: int = 2) -> str:
        with pytest.raises(ValueError) as caught:
            zero_optim.ShardedAdamW(make_parameters(), stage=stage, mesh=mesh)
        return str(caught.value)

    names = ("a", "b", "c")
    three = init_device_mesh("cpu", (1, 2, 2), mesh_dim_names=names)
    both = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_replicate", "pp_replicate"))
    alone = init_device_mesh("cpu", (4, 1), mesh_dim_names=("replicate", "shard"))
    turned = DeviceMesh("cpu", torch.tensor([[1, 0], [3, 2]]))
    messages = [told(mesh) for mesh in (three, both, alone, turned)]
    with pytest.raises(ValueError, match='state_over="all" with stage=0'):
        zero_optim.ShardedAdamW(make_parameters(), stage=0, mesh=alone, state_over="all")
    with pytest.raises(ValueError, match="state_over must be"):
        zero_optim.ShardedAdamW(make_parameters(), mesh=alone, state_over="replicate")
    with pytest.raises(ValueError, match='at stage 1 or 2 with state_over="all"'):
        zero_optim.shard_module(Net(), (Block,), mesh=alone, state_over="all")
    square = make_mesh(2, 2)
    model = zero_optim.shard_module(Net(), (Block,), mesh=square)
    other = init_device_mesh("cpu", (2, 2), mesh_dim_names=("shard", "replicate"))
    with pytest.raises(ValueError) as caught:
        zero_optim.ShardedAdamW(model.parameters(), mesh=other)
    with pytest.raises(ValueError, match="give it to shard_module"):
        zero_optim.ShardedAdamW(model.parameters(), state_over="all")
    with pytest.raises(TypeError, match="give a DeviceMesh"):
        zero_optim.ShardedAdamW(make_parameters(), mesh="replicate")
    with pytest.raises(zero_optim.RankMismatchError, match="mesh=None.*mesh="):
        zero_optim.ShardedAdamW(make_parameters(), mesh=square if rank else None)
    with pytest.raises(zero_optim.RankMismatchError, match="state_over"):
        zero_optim.ShardedAdamW(make_parameters(), mesh=square, state_over="all" if rank else "shard")
    zero_optim.ShardedAdamW(make_parameters(), stage=0, mesh=alone).close()
    # With one rank in a row all four shard, as without a mesh.
    opt = zero_optim.ShardedAdamW(make_parameters(), mesh=alone, state_over="all")
    assert opt.engine.sharding.shard_count == 4
    opt.close()
    return [*messages, str(caught.value)]


def test_a_mesh_that_does_not_fit_is_refused_by_name():
    three, both, alone, turned, other = run_ranks(4, _refused)[0]
    assert "3" in three and "['a', 'b', 'c']" in three
    assert "dp_replicate" in both and "pp_replicate" in both
    assert "'shard'" in alone and "one rank" in alone and "stage=0" in alone
    assert "[1, 0]" in turned and "ascending" in turned
    assert "[[0, 1], [2, 3]]" in other and "[[0, 2], [1, 3]]" in other


def _named_the_other_way(rank: int, world_size: int) -> tuple[list, list]:
    """Dimensions are told by their names first."""
    turned = init_device_mesh("cpu", (2, 3), mesh_dim_names=("dp_shard", "dp_replicate"))
    unnamed = init_device_mesh("cpu", (2, 3))
    return list(read_rows(turned)), list(read_rows(unnamed))


def test_which_dimension_repeats_is_told_by_name_else_the_first():
    turned, unnamed = run_ranks(6, _named_the_other_way)[0]
    assert turned == [(0, 3), (1, 4), (2, 5)]
    assert unnamed == [(0, 1, 2), (3, 4, 5)]


def _groups_made(rank: int, world_size: int) -> list[int]:
    mesh = make_mesh(2, 2)
    counts = []
    for _ in range(3):
        params = make_parameters()
        opt = zero_optim.ShardedAdamW(params, mesh=mesh)
        linear_backward(params, make_gradients(params, rank, 0))
        opt.step()
        opt.close()
        counts.append(len(dist.distributed_c10d._world.pg_names))
    return counts


def test_the_next_optimizer_takes_over_the_groups_of_the_last():
    for counts in run_ranks(4, _groups_made):
        assert counts[1:] == counts[:-1]
