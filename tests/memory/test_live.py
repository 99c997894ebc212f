"""What is planned of an optimizer that is there, beside what ``track`` measures; and where memory runs out."""

from __future__ import annotations

import contextlib
from typing import Any
from unittest import mock

import pytest
import torch
import zero_optim
from cells import pairs, pairs_of
from grid_cases import make_mesh
from harness import run_ranks
from sharded_cases import Block, Net, loss_of, tokens
from torch.distributed.device_mesh import init_device_mesh
from zero_optim import memory
from zero_optim.comm import transport
from zero_optim.errors import OutOfMemoryError, RankMismatchError
from zero_optim.params.flat_params import FlatParams
from zero_optim.step.shard_state import ShardState

OF_THE_CPU = "[enforce fail at alloc_cpu.cpp:124] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to"


def make(stage: int, dtype: torch.dtype, frozen: bool = False, **options: Any) -> tuple[Net, Any]:
    torch.manual_seed(0)
    model = Net(width=200, depth=6).to(dtype)
    model.embedding.requires_grad_(not frozen)
    if "state_over" in options:
        options["mesh"] = make_mesh(2, 2)
    if stage == 3:
        both = ("state_offload", "device_budget", "grad_accumulation_dtype")
        of_optimizer = {name: options.pop(name) for name in both if name in options}
        zero_optim.shard_module(model, (Block,), **options)
        options = of_optimizer
    return model, zero_optim.ShardedAdamW(model.named_parameters(), stage=stage, **options)


def train(rank: int, model: Net, opt: Any, steps: int = 2) -> None:
    for step in range(steps):
        loss_of(model, tokens(rank, step)).backward()
        opt.step()
        opt.zero_grad()


# -- planned against measured ----------------------------------------------------------------------------------------


def differences(rank: int, world_size: int, stage: int, dtype: torch.dtype, options: dict[str, Any]) -> dict[str, Any]:
    """By kind and collective, what is planned and what is measured, where they differ."""
    model, opt = make(stage, dtype, **options)
    with memory.track() as tracker:
        train(rank, model, opt, steps=1)
        first = opt.stats()["collectives"]  # at stage 3 it gathers for the second, too
        train(rank, model, opt, steps=1)
        planned = memory.plan_of(opt)  # the buckets are laid out in the order that the first step has seen
    assert (planned.job.rank, planned.job.device) == (rank, "cpu")
    both, none = opt.stats()["collectives"], {"bytes": 0, "calls": 0}
    moved, calls = (
        {kind: of[key] - first.get(kind, none)[key] for kind, of in both.items()} for key in ("bytes", "calls")
    )
    assert {kind: calls[kind] for kind in planned.calls} == planned.calls
    pairs = {kind: (planned.memory.get(kind), nbytes) for kind, nbytes in tracker.peak.items()}
    pairs |= {kind: (nbytes, moved[kind]) for kind, nbytes in planned.traffic.items()}
    off_device = opt.stats()["state_offload"]
    of_params = {"host": 0, "disk": 0, **opt.stats()["param_offload"]}
    for kind in ("host", "disk"):
        pairs[kind] = (getattr(planned, kind), off_device[kind] + of_params[kind])
    opt.close()
    assert sum(tracker.peak.values()) > 10**6
    return {kind: pair for kind, pair in pairs.items() if pair[0] != pair[1]}


@pytest.mark.parametrize(
    ("stage", "world_size", "dtype", "frozen"),
    pairs((0, 1, 2, 3), (1, 2), (torch.bfloat16, torch.float32), (False, True)),
)
def test_what_is_planned_is_what_is_measured(stage, world_size, dtype, frozen):
    """To the byte, by kind and by collective."""
    assert run_ranks(world_size, differences, stage, dtype, {"frozen": frozen}) == [{}] * world_size


@pytest.mark.parametrize(
    ("stage", "options"),
    [
        (2, {"bucket_cap_mb": 0.05, "grad_reduce_dtype": torch.float32}),
        (0, {"grad_accumulation_dtype": torch.float32}),
        (1, {"grad_accumulation_dtype": torch.float32}),
        (2, {"grad_accumulation_dtype": torch.float32}),
        (2, {"ema_decay": (0.9, 0.99), "state_offload": "cpu"}),
        (3, {"grad_accumulation_dtype": torch.float32}),
        (3, {"prefetch": 2}),
        (3, {"reshard_after_forward": False}),
    ],
)
def test_options_are_planned(stage, options):
    assert run_ranks(2, differences, stage, torch.bfloat16, options) == [{}] * 2


STORES = {
    None: {},
    "cpu": {"state_offload": "cpu"},
    "paged": {"state_offload": "paged", "device_budget": 2_000_000},
    "nvme": {},
}
OFF_THE_DEVICE = pairs_of(
    (stage, dtype, store, params)
    for stage in (1, 2, 3)
    for dtype in (torch.bfloat16, torch.float32)
    for store in STORES
    for params in ((None, "cpu", "nvme") if stage == 3 else (None,))
    if store or params
)


@pytest.mark.parametrize(("stage", "dtype", "store", "params"), OFF_THE_DEVICE)
def test_what_is_off_the_device_is_planned(stage, dtype, store, params, tmp_path):
    """To the byte. Of a disk pages and buffers are whole blocks of 4096 bytes, which is less than 1 % here."""
    folder = f"nvme:{tmp_path}"
    options = {**STORES[store]} | ({"param_offload": folder if params == "nvme" else params} if params else {})
    if store == "nvme":
        options["state_offload"] = folder
    for of_rank in run_ranks(2, differences, stage, dtype, options):
        if "nvme" not in (store, params):
            assert of_rank == {}
        assert set(of_rank) <= {"host", "disk"}
        for planned, measured in of_rank.values():
            assert planned <= measured < 1.01 * planned


@pytest.mark.parametrize(
    ("stage", "options"),
    [
        (1, {"grad_reduce_dtype": torch.float32}),
        (2, {"bucket_cap_mb": 0.05}),
        (2, {"state_offload": "cpu"}),
        (3, {"frozen": True}),
        (3, {"state_offload": "paged", "device_budget": 0, "param_offload": "cpu"}),
    ],
)
def test_state_over_all_ranks_of_a_mesh_is_planned(stage, options):
    """To the byte, as all the others."""
    assert run_ranks(4, differences, stage, torch.bfloat16, {"state_over": "all", **options}) == [{}] * 4


def test_on_three_ranks():
    assert run_ranks(3, differences, 3, torch.bfloat16, {}) == [{}] * 3


def test_the_table_has_both():
    model, opt = make(2, torch.bfloat16)
    with memory.track() as tracker:
        train(0, model, opt, 1)
        assert tracker.now() == {**opt.stats()["memory"]}
    said = tracker.table(memory.plan_of(opt))
    (line,) = (line.split() for line in said.splitlines() if line.split()[0] == "parameters")
    nbytes = 2 * sum(p.numel() for p in model.parameters())
    assert line[1:] == [f"{nbytes / 1e6:.2f}", f"{nbytes / 1e6:.2f}", "+0.00%"] and nbytes > 10**6
    assert said.startswith("  MB a rank")
    opt.close()


def test_tracking_sees_optimizers_that_come_and_go():
    with memory.track() as tracker:
        assert tracker.now() == {}
        model, opt = make(1, torch.float32)
        train(0, model, opt, 1)
        opt.close()
        assert tracker.now() == {}
    assert tracker.peak["exp_avg"] == 4 * sum(p.numel() for p in model.parameters())


# -- out of memory -----------------------------------------------------------------------------------------------------


def full() -> mock._patch:
    return mock.patch.object(FlatParams, "__init__", side_effect=RuntimeError(f"{OF_THE_CPU} allocate 12 bytes"))


def full_for_state(method: str) -> mock._patch:
    return mock.patch.object(ShardState, method, side_effect=torch.OutOfMemoryError("CUDA out of memory. Tried"))


def raised(call: Any) -> tuple[str, str, bool]:
    """Class and message of what the call raises, and whether it came of another error."""
    with pytest.raises(RuntimeError) as caught:
        call()
    return type(caught.value).__name__, str(caught.value), caught.value.__cause__ is not None


def test_construction_out_of_memory():
    with full():
        name, said, has_cause = raised(lambda: make(2, torch.bfloat16))
    assert (name, has_cause) == ("OutOfMemoryError", True)
    assert "as the optimizer was made: [enforce fail" in said
    assert "stage 2, 1 rank" in said and "  exp_avg_sq" in said and "model state" in said
    assert 'What takes less: state_dtype="int8"' in said
    assert issubclass(OutOfMemoryError, torch.OutOfMemoryError)
    make(2, torch.bfloat16)[1].close()  # the parameters of a failed one are free again


def test_other_errors_pass():
    with mock.patch.object(FlatParams, "__init__", side_effect=RuntimeError("shape mismatch")):
        assert raised(lambda: make(2, torch.bfloat16))[:2] == ("RuntimeError", "shape mismatch")


def test_the_first_step_out_of_memory_and_no_later_one():
    model, opt = make(2, torch.bfloat16)
    loss_of(model, tokens(0, 0)).backward()
    with full_for_state("begin_update"):
        name, said, _ = raised(opt.step)
    assert name == "OutOfMemoryError" and "in the first step: CUDA out of memory" in said
    opt.step()
    with full_for_state("begin_update"):
        assert raised(opt.step)[0] == "OutOfMemoryError"
        assert "model state" not in raised(opt.step)[1]  # torch's own: all the memory that it takes is there by then
    opt.close()


def one_rank_fails(rank: int, world_size: int, when: str) -> list[tuple[str, str]]:
    """What is raised where memory runs out on rank 1; and by the next step of an optimizer that is there."""
    fails = {"construction": full, "state": lambda: full_for_state("__init__"), "first step": full}[when]
    if when != "first step":
        with fails() if rank == 1 else contextlib.nullcontext():
            return [raised(lambda: make(1, torch.bfloat16))[:2]]
    model, opt = make(1, torch.bfloat16)
    opt.engine.reducer._counts.agree = lambda reports, order: order[::-1]  # for which buckets are laid out anew
    loss_of(model, tokens(rank, 0)).backward()
    with fails() if rank == 1 else contextlib.nullcontext():
        first = raised(opt.step)[:2]
    model.zero_grad()
    loss_of(model, tokens(rank, 0)).backward()
    second = raised(opt.step)[:2]
    opt.close()
    return [first, second]


@pytest.mark.parametrize("when", ["construction", "state", "first step"])
def test_the_other_rank_does_not_wait(when):
    here, there = run_ranks(2, one_rank_fails, when)
    (name, said), (failed, explained) = here[0], there[0]
    assert failed == "OutOfMemoryError" and "stage 1, 2 ranks" in explained
    assert "stage=2 fits: " in explained
    assert name == RankMismatchError.__name__ and "rank 1 failed with" in said
    assert here[1:] == there[1:]
    assert all(name == "ZeroOptimError" and "make a new optimizer" in said for name, said in here[1:])


def _communicating_groups(rank: int, world_size: int, job: memory.Job) -> int:
    """How many groups of a rank a collective of the device is issued in, up to the first step."""
    used: Any = transport.used()
    parts = {"pp": job.pipeline, "replicate": job.replicas, "shard": job.data // job.replicas, "tp": job.tensor}
    mesh = init_device_mesh("cpu", (*parts.values(),), mesh_dim_names=(*parts,))
    model = Net()
    for parameter in model.parameters() if job.tensor > 1 else ():
        parameter.tensor_model_parallel, parameter.partition_dim = parameter.ndim > 1, 0
    cut = mesh["tp"] if job.tensor > 1 else None
    averaged = mesh["replicate", "shard"] if job.replicas > 1 else mesh["shard"]
    pipeline = mesh["pp"] if job.pipeline > 1 else None
    if job.stage == 3:
        reshard = job.reshard_after_forward
        given = {"mesh": averaged, "state_over": job.state_over, "tensor_parallel": cut}
        zero_optim.shard_module(model, (Block,), **given, reshard_after_forward=reshard)
        averaged = None
    given = {"mesh": averaged, "state_over": job.state_over, "tensor_parallel": cut, "pipeline": pipeline}
    opt = zero_optim.ShardedAdamW(model.named_parameters(), stage=job.stage, **given)
    loss_of(model, tokens(rank, 0)).backward()
    opt.step()
    opt.close()
    return len({entry.group for entry in used.issued if entry.kind not in ("barrier", "gather_objects")})


@pytest.mark.parametrize(
    ("job", "count"),
    [
        (memory.Job(world=1), 0),
        (memory.Job(world=2, stage=0), 2),
        (memory.Job(world=2, stage=2), 2),
        (memory.Job(world=2, stage=3), 3),
        (memory.Job(world=4, stage=2, replicas=2), 4),
        (memory.Job(world=4, stage=3, replicas=2), 7),
        (memory.Job(world=4, stage=2, replicas=2, state_over="all"), 4),
        (memory.Job(world=4, stage=3, replicas=2, state_over="all"), 7),
        (memory.Job(world=4, stage=3, reshard_after_forward=2), 4),
        (memory.Job(world=4, stage=2, tensor=2), 4),
        (memory.Job(world=4, stage=3, tensor=2), 7),
        (memory.Job(world=2, stage=2, tensor=2), 4),  # one of this rank alone: plain slices are reduced on one, too
        (memory.Job(world=4, stage=2, pipeline=2, accumulate=2), 3),
        (memory.Job(world=2, stage=2, pipeline=2, accumulate=2), 1),
    ],
)
def test_communicators_are_counted(job: memory.Job, count: int) -> None:
    assert memory.plan(memory.of_decoder(memory.KNOWN["gpt2"], torch.bfloat16), job).communicators == count
    assert run_ranks(job.world, _communicating_groups, job, simulated="late") == [count] * job.world
