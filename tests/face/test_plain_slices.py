"""Tensor parallelism without DTensors: plain slices with Megatron's marks, against the whole model in one process."""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import eventful_cases
import pytest
import torch
import torch.distributed as dist
from cells import halves, slow
from harness import run_ranks
from megatron_cases import HYPER, Block, Model, loss_of, make_model, slice_of
from oracle import Hyper, MasterAdamW, accumulate, pack_rounded
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from training_cases import (
    TINY_CAP_MB,
    Planned,
    difference,
    linear_backward,
    linear_loss,
    maybe_no_sync,
    raise_in_backward,
)
from zero_optim import (
    GradientError,
    GradScaler,
    ParameterError,
    RankMismatchError,
    ShardedAdamW,
    full_model_state_dict,
    full_state_dict,
    gather_parameters,
    shard_module,
)

TENSOR = 2
Outcome = dict[str, Any]


@dataclass(frozen=True)
class Way:
    """A way to train."""

    stage: int = 2
    steps: int = 3
    micro: int = 1
    no_sync: bool = False
    clip: tuple[float, float] | None = None
    scaler: bool = False
    overflow_on: int | None = None
    """The rank whose loss is infinite in the first step."""
    options: dict[str, Any] = field(default_factory=dict)
    param_offload: str | None = None


def make_mesh(data: int, tensor: int = TENSOR) -> dist.DeviceMesh:
    return init_device_mesh("cpu", (data, tensor), mesh_dim_names=("dp", "tp"))


def make_optimizer(way: Way, model: Model, mesh: dist.DeviceMesh) -> ShardedAdamW:
    given = {"mesh": mesh["dp"], "tensor_parallel": mesh["tp"]}
    if way.stage == 3:
        shard_module(model, (Block,), **given, param_offload=way.param_offload)
        given = {}
    return ShardedAdamW(model.named_parameters(), **HYPER, **given, stage=way.stage, **way.options)


def train(rank: int, way: Way, mesh: dist.DeviceMesh) -> Outcome:
    model = make_model(mesh["tp"].get_group())
    opt = make_optimizer(way, model, mesh)
    scaler = GradScaler(init_scale=2.0**10) if way.scaler else None
    norms = []
    for step in range(way.steps):
        for micro in range(way.micro):
            with maybe_no_sync(opt, way.no_sync and micro < way.micro - 1):
                loss = loss_of(model, mesh.get_local_rank("dp"), step, micro)
                if way.overflow_on == rank and step == 0:
                    loss = loss * math.inf
                (loss if scaler is None else scaler.scale(loss)).backward()
        if way.clip is not None:
            if scaler is not None:
                scaler.unscale_(opt)
            norms.append(float(opt.clip_grad_norm_(*way.clip)))
        opt.step() if scaler is None else scaler.step(opt)
        if scaler is not None:
            scaler.update()
        opt.zero_grad()
    found = {
        "parameters": full_model_state_dict(model, rank=None),
        "norms": norms,
        "state": full_state_dict(opt, rank=None)["state"],
        "skipped": opt.stats()["skipped_steps"],
    }
    opt.close()
    return found


def alone(way: Way, data: int) -> tuple[dict[str, Tensor], list[float], dict[int, dict[str, Tensor]]]:
    model = make_model()
    opt = torch.optim.AdamW(model.parameters(), **HYPER)
    norms = []
    for step in range(way.steps):
        if way.overflow_on is not None and step == 0:
            norms.append(math.nan)
            continue
        for micro in range(way.micro):
            (sum(loss_of(model, rank, step, micro) for rank in range(data)) / data).backward()
        if way.clip is not None:
            norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), *way.clip)))
        opt.step()
        opt.zero_grad()
    return dict(model.named_parameters()), norms, opt.state_dict()["state"]


def compare(found: Outcome, way: Way, data: int, rank: int) -> None:
    parameters, norms, state = alone(way, data)
    own = rank % TENSOR
    for index, (name, whole) in enumerate(parameters.items()):
        wanted = slice_of(name, whole.detach(), own, TENSOR)
        torch.testing.assert_close(found["parameters"][name], wanted, rtol=1e-5, atol=1e-5)
        for kind in ("exp_avg", "exp_avg_sq"):
            wanted = slice_of(name, state[index][kind], own, TENSOR)
            torch.testing.assert_close(found["state"][index][kind], wanted, rtol=1e-4, atol=1e-5)
    assert found["norms"] == pytest.approx(norms, rel=1e-4, nan_ok=True)
    assert found["skipped"] == (way.overflow_on is not None)


WAYS = {
    "clipped by norm 2": Way(clip=(0.5, 2.0)),
    "clipped by the largest": Way(clip=(0.01, math.inf)),
    "clipped by norm 3, no_sync": Way(clip=(0.1, 3.0), micro=3, no_sync=True),
    "several backwards": Way(clip=(0.5, 1.0), micro=2),
    "clipped by the option": Way(options={"max_grad_norm": 1e9}),
    "an overflow on one rank": Way(scaler=True, overflow_on=3, clip=(0.5, 2.0)),
}


def outcomes(rank: int, world_size: int, ways: list[Way]) -> list[Outcome]:
    mesh = make_mesh(world_size // TENSOR)
    return [train(rank, way, mesh) for way in ways]


@pytest.mark.parametrize(
    ("stage", "turns"), [(0, (0,)), (1, (1,)), (2, (2,)), (3, (1, 2)), pytest.param(3, (0,), marks=slow)]
)
def test_trains_as_one_process_does(stage: int, turns: Sequence[int]) -> None:
    """Stage 3 in every way. Stages 0 to 2 take turns: their averages have every cell below."""
    ways = [replace(way, stage=stage) for turn, way in enumerate(WAYS.values()) if turn % 3 in turns]
    for rank, found in enumerate(run_ranks(4, outcomes, ways, timeout=120)):
        for way, of_way in zip(ways, found, strict=True):
            compare(of_way, way, 2, rank)


def test_one_data_parallel_rank_trains_as_one_process_does() -> None:
    """Terms are added up, once each, also where a rank averages with no other."""
    ways = [Way(stage, micro=2, clip=(0.5, 2.0), no_sync=no_sync) for stage in range(4) for no_sync in (False, True)]
    ways.append(Way(3, micro=2, param_offload="cpu"))
    for rank, found in enumerate(run_ranks(TENSOR, outcomes, ways, timeout=120)):
        for way, of_way in zip(ways, found, strict=True):
            compare(of_way, way, 1, rank)


# -- all that may happen -----------------------------------------------------------------------------------------------

FROZEN = ("blocks.0.inner", "blocks.1.norm")  # a slice, and what has terms


def used(step: int) -> tuple[int, ...]:
    """The blocks that are used in a step."""
    return (0,) if step == eventful_cases.ABSENT else (0, 1)


def freeze(model: Model) -> Model:
    for name in FROZEN:
        model.get_parameter(name).requires_grad_(False)
    return model


def eventful(rank: int, world_size: int, stage: int, folder: str) -> eventful_cases.Outcome:
    mesh = make_mesh(2)

    def make(**options: Any) -> eventful_cases.Job:
        model = freeze(make_model(mesh["tp"].get_group()))
        opt = make_optimizer(Way(stage, options=options), model, mesh)

        def backwards(step: int) -> None:
            for micro in range(2):
                with maybe_no_sync(opt, micro == 0):
                    loss = loss_of(model, mesh.get_local_rank("dp"), step, micro, used(step))
                    (loss * math.inf if rank == 3 and step == eventful_cases.OVERFLOW else loss).backward()

        return eventful_cases.Job(model, opt, backwards)

    return eventful_cases.train(make, folder)


@pytest.mark.parametrize("stage", [0, pytest.param(1, marks=slow), 2, 3])
def test_all_that_may_happen(stage: int, tmp_path: Path) -> None:
    """Overflows, absent and frozen gradients, ``no_sync``; checkpoints, whole states, state off the device."""
    model = freeze(make_model())

    def backwards(step: int) -> None:
        for micro in range(2):
            (sum(loss_of(model, data, step, micro, used(step)) for data in range(2)) / 2).backward()

    outcomes = run_ranks(4, eventful, stage, str(tmp_path), timeout=120)
    own = lambda rank, name, whole: slice_of(name, whole, rank % TENSOR, TENSOR)  # noqa: E731
    eventful_cases.assert_as_in_one_process(outcomes, model, backwards, part=own)


# -- bits --------------------------------------------------------------------------------------------------------------

KINDS = {
    (5, 7): "slice",
    (300, 9): "slice",
    (6,): "slice",
    (4, 4): "copy",
    (33, 8): "term",
    (7,): "term",
    (1, 300): "slice",
    (3, 1): "copy",
}
OWN = Hyper(lr=1e-2, weight_decay=0.1)


@dataclass(frozen=True)
class Cell:
    """One training with gradients that are given. ``absent``: each rank leaves out some."""

    stage: int
    micro: int = 1
    no_sync: bool = False
    cap_mb: float = TINY_CAP_MB
    reduce_dtype: torch.dtype | None = None
    overlap: bool = True
    absent: bool = False


CELLS = [
    *(Cell(stage, *way) for stage, way in itertools.product((0, 1, 2), ((1, False), (2, True), (2, False)))),
    *(Cell(stage, 2, no_sync=True, absent=True, cap_mb=25.0) for stage in (0, 1, 2)),
    *(Cell(stage, 2, no_sync=True, reduce_dtype=torch.float32, overlap=False) for stage in (0, 1, 2)),
]


def value(place: int, shape: tuple[int, ...], seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1000 * seed + place))


def initial(tensor: int) -> list[Tensor]:
    """Slices are others on each tensor-parallel rank."""
    return [value(n, shape, tensor if kind == "slice" else 0) for n, (shape, kind) in enumerate(KINDS.items())]


def given(cell: Cell, data: int, tensor: int, step: int, micro: int, dtype: torch.dtype) -> list[Tensor | None]:
    """Copies have the same gradient on all tensor-parallel ranks; of a term, some may have none."""
    grads: list[Tensor | None] = []
    for n, (shape, kind) in enumerate(KINDS.items()):
        number = 0 if kind == "copy" else tensor
        absent = cell.absent and (n + data + micro + number * (kind == "term")) % 3 == 0
        grads.append(None if absent else value(n, shape, 7 + ((data * 10 + step) * 10 + micro) * 10 + number).to(dtype))
    return grads


def train_cell(cell: Cell, dtype: torch.dtype, mesh: dist.DeviceMesh) -> list[Tensor]:
    """Copies begin with other values on each rank, and slices on each data-parallel rank: the first one's count."""
    data, tensor = mesh.get_local_rank("dp"), mesh.get_local_rank("tp")
    params = []
    for place, (own, kind) in enumerate(zip(initial(tensor), KINDS.values(), strict=True)):
        first = data == 0 and (kind == "slice" or tensor == 0)
        parameter = nn.Parameter((own if first else own + place + 1).to(dtype))
        parameter.tensor_model_parallel = kind == "slice"
        if kind == "term":
            parameter.sequence_parallel = True
        params.append(parameter)
    opt = ShardedAdamW(
        params,
        lr=OWN.lr,
        weight_decay=OWN.weight_decay,
        stage=cell.stage,
        mesh=mesh["dp"],
        tensor_parallel=mesh["tp"],
        bucket_cap_mb=cell.cap_mb,
        grad_reduce_dtype=cell.reduce_dtype,
        overlap_grad_reduce=cell.overlap,
    )
    for step in range(3):
        for micro in range(cell.micro):
            with maybe_no_sync(opt, cell.no_sync and micro < cell.micro - 1):
                linear_backward(params, given(cell, data, tensor, step, micro, dtype))
        opt.step()
        opt.zero_grad()
    opt.close()
    return [parameter.detach().clone() for parameter in params]


def average(terms: list[list[Tensor | None]], own: int, dtype: torch.dtype, kind: str) -> Tensor | None:
    """``terms[data][tensor]``: packed and rounded each; those of a row are added up first where they are terms."""
    rows = [row if kind == "term" else [row[own]] for row in terms]
    like = next((term for row in rows for term in row if term is not None), None)
    if like is None:
        return None
    total = torch.zeros(like.shape)
    for row in rows:
        packed = [pack_rounded(term, len(terms), dtype).float() for term in row if term is not None]
        if packed:
            total = total + sum(packed[1:], packed[0]).to(dtype).float()
    return total.to(dtype)


def expected(cell: Cell, data: int, tensor: int, dtype: torch.dtype) -> list[Tensor]:
    """What one tensor-parallel rank has in the end."""
    oracle = MasterAdamW([own.to(dtype) for own in initial(tensor)], OWN)
    for step in range(3):
        local: list = [[None] * TENSOR for _ in range(data)]
        total = None
        for micro in range(cell.micro):
            for d, t in itertools.product(range(data), range(TENSOR)):
                local[d][t] = accumulate(local[d][t], given(cell, d, t, step, micro, dtype))
            if not cell.no_sync or micro == cell.micro - 1:
                averages = [
                    average([[of[n] for of in row] for row in local], tensor, cell.reduce_dtype or dtype, kind)
                    for n, kind in enumerate(KINDS.values())
                ]
                if cell.stage == 0:  # there ``.grad`` shows the average, in the parameter's dtype
                    averages = [None if one is None else one.to(dtype) for one in averages]
                total = accumulate(total, averages)
                local = [[None] * TENSOR for _ in range(data)]
        oracle.step(total or [])
    return oracle.params


def train_cells(rank: int, world_size: int, dtype: torch.dtype, half: int) -> list[list[Tensor]]:
    mesh = make_mesh(world_size // TENSOR)
    return [train_cell(cell, dtype, mesh) for cell in CELLS[half::2]]


@pytest.mark.parametrize(
    ("data", "dtype", "half"), halves([(2, torch.bfloat16), (2, torch.float32), (1, torch.float16)])
)
def test_every_cell_equals_the_oracle_bit_for_bit(data: int, dtype: torch.dtype, half: int) -> None:
    failures = []
    oracle = functools.cache(lambda cell, tensor: expected(cell, data, tensor, dtype))
    for rank, found in enumerate(run_ranks(data * TENSOR, train_cells, dtype, half, timeout=120)):
        for cell, of_cell in zip(CELLS[half::2], found, strict=True):
            if differs := difference(of_cell, oracle(cell, rank % TENSOR)):
                failures.append(f"{cell}, rank {rank}: {differs}")
    assert not failures, "\n".join(failures)


# -- what happens on one rank alone ------------------------------------------------------------------------------------


def marked(shape: tuple[int, ...], *marks: str) -> nn.Parameter:
    parameter = nn.Parameter(torch.ones(shape))
    parameter.tensor_model_parallel = False
    for mark in marks:
        setattr(parameter, mark, True)
    return parameter


SLICE, TERM = "tensor_model_parallel", "sequence_parallel"


def on_one_rank(rank: int, world_size: int, stage: int) -> tuple[list[bool], str, list[Tensor]]:
    """An overflow of a copy on rank 3, which does not count it; a gradient of a slice that cannot be used, on rank 1;
    a backward that raises on one data-parallel rank before its first gradient."""
    mesh = make_mesh(2)
    params = [marked((6, 5), SLICE), marked((7,)), marked((5, 3), TERM)]
    names = ("slice", "copy", "term")
    given = {"mesh": mesh["dp"], "tensor_parallel": mesh["tp"]}
    opt = ShardedAdamW(zip(names, params, strict=True), stage=stage, **given)
    grads = [torch.full_like(parameter, 0.5) for parameter in params]
    unchanged = []
    for step in range(3):
        before = [parameter.detach().clone() for parameter in params]
        own = [grads[0], grads[1] * (math.inf if (step, rank) == (1, 3) else 1.0), grads[2]]
        linear_backward(params, own)
        opt.step()
        opt.zero_grad()
        unchanged.append(all(map(torch.equal, before, params)))
    with opt.no_sync():
        linear_backward(params, grads)
    if rank == 1:
        params[0].grad = params[0].grad.to_sparse()
    with pytest.raises(GradientError, match="'slice'|rank 1") as error:
        opt.step()
    for _ in range(2):
        opt.zero_grad()
    before = [parameter.detach().clone() for parameter in params]
    loss = linear_loss(params, grads)
    raises = rank >= 2 and stage > 0  # at stage 0 the others would wait for the average in their backward
    with pytest.raises(Planned) if raises else contextlib.nullcontext():
        (raise_in_backward(loss) if raises else loss).backward()
    for _ in range(2):
        opt.zero_grad()
    assert all(map(torch.equal, before, params))
    linear_backward(params, grads)
    norm = opt.clip_grad_norm_(1e9).item()
    opt.step()
    opt.close()
    return unchanged, str(error.value), [torch.tensor(norm), *(parameter.detach() for parameter in params)]


@pytest.mark.parametrize("stage", [0, 2])
def test_what_happens_on_one_rank_is_known_to_all(stage: int) -> None:
    norm = math.sqrt(60 * 0.5**2 + 7 * 0.5**2 + 15)  # of two slices, a copy, and a sum of two terms of 0.5
    for unchanged, told, (found, *params) in run_ranks(4, on_one_rank, stage):
        assert unchanged == [False, True, False]
        assert "slice" in told
        assert found.item() == pytest.approx(norm)
        oracle = MasterAdamW([torch.ones_like(parameter) for parameter in params])
        for _ in range(3):  # the first, the third, and the last step
            oracle.step([torch.full_like(params[0], 0.5), torch.full_like(params[1], 0.5), torch.ones_like(params[2])])
        for parameter, wanted in zip(params, oracle.params, strict=True):
            torch.testing.assert_close(parameter, wanted, rtol=1e-6, atol=1e-6)


# -- mistakes ----------------------------------------------------------------------------------------------------------


def told(kind: type[Exception], params: Any, **options: Any) -> str:
    with pytest.raises(kind) as error:
        ShardedAdamW(params, **options)
    return str(error.value)


def mistakes(rank: int, world_size: int) -> dict[str, str]:
    from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
    from torch.distributed.tensor import DTensor, Shard

    mesh = make_mesh(2)
    dp, tp = mesh["dp"], mesh["tp"]
    both = {"mesh": dp, "tensor_parallel": tp}
    cut, copy = marked((4, 3), SLICE), marked((3,))
    within = nn.Parameter(DTensor.from_local(torch.ones(2, 3), tp, [Shard(0)], run_check=False))
    named = [("fc.weight", cut), ("norm", copy)]
    model = make_model(tp.get_group())
    found = {
        "nobody said": told(ParameterError, named, mesh=dp),
        "nobody said, of all ranks": told(ParameterError, named),
        "nobody said, of a term": told(ParameterError, [("norm", marked((3,), TERM))], mesh=dp),
        "a whole mesh": told(ValueError, named, mesh=dp, tensor_parallel=mesh),
        "a text": told(TypeError, named, mesh=dp, tensor_parallel="tp"),
        "the default group": told(ValueError, named, tensor_parallel=tp),
        "the same dimension": told(ValueError, named, mesh=tp, tensor_parallel=tp.get_group()),
        "no marks": told(ParameterError, [("fc.weight", nn.Parameter(torch.ones(3)))], **both),
        "a slice with terms": told(ParameterError, [("fc.weight", marked((4, 3), SLICE, TERM))], **both),
        "a mean": told(ParameterError, [("q", marked((3,), "average_gradients_across_tp_domain"))], **both),
        "other marks": told(RankMismatchError, [("fc.weight", marked((4, 3), *((SLICE,) * (rank % 2))))], **both),
        "other sizes": told(RankMismatchError, [("fc.weight", marked((4 + rank % 2, 3), SLICE))], **both),
        "on some ranks": told(
            RankMismatchError, [("norm", copy)], mesh=dp, **({"tensor_parallel": tp} if rank < 2 else {})
        ),
        "another mesh of DTensors": told(ValueError, [("fc.weight", within)], mesh=dp, tensor_parallel=dp),
        "beside DTensors": told(ParameterError, [("fc.weight", within), ("other", cut)], mesh=dp),
        "a term of experts": told(
            ParameterError,
            [
                {"params": [("fc.weight", cut)]},
                {"params": [("bias", marked((3,), TERM))], "mesh": tp, "grad_divisor": 2},
            ],
            **both,
        ),
        "a second copy": told(ParameterError, [("fc.weight", cut), ("head", marked((3,), "shared"))], **both),
    }
    with pytest.raises(ParameterError) as error:
        shard_module(model, (Block,), mesh=dp)
    found["shard_module was not told"] = str(error.value)
    shard_module(model, (Block,), **both)
    found["shard_module was told other ranks"] = told(ValueError, model.named_parameters(), tensor_parallel=dp)
    opt = ShardedAdamW([("norm", marked((3,)))], mesh=dp)
    with pytest.raises(ParameterError) as error:
        opt.add_param_group({"params": [("added", marked((4, 3), SLICE))]})
    found["added"] = str(error.value)
    opt.close()
    opt = ShardedAdamW(named, **both)
    module = nn.ParameterDict({name.replace(".", "_"): parameter for name, parameter in named})
    with pytest.raises(ParameterError) as error:
        get_optimizer_state_dict(module, opt)
    found["torch.distributed.checkpoint"] = str(error.value)
    opt.close()
    return found


def test_mistakes_are_told_on_every_rank() -> None:
    expected = {
        "nobody said": "'fc.weight' has tensor_model_parallel = True, and which ranks have the other slices is not "
        "known: give the optimizer, or shard_module, tensor_parallel=world_mesh['tp']",
        "nobody said, of all ranks": "tensor_parallel=world_mesh['tp'], or a process group: of one rank, where nothing",
        "nobody said, of a term": "'norm' has sequence_parallel = True, and which ranks have the other slices",
        "a whole mesh": "tensor_parallel is a mesh of 2 dimensions, ('dp', 'tp')",
        "a text": "tensor_parallel is a str: give a DeviceMesh, as mesh['tp'], or a process group",
        "the default group": "several of the same. Give the other dimension, as mesh=world_mesh['dp']",
        "the same dimension": "several of the same. Give the other dimension, as mesh=world_mesh['dp']",
        "no marks": "none of the parameters has a mark, 'fc.weight' for one",
        "a slice with terms": "'fc.weight' has tensor_model_parallel = True, sequence_parallel = True",
        "a mean": "'q' has average_gradients_across_tp_domain = True: the mean of a gradient",
        "other marks": "rank 1 has 'fc.weight': (4, 3) torch.float32, tensor_model_parallel = True of group 0",
        "other sizes": "rank 1 has 'fc.weight': (5, 3) torch.float32, tensor_model_parallel = True of group 0",
        "on some ranks": "of DTensors or with tensor_parallel",
        "another mesh of DTensors": "leave tensor_parallel out",
        "beside DTensors": "'other' has tensor_model_parallel = True, and other parameters are DTensors",
        "a term of experts": "'bias' has sequence_parallel = True, and is in a group of experts",
        "a second copy": "'head' has shared = True, which marks a second copy of what another stage counts, and there",
        "shard_module was not told": "'blocks.0.norm' has sequence_parallel = True, and which ranks",
        "shard_module was told other ranks": "give the optimizer the same tensor_parallel as shard_module, or none",
        "added": "'added' has tensor_model_parallel = True, and which ranks have the other slices is not known",
        "torch.distributed.checkpoint": "'fc.weight' is a plain slice, of which other tensor-parallel ranks",
    }
    for found in run_ranks(4, mistakes):
        assert found.keys() == expected.keys()
        for case, text in expected.items():
            assert text in found[case], f"{case}: {found[case]}"


def nothing_cut(rank: int, world_size: int) -> bool:
    """With one tensor-parallel rank Megatron marks slices, and they are wholes."""
    mesh = make_mesh(2, 1)
    outcomes = []
    for marks in (True, False):
        model = make_model()
        if not marks:
            for parameter in model.parameters():
                vars(parameter).clear()
        given = {"tensor_parallel": mesh["tp"]} if marks else {}
        opt = ShardedAdamW(model.named_parameters(), **HYPER, mesh=mesh["dp"], **given)
        loss_of(model, rank, 0).backward()
        norm = opt.clip_grad_norm_(0.1)
        opt.step()
        opt.close()
        outcomes.append([norm, *(parameter.detach() for parameter in model.parameters())])
    torch.testing.assert_close(*outcomes, rtol=1e-6, atol=1e-7)
    return True


def test_marks_where_nothing_is_cut_change_nothing() -> None:
    assert run_ranks(2, nothing_cut) == [True, True]


def from_meta(rank: int, world_size: int) -> Outcome:
    """Parameters that ``shard_module`` makes anew have the marks of those on ``meta``."""
    mesh = make_mesh(2)
    group, values = mesh["tp"].get_group(), make_model(mesh["tp"].get_group())
    with torch.device("meta"):
        model = make_model(None if group is None else group)
    modules = dict(values.named_modules())
    names = {module: name for name, module in model.named_modules()}

    def fill(module: nn.Module) -> None:
        with torch.no_grad():
            for name, parameter in module.named_parameters(recurse=False):
                parameter.copy_(modules[names[module]].get_parameter(name))

    shard_module(model, (Block,), mesh=mesh["dp"], tensor_parallel=mesh["tp"], init_fn=fill)
    opt = ShardedAdamW(model.named_parameters(), **HYPER)
    norms = []
    for step in range(3):
        loss_of(model, mesh.get_local_rank("dp"), step).backward()
        norms.append(float(opt.clip_grad_norm_(0.5)))
        opt.step()
        opt.zero_grad()
    with gather_parameters(model):
        found = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    return {
        "parameters": found,
        "norms": norms,
        "state": full_state_dict(opt, rank=None)["state"],
        "skipped": opt.stats()["skipped_steps"],
    }


def test_a_model_from_meta_keeps_its_marks() -> None:
    for rank, found in enumerate(run_ranks(4, from_meta)):
        compare(found, Way(clip=(0.5, 2.0)), 2, rank)
