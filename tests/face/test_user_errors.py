"""What goes wrong is said on every rank, at once: a type, the parameter's name and the remedy. Nothing hangs."""

from __future__ import annotations

import functools
import gc
import inspect
import math
import os
import re
import sys
import typing
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import zero_optim
from harness import run_ranks
from oracle import Hyper, MasterAdamW
from torch import Tensor, nn
from training_cases import (
    ROW,
    TINY_CAP_MB,
    assert_bitwise,
    copies,
    error_of,
    linear_backward,
    linear_loss,
    make_gradients,
    make_parameters,
    named,
)
from zero_optim import settings
from zero_optim.settings import RankOptions, ShardingOptions

SHAPES = ((8, 4), (5,), (3, 3))
LR = 1e-2
SAME = nn.Parameter(torch.ones(3))


def _trains(rank: int) -> None:
    """The process group is in step still: another optimizer works."""
    params = make_parameters(SHAPES)
    opt = zero_optim.ShardedAdamW(params)
    linear_backward(params, make_gradients(params, rank, 0))
    opt.step()
    opt.close()


def _odd_entries(rank: int, world_size: int) -> list[tuple[str, str]]:
    """What the constructor and ``add_param_group`` raise for entries of which torch raises KeyError or IndexError, on
    rank 1 alone; and ``clip_grad_norm_`` for names."""
    opt = zero_optim.ShardedAdamW([("b", nn.Parameter(torch.ones(3)))])
    found = []
    for odd in ({"lr": 1.0}, {"params": [("a",)]}, {"params": "abc"}):
        new = make_parameters(((3,),))
        found.append(error_of(lambda odd=odd, new=new: zero_optim.ShardedAdamW([odd] if rank == 1 else new)))
        added = {"params": [("c", nn.Parameter(torch.ones(3)))]}
        found.append(error_of(lambda odd=odd, added=added: opt.add_param_group(odd if rank == 1 else added)))
        assert len(opt.param_groups) == 1
    found.append(error_of(lambda: opt.clip_grad_norm_(1.0, 2.0, ["b"])))
    opt.close()
    return found


def test_odd_entries_of_params_are_described_on_every_rank():
    for rank, found in enumerate(run_ranks(2, _odd_entries)):
        own = [*["ParameterError"] * 4, *["TypeError"] * 2] if rank else ["RankMismatchError"] * 6
        assert [kind for kind, _ in found] == [*own, "TypeError"], found
        assert "parameter group 0 has no 'params'" in found[0][1] and "parameter group 1 has no 'params'" in found[1][1]
        assert "a tuple of 1: give pairs" in found[2][1] and "parameters holds a str" in found[-1][1]


# -- parameters and arguments ----------------------------------------------------------------------------------------

BAD_TENSORS: dict[str, tuple[Callable[[], Tensor], str]] = {  # what it is, and a word of the remedy
    "integer": (lambda: torch.ones(3, dtype=torch.int64), "cast"),
    "bool": (lambda: torch.ones(3, dtype=torch.bool), "cast"),
    "complex": (lambda: torch.ones(3, dtype=torch.complex64), "cast"),
    "float64": (lambda: torch.ones(3, dtype=torch.float64), "cast"),
    "float8": (lambda: torch.ones(3).to(torch.float8_e5m2), "cast"),
    "sparse": (lambda: torch.eye(3).to_sparse(), "to_dense()"),
    "sparse rows": (lambda: torch.eye(3).to_sparse_csr(), "to_dense()"),
    "meta": (lambda: torch.ones(3, device="meta"), "materialise"),
}


def _bad_parameters(rank: int, world_size: int) -> dict[str, list[tuple[str, str]]]:
    """Errors where every rank gives such a parameter, named and not, and where rank 1 alone does."""
    errors = {}
    for case, (make, _) in BAD_TENSORS.items():
        good, bad = make_parameters(((3,), (3,))), nn.Parameter(make(), requires_grad=False)
        entries = [("encoder.good", good[0]), ("encoder.bad", bad)]
        here = entries if rank == 1 else named(good, "encoder.")
        errors[case] = [
            error_of(lambda entries=entries: zero_optim.ShardedAdamW(entries)),
            error_of(lambda entries=entries: zero_optim.ShardedAdamW([p for _, p in entries])),
            error_of(lambda here=here: zero_optim.ShardedAdamW(here)),
        ]
        hooks = (good[0]._post_accumulate_grad_hooks, good[0]._backward_hooks)
        assert not any(hooks), "a failed constructor left a hook"
    _trains(rank)
    return errors


def test_parameters_that_cannot_be_held_are_named_on_every_rank():
    for rank, errors in enumerate(run_ranks(2, _bad_parameters, timeout=40)):
        for case, (with_name, without, on_one) in errors.items():
            remedy = BAD_TENSORS[case][1]
            assert with_name[0] == without[0] == "ParameterError", f"{case}: {with_name} {without}"
            assert "encoder.bad" in with_name[1] and remedy in with_name[1], f"{case}: {with_name[1]}"
            assert "parameter 1 of group 0" in without[1] and remedy in without[1], f"{case}: {without[1]}"
            assert on_one[0] == ("ParameterError" if rank == 1 else "RankMismatchError"), f"{case}: {on_one}"
            assert "encoder.bad" in on_one[1] and remedy in on_one[1], f"{case}: {on_one[1]}"
            assert rank == 1 or "rank 1" in on_one[1], f"{case}: {on_one[1]}"


def _different(case: str, rank: int) -> Any:
    odd = rank == 1
    params = make_parameters(SHAPES)
    if case == "name":
        return named(params, "block" if odd else "layer")
    if case == "shape":
        return named(make_parameters(((8, 4), (6,) if odd else (5,), (3, 3))))
    if case == "dtype":
        return named([params[0], make_parameters([(5,)], torch.float16 if odd else torch.bfloat16)[0], params[2]])
    if case == "order":
        return [named(params)[i] for i in ((0, 2, 1) if odd else (0, 1, 2))]
    if case == "count":
        return named(params)[: 2 if odd else 3]
    if case == "frozen":
        params[1].requires_grad_(not odd)
        return named(params)
    return [{"params": named(params), "lr": 1e-2 if odd else 1e-3}]


# For each difference, what rank 0 has and what rank 1 has, as the message is to say it.
DIFFERENCES = {
    "name": ("layer0.weight", "block0.weight"),
    "shape": ("layer1.weight': (5,)", "layer1.weight': (6,)"),
    "dtype": ("bfloat16", "float16"),
    "order": ("layer1.weight", "layer2.weight"),
    "count": ("layer2.weight", "nothing more"),
    "frozen": ("layer1.weight", "frozen"),
    "group": ("0.001", "0.01"),
}


def _differing(rank: int, world_size: int) -> dict[str, tuple[str, str]]:
    errors = {}
    for case in DIFFERENCES:
        errors[case] = error_of(lambda case=case: zero_optim.ShardedAdamW(_different(case, rank)))
    _trains(rank)
    return errors


@pytest.mark.parametrize("world_size", [2, 3])
def test_what_differs_between_ranks_is_quoted_from_both(world_size):
    for rank, errors in enumerate(run_ranks(world_size, _differing, timeout=40)):
        for case, words in DIFFERENCES.items():
            kind, text = errors[case]
            assert kind == "RankMismatchError", f"{case}, rank {rank}: {kind} {text}"
            assert "rank 0" in text and "rank 1" in text, f"{case}: both ranks are named: {text}"
            assert all(word in text for word in words), f"{case}: what differs is quoted: {text}"
            assert "Every rank must" in text, f"{case}: the remedy is named: {text}"


BAD_OPTIONS: tuple[dict[str, Any], ...] = (
    {"lr": -1.0},
    {"lr": math.nan},
    {"betas": (0.9, 1.0)},
    {"betas": (-0.1, 0.9)},
    {"eps": -1e-8},
    {"weight_decay": -0.1},
    {"stage": -1},
    {"stage": 4},
    {"stage": "2"},
    {"stage": 2.5},
    {"stage": True},
    {"bucket_cap_mb": 0.0},
    {"bucket_cap_mb": -1.0},
    {"grad_reduce_dtype": torch.float64},
    {"grad_reduce_dtype": torch.int32},
    {"max_grad_norm": 0.0},
    {"max_grad_norm": -1.0},
    {"check_replicas_every": 0},
    {"check_replicas_every": True},
    {"differentiable": True},
)


def _bad_options(rank: int, world_size: int) -> list[list[tuple[str, str]]]:
    """As argument on every rank, as argument on rank 1, and as option of the second group on every rank."""
    results = []
    for options in BAD_OPTIONS:
        params = make_parameters(SHAPES)
        on_one = options if rank == 1 else {}
        groups = [{"params": params[:1]}, {"params": params[1:], **options}]
        of_group = not set(options) & {
            "stage",
            "bucket_cap_mb",
            "grad_reduce_dtype",
            "max_grad_norm",
            "check_replicas_every",
        }
        calls = [
            lambda params=params, options=options: zero_optim.ShardedAdamW(params, **options),
            lambda params=params, on_one=on_one: zero_optim.ShardedAdamW(params, **on_one),
            *([lambda groups=groups: zero_optim.ShardedAdamW(groups)] if of_group else []),
        ]
        results.append([error_of(call) for call in calls])
    _trains(rank)
    return results


def test_arguments_out_of_range_are_named_on_every_rank():
    for rank, results in enumerate(run_ranks(2, _bad_options, timeout=40)):
        for options, (everywhere, on_one, *of_group) in zip(BAD_OPTIONS, results, strict=True):
            (name,) = options
            assert everywhere[0] == "ValueError" and name in everywhere[1], f"{options}: {everywhere}"
            assert on_one[0] == ("ValueError" if rank == 1 else "RankMismatchError"), f"{options}: {on_one}"
            assert name in on_one[1] and (rank == 1 or "rank 1" in on_one[1]), f"{options}: {on_one}"
            for error in of_group:
                assert error[0] == "ValueError" and name in error[1] and "group 1" in error[1], f"{options}: {error}"


@pytest.mark.parametrize(
    ("params", "kind", "text"),
    [
        ([], ValueError, "empty|no parameter"),
        ([torch.ones(3, requires_grad=True) * 2], (ValueError, zero_optim.ParameterError), "leaf"),
        ([1.0, 2.0], TypeError, None),
        ([{"params": [SAME]}, {"params": [SAME]}], ValueError, "group"),
    ],
    ids=["nothing", "no leaf", "no tensor", "twice"],
)
def test_what_is_no_list_of_parameters(params, kind, text):
    with pytest.raises(kind, match=text):
        zero_optim.ShardedAdamW(params)


def test_errors_have_one_base():
    names = (
        "ParameterError RankMismatchError GradientError OffloadError ShardAccessError ClosedError StateMismatchError"
    )
    for name in names.split():
        assert issubclass(getattr(zero_optim, name), zero_optim.ZeroOptimError)
    assert issubclass(zero_optim.ZeroOptimError, RuntimeError)


DROP_INS = (
    zero_optim.ShardedAdamW,
    zero_optim.ShardedAdam,
    zero_optim.ShardedLion,
    zero_optim.ShardedSGD,
    zero_optim.ShardedMuon,
)


# -- keywords of torch.optim.AdamW -----------------------------------------------------------------------------------


def test_positions_are_torchs_up_to_amsgrad():
    ours = list(inspect.signature(zero_optim.ShardedAdamW.__init__).parameters.values())
    theirs = list(inspect.signature(torch.optim.AdamW.__init__).parameters.values())
    by_position = [p for p in theirs if p.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD]
    assert [p.name for p in ours[: len(by_position)]] == [p.name for p in by_position]
    assert ours[len(by_position)].kind is inspect.Parameter.KEYWORD_ONLY
    assert {p.name for p in theirs} <= {p.name for p in ours}
    opt = zero_optim.ShardedAdamW(make_parameters(SHAPES), 1e-3, (0.9, 0.99), 1e-8, 0.0, False)
    opt.close()
    opt = zero_optim.ShardedAdamW(make_parameters(SHAPES), 1e-3, (0.9, 0.99), 1e-8, 0.0, True)
    assert "max_exp_avg_sq" in opt.stats()["memory"]
    opt.close()


@pytest.mark.parametrize("made", [zero_optim.ShardedOptimizer, *DROP_INS])
def test_signatures_show_every_option_with_its_type_and_default(made):
    shown = inspect.signature(made).parameters
    assert not [p.name for p in shown.values() if p.kind in (p.VAR_KEYWORD, p.VAR_POSITIONAL)]
    for name, hint in typing.get_type_hints(ShardingOptions).items():
        default = {"skip_nonfinite": True, "overlap_grad_reduce": True, "overlap_param_gather": True}.get(name)
        default = {"state_dtype": "fp32", "state_over": "shard"}.get(name, default)
        assert (shown[name].default, shown[name].kind) == (default, inspect.Parameter.KEYWORD_ONLY), name
        assert eval(shown[name].annotation, vars(settings)) == hint, name


def test_settings_have_the_types_of_the_options():
    options, ranks = typing.get_type_hints(ShardingOptions), typing.get_type_hints(RankOptions)
    own = typing.get_type_hints(settings.Settings)
    assert own | {"stage": int | None} == {name: hint for name, hint in options.items() if name not in ranks}


@pytest.mark.parametrize("name", ["fused", "foreach", "capturable"])
def test_a_keyword_that_means_nothing_here_is_warned_of(name):
    with pytest.warns(UserWarning, match=name) as caught:
        zero_optim.ShardedAdamW(make_parameters(SHAPES), **{name: True}).close()
    assert len(caught) == 1
    assert caught[0].filename == __file__, "the warning shows the user's own line"


def test_keywords_left_at_nothing_are_silent():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for value in (None, False):
            zero_optim.ShardedAdamW(make_parameters(SHAPES), fused=value, foreach=value).close()
        zero_optim.ShardedAdamW(make_parameters(SHAPES), capturable=False, differentiable=False, amsgrad=False).close()
        zero_optim.ShardedAdamW(make_parameters(SHAPES), maximize=True).close()


@pytest.mark.parametrize(
    ("made", "keyword", "meant"),
    [
        (zero_optim.ShardedAdamW, "stagee", "; did you mean stage?"),
        (zero_optim.ShardedAdamW, "weight_decy", "; did you mean weight_decay?"),
        (zero_optim.ShardedAdam, "offload", "; did you mean state_offload?"),
        (zero_optim.ShardedLion, "eps", ""),
        (zero_optim.ShardedSGD, "max_norm", "; did you mean max_grad_norm?"),
        (zero_optim.ShardedMuon, "foreach", ""),
    ],
)
def test_a_keyword_that_is_not_there_is_told_with_the_class_and_what_may_be_meant(made, keyword, meant):
    with pytest.raises(TypeError) as caught:
        made(make_parameters(SHAPES), **{keyword: 2})
    assert str(caught.value) == f"{made.__name__} has no argument {keyword!r}{meant}"


def test_a_key_of_a_group_that_is_nearly_an_option_is_warned_of():
    parameter = make_parameters(SHAPES)[0]
    said = "parameter group 0 has 'weigth_decay', which is not read: is 'weight_decay' meant?"
    with pytest.warns(UserWarning, match=re.escape(said)):
        zero_optim.ShardedAdamW([{"params": [parameter], "weigth_decay": 0.1}]).close()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        of_the_user = {"name": "decayed", "initial_lr": 1.0, "max_momentum": 0.9, "weight_decay_scale": 2}
        zero_optim.ShardedAdamW([{"params": [parameter], **of_the_user}]).close()


OTHERS = [
    (zero_optim.ShardedAdamW, torch.optim.SGD, "momentum, dampening, nesterov, and no betas"),
    (zero_optim.ShardedAdamW, torch.optim.RMSprop, "momentum, and no betas"),
    (zero_optim.ShardedLion, torch.optim.SGD, "momentum, dampening, nesterov, and no betas"),
    (zero_optim.ShardedSGD, torch.optim.AdamW, "betas, amsgrad, and no momentum"),
]


@pytest.mark.parametrize(("made", "other", "told"), OTHERS)
def test_state_of_another_optimizer_that_has_not_stepped_is_refused(made, other, told):
    """It has no tensors to tell by, and its options would be taken over."""
    params = make_parameters(SHAPES)
    opt = made(params, lr=0.5)
    before = [dict(group) for group in opt.param_groups]
    state = other(make_parameters(SHAPES), lr=0.25).state_dict()
    for load in (opt.load_state_dict, lambda state: zero_optim.load_full_state_dict(opt, state)):
        with pytest.raises(
            zero_optim.StateMismatchError, match=f"of another optimizer: its parameter group 0 has {told}"
        ):
            load(state)
    assert [dict(group) for group in opt.param_groups] == before
    own = opt.state_dict()
    own["param_groups"][0] |= {"initial_lr": 0.5, "base_momentum": 0.8, "name": "all", "lr_scale": 1.0}
    opt.load_state_dict(own)
    assert opt.param_groups[0]["name"] == "all"
    opt.close()


# -- gradients -------------------------------------------------------------------------------------------------------


def _unexpected(kind: str, parameter: nn.Parameter) -> None:
    if kind == "sparse":
        parameter.grad_dtype = None
        parameter.grad = torch.ones(parameter.shape).to_sparse()
    else:
        parameter.grad_dtype = None  # let autograd's own check pass, as a user who knows can
        parameter.grad = torch.ones(parameter.shape, dtype=getattr(torch, kind))


def _unexpected_gradients(
    rank: int, world_size: int, stage: int, kind: str, culprits: tuple[int, ...], via: str
) -> tuple[str, str, bool]:
    """``learning``: the step that has to raise is the first one, which lays the buckets out in backward's order."""
    params = make_parameters(SHAPES)
    opt = zero_optim.ShardedAdamW(named(params), stage=stage, bucket_cap_mb=TINY_CAP_MB)
    if via == "learning":
        with opt.no_sync():
            linear_backward(params[::-1], make_gradients(params, rank, 0)[::-1])
    else:
        linear_backward(params, make_gradients(params, rank, 0))
        opt.step()
        opt.zero_grad()
    before = copies(params)
    if rank in culprits:
        _unexpected(kind, params[1])

    def apply() -> None:
        if via == "clip":
            opt.clip_grad_norm_(1.0)
        opt.step()

    found = error_of(apply)
    same = all(torch.equal(a, b) for a, b in zip(before, params, strict=True))
    opt.zero_grad()
    linear_backward(params, make_gradients(params, rank, 1))
    opt.step()  # that gradient is forgotten
    opt.close()
    _trains(rank)
    return *found, same


@pytest.mark.parametrize("culprits", [(0, 1), (1,)], ids=["on every rank", "on one rank"])
@pytest.mark.parametrize(
    ("stage", "kind", "via"),
    [(0, "float64", "step"), (1, "sparse", "clip"), (2, "float64", "step"), (2, "sparse", "learning")],
)
def test_a_gradient_of_another_kind_is_named_on_every_rank(stage, kind, via, culprits):
    results = run_ranks(2, _unexpected_gradients, stage, kind, culprits, via, timeout=40)
    for rank, (error, text, same) in enumerate(results):
        assert error in ("GradientError", *(() if rank in culprits else ("RankMismatchError",))), f"{error} {text}"
        assert "layer1.weight" in text and "expected a dense torch.float32" in text, text
        assert same, "nothing was updated"


def test_a_sparse_gradient_from_backward_is_named():
    table = nn.Embedding(6, 3, sparse=True)
    opt = zero_optim.ShardedAdamW(table.named_parameters())
    with pytest.raises(zero_optim.GradientError, match="weight"):
        table(torch.tensor([1, 2])).sum().backward()
        opt.step()
    opt.close()


def _cast(rank: int, world_size: int, stage: int, how: str) -> tuple[str, str]:
    params = make_parameters(SHAPES)
    opt = zero_optim.ShardedAdamW(named(params), stage=stage, bucket_cap_mb=TINY_CAP_MB)
    linear_backward(params, make_gradients(params, rank, 0))
    opt.step()
    if how == "cast with its gradient":  # as ``model.half()`` does before ``zero_grad``
        nn.ParameterList(params).half()
    else:
        opt.zero_grad()
        other_strides = params[1].data.repeat_interleave(2)[::2]
        params[1].data = other_strides if how == "other strides" else params[1].data.half()
    next_call = (
        opt.step if how == "cast, then step" else lambda: linear_backward(params, make_gradients(params, rank, 1))
    )
    found = error_of(next_call)
    opt.close()
    _trains(rank)
    return found


@pytest.mark.parametrize("how", ["cast", "other strides", "cast, then step", "cast with its gradient"])
@pytest.mark.parametrize("stage", [0, 1, 2])
def test_a_model_cast_or_moved_after_construction_is_named(stage, how):
    for kind, text in run_ranks(2, _cast, stage, how, timeout=40):
        assert kind == "ParameterError", f"{kind} {text}"
        named = "weight" if how == "cast with its gradient" else "layer1.weight"  # whichever comes first in backward
        assert named in text and "new optimizer" in text


@pytest.mark.parametrize(
    ("max_norm", "got"),
    [
        (make_parameters(SHAPES), "got a list"),
        ("1.0", "got '1.0'"),
        (None, "got a NoneType"),
        (torch.ones(2), r"got a Tensor of shape \[2\]"),
    ],
)
def test_what_is_no_norm_is_told_with_the_right_call(max_norm, got):
    """torch's own function takes the parameters first. The gradients are as they were."""
    params = make_parameters(SHAPES)
    opt = zero_optim.ShardedAdamW(params)
    linear_backward(params, make_gradients(params, 0, 0))
    before = copies(p.grad for p in params)
    with pytest.raises(TypeError, match=rf"max_norm must be a number, {got}. Call opt\.clip_grad_norm_\(1\.0\)"):
        opt.clip_grad_norm_(max_norm, 1.0)
    assert_bitwise(copies(p.grad for p in params), before)
    assert opt.clip_grad_norm_(torch.tensor(1.0)) > 0
    opt.close()


# -- use after the end, ends after a failure -------------------------------------------------------------------------


def _after_close(rank: int, world_size: int) -> dict[str, tuple[str, str]]:
    params = make_parameters(SHAPES)
    model = nn.ParameterList(params)
    opt = zero_optim.ShardedAdamW(model.named_parameters())
    opt.close()
    calls: dict[str, Callable[[], Any]] = {
        "step": opt.step,
        "zero_grad": opt.zero_grad,
        "clip_grad_norm_": lambda: opt.clip_grad_norm_(1.0),
        "no_sync": lambda: opt.no_sync().__enter__(),
        "state_dict": opt.state_dict,
        "load_state_dict": lambda: opt.load_state_dict({}),
        "stats": opt.stats,
        "observe": opt.observe,
        "attach": lambda: opt.attach(model),
        "refresh_master": opt.refresh_master,
        "wait_for_parameters": opt.wait_for_parameters,
        "add_param_group": lambda: opt.add_param_group({"params": make_parameters(((2,),))}),
        "scaler.step": lambda: zero_optim.GradScaler().step(opt),
    }
    scaler = zero_optim.GradScaler()
    scaler.scale(torch.ones(()))
    calls["scaler.step"] = lambda: scaler.step(opt)
    errors = {name: error_of(call) for name, call in calls.items()}
    _trains(rank)
    return errors


def test_a_closed_optimizer_refuses_everything_with_the_remedy():
    for errors in run_ranks(2, _after_close):
        for name, (kind, text) in errors.items():
            assert kind == "ClosedError", f"{name}: {kind or 'nothing raised'} {text}"
            assert "closed" in text and "new one" in text, f"{name}: {text}"


class _Refusing:
    """Stands in for a collective that fails in the middle of the constructor."""

    def __init__(self, after: int) -> None:
        self.calls, self.after = 0, after

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        self.calls += 1
        if self.calls > self.after:
            raise ArithmeticError("broadcast failed")


@pytest.mark.parametrize("after", [0, 2])
def test_a_constructor_that_fails_in_the_middle_lets_go_of_everything(after, monkeypatch):
    """Hooks, claims and complaints: there are none after it, whether the half-made object is closed or dropped."""
    params = make_parameters(SHAPES)
    complaints: list[str] = []
    monkeypatch.setattr(sys, "unraisablehook", lambda args: complaints.append(str(args.exc_value)))
    half_made = zero_optim.ShardedAdamW.__new__(zero_optim.ShardedAdamW)
    half_made.close()  # before it was ever constructed
    with monkeypatch.context() as patch:
        patch.setattr("zero_optim.comm.collectives.Comm.broadcast", _Refusing(after))
        with pytest.raises(ArithmeticError, match="broadcast failed"):
            half_made.__init__(params)
    half_made.close()
    half_made.close()
    assert error_of(half_made.step)[0] == "ClosedError"
    del half_made
    gc.collect()
    assert complaints == []
    assert not any(p._post_accumulate_grad_hooks or p._backward_hooks for p in params)
    opt = zero_optim.ShardedAdamW(params, lr=LR)
    oracle = MasterAdamW(make_parameters(SHAPES), Hyper(lr=LR))
    linear_backward(params, make_gradients(params, 0, 0))
    opt.step()
    opt.close()
    oracle.step(make_gradients(oracle.params, 0, 0))
    assert_bitwise(params, oracle.params)


def _backward_and_step(opt: Any, params: list[nn.Parameter], rank: int) -> None:
    linear_backward(params, make_gradients(params, rank, 2))
    opt.step()


def _left_alone(rank: int, world_size: int, stage: int, end: str) -> tuple[str, str, list[str], bool]:
    """Rank 1 leaves; rank 0 gets an error in ``step``, and can then close or drop the optimizer without another."""
    params = make_parameters(SHAPES)
    opt = zero_optim.ShardedAdamW(params, stage=stage, bucket_cap_mb=TINY_CAP_MB)
    for step in range(2):
        linear_backward(params, make_gradients(params, rank, step))
        opt.step()
        opt.zero_grad()
    if rank == 1:
        opt.close()
        return "", "", [], True
    complaints: list[str] = []
    sys.unraisablehook = lambda args: complaints.append(str(args.exc_value))
    try:
        kind, text = error_of(functools.partial(_backward_and_step, opt, params, rank))
        if end == "close":
            opt.close()
        del opt
        gc.collect()
    finally:
        sys.unraisablehook = sys.__unraisablehook__
    return kind, text, complaints, not any(p._post_accumulate_grad_hooks for p in params)


@pytest.mark.parametrize("end", ["close", "delete"])
@pytest.mark.parametrize("stage", [0, 2])
def test_a_rank_that_is_left_alone_is_told_and_can_close(stage, end):
    (kind, text, complaints, released), _ = run_ranks(2, _left_alone, stage, end, timeout=40)
    assert kind == "CollectiveError", f"{kind or 'nothing raised'} {text}"
    assert "rank" in text
    assert complaints == [], "the destructor is quiet"
    assert released


def _forced_backend(rank: int, world_size: int, ranks: tuple[int, ...]) -> tuple[str, str]:
    """``ZERO_KERNELS_BACKEND`` names one that is not there, on some ranks."""
    before = os.environ.pop("ZERO_KERNELS_BACKEND", None)
    if rank in ranks:
        os.environ["ZERO_KERNELS_BACKEND"] = "no_such_backend"

    def train() -> None:
        params = make_parameters(SHAPES)
        opt = zero_optim.ShardedAdamW(params)
        linear_backward(params, make_gradients(params, rank, 0))
        opt.step()
        opt.close()

    found = error_of(train)
    os.environ.pop("ZERO_KERNELS_BACKEND", None)
    if before is not None:
        os.environ["ZERO_KERNELS_BACKEND"] = before
    gc.collect()
    _trains(rank)
    return found


@pytest.mark.parametrize("ranks", [(0, 1), (1,)], ids=["every rank", "one rank"])
def test_a_backend_that_is_not_there_is_said_on_every_rank(ranks):
    for rank, (kind, text) in enumerate(run_ranks(2, _forced_backend, ranks, timeout=40)):
        assert kind == ("BackendError" if rank in ranks else "RankMismatchError"), f"{kind or 'nothing raised'} {text}"
        assert "no_such_backend" in text and "reference" in text, f"those that are usable are listed: {text}"


# -- the first gradient that was not finite --------------------------------------------------------------------------


def _non_finite(rank: int, world_size: int, stage: int, cap: float, scaled: bool) -> list[Any]:
    """``stats()["non_finite"]`` after each step. Bad are: 3 (rank 1), 4 (rank 0), 7 (both ranks), counted from 1."""
    params = make_parameters(SHAPES, torch.float16)
    opt = zero_optim.ShardedAdamW(named(params), stage=stage, bucket_cap_mb=cap)
    scaler = zero_optim.GradScaler(init_scale=64.0, enabled=scaled)
    bad = {3: {1: 2}, 4: {0: 0}, 7: {0: 1, 1: 0}}  # step: {rank: parameter}
    seen = []
    for step in range(1, 9):
        grads = make_gradients(params, rank, step, grid=2)
        if rank in bad.get(step, {}):
            grads[bad[step][rank]].view(-1)[-1] = math.nan if step == 4 else math.inf
        scaler.scale(linear_loss(params, grads)).backward()
        scaler.step(opt)
        scaler.update()
        opt.zero_grad()
        seen.append(opt.stats()["non_finite"])
    opt.close()
    return seen


@pytest.mark.parametrize("scaled", [True, False], ids=["scaler", "no scaler"])
@pytest.mark.parametrize("stage", [0, 1, 2])
def test_the_first_non_finite_gradient_is_named_alike_on_every_rank(stage, scaled):
    for cap in (TINY_CAP_MB, 25.0):
        first, second = run_ranks(2, _non_finite, stage, cap, scaled)
        assert first == second, "every rank says the same"
        assert first[:2] == [None, None]
        assert first[2:6] == [{"parameter": "layer2.weight", "rank": 1, "step": 3}] * 4, "a run has one first"
        assert first[6] in ({"parameter": f"layer{1 - r}.weight", "rank": r, "step": 7} for r in range(2))
        assert first[7] == first[6]


def _born_in_the_sum(rank: int, world_size: int, stage: int) -> list[Any]:
    """Two reduced backwards, finite in fp16, add up to infinity in the last element of the second parameter."""
    params = make_parameters(((2, ROW), (4 * ROW,)), torch.float16)
    opt = zero_optim.ShardedAdamW(named(params), stage=stage, bucket_cap_mb=25.0)
    seen = []
    for step in range(4):
        for micro in range(2):
            grads = make_gradients(params, rank, step, micro, grid=2)
            if step == 1:
                grads[1][-1] = 65504.0
            linear_backward(params, grads)
        opt.step()
        opt.zero_grad()
        seen.append(opt.stats()["non_finite"])
    opt.close()
    return seen


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_an_overflow_born_in_the_sum_is_its_owners(stage):
    """All ranks know it after the next step at the latest: its owner finds it in the update that it skips."""
    results = run_ranks(2, _born_in_the_sum, stage)
    for seen in results:
        assert seen[0] is None
        assert seen[1]["step"] == 2
        assert seen[1]["parameter"] in ("layer1.weight", None)
        assert seen[2] == seen[3] == results[0][2], "every rank says the same"
        assert seen[2]["parameter"] == "layer1.weight" and seen[2]["step"] == 2
        assert seen[2]["rank"] == (0 if stage == 0 else 1), "the last element is in the last rank's shard"


def _scale_falls(rank: int, world_size: int, stage: int) -> list[str]:
    """Warnings of a scaler whose gradients are not finite whatever the scale."""
    params = make_parameters(SHAPES, torch.float16)
    opt = zero_optim.ShardedAdamW(named(params), stage=stage)
    scaler = zero_optim.GradScaler(init_scale=4.0)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step in range(6):
            grads = make_gradients(params, rank, step)
            if step and rank == 1:
                grads[1][0] = math.inf
            scaler.scale(linear_loss(params, grads)).backward()
            scaler.step(opt)
            scaler.update()
            opt.zero_grad()
    opt.close()
    return [str(warning.message) for warning in caught]


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_a_loss_scale_that_falls_below_one_is_warned_of_once_with_the_culprit(stage):
    for messages in run_ranks(2, _scale_falls, stage):
        assert len(messages) == 1, messages
        for word in ("loss scale", "layer1.weight", "rank 1", "step 2"):
            assert word in messages[0]
