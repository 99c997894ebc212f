"""``check_replicas`` and ``check_replicas_every``: a bit that differs between ranks is found, and no other thing is."""

from __future__ import annotations

import contextlib
import itertools
import re
from typing import Any

import pytest
import torch
import torch.distributed as dist
import zero_optim
from cells import slow_where
from eventful_cases import local
from harness import run_ranks
from simulated_gpu.switch import LATE, the_device
from topology_cases import TOPOLOGIES, mesh_of
from torch import Tensor, nn
from training_cases import make_parameters
from zero_optim import FlatShard, ParameterError, RankMismatchError, ShardedAdamW, check_replicas

STEPS = 3

# -- every topology ----------------------------------------------------------------------------------------------------


def error_of(call: Any, *args: Any) -> str:
    try:
        call(*args)
    except RankMismatchError as error:
        return str(error)
    return ""


def built(name: str, stage: int, **options: Any) -> tuple[Any, Any]:
    job = TOPOLOGIES[name].make(torch.float32)
    return job, ShardedAdamW(job.groups_at(stage), lr=1e-2, stage=stage, **job.given, **job.options, **options)


def held(model: nn.Module) -> dict[str, Tensor]:
    """This rank's part of each parameter, flat, by its name."""
    named = model.named_parameters()
    return {name: p.local if isinstance(p, FlatShard) else local(p).data.view(-1) for name, p in named}


def drift(values: Tensor) -> None:
    """By one unit in the last place of the last element."""
    values[-1:].view(torch.int32).bitwise_xor_(1)


def drifted(rank: int, world_size: int, name: str, stage: int) -> list[tuple[str, list[bool], list[str]]]:
    """Of each parameter of the last rank: whether both faces have to find it, and what they raise where it drifts."""
    job, opt = built(name, stage, check_replicas_every=1)
    for step in range(STEPS):
        job.backwards(opt, step, lambda loss: loss)
        opt.step()
        check_replicas(job.model)
        opt.zero_grad()
    trained = {opt.engine.parameters.name(index) for index in opt.engine.parameters.trained}
    every: list[Any] = [None] * world_size
    dist.all_gather_object(every, ({of: values.numpy().tobytes() for of, values in held(job.model).items()}, trained))
    found, (last, trained) = [], every[-1]
    for own in sorted(last):
        equal = last[own] != b"" and sum(of_rank.get(own) == last[own] for of_rank, _ in every) > 1
        if rank == world_size - 1:
            drift(held(job.model)[own])
        messages = [error_of(check_replicas, opt)]
        if own in trained:
            job.backwards(opt, STEPS, lambda loss: loss)
            messages.append(error_of(opt.step))
            opt.zero_grad()
        if rank == world_size - 1:
            drift(held(job.model)[own])
        assert error_of(check_replicas, opt) == "", "it was made undone"
        found.append((own, [equal] * len(messages), messages))
    opt.close()
    return found


CELLS = [(name, stage) for name, of in TOPOLOGIES.items() for stage in of.stages]
# Eight ranks take a minute on two cores.
SMALL = {name: of for name, of in TOPOLOGIES.items() if of.ranks <= 4}
FIRST = [(name, of.stages[number % len(of.stages)]) for number, (name, of) in enumerate(SMALL.items())]


@pytest.mark.parametrize(("name", "stage"), slow_where(lambda cell: cell not in FIRST, CELLS))
def test_a_bit_of_one_rank_is_found_and_named_on_every_topology(name: str, stage: int) -> None:
    of_rank = run_ranks(TOPOLOGIES[name].ranks, drifted, name, stage, timeout=180)
    nothing = name == "pipeline of two ranks" or (stage == 3 and not re.search("tensor|plain|hybrid", name))
    for rank, found in enumerate(of_rank):
        assert any(all(wanted) for _, wanted, _ in found) is not nothing
        for own, wanted, messages in found:
            assert [bool(message) for message in messages] == wanted, f"{own} on rank {rank}: {messages}"
            for message in messages if rank == len(of_rank) - 1 else ():
                assert not message or (own in message and re.search(rf"\b{rank}\b", message)), f"{own}: {message}"


# -- bytes -------------------------------------------------------------------------------------------------------------

SHAPES = ((17, 9), (300,), (5, 7), (0,), (3,))
NAN = 0x7FC0  # of bf16


def write(values: Tensor, number: int) -> None:
    values.data.view(-1)[:1].view(torch.int16).fill_(number - (number >> 15 << 16))


CHANGES: dict[str, tuple[int, int]] = {
    "a sign of zero": (0x0000, 0x8000),
    "another payload": (NAN, NAN + 1),
    "a bit": (0x3F80, 0x3F81),
    "the same NaN": (NAN, NAN),
    "the same zero": (0x8000, 0x8000),
}


def of_one_element(rank: int, world_size: int) -> dict[str, list[str]]:
    """Three ranks write the first bits, then rank 1 the second ones; and two elements that change places."""
    found = {}
    params = make_parameters(SHAPES, torch.bfloat16)
    opt = ShardedAdamW([(f"p{n}", p) for n, p in enumerate(params)], check_replicas_every=1, skip_nonfinite=False)
    for change, numbers in CHANGES.items():
        before = params[4].detach().clone()
        write(params[4], numbers[rank == 1])
        found[change] = [error_of(check_replicas, opt), error_of(opt.step)]
        params[4].data.copy_(before)
    if rank == 1:
        params[1].data[:2] = params[1].data[:2].flip(0)
    found["places"] = [error_of(check_replicas, opt), error_of(opt.step)]
    return found


def test_bits_count_and_not_values() -> None:
    for found in run_ranks(3, of_one_element):
        for change, messages in found.items():
            name = "p1" if change == "places" else "p4"
            wanted = "" if "same" in change else f"'{name}' on ranks [1] differs from that on ranks [0, 2]: these"
            assert all(message.startswith(wanted) and bool(message) is bool(wanted) for message in messages), change


def divided(rank: int, world_size: int) -> list[tuple[str, str]]:
    """In every division of the ranks in two, and in three, one part drifts and another one further."""
    params = make_parameters(SHAPES)
    opt = ShardedAdamW(params, check_replicas_every=1)
    found = []
    for versions in itertools.product(range(3), repeat=world_size):
        if len(set(versions)) > 1:
            params[0].data.view(-1)[7:8].view(torch.int32).bitwise_xor_(versions[rank])
            first = [other for other, version in enumerate(versions) if version != versions[rank]]
            found.append((f"ranks {first}" if len(set(versions)) == 2 else "", error_of(opt.step)))
            params[0].data.view(-1)[7:8].view(torch.int32).bitwise_xor_(versions[rank])
    return found


def test_ranks_with_two_versions_or_three_never_cancel() -> None:
    for found in run_ranks(4, divided):
        assert len(found) == 78 and all(message and words in message for words, message in found)


# -- what is not at rest, or not on the device -------------------------------------------------------------------------

STORES: dict[str, tuple[int, dict[str, Any], dict[str, Any]]] = {
    "stage 0": (0, {}, {"state_dtype": "int8"}),
    "on the CPU": (0, {}, {"state_offload": "cpu"}),
    "paged": (0, {}, {"state_offload": "paged", "device_budget": 0, "master": "fp32"}),
    "nvme": (0, {}, {"state_offload": "nvme:/tmp"}),
    "replicas": (2, {}, {}),
    "replicas of units": (3, {}, {"ema_decay": 0.5}),
    "parameters on the CPU": (3, {"param_offload": "cpu"}, {}),
}


def opposite(rank: int, world_size: int) -> str:
    """Both shards of a parameter are equal, and drift alike on one replica each."""
    model = nn.Linear(1, 256, bias=False)
    nn.init.zeros_(model.weight)
    mesh = mesh_of(replicate=2, shard=2)
    zero_optim.shard_module(model, (nn.Linear,), mesh=mesh)
    opt = ShardedAdamW(model, mesh=mesh, check_replicas_every=1)
    if rank in (0, 3):
        drift(held(model)["weight"])
    return error_of(opt.step)


def test_equal_shards_do_not_cancel() -> None:
    assert all("[3] differs" in message or "[2] differs" in message for message in run_ranks(4, opposite))


class Trained:
    """Three layers of bf16 in as many units or buckets, on one device."""

    def __init__(self, stage: int, of_model: dict[str, Any], options: dict[str, Any], replicas: int = 1) -> None:
        self.device = the_device()
        mesh = None if replicas == 1 else mesh_of(replicate=replicas, shard=2)
        self.model = nn.Sequential(*(nn.Linear(12, 12) for _ in range(3))).to(self.device, torch.bfloat16)
        if stage == 3:
            zero_optim.shard_module(self.model, (nn.Linear,), mesh=mesh, **of_model)
        self.opt = ShardedAdamW(self.model, stage=stage, mesh=mesh, bucket_cap_mb=0.001, **options)

    def step(self, number: int, clips: bool = False) -> str:
        x = torch.full((2, 12), 1.0 + dist.get_rank() + number, dtype=torch.bfloat16, device=self.device)
        self.model(x).float().square().sum().backward()
        if clips:
            self.opt.clip_grad_norm_(0.5)
        message = error_of(self.opt.step)
        self.opt.zero_grad()
        return message

    def drift(self) -> None:
        held(self.model)["1.bias"][:1].view(torch.int16).bitwise_xor_(1)


def in_stores(rank: int, world_size: int, name: str) -> list[str]:
    """Nothing is found in training; then state of rank 1 begins anew, and then a parameter of rank 1 drifts."""
    stage, of_model, options = STORES[name]
    job = Trained(stage, of_model, {**options, "check_replicas_every": 1}, world_size // 2)
    for step in range(STEPS):
        assert job.step(step, clips=step == 2) == ""
        assert stage != 2 or step == 0 or any(bucket.unsharding.pending for bucket in job.opt.engine.reducer.buckets)
        check_replicas(job.model)
    if rank == 1:
        job.drift()
    parameter = job.step(STEPS)
    if rank == 1:
        job.drift()
        job.opt.engine.states.restart({2, 3}, ["exp_avg"])
    state = error_of(check_replicas, job.opt)
    assert job.step(STEPS) == "", "a step compares parameters alone"
    return [parameter, state]


@pytest.mark.parametrize("name", STORES)
def test_state_and_parameters_wherever_they_are(name: str) -> None:
    """Of replicas rank 3 has the same as rank 1, but for the parameters at stage 2."""
    stage = STORES[name][0]
    differ = "on ranks [3] differs from that on ranks [1]" if stage else "on ranks [1] differs from that on ranks [0]"
    for parameter, state in run_ranks(4 if stage else 2, in_stores, name):
        of_all = "on ranks [1] differs from that on ranks [0, 2, 3]"
        assert parameter.startswith(f"'1.bias' {of_all if stage == 2 else differ}: these should be equal"), parameter
        assert re.match(rf"exp_avg\w* of '1.\w+' {re.escape(differ)}", state), state


# -- on a GPU, and what is sent ----------------------------------------------------------------------------------------


def drifting(rank: int, world_size: int, stage: int, replicas: int, every: int | None, drifts: int) -> tuple[Any, Any]:
    """The steps that raised, and what; and what was sent. A parameter of rank 1 drifts before one step, and back."""
    job, raised = Trained(stage, {}, {"check_replicas_every": every}, replicas), []
    for step in range(8):
        if rank == 1 and step == drifts:
            job.drift()
        if message := job.step(step):
            raised.append((step, message))
            if rank == 1:
                job.drift()
        if step == 2:
            job.opt.clip_grad_norm_(1.0)  # it exchanges, and nothing has waited for parameters
    check_replicas(job.opt)
    sent = {kind: (of["calls"], of["bytes"]) for kind, of in job.opt.stats()["collectives"].items()}
    if drifts < 8:
        if rank == 1:
            job.drift()
        late = pytest.warns(UserWarning, match="ranks held different bits")
        with late if job.device.type == "cuda" else contextlib.nullcontext():
            assert bool(job.step(8)) is (job.device.type == "cpu")
            job.opt.close()
    return raised, sent


GRIDS = [(0, 1), (1, 1), (2, 1), (3, 2)]


@pytest.mark.parametrize(("stage", "replicas"), GRIDS)
def test_on_a_gpu_ranks_raise_one_step_later(stage: int, replicas: int) -> None:
    for simulated in (LATE, ""):
        for raised, _ in run_ranks(2 * replicas, drifting, stage, replicas, 2, 3, simulated=simulated):
            ((step, message),) = raised
            assert step == (4 if simulated else 3), "of steps 0 to 6 the second one is compared, and so on"
            replaced = simulated and stage in (1, 2)
            other = "[3] differs from that on ranks [1]" if replicas > 1 else "[1] differs from that on ranks [0]"
            assert message.startswith("ranks held different bits" if replaced else f"'1.bias' on ranks {other}"), (
                message
            )


@pytest.mark.parametrize(("stage", "replicas"), [*GRIDS, (3, 1)])
def test_nothing_more_is_sent_but_64_numbers(stage: int, replicas: int) -> None:
    ranks = 2 * replicas
    (_, without), (_, compared) = (run_ranks(ranks, drifting, stage, replicas, every, 9)[0] for every in (None, 3))
    calls, size = without["exchange"]
    more = 0 if (stage, replicas) == (3, 1) else 64 * 4
    assert compared == {**without, "exchange": (calls, size + calls * more)}


def refused(rank: int, world_size: int) -> None:
    model = nn.Linear(3, 3)
    with pytest.raises(ParameterError, match="no open optimizer of zero_optim holds the model"):
        check_replicas(model)
    with pytest.raises(TypeError, match="was given a Tensor: give a model or a ShardedOptimizer"):
        check_replicas(model.weight.detach())
    with pytest.raises(RankMismatchError, match="check_replicas_every"):
        ShardedAdamW(model, check_replicas_every=1 + rank)
    opt = ShardedAdamW(model, ema_decay=0.5)
    with opt.swap_to_ema(), pytest.raises(zero_optim.ZeroOptimError, match="within swap_to_ema"):
        check_replicas(opt)
    opt.sleep()
    with pytest.raises(zero_optim.ZeroOptimError, match="asleep"):
        check_replicas(opt)
    opt.close()
    with pytest.raises(zero_optim.ClosedError):
        check_replicas(opt)


def test_what_cannot_be_compared_is_refused() -> None:
    run_ranks(2, refused)
