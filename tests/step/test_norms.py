"""``clip_grad_norm_`` of all or some parameters, once or several times, as torch's own on averaged full gradients."""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass

import pytest
import torch
import zero_optim
from cells import pairs
from harness import run_ranks
from oracle import FP32_EPS, averages
from torch import Tensor, nn
from training_cases import (
    TINY_CAP_MB,
    assert_bitwise,
    assert_within,
    copies,
    error_of,
    linear_backward,
    make_gradients,
    make_parameters,
    named,
)
from zero_optim.step import clip as step_clip

SHAPES = ((17, 9), (300,), (1,), (12, 8), (40, 25), (2, 1))
ADAM = {"lr": 1e-2, "eps": 1e-1}  # a large eps lets the update feel the coefficient
STEPS = 3
NORMS = (1.0, 2.0, math.inf, 3.5)
SIZE = {1.0: 600.0, 2.0: 30.0, 3.5: 10.0, math.inf: 3.0}  # of the order of the norm of all gradients


@dataclass(frozen=True)
class Clip:
    """One call. ``part``: ``max_norm`` is this part of ``SIZE``. ``subset`` None: all parameters."""

    part: float
    subset: tuple[int, ...] | None
    norm_type: float = 2.0

    @property
    def max_norm(self) -> float:
        return self.part * SIZE[self.norm_type]


def _of_each_type(name: str, *clips: Clip) -> dict[str, tuple[Clip, ...]]:
    return {
        f"{name}, {norm_type}": tuple(Clip(clip.part, clip.subset, norm_type) for clip in clips) for norm_type in NORMS
    }


# What is called before every step.
PROGRAMS: dict[str, tuple[Clip, ...]] = {
    **_of_each_type("some", Clip(0.2, (0, 3, 4))),
    **_of_each_type("some, not enough to clip", Clip(1e3, (0, 3, 4))),
    **_of_each_type("two that share nothing", Clip(0.2, (0, 4)), Clip(0.05, (1, 2, 5))),
    **_of_each_type("some, then all", Clip(0.1, (1, 4)), Clip(0.1, None)),
    **_of_each_type("all, then some", Clip(0.2, None), Clip(0.05, (1, 4))),
    **_of_each_type("two that overlap", Clip(0.2, (0, 1, 4)), Clip(0.05, (1, 4, 5))),
    **_of_each_type("the same twice, closer", Clip(0.2, (0, 4)), Clip(0.05, (0, 4))),
    **_of_each_type("the same twice, wider", Clip(0.05, (0, 4)), Clip(0.2, (0, 4))),
    **_of_each_type("all twice", Clip(0.2, None), Clip(0.05, None)),
    "one of each type": tuple(Clip(0.3, (0, 3, 4), norm_type) for norm_type in NORMS),
    "all of one type, some of another": (Clip(0.3, None, math.inf), Clip(0.1, (0, 3, 4), 1.0), Clip(0.1, None, 2.0)),
    "a single one": (Clip(0.01, (4,)),),
    "none at all": (Clip(0.2, ()),),
}


def _grads(like: list[Tensor], rank: int, step: int) -> list[Tensor | None]:
    """Nobody has a gradient for parameter 3 in step 1; rank 1 alone has one for parameter 2 in step 2."""
    grads: list[Tensor | None] = list(make_gradients(like, rank, step))
    if step == 1:
        grads[3] = None
    if step == 2 and rank != 1:
        grads[2] = None
    return grads


def _train(rank: int, world_size: int, stage: int, clips: tuple[Clip, ...]) -> tuple[list[Tensor], list[float]]:
    params = make_parameters(SHAPES)
    opt = zero_optim.ShardedAdamW(params, **ADAM, stage=stage, bucket_cap_mb=TINY_CAP_MB)
    norms = []
    for step in range(STEPS):
        linear_backward(params, _grads(params, rank, step))
        for clip in clips:
            subset = {} if clip.subset is None else {"parameters": [params[i] for i in clip.subset]}
            norms.append(float(opt.clip_grad_norm_(clip.max_norm, clip.norm_type, **subset)))
        opt.step()
        opt.zero_grad()
    opt.close()
    return copies(params), norms


def _train_all(
    rank: int, world_size: int, stage: int, programs: dict[str, tuple[Clip, ...]]
) -> dict[str, tuple[list[Tensor], list[float]]]:
    return {name: _train(rank, world_size, stage, clips) for name, clips in programs.items()}


def _by_torch(world_size: int, clips: tuple[Clip, ...]) -> tuple[list[Tensor], list[float]]:
    params = make_parameters(SHAPES)
    adamw = torch.optim.AdamW(params, **ADAM)
    norms = []
    for step in range(STEPS):
        for p, g in zip(params, averages([_grads(params, rank, step) for rank in range(world_size)]), strict=True):
            p.grad = g
        for clip in clips:
            subset = [params[i] for i in (range(len(params)) if clip.subset is None else clip.subset)]
            norms.append(float(nn.utils.clip_grad_norm_(subset, clip.max_norm, clip.norm_type)))
        adamw.step()
        adamw.zero_grad()
    return copies(params), norms


def _check(world_size: int, stage: int, programs: dict[str, tuple[Clip, ...]]) -> None:
    results = run_ranks(world_size, _train_all, stage, programs, timeout=90)
    for name, clips in programs.items():
        params, norms = _by_torch(world_size, clips)
        bounds = [FP32_EPS * STEPS * (4 * p.abs() + 64 * ADAM["lr"]) for p in params]
        for rank, result in enumerate(results):
            own, own_norms = result[name]
            assert own_norms == pytest.approx(norms, rel=32 * FP32_EPS), f"{name}, rank {rank}: norms"
            assert_within(own, params, bounds, f"{name}, rank {rank}")
            assert_bitwise(own, results[0][name][0], f"{name}, rank {rank} against rank 0")


OF_TYPE = {name: name.rpartition(", ")[2] if name[-1].isdigit() or name.endswith("inf") else "" for name in PROGRAMS}
"""The norm that all clips of a program have; empty: several."""


@pytest.mark.parametrize(("stage", "world_size", "norm_type"), pairs([0, 1, 2], [1, 2], [*map(str, NORMS), ""]))
def test_clips_of_all_and_of_some_equal_torchs(stage, world_size, norm_type):
    _check(world_size, stage, {name: clips for name, clips in PROGRAMS.items() if OF_TYPE[name] == norm_type})


def test_clips_equal_torchs_on_three_ranks():
    _check(3, 2, {name: clips for name, clips in PROGRAMS.items() if name.endswith(("3.5", "inf"))})


def _coefficients_alone(rank: int, world_size: int, stage: int) -> tuple[bool, list[bool]]:
    """Whether clips leave the gradients in memory as they are; whether each parameter is as if never clipped."""
    results = []
    for clip in (True, False):
        params = make_parameters(SHAPES)
        opt = zero_optim.ShardedAdamW(params, **ADAM, stage=stage, bucket_cap_mb=TINY_CAP_MB)
        linear_backward(params, make_gradients(params, rank, 0))
        if clip:
            opt.clip_grad_norm_(math.inf)  # completes the reduction
            before = [getattr(p.grad, "local", p.grad).clone() for p in params]
            opt.clip_grad_norm_(0.5, parameters=params[:2])
            same = all(torch.equal(getattr(p.grad, "local", p.grad), b) for p, b in zip(params, before, strict=True))
        opt.step()
        opt.close()
        results.append(copies(params))
    return same, [torch.equal(a, b) for a, b in zip(*results, strict=True)]


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("stage", [0, 1, 2])
def test_clipping_writes_no_gradient_and_touches_no_other_parameter(stage, world_size):
    for same, unclipped in run_ranks(world_size, _coefficients_alone, stage):
        assert same
        assert unclipped == [False, False, True, True, True, True]


def _ways_of_giving(rank: int, world_size: int) -> list[tuple[float, list[Tensor]]]:
    """A list, a generator, one tensor where one is meant, a name twice: the same parameters."""
    results = []
    for way in ("list", "generator", "twice", "tensor"):
        params = make_parameters(SHAPES)
        opt = zero_optim.ShardedAdamW(params, **ADAM)
        linear_backward(params, make_gradients(params, rank, 0))
        given = {
            "list": params[4:5],
            "generator": (p for p in params[4:5]),
            "twice": [params[4], params[4]],
            "tensor": params[4],
        }[way]
        norm = float(opt.clip_grad_norm_(0.5, parameters=given))
        opt.step()
        opt.close()
        results.append((norm, copies(params)))
    return results


def test_ways_of_naming_what_to_clip():
    for first, *others in run_ranks(2, _ways_of_giving):
        for norm, params in others:
            assert norm == first[0]
            assert_bitwise(params, first[1])


def _foreign(rank: int, world_size: int) -> tuple[str, str, bool]:
    """A parameter of another optimizer is refused; the step after it is an ordinary one."""
    params, other = make_parameters(SHAPES), make_parameters(((7, 3),))
    opt = zero_optim.ShardedAdamW(named(params), **ADAM)
    plain = make_parameters(SHAPES)
    reference = zero_optim.ShardedAdamW(plain, **ADAM)
    for own, optimizer in ((params, opt), (plain, reference)):
        linear_backward(own, make_gradients(own, rank, 0))
        if optimizer is opt:
            kind, text = error_of(lambda: opt.clip_grad_norm_(0.5, parameters=[params[0], other[0]]))
        optimizer.step()
        optimizer.close()
    return kind, text, all(torch.equal(a, b) for a, b in zip(params, plain, strict=True))


def test_a_parameter_that_is_not_the_optimizers_is_refused_by_shape():
    for kind, text, same in run_ranks(2, _foreign):
        assert kind == "ParameterError" and "(7, 3)" in text
        assert same


def _backward_after_clip(rank: int, world_size: int, stage: int, some: bool) -> tuple[list[Tensor], list[Tensor], int]:
    """A backward after a clip of some, or all: it is as if they had not been clipped, and a warning says so."""
    results, messages = [], 0
    for clip in (True, False):
        params = make_parameters(SHAPES)
        opt = zero_optim.ShardedAdamW(params, **ADAM, stage=stage)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            linear_backward(params, make_gradients(params, rank, 0, 0))
            if clip:
                opt.clip_grad_norm_(0.1, parameters=params[:2] if some else None)
            linear_backward(params, make_gradients(params, rank, 0, 1))
            opt.step()
            opt.zero_grad()
            linear_backward(params, make_gradients(params, rank, 1))
            opt.step()  # nor does a coefficient outlive its step
        messages += sum("clip_grad_norm_" in str(warning.message) for warning in caught)
        opt.close()
        results.append(copies(params))
    return results[0], results[1], messages


@pytest.mark.parametrize("some", [True, False])
@pytest.mark.parametrize("stage", [0, 1, 2])
def test_a_backward_after_clipping_discards_the_coefficient(stage, some):
    for clipped, plain, messages in run_ranks(2, _backward_after_clip, stage, some):
        assert_bitwise(clipped, plain)
        assert messages == 1


def test_a_product_rounds_once_as_torchs_op_does() -> None:
    """On CUDA torch has no such op for bf16: the same bits, by a scale that is no power of two, too."""
    for scale in (2.0**-7, 1 / 3, 3e4):
        inverse, found = torch.full((1,), scale), torch.zeros(1)
        ours = torch.randn(257, generator=torch.Generator().manual_seed(1)).bfloat16()
        theirs = ours.clone()
        torch._amp_foreach_non_finite_check_and_unscale_([theirs], found, inverse)
        ours.mul_(inverse)
        assert_bitwise([ours], [theirs], str(scale))


# -- edits after a clip ------------------------------------------------------------------------------------------------


def _edited_after_a_clip(rank: int, world_size: int, stage: int, edit: str, editing: int) -> list[str]:
    """What each of three steps raises. Between clip and step of the second, the first ``editing`` ranks edit."""
    params = [nn.Parameter(torch.ones(600)) for _ in range(3)]
    opt = zero_optim.ShardedAdamW(named(params), lr=0.1, stage=stage, bucket_cap_mb=0.002)
    raised = []
    for step in range(3):
        torch.stack([(p * (rank + 1)).sum() for p in params]).sum().backward()
        try:
            opt.clip_grad_norm_(1.0)
            if step == 1 and rank < editing:
                if edit == "drop":
                    params[1].grad = None
                else:
                    params[1].grad.zero_()
            opt.step()
            raised.append("")
        except zero_optim.RankMismatchError as error:
            raised.append(str(error))
        opt.zero_grad()
    opt.close()
    return raised


@pytest.mark.parametrize("edit", ["drop", "write"])
@pytest.mark.parametrize("stage", [0, 1, 2])
def test_edits_after_a_clip_on_one_rank_are_told_in_the_next_step(stage: int, edit: str) -> None:
    """To all ranks; and nobody waits for anybody before."""
    for *before, last in run_ranks(2, _edited_after_a_clip, stage, edit, 1):
        assert before == ["", ""]
        assert "'layer1.weight'" in last and "were dropped or written in place on some ranks" in last, last
    assert run_ranks(2, _edited_after_a_clip, stage, edit, 2) == [["", "", ""]] * 2


# -- any p, whatever the size of the gradients -------------------------------------------------------------------------

ALL_NORMS = (0.5, 1.0, 1.5, 2.0, 3.0, 8.0, 16.0, 64.0, math.inf)
SIZES = {"ordinary": 1.0, "huge": 2.0**33, "tiny": 2.0**-50}  # powers of two: they change no rounding
SCALERS = {"no scaler": None, "unscaled": True, "not unscaled": False}
SCALE = 2.0**16
SOME = (0, 2, 5)  # of the parameters


class Given(nn.Module):
    """Its forward is a loss that gives each parameter the gradient that it is called with."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList(make_parameters(SHAPES))

    def forward(self, grads: list[Tensor]) -> Tensor:
        return sum((p * g).sum() for p, g in zip(self.weights, grads, strict=True))


def _steps() -> list[tuple[float, bool]]:
    """Norm type, and whether some of the parameters are clipped or all."""
    return [(norm_type, some) for norm_type in ALL_NORMS for some in (False, True)]


def _sizes_and_scalers(turn: int) -> list[tuple[str, str]]:
    """Each size, and each scaler, once. Three turns in a row have all pairs."""
    scalers = list(SCALERS)
    return [(size, scalers[(number + turn) % len(scalers)]) for number, size in enumerate(SIZES)]


def _any_norm(
    rank: int, world_size: int, stage: int, turn: int
) -> dict[tuple[str, str], tuple[list[float], list[Tensor]]]:
    results = {}
    for size, scaling in _sizes_and_scalers(turn):
        model = nn.Sequential(Given())
        model = zero_optim.shard_module(model, [Given]) if stage == 3 else model
        opt = zero_optim.ShardedAdamW(model.parameters(), **ADAM, stage=stage, bucket_cap_mb=TINY_CAP_MB)
        unscale = SCALERS[scaling]
        scaler = zero_optim.GradScaler(init_scale=SCALE, enabled=unscale is not None)
        norms = []
        for step, (norm_type, some) in enumerate(_steps()):
            grads = [g * SIZES[size] for g in make_gradients(make_parameters(SHAPES), rank, step)]
            scaler.scale(model(grads)).backward()
            if unscale:
                scaler.unscale_(opt)
            chosen = [p for i, p in enumerate(model.parameters()) if i in SOME] if some else None
            norms.append(opt.clip_grad_norm_(1.0, norm_type, parameters=chosen))
            scaler.step(opt)
            scaler.update()
            opt.zero_grad()
        assert opt.stats()["skipped_steps"] == 0
        with zero_optim.gather_parameters(model):
            results[size, scaling] = [float(norm) for norm in norms], copies(model.parameters())
        opt.close()
    return results


def _any_norm_expected(world_size: int, size: str, scaling: str) -> tuple[list[float], list[Tensor]]:
    """Norms are torch's in float64 of gradients of ordinary size, where they are right for every p; times the size."""
    params = make_parameters(SHAPES)
    adamw = torch.optim.AdamW(params, **ADAM)
    norms, held = [], SCALE if SCALERS[scaling] is False else 1.0
    for step, (norm_type, some) in enumerate(_steps()):
        grads = averages([make_gradients(params, rank, step) for rank in range(world_size)])
        chosen = SOME if some else range(len(params))
        doubles = [nn.Parameter(g.double()) for g in grads]
        for double in doubles:
            double.grad = double.detach().clone()
        norm = float(nn.utils.clip_grad_norm_([doubles[i] for i in chosen], math.inf, norm_type))
        norms.append(norm * SIZES[size] * held)
        for index, (p, g) in enumerate(zip(params, grads, strict=True)):
            p.grad = g * SIZES[size] * (min(1.0, 1.0 / (norms[-1] + 1e-6)) if index in chosen else 1.0)
        adamw.step()
    return norms, copies(params)


@pytest.mark.parametrize(
    ("turn", "stage", "world_size"), [(0, 2, 1), (0, 0, 2), (1, 1, 2), (2, 2, 2), (0, 3, 2), (1, 3, 2)]
)
def test_any_norm_of_gradients_of_any_size(turn, stage, world_size):
    """|g|^64 leaves fp32 and float64 at sizes that gradients have; a loss scale makes that of |g|^8."""
    results = run_ranks(world_size, _any_norm, stage, turn, timeout=90)
    for size, scaling in results[0]:
        norms, params = _any_norm_expected(world_size, size, scaling)
        bounds = [FP32_EPS * len(norms) * (4 * p.abs() + 64 * ADAM["lr"]) for p in params]
        for result in results:
            own_norms, own = result[size, scaling]
            assert own_norms == pytest.approx(norms, rel=32 * FP32_EPS), (size, scaling)
            assert_within(own, params, bounds, f"{size}, {scaling}")
        assert all(result[size, scaling][0] == results[0][size, scaling][0] for result in results)


@pytest.mark.parametrize("norm_type", [p for p in ALL_NORMS if p not in step_clip.KERNEL_NORMS])
@pytest.mark.parametrize(
    "values", [(3e38, 1e38, 5.0), (1e-45, 3e-45), (0.0, 1e-30), (0.0, 0.0), (1.0, math.inf), (0.0,)]
)
def test_a_norm_at_the_ends_of_fp32(values, norm_type):
    """Given by logarithms. Parts of a norm that are clipped by different factors add up as parameters do."""
    exact = torch.tensor(values).double()
    logs = norm_type * exact.log()
    norm = float((logs.logsumexp(0) / norm_type).exp())
    parts = step_clip.Norms.of([torch.tensor([value]) for value in values], norm_type)
    whole = step_clip.Norms.of([torch.tensor(values)], norm_type)
    for got in (parts.together(norm_type).norm(norm_type), whole.norm(norm_type)):
        assert float(got) == pytest.approx(norm, rel=1e-12)
