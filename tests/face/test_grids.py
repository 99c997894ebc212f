"""A mesh of two dimensions, ranks that share and ranks that repeat, against the oracle and against one dimension."""

from __future__ import annotations

import dataclasses
import itertools
import math

import eventful_cases
import pytest
import torch
from cells import slow, slow_after
from grid_cases import grid_averages, make_mesh, on_mesh
from harness import run_ranks
from oracle import Hyper, MasterAdamW, accumulate
from sharded_cases import Block, Net, Outcome, Run, loss_of, losses_and_state, make, tokens
from torch import Tensor
from training_cases import (
    DTYPES,
    SHAPES,
    TINY_CAP_MB,
    assert_bitwise,
    difference,
    linear_backward,
    make_gradients,
    make_parameters,
    of_dtype,
    train_given,
)

STEPS = 3
HYPER = Hyper(lr=1e-2, weight_decay=0.1)
ACCUMULATIONS = ((1, False), (3, True), (2, False))  # micro-batches; whether all but the last are under no_sync


@dataclasses.dataclass(frozen=True)
class Cell:
    """One training. ``absent``: each rank leaves out some gradients, others than the other ranks."""

    stage: int
    micro: int = 1
    no_sync: bool = False
    cap_mb: float = TINY_CAP_MB
    reduce_dtype: torch.dtype | None = None
    overlap: bool = True
    gather_overlap: bool = False
    absent: bool = False
    offload: str | None = None


CELLS = [
    *(
        Cell(stage, *way, (TINY_CAP_MB, 25.0)[(stage + turn) % 2])
        for stage, (turn, way) in itertools.product((1, 2), enumerate(ACCUMULATIONS))
    ),
    *(Cell(stage, 3, no_sync=True, absent=True) for stage in (1, 2)),
    *(Cell(stage, 2, no_sync=True, reduce_dtype=torch.float32, overlap=False) for stage in (1, 2)),
    Cell(2, 2, gather_overlap=True),
    *(Cell(2, 2, offload=tier) for tier in ("cpu", "paged", "nvme:{folder}")),
]


def _local(cell: Cell, like: list[Tensor], rank: int, step: int, micro: int) -> list[Tensor | None]:
    grads: list[Tensor | None] = [*make_gradients(like, rank, step, micro)]
    if cell.absent:  # the last has none on any rank in the first step
        for index in range(len(grads)):
            if (index + rank + micro) % 3 == 0 or (step == 0 and index == len(grads) - 1):
                grads[index] = None
    return grads


def _train(rank: int, cell: Cell, dtype: torch.dtype, mesh: object, folder: str = "") -> list[Tensor]:
    import zero_optim

    params = make_parameters(SHAPES, dtype, seed=rank)
    opt = zero_optim.ShardedAdamW(
        params,
        lr=HYPER.lr,
        weight_decay=HYPER.weight_decay,
        stage=cell.stage,
        mesh=mesh,
        bucket_cap_mb=cell.cap_mb,
        grad_reduce_dtype=cell.reduce_dtype,
        overlap_grad_reduce=cell.overlap,
        overlap_param_gather=cell.gather_overlap,
        state_offload=None if cell.offload is None else cell.offload.format(folder=folder),
    )
    given = lambda step, micro: _local(cell, params, rank, step, micro)  # noqa: E731
    return train_given(params, opt, STEPS, cell.micro, cell.no_sync, given)


def _expected(cell: Cell, ranks: int, dtype: torch.dtype) -> list[Tensor]:
    like = make_parameters(SHAPES, dtype)
    oracle = MasterAdamW(like, HYPER)
    for step in range(STEPS):
        local: list = [None] * ranks
        total = None
        for micro in range(cell.micro):
            for rank in range(ranks):
                local[rank] = accumulate(local[rank], _local(cell, like, rank, step, micro))
            if not cell.no_sync or micro == cell.micro - 1:
                total = accumulate(total, grid_averages(local, 2, cell.reduce_dtype))
                local = [None] * ranks
        oracle.step(total or [])
    return oracle.params


def _train_cells(rank: int, world_size: int, dtype: torch.dtype, turn: int, folder: str) -> list[list[Tensor]]:
    mesh = make_mesh(2, world_size // 2)
    return [_train(rank, cell, dtype, mesh, folder) for cell in of_dtype(CELLS, dtype, turn)]


@pytest.mark.parametrize("turn", slow_after(1, (0, 1)))
@pytest.mark.parametrize(
    ("ranks", "dtype"), [(4, torch.float32), (4, torch.bfloat16), (6, torch.float16)], ids=["fp32", "bf16", "fp16"]
)
def test_every_cell_equals_the_oracle_bit_for_bit(ranks, dtype, turn, tmp_path):
    results = run_ranks(ranks, _train_cells, dtype, turn, str(tmp_path), timeout=120)
    failures = []
    for number, cell in enumerate(of_dtype(CELLS, dtype, turn)):
        expected = _expected(cell, ranks, dtype)
        for rank in range(ranks):
            if found := difference(results[rank][number], expected):
                failures.append(f"{cell}, rank {rank}: {found}")
    assert not failures, "\n".join(failures)


# -- stage 3 -----------------------------------------------------------------------------------------------------


def _outcomes(rank: int, world_size: int, runs: list[Run]) -> list[Outcome]:
    mesh = make_mesh(2, world_size // 2)
    return [losses_and_state(rank, world_size, on_mesh(run, mesh)) for run in runs]


def _stage_3_runs(ranks: int) -> list[Run]:
    """On eight ranks those that regather a unit within two of the four that share it."""
    runs = []
    ways = ({}, {"reshard_after_forward": False}, {"reshard_after_forward": 2, "prefetch": 2}, {"param_offload": "cpu"})
    for number, shard in enumerate(ways):
        micro, no_sync = ACCUMULATIONS[number % 3]
        options = {"state_offload": "cpu"} if "param_offload" in shard else {}
        run = Run(dtype=DTYPES[number % 3], steps=2, micro=micro, no_sync=no_sync, shard=shard, options=options)
        if (ranks == 8) is (shard.get("reshard_after_forward") == 2):
            runs += [run.at(2), run]
    return runs


@pytest.mark.parametrize("ranks", [4, 8])
def test_stage_3_equals_stage_2_bit_for_bit(ranks):
    runs = _stage_3_runs(ranks)
    for outcomes in run_ranks(ranks, _outcomes, runs, timeout=180):
        for stage_2, stage_3 in zip(outcomes[::2], outcomes[1::2], strict=True):
            assert stage_3.losses == stage_2.losses
            assert_bitwise([*stage_3.parameters.values()], [*stage_2.parameters.values()])
            for index, state in stage_2.state.items():
                assert_bitwise([*stage_3.state[index].values()], [*state.values()], f"state of {index}")


# -- norms, overflow, traffic, memory ----------------------------------------------------------------------------


def _norms(rank: int, world_size: int, stage: int) -> list[tuple[float, float, float]]:
    """Of the same gradients: on a mesh, on one dimension, and by torch of the whole averages."""
    mesh = make_mesh(2, world_size // 2)
    found = []
    for norm_type in (2.0, 1.0, math.inf, 3.0):
        norms = []
        for given in (mesh, None):
            torch.manual_seed(0)
            run = Run(stage=stage)
            model, opt = make(on_mesh(run, given) if given is not None else run, Net())
            loss_of(model, tokens(rank, 0)).backward()
            norms.append(float(opt.clip_grad_norm_(1e9, norm_type)))
            opt.close()
        torch.manual_seed(0)
        whole = Net()
        (sum(loss_of(whole, tokens(other, 0)) for other in range(world_size)) / world_size).backward()
        total = torch.nn.utils.clip_grad_norm_(whole.parameters(), 1e9, norm_type)
        found.append((*norms, float(total)))
    return found


@pytest.mark.parametrize("stage", slow_after(1, (3, 1, 2)))  # norms on topologies have stages 1 and 2
def test_norms_count_each_gradient_once(stage):
    for found in run_ranks(4, _norms, stage):
        for on_grid, flat, whole in found:
            assert on_grid == pytest.approx(whole, rel=1e-5)
            assert on_grid == pytest.approx(flat, rel=1e-5)


def _overflow(rank: int, world_size: int, stage: int) -> tuple[int, float]:
    """Steps skipped, and the scale: one rank overflows in the first of two steps."""
    import zero_optim

    torch.manual_seed(0)
    run = Run(stage=stage, dtype=torch.float16)
    model, opt = make(on_mesh(run, make_mesh(2, 2)), Net())
    scaler = zero_optim.GradScaler(init_scale=2.0**10)
    before = [p.detach().clone() for p in model.parameters()] if stage < 3 else []
    for step in range(2):
        loss = loss_of(model, tokens(rank, step)) * (math.inf if rank == 3 and step == 0 else 1)
        scaler.scale(loss).backward()
        scaler.step(opt)
        scaler.update()
        opt.zero_grad()
        if step == 0 and before:
            assert all(torch.equal(p, old) for p, old in zip(model.parameters(), before, strict=True))
    skipped, scale = opt.stats()["skipped_steps"], scaler.get_scale()
    opt.close()
    return skipped, scale


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_an_overflow_on_one_rank_skips_the_step_on_all(stage):
    assert run_ranks(4, _overflow, stage) == [(1, 2.0**9)] * 4


def _sent(rank: int, world_size: int, stage: int) -> tuple[dict[str, int], dict[str, int], dict[str, int], dict]:
    """Bytes of one step, and what was planned; bytes held, and planned."""
    from zero_optim import memory

    torch.manual_seed(0)
    model, opt = make(on_mesh(Run(stage=stage), make_mesh(2, world_size // 2)), Net(width=64))

    def step() -> dict[str, int]:
        loss_of(model, tokens(rank, 0)).backward()
        opt.step()
        opt.zero_grad()
        return {kind: of["bytes"] for kind, of in opt.stats()["collectives"].items()}

    step()
    before, after = step(), step()
    planned = memory.plan_of(opt)
    kinds = ("parameters", "exp_avg", "exp_avg_sq", "gradients")
    held = {kind: opt.stats()["memory"][kind] for kind in kinds}
    opt.close()
    sent = {kind: after[kind] - before[kind] for kind in planned.traffic}
    return sent, planned.traffic, held, {kind: planned.memory[kind] for kind in kinds}


@pytest.mark.parametrize("stage", slow_after(2, (1, 3, 2)))
def test_traffic_over_either_link_and_memory_are_as_planned(stage):
    for sent, planned, held, memory in run_ranks(6, _sent, stage):
        assert sent == planned
        assert sent["all_reduce"] * 3 == sent["reduce_scatter"], "across go the shards alone"
        if stage < 3:  # gradients of stage 3 are freed after the step
            assert held == memory
        assert held["exp_avg"] == memory["exp_avg"]


# -- all that may happen -----------------------------------------------------------------------------------------


def _batch(rank: int, step: int, micro: int) -> Tensor:
    generator = torch.Generator().manual_seed((rank * 100 + step) * 10 + micro)
    return torch.randn(6, eventful_cases.WIDTH, generator=generator)


def _eventful(rank: int, world_size: int, stage: int, folder: str) -> eventful_cases.Outcome:
    data = lambda step, micro: _batch(rank, step, micro)  # noqa: E731
    return eventful_cases.train_net(rank, stage, make_mesh(2, 2), data, folder)


@pytest.mark.parametrize("stage", [0, 1, pytest.param(2, marks=slow), 3])
def test_all_that_may_happen(stage, tmp_path):
    """Overflows, absent and frozen gradients, ``no_sync``; checkpoints, whole states, state off the device."""
    outcomes = run_ranks(4, _eventful, stage, str(tmp_path))
    everything = lambda step, micro: torch.cat([_batch(rank, step, micro) for rank in range(4)])  # noqa: E731
    eventful_cases.assert_net_as_in_one_process(outcomes, everything)


# -- what does not fit -------------------------------------------------------------------------------------------


def _refused(rank: int, world_size: int) -> list[str]:
    import zero_optim
    from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

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
    square = make_mesh(2, 2)
    model = zero_optim.shard_module(Net(), (Block,), mesh=square)
    other = init_device_mesh("cpu", (2, 2), mesh_dim_names=("shard", "replicate"))
    with pytest.raises(ValueError) as caught:
        zero_optim.ShardedAdamW(model.parameters(), mesh=other)
    with pytest.raises(TypeError, match="give a DeviceMesh"):
        zero_optim.ShardedAdamW(make_parameters(), mesh="replicate")
    with pytest.raises(zero_optim.RankMismatchError, match="mesh=None.*mesh="):
        zero_optim.ShardedAdamW(make_parameters(), mesh=square if rank else None)
    zero_optim.ShardedAdamW(make_parameters(), stage=0, mesh=alone).close()
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
    from torch.distributed.device_mesh import init_device_mesh
    from zero_optim.comm.grid import read_rows

    turned = init_device_mesh("cpu", (2, 3), mesh_dim_names=("dp_shard", "dp_replicate"))
    unnamed = init_device_mesh("cpu", (2, 3))
    return list(read_rows(turned)), list(read_rows(unnamed))


def test_which_dimension_repeats_is_told_by_name_else_the_first():
    turned, unnamed = run_ranks(6, _named_the_other_way)[0]
    assert turned == [(0, 3), (1, 4), (2, 5)]
    assert unnamed == [(0, 1, 2), (3, 4, 5)]


def _groups_made(rank: int, world_size: int) -> list[int]:
    import torch.distributed as dist
    import zero_optim

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


def _a_part(rank: int, world_size: int) -> list[Tensor]:
    """Two jobs side by side, each on a mesh of its own half of the ranks."""
    from torch.distributed.device_mesh import init_device_mesh

    halves = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("job", "replicate", "shard"))
    return _train(rank % 4, Cell(2, 2), torch.float32, halves["replicate", "shard"])


def test_a_mesh_of_some_ranks():
    expected = _expected(Cell(2, 2), 4, torch.float32)
    for params in run_ranks(8, _a_part):
        assert_bitwise(params, expected)
