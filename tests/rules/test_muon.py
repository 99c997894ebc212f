"""``ShardedMuon`` against ``torch.optim.Muon`` of whole fp32 parameters, and itself on other numbers of ranks."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from functools import partial
from itertools import product
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import zero_optim
from cells import slow_after
from harness import run_ranks
from muon_cases import AS_TORCH, OPTIONS, Gradient, masters_alone, masters_of, mean, step_on_rank
from torch import Tensor, nn
from zero_optim import ParameterError, ShardedMuon, StateMismatchError, validate
from zero_optim.grads import buckets
from zero_optim.rules.muon import Muon, scale_of
from zero_optim.rules.newton_schulz import POLAR_EXPRESS
from zero_optim.rules.update_rule import ShardUpdate, Whole

import zero_kernels

SHAPES = ((24, 40), (72, 8), (8, 72), (0, 4), (40, 40), (1, 130), (130, 3), (24, 40))
STEPS = 4


def _weights(dtype: torch.dtype) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter((torch.randn(shape, generator=generator) / 4).to(dtype)) for shape in SHAPES]


def _gradient(rank: int, step: int, number: int, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * rank + 100 * step + number)
    return torch.randn(SHAPES[number], generator=generator).to(dtype)


def _gradients(dtype: torch.dtype) -> Gradient:
    return lambda rank, step, number: _gradient(rank, step, number, dtype)


def _oracle(world_size: int, dtype: torch.dtype, **options: Any) -> list[Tensor]:
    """torch's Muon of fp32 masters. Gradients are cast, as ours are."""
    masters = [nn.Parameter(weight.detach().float()) for weight in _weights(dtype)]
    opt = torch.optim.Muon(masters, **{**OPTIONS, **options})
    for step in range(STEPS):
        for number, master in enumerate(masters):
            master.grad = mean(_gradients(dtype), world_size, step, number).float()
        opt.step()
    return [master.detach() for master in masters]


def _train(
    rank: int, world_size: int, dtype: torch.dtype, options: dict[str, Any], steps: int = STEPS, first: int = 0
) -> list[Tensor]:
    """The masters, whole."""
    params = _weights(dtype)
    opt = ShardedMuon(params, **{**OPTIONS, "bucket_cap_mb": 0.002, **options})
    _steps(opt, params, rank, range(first, first + steps), dtype)
    masters = masters_of(opt, params)
    opt.close()
    return masters


def _steps(opt: ShardedMuon, params: list[nn.Parameter], rank: int, steps: range, dtype: torch.dtype) -> None:
    for step in steps:
        step_on_rank(opt, params, _gradients(dtype), rank, step)


@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize("scale", [None, "match_rms_adamw"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_it_is_torchs(dtype: torch.dtype, scale: str | None, nesterov: bool) -> None:
    options = {"adjust_lr_fn": scale, "nesterov": nesterov}
    for found, expected in zip(_train(0, 1, dtype, options | AS_TORCH), _oracle(1, dtype, **options), strict=True):
        torch.testing.assert_close(found, expected, rtol=0, atol=2e-7)  # of values below 2: a unit or two


@pytest.mark.parametrize(("world_size", "stage"), slow_after(2, [(2, 0), (3, 2), (2, 1), (3, 1), (2, 2)]))
def test_ranks_make_no_difference(world_size: int, stage: int) -> None:
    """To the bit: each matrix is made orthogonal by the same operations, on whatever rank it lies."""
    for dtype, options in product((torch.float32, torch.bfloat16), ({}, AS_TORCH)):
        every = run_ranks(world_size, _train, dtype, {"stage": stage, **options})
        for masters in every if options else ():
            for found, expected in zip(masters, _oracle(world_size, dtype), strict=True):
                torch.testing.assert_close(found, expected, rtol=0, atol=2e-7)
        assert all(all(map(torch.equal, masters, _alone(world_size, dtype, **options))) for masters in every)


def _alone(world_size: int, dtype: torch.dtype, **options: Any) -> list[Tensor]:
    """One rank that is given the averages."""
    params = _weights(dtype)
    return masters_alone(ShardedMuon(params, **OPTIONS, **options), params, _gradients(dtype), world_size, range(STEPS))


def test_a_skipped_update_marks_who_is_not_finite() -> None:
    """As where an overflow arises in the sum, and no rank has seen it before."""
    rule = Muon()
    table = torch.zeros(2, len(rule.columns))
    table[:, rule.columns.index("active")] = table[:, rule.columns.index("grad_factor")] = 1
    wholes = [Whole(number, 128 * number, torch.Size((8, 16)), None) for number in range(2)]
    grad, marks = torch.ones(256), torch.zeros(2, dtype=torch.int32)
    grad[200] = torch.inf
    parameter, state = torch.ones(256), {"momentum_buffer": torch.zeros(256)}
    rows = torch.tensor([0, 1], dtype=torch.int32)
    prepared = rule.prepared()
    prepared.update([ShardUpdate(grad, parameter, state, rows, table, None, torch.ones(1), marks, wholes=wholes)])
    assert marks.tolist() == [0, 1]
    assert not state["momentum_buffer"].any() and torch.equal(parameter, torch.ones(256))


# -- where matrices lie -----------------------------------------------------------------------------------------------


def _places(rank: int, world_size: int) -> tuple[list[int], bool]:
    params = _weights(torch.bfloat16)
    opt = ShardedMuon(params, bucket_cap_mb=0.002, **OPTIONS)
    held = [whole.param for shard in opt.engine.states.shards for whole in shard.wholes]
    planned = zero_optim.memory.plan_of(opt).memory
    same = all(planned[kind] == nbytes for kind, nbytes in opt.stats()["memory"].items())
    opt.close()
    return held, same


@pytest.mark.parametrize("world_size", [2, 5])
def test_no_shard_cuts_a_matrix(world_size: int) -> None:
    found = run_ranks(world_size, _places)
    assert sorted(param for held, _ in found for param in held) == [
        n for n, shape in enumerate(SHAPES) if 0 not in shape
    ]
    assert all(same for _, same in found)


# -- saved and loaded -------------------------------------------------------------------------------------------------


def _to_torch_and_back(rank: int, world_size: int) -> list[Tensor]:
    """Two steps, the state by way of torch's optimizer, two more."""
    params = _weights(torch.float32)
    opt = ShardedMuon(params, **OPTIONS)
    _steps(opt, params, rank, range(2), torch.float32)
    state = zero_optim.full_state_dict(opt, rank=None)
    opt.close()
    theirs = torch.optim.Muon([nn.Parameter(p.detach().clone()) for p in params], **OPTIONS)
    theirs.load_state_dict(state)
    again = ShardedMuon(params, **OPTIONS)
    zero_optim.load_full_state_dict(again, theirs.state_dict())
    _steps(again, params, rank, range(2, 4), torch.float32)
    masters = masters_of(again, params)
    again.close()
    return masters


def test_by_way_of_torch() -> None:
    for masters in run_ranks(2, _to_torch_and_back):
        assert all(map(torch.equal, masters, _alone(2, torch.float32)))


def _model() -> nn.ParameterList:
    return nn.ParameterList(_weights(torch.bfloat16))


# -- the iteration ----------------------------------------------------------------------------------------------------


def test_coefficients_of_steps_are_saved() -> None:
    options = {"ns_coefficients": POLAR_EXPRESS, "ns_steps": 6}
    weights = _weights(torch.float32)
    opt = ShardedMuon(weights, **options)
    _steps(opt, weights, 0, range(2), torch.float32)
    state = zero_optim.full_state_dict(opt)
    opt.close()
    again = ShardedMuon(weights, ns_coefficients=[[*of_step] for of_step in POLAR_EXPRESS], ns_steps=6)
    zero_optim.load_full_state_dict(again, state)
    again.close()
    other = ShardedMuon(weights, ns_coefficients=POLAR_EXPRESS[:5])
    with pytest.raises(StateMismatchError, match="ns_coefficients"):
        zero_optim.load_full_state_dict(other, state)
    other.close()


def test_scales() -> None:
    assert scale_of((4, 16), None) == scale_of((4, 16), "original") == 1.0
    assert scale_of((16, 4), None) == scale_of((16, 4), "spectral_unclamped") == 2.0
    assert scale_of((4, 16), "spectral_unclamped") == 0.5
    assert scale_of((4, 25), "match_rms_adamw") == pytest.approx(1.0)


def _padded(rank: int, world_size: int, matrices: int) -> list[str]:
    params = [nn.Parameter(torch.zeros(32, 32, dtype=torch.bfloat16)) for _ in range(matrices)]
    with warnings.catch_warnings(record=True) as seen, mock.patch.object(buckets, "MANY_BYTES", 0):
        warnings.simplefilter("always")
        ShardedMuon(params).close()
    return [str(warning.message) for warning in seen]


def test_much_padding_is_warned_of_once() -> None:
    first, *others = run_ranks(3, _padded, 2)
    assert others == [[], []] and len(first) == 1
    for part in ("3 ranks shard few matrices (2)", "50% of padding", "2,048 bytes", "stage=3", "mesh"):
        assert part in first[0]
    assert run_ranks(3, _padded, 3) == [[], [], []]


# -- who takes what ---------------------------------------------------------------------------------------------------


class _Decoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, 8)
        self.layer = nn.Linear(8, 16)
        self.norm = nn.LayerNorm(16)
        self.head = nn.Linear(16, 50, bias=False)
        self.tied = nn.Linear(8, 50, bias=False)
        self.tied.weight = self.embedding.weight


def test_split_gives_hidden_matrices() -> None:
    matrices, others = ShardedMuon.split(_Decoder())
    assert [name for name, _ in matrices] == ["layer.weight"]
    assert [name for name, _ in others] == [
        "embedding.weight",
        "layer.bias",
        "norm.weight",
        "norm.bias",
        "head.weight",
    ]


def test_split_looks_at_the_module_itself() -> None:
    """Of BERT's ``output.dense`` the module is no head."""
    block = nn.ModuleDict({"output": nn.ModuleDict({"dense": nn.Linear(4, 4)}), "score": nn.Linear(4, 4)})
    assert [name for name, _ in ShardedMuon.split(block)[0]] == ["output.dense.weight"]


def test_split_takes_no_block_for_a_head() -> None:
    """A model may be as wide as it has positions, or have a layer as tall as its small vocabulary, in each block."""
    blocks = nn.ModuleList([nn.ModuleDict({"up": nn.Linear(8, 32), "out": nn.Linear(32, 8)}) for _ in range(2)])
    model = nn.ModuleDict({"tokens": nn.Embedding(32, 8), "positions": nn.Embedding(8, 8), "blocks": blocks})
    names = [f"blocks.{block}.{layer}.weight" for block in range(2) for layer in ("up", "out")]
    assert [name for name, _ in ShardedMuon.split(model)[0]] == names

    model = nn.ModuleDict({"tokens": nn.Embedding(50, 8), "blocks": blocks, "unembed": nn.Linear(8, 50)})
    assert [name for name, _ in ShardedMuon.split(model)[0]] == names


@pytest.mark.parametrize(
    ("source", "target", "told"),
    [
        (
            partial(zero_optim.ShardedSGD, lr=0.1, momentum=0.9),
            ShardedMuon,
            "has dampening: it is of another optimizer",
        ),
        (zero_optim.ShardedAdamW, ShardedMuon, "has betas: it is of another optimizer"),
        (ShardedMuon, partial(zero_optim.ShardedSGD, lr=0.1, momentum=0.9), "has ns_steps: it is of Muon"),
    ],
)
def test_state_of_other_optimizers_is_refused(
    source: Callable[..., Any], target: Callable[..., Any], told: str
) -> None:
    model = _model()
    opt = source(model.named_parameters())
    _steps(opt, list(model), 0, range(1), torch.bfloat16)
    own, whole = copy.deepcopy(opt.state_dict()), zero_optim.full_state_dict(opt)
    opt.close()
    other = target(model.named_parameters())
    for load in (lambda: other.load_state_dict(own), lambda: zero_optim.load_full_state_dict(other, whole)):
        with pytest.raises(zero_optim.StateMismatchError, match=f"of the state {told}"):
            load()
    other.close()


def test_original_is_the_usual_scale() -> None:
    params = _weights(torch.float32)
    opt = ShardedMuon(params, adjust_lr_fn="original")
    opt.step()
    state = opt.state_dict()
    opt.close()
    again = ShardedMuon(params)
    again.load_state_dict(state)
    again.close()


THREE = "must be three numbers, or three for each"


@pytest.mark.parametrize(
    ("options", "error", "says"),
    [
        ({"ns_steps": 0}, ValueError, "ns_steps must be a number from 1"),
        ({"adjust_lr_fn": "x"}, ValueError, "adjust_lr_fn must be one of"),
        ({"ns_coefficients": (1, 2)}, ValueError, THREE),
        ({"ns_coefficients": POLAR_EXPRESS}, ValueError, f"{THREE} of ns_steps=5"),
        ({"ns_coefficients": "abc"}, ValueError, THREE),
        ({"ns_coefficients": 3.4}, ValueError, THREE),
        ({"ns_gram": "no"}, ValueError, "ns_gram must be True or False"),
        ({"ns_product": "x"}, ValueError, "ns_product must be one of 'torch', "),
        (
            {"ns_product": "triton"},
            ParameterError,
            "parameter 0 .*Muon: ns_product='triton' needs Triton on a GPU, and runs on cuda .*: leave ns_product out",
        ),
        ({"eps": 0.0}, ValueError, "eps must be a number above 0"),
        ({"eps": "a"}, ValueError, "eps must be a number above 0"),
        ({"momentum": None}, ValueError, "momentum of .* must be a number"),
        ({"nesterov": "yes"}, ValueError, "nesterov of .* must be True"),
    ],
)
def test_options_out_of_range(options: dict[str, Any], error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=says):
        ShardedMuon(_weights(torch.float32), **options)


def test_a_vector_and_an_option_of_a_group_alone_are_refused() -> None:
    with pytest.raises(ParameterError, match="has 1 dimensions, and Muon makes"):
        ShardedMuon([nn.Parameter(torch.zeros(3))])
    with pytest.raises(ValueError, match="ns_steps of parameter group 0 is 7, .* make it with ns_steps=7"):
        ShardedMuon([{"params": _weights(torch.float32)[:1], "ns_steps": 7}])


def _refused(rank: int, world_size: int, options: dict[str, Any]) -> str:
    with pytest.raises((ParameterError, zero_optim.RankMismatchError)) as refusal:
        ShardedMuon(_weights(torch.float32), **options)
    return str(refusal.value)


def test_a_product_that_cannot_be_had_is_refused_on_every_rank() -> None:
    """Before anything is trained, also where an update would be on the host."""
    for options in ({}, {"stage": 0}, {"state_offload": "cpu"}):
        for said in run_ranks(2, _refused, {"ns_product": "triton", **options}):
            assert "ns_product='triton' needs Triton on a GPU, and runs on cuda tensors, not on cpu" in said


def test_a_device_is_where_the_update_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """With ``state_offload="cpu"`` that is the host, whatever the parameters are on."""
    rule = Muon(ns_product="triton")
    monkeypatch.setattr(zero_kernels, "why_no_symmetric_product", lambda device: f"this is {device}")
    assert rule.refuse_device(torch.device("cuda", 1)) == (
        "ns_product='triton' needs Triton on a GPU, and this is cuda:1: leave ns_product out"
    )
    assert Muon().refuse_device(torch.device("cpu")) is None
    monkeypatch.setattr(
        zero_kernels, "why_no_symmetric_product", lambda device: "host" if device.type == "cpu" else None
    )
    assert rule.refuse_device(torch.device("cuda")) is None
    weights = [nn.Parameter(weight.to("meta")) for weight in _weights(torch.float32)]
    parameters = SimpleNamespace(all=weights, labels=["w"] * len(weights), group=lambda index: {})
    check = partial(validate.check_rules_take, SimpleNamespace(all=[rule], of=lambda index: rule), parameters, [0], 2)
    check(None)
    check("paged")
    with pytest.raises(ParameterError, match="and host: leave"):
        check("cpu")
