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
from torch import Tensor
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
            norms.append(float(torch.nn.utils.clip_grad_norm_(subset, clip.max_norm, clip.norm_type)))
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


def test_gradients_are_unscaled_as_by_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """In parts, where torch has no op for bf16: the same bits, by a scale that is no power of two, too."""
    from zero_optim.step import clip

    monkeypatch.setattr(clip, "PART", 100)
    for scale in (2.0**-7, 1 / 3, 3e4):
        inverse, found = torch.full((1,), scale), torch.zeros(1)
        ours = torch.randn(257, generator=torch.Generator().manual_seed(1)).bfloat16()
        theirs = ours.clone()
        torch._amp_foreach_non_finite_check_and_unscale_([theirs], found, inverse)
        clip.multiply_in_parts(ours, inverse)
        assert_bitwise([ours], [theirs], str(scale))
