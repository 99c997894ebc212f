"""Any model, any groups, any use of the parameters, any sharding: the same training as one process with full tensors.

Gradients are such that every sum over ranks and micro-batches is exact, in any order and in every dtype, so all stages,
world sizes and schedules must give the oracle's own bits. Only a clipped step carries a coefficient that is rounded.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import os
import random
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from cells import covering, slow
from harness import run_ranks
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from oracle import FP32_EPS, Hyper, MasterAdamW
from torch import Tensor
from training_cases import (
    ROW,
    TINY_CAP_MB,
    assert_bitwise,
    assert_within,
    copies,
    linear_backward,
    make_gradients,
    make_parameters,
    maybe_no_sync,
    named,
)

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SHAPES = ((), (0,), (1,), (3,), (5, 3), (2, ROW), (ROW + 1,), (300,), (3, 0), (1, 7, 2))
RATES = (0.0, 2.0**-10, 2.0**-7)  # a tensor holds them exactly, so it makes the float's own coefficients
CLIPPED_EPS = 0.1  # lets an update feel the coefficient, and keeps it from magnifying the coefficient's last bit
BOUNDED = settings(
    derandomize=True,
    deadline=None,
    database=None,
    max_examples=25,
    report_multiple_bugs=False,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.large_base_example],
)


@dataclass(frozen=True)
class Micro:
    """One backward. ``used[rank]``: the parameters that it reaches there; none: that rank has no backward."""

    synced: bool
    used: tuple[frozenset[int], ...]


@dataclass(frozen=True)
class Clip:
    """One call of ``clip_grad_norm_``. ``subset`` None: all parameters."""

    max_norm: float
    norm_type: float
    subset: frozenset[int] | None


@dataclass(frozen=True)
class Step:
    """Backwards, clips, ``step``, ``zero_grad``. ``rate``: multiplies every group's lr from here on; ``frozen``: what
    requires no gradient in this step."""

    micros: tuple[Micro, ...]
    clips: tuple[Clip, ...] = ()
    rate: float = 1.0
    zeroed_by_model: bool = False
    frozen: frozenset[int] = frozenset()


@dataclass(frozen=True)
class Group:
    hyper: Hyper
    maximize: bool = False
    tensor_lr: bool = False


@dataclass(frozen=True)
class Program:
    """A training run. ``group_of``, ``dtypes``: by parameter; ``order``: the seed of the orders of use; ``frozen``: at
    construction; ``lazy``: ``overlap_param_gather``."""

    world_size: int
    stage: int
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[torch.dtype, ...]
    groups: tuple[Group, ...]
    group_of: tuple[int, ...]
    steps: tuple[Step, ...]
    frozen: frozenset[int] = frozenset()
    cap_mb: float = 25.0
    overlap: bool = True
    lazy: bool = False
    reduce_dtype: torch.dtype | None = None
    order: int = 0
    poison: bool = False

    @property
    def clipped(self) -> bool:
        return any(step.clips for step in self.steps)

    @property
    def has_names(self) -> bool:
        """torch wants names in all groups or in none, and an empty group has none."""
        return set(self.group_of) == set(range(len(self.groups)))

    def keys(self) -> list[Any]:
        """What each parameter is called in a state dict: its name, else its place among the groups' parameters."""
        if self.has_names:
            return [name for name, _ in named(self.shapes)]
        places = sorted(range(len(self.group_of)), key=lambda index: self.group_of[index])
        return [places.index(index) for index in range(len(self.group_of))]

    def parameters(self) -> list[torch.nn.Parameter]:
        params = [
            make_parameters([s], d, seed=i)[0] for i, (s, d) in enumerate(zip(self.shapes, self.dtypes, strict=True))
        ]
        for index in self.frozen:
            params[index].requires_grad_(False)
        return params


# -- what ranks do -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class History:
    """``params``: after each step; ``norms``: what clips returned; ``counts``: updates of each trained parameter."""

    params: list[list[Tensor]]
    norms: list[float]
    counts: dict[Any, int]


@contextmanager
def debugging(poison: bool) -> Iterator[None]:
    """``ZERO_OPTIM_DEBUG`` for what is constructed inside."""
    before = os.environ.pop("ZERO_OPTIM_DEBUG", None)
    if poison:
        os.environ["ZERO_OPTIM_DEBUG"] = "poison"
    try:
        yield
    finally:
        os.environ.pop("ZERO_OPTIM_DEBUG", None)
        if before is not None:
            os.environ["ZERO_OPTIM_DEBUG"] = before


def _group(group: Group, params: list) -> dict[str, Any]:
    hyper = group.hyper
    options = {"betas": hyper.betas, "eps": hyper.eps, "weight_decay": hyper.weight_decay}
    lr = torch.tensor(hyper.lr) if group.tensor_lr else hyper.lr
    return {"params": params, "lr": lr, **options, "maximize": group.maximize}


def make_optimizer(program: Program, params: list[torch.nn.Parameter]) -> Any:
    import zero_optim

    pairs = named(params) if program.has_names else params
    members = [[pairs[i] for i, of in enumerate(program.group_of) if of == k] for k in range(len(program.groups))]
    with debugging(program.poison):
        return zero_optim.ShardedAdamW(
            [_group(group, own) for group, own in zip(program.groups, members, strict=True)],
            stage=program.stage,
            bucket_cap_mb=program.cap_mb,
            overlap_grad_reduce=program.overlap,
            overlap_param_gather=program.lazy,
            grad_reduce_dtype=program.reduce_dtype,
            decoupled_weight_decay=program.groups[0].hyper.decoupled,
        )


def run(rank: int, world_size: int, program: Program) -> History | str:
    """An error is returned: ranks that all raise then go on with the next example in the same processes."""
    try:
        return train(rank, world_size, program)
    except Exception:
        return traceback.format_exc()


def train(rank: int, world_size: int, program: Program) -> History:
    params = program.parameters()
    opt = make_optimizer(program, params)
    order = random.Random(1000 * program.order + rank).sample(range(len(params)), len(params))
    history = History([], [], {})
    for number, step in enumerate(program.steps):
        for group in opt.param_groups:
            group["lr"] = group["lr"] * step.rate
        for index, p in enumerate(params):
            p.requires_grad_(index not in step.frozen)
        for place, micro in enumerate(step.micros):
            grads = make_gradients(params, rank, number, place, grid=world_size)
            own = [i for i in order if i in micro.used[rank]]
            with maybe_no_sync(opt, not micro.synced):
                if own:
                    linear_backward([params[i] for i in own], [grads[i] for i in own])
        for clip in step.clips:
            subset = {} if clip.subset is None else {"parameters": [params[i] for i in sorted(clip.subset)]}
            history.norms.append(float(opt.clip_grad_norm_(clip.max_norm, clip.norm_type, **subset)))
        opt.step()
        opt.wait_for_parameters()
        if step.zeroed_by_model:
            for p in params:
                p.grad = None
        else:
            opt.zero_grad()
        history.params.append(copies(params))
    history.counts.update({key: int(entry["step"]) for key, entry in opt.state_dict()["state"].items()})
    opt.close()
    return history


# -- what must come out ------------------------------------------------------------------------------------------------


def _averaged(program: Program, like: list[Tensor], number: int) -> list[Tensor | None]:
    """The exact mean over ranks of the sums over micro-batches; None for a parameter that no rank used."""
    totals: list[Tensor | None] = [None] * len(like)
    for place, micro in enumerate(program.steps[number].micros):
        for rank, used in enumerate(micro.used):
            grads = make_gradients(like, rank, number, place, grid=program.world_size)
            for index in used:
                before = totals[index]
                totals[index] = grads[index].double() + (0.0 if before is None else before)
    return [None if total is None else (total / program.world_size).float() for total in totals]


def _apply_clip(clip: Clip, grads: list[Tensor | None]) -> float:
    """Scale ``grads`` as ``torch.nn.utils.clip_grad_norm_`` does; the norm before it."""
    chosen = [i for i, g in enumerate(grads) if g is not None and (clip.subset is None or i in clip.subset)]
    values = torch.cat([torch.zeros(1)] + [grads[i].flatten() for i in chosen])
    norm = float(torch.linalg.vector_norm(values, clip.norm_type, dtype=torch.float64))
    for i in chosen:
        grads[i] = grads[i] * min(1.0, clip.max_norm / (norm + 1e-6))
    return norm


def play(program: Program) -> History:
    """The same run with full tensors on one process, which knows nothing of stages and buckets."""
    return _play(
        dataclasses.replace(program, stage=0, cap_mb=25.0, overlap=True, lazy=False, reduce_dtype=None, poison=False)
    )


@functools.lru_cache(maxsize=8)
def _play(program: Program) -> History:
    hypers = [program.groups[of].hyper for of in program.group_of]
    signs = [-1.0 if program.groups[of].maximize else 1.0 for of in program.group_of]
    oracle = MasterAdamW(program.parameters(), hypers)
    history = History([], [], {})
    for number, step in enumerate(program.steps):
        oracle.hypers = [dataclasses.replace(h, lr=h.lr * step.rate) for h in oracle.hypers]
        grads = _averaged(program, oracle.params, number)
        history.norms.extend(_apply_clip(clip, grads) for clip in step.clips)
        oracle.step([None if g is None else g * sign for g, sign in zip(grads, signs, strict=True)])
        history.params.append(copies(oracle.params))
    always_frozen = program.frozen.intersection(*(step.frozen for step in program.steps))
    for index, (key, count) in enumerate(zip(program.keys(), oracle.steps, strict=True)):
        if index not in always_frozen:
            history.counts[key] = count
    return history


def _bounds(program: Program, params: list[Tensor]) -> list[Tensor]:
    """How far a clipped run may be off: a few ulp of the coefficient in every update, then one ulp of the dtype."""
    rate = max(RATES) * max(itertools.accumulate((step.rate for step in program.steps), lambda a, b: a * b))
    fp32 = [FP32_EPS * len(program.steps) * (8 * p.float().abs() + 64 * rate) for p in params]
    ulps = [0.0 if p.dtype == torch.float32 else torch.finfo(p.dtype).eps for p in params]
    return [
        b + ulp * p.float().abs() + (2.0**-24 if ulp else 0.0) for b, p, ulp in zip(fp32, params, ulps, strict=True)
    ]


def check(program: Program, histories: list[History | str]) -> None:
    expected = play(program)
    for rank, history in enumerate(histories):
        assert not isinstance(history, str), f"rank {rank} raised: {history}"
        for number, (params, wanted) in enumerate(zip(history.params, expected.params, strict=True)):
            what = f"rank {rank}, after step {number}"
            if program.clipped:
                assert_within(params, wanted, _bounds(program, wanted), what)
            else:
                assert_bitwise(params, wanted, what)
            assert_bitwise(params, histories[0].params[number], f"{what}, against rank 0")
        assert history.norms == pytest.approx(expected.norms, rel=1e-5, abs=1e-12)
        assert history.counts == expected.counts, f"rank {rank}: updates"


# -- random programs ---------------------------------------------------------------------------------------------------


def _subset(indices: list[int]) -> st.SearchStrategy[frozenset[int]]:
    """Any of them; all of them is as likely as one set in four."""
    everything = st.just(frozenset(indices))
    return st.one_of(everything, *[st.frozensets(st.sampled_from(indices or [0]), max_size=len(indices))] * 3)


@st.composite
def _micros(draw: st.DrawFn, trainable: list[int], settled: list[int], world_size: int) -> tuple[Micro, ...]:
    """Ranks must agree on how often a step reduces: a synchronised backward reaches something that was trained before,
    unless it is the only one and the last. One under ``no_sync`` may reach nothing at any time."""
    synced = draw(st.lists(st.booleans(), min_size=1, max_size=3))
    must_reach = sum(synced) > 1 or not synced[-1]
    micros = []
    for flag in synced:
        used = [draw(_subset(trainable)) for _ in range(world_size)]
        if must_reach and flag:
            used = [own if own & set(settled) else own | set(settled[:1]) for own in used]
        micros.append(Micro(flag, tuple(used)))
    return tuple(micros)


@st.composite
def _clips(draw: st.DrawFn, trainable: list[int]) -> tuple[Clip, ...]:
    limits, types = st.sampled_from((0.25, 2.0, 1e4)), st.sampled_from((2.0, 1.0, math.inf, 3.5))
    subsets = st.one_of(st.none(), _subset(trainable))
    return tuple(Clip(draw(limits), draw(types), draw(subsets)) for _ in range(draw(st.integers(0, 2))))


@st.composite
def programs(draw: st.DrawFn) -> Program:
    world_size = draw(st.integers(1, 4))
    count = draw(st.integers(1, 6))
    some = st.frozensets(st.integers(0, count - 1), max_size=2)
    at_first = draw(st.one_of(st.just(frozenset()), some))
    thaws = draw(st.booleans())  # or what is frozen stays so
    clipped, decoupled = draw(st.booleans()), draw(st.booleans())

    def group() -> Group:
        hyper = Hyper(
            lr=draw(st.sampled_from(RATES)),
            betas=draw(st.sampled_from(((0.9, 0.999), (0.0, 0.5), (0.3, 0.99)))),
            eps=CLIPPED_EPS if clipped else draw(st.sampled_from((1e-8, 1e-3))),
            weight_decay=draw(st.sampled_from((0.0, 0.1))),
            decoupled=decoupled,
        )
        return Group(hyper, draw(st.booleans()), draw(st.booleans()))

    groups = tuple(group() for _ in range(draw(st.integers(1, 3))))

    trained = set(range(count)) - at_first

    def step() -> Step:
        frozen = draw(some) if thaws else at_first
        trainable = [index for index in range(count) if index not in frozen]
        settled = [index for index in trainable if index in trained]
        trained.update(trainable)
        clips = draw(_clips(list(range(count)))) if clipped else ()
        rate, by_model = draw(st.sampled_from((1.0, 0.5, 2.0))), draw(st.booleans())
        return Step(draw(_micros(trainable, settled, world_size)), clips, rate, by_model, frozen)

    steps = tuple(step() for _ in range(draw(st.integers(1, 4))))
    return Program(
        world_size=world_size,
        stage=draw(st.integers(0, 2)),
        shapes=tuple(draw(st.sampled_from(SHAPES)) for _ in range(count)),
        dtypes=tuple(draw(st.sampled_from(DTYPES)) for _ in range(count)),
        groups=groups,
        group_of=tuple(draw(st.integers(0, len(groups) - 1)) for _ in range(count)),
        steps=steps,
        frozen=at_first,
        cap_mb=draw(st.sampled_from((TINY_CAP_MB, 0.002, 25.0))),
        overlap=draw(st.booleans()),
        lazy=draw(st.booleans()),
        reduce_dtype=draw(st.sampled_from((None, *DTYPES))),
        order=draw(st.integers(0, 9)),
        poison=draw(st.booleans()),
    )


@given(programs())
@BOUNDED
def test_any_program_trains_as_one_process_does(program: Program) -> None:
    check(program, run_ranks(program.world_size, run, program, timeout=40))


@slow
@given(programs())
@settings(BOUNDED, max_examples=80)
def test_any_of_more_programs_trains_as_one_process_does(program: Program) -> None:
    check(program, run_ranks(program.world_size, run, program, timeout=40))


# -- buffers that are filled with NaN when they are released ----------------------------------------------------------


def _parity_programs(world_size: int, dtype: torch.dtype, *, needed: bool) -> list[Program]:
    """Cases of the parity matrix, with a parameter that one rank alone uses and one that nobody does: those that have
    every pair of settings, or the others."""
    count = len(SHAPES)
    used = tuple(frozenset(i for i in range(count - 1) if i or not rank) for rank in range(world_size))
    plain, accumulated = (Micro(True, used),), (Micro(False, used), Micro(False, used), Micro(True, used))
    table = [*itertools.product((0, 1, 2), (plain, plain * 2, accumulated), (TINY_CAP_MB, 25.0), (True, False))]
    pairs = covering(table)
    return [
        Program(
            world_size=world_size,
            stage=stage,
            shapes=SHAPES,
            dtypes=(dtype,) * count,
            groups=(Group(Hyper(lr=1e-2, weight_decay=0.1)),),
            group_of=(0,) * count,
            steps=(Step(micros),) * 3,
            cap_mb=cap,
            overlap=overlap,
            poison=True,
        )
        for stage, micros, cap, overlap in table
        if ((stage, micros, cap, overlap) in pairs) is needed
    ]


def _run_all(rank: int, world_size: int, cases: list[Program]) -> list[History | str]:
    return [run(rank, world_size, program) for program in cases]


@pytest.mark.parametrize("needed", [True, pytest.param(False, marks=slow)], ids=["pairs", "others"])
@pytest.mark.parametrize(("world_size", "dtype"), [(2, torch.bfloat16), (3, torch.float32)], ids=["bf16", "fp32"])
def test_poisoned_buffers_reach_no_result(world_size: int, dtype: torch.dtype, needed: bool) -> None:
    cases = _parity_programs(world_size, dtype, needed=needed)
    results = run_ranks(world_size, _run_all, cases)
    for number, program in enumerate(cases):
        check(program, [histories[number] for histories in results])


def _buffers(rank: int, world_size: int, poison: bool, later: bool) -> list[bool]:
    """Whether each communication buffer is NaN after a step; ``later``: the variable is set after construction."""
    import zero_optim

    params = make_parameters(((12, ROW),) * 6)
    with debugging(poison and not later):
        opt = zero_optim.ShardedAdamW(params, stage=2, bucket_cap_mb=TINY_CAP_MB)
    with debugging(poison):
        for step in range(2):
            linear_backward(params, make_gradients(params, rank, step))
            opt.step()
            opt.zero_grad()
    storages = opt.engine.reducer.rounds.buffers.storages
    found = [bool(storage.view(torch.float32)[: 12 * ROW].isnan().all()) for storage in storages]
    opt.close()
    return found


def test_the_environment_poisons_what_is_released_if_it_says_so_at_construction() -> None:
    assert run_ranks(2, _buffers, True, False) == [[True, True]] * 2
    assert run_ranks(2, _buffers, True, True) == [[False, False]] * 2
    assert run_ranks(2, _buffers, False, False) == [[False, False]] * 2


def test_an_option_of_the_environment_that_does_not_exist_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    import zero_optim

    monkeypatch.setenv("ZERO_OPTIM_DEBUG", "poisson")
    with pytest.raises(ValueError, match="ZERO_OPTIM_DEBUG.*poisson"):
        zero_optim.ShardedAdamW(make_parameters(((3,),)))
