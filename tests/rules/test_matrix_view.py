"""Parameters that are several matrices for ``ShardedMuon``, against ``torch.optim.Muon`` of each matrix by itself."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import zero_optim
from guards import no_host_reads
from harness import run_ranks
from muon_cases import AS_TORCH, OPTIONS, Gradient, masters_alone, masters_of, step_on_rank
from torch import Tensor, nn
from zero_optim import ParameterError, ShardedMuon
from zero_optim.rules import muon
from zero_optim.rules.muon import LEAST_TOGETHER, blocks_of, matrices_of, shapes_of
from zero_optim.rules.newton_schulz import QUINTIC, orthogonalized

LAST, LAST_3D = torch.channels_last, torch.channels_last_3d
PARAMETERS: dict[str, tuple[tuple[int, ...], dict[str, Any] | None]] = {
    "plain": ((24, 40), None),
    "heads": ((72, 40), {"rows": 4}),
    "qkv": ((76, 30), {"rows": (36, 20, 20)}),
    "out": ((24, 80), {"columns": 4}),
    "halves": ((20, 50), {"columns": [30, 20]}),
    "experts": ((3, 40, 24), None),
    "gate_up": ((2, 48, 20), {"rows": 2}),
    "down": ((2, 20, 48), {"columns": 2}),
    "convolution": ((24, 5, 3, 3), None),
    "last": ((24, 5, 3, 3), None),
    "cut": ((18, 6, 3, 3), {"columns": 2}),
    "groups": ((40, 3, 3, 3), {"rows": 2}),
    "solid": ((20, 4, 2, 3, 2), None),
}
"""By name: shape, and view."""

FORMATS = {"last": LAST, "cut": LAST, "solid": LAST_3D}
STEPS = 3


def _values(seed: int, name: str, dtype: torch.dtype) -> Tensor:
    shape = PARAMETERS[name][0]
    number = [*PARAMETERS].index(name)
    values = torch.randn(shape, generator=torch.Generator().manual_seed(100 * seed + number)).to(dtype)
    return values.to(memory_format=FORMATS.get(name, torch.contiguous_format))


def _parameters(names: Sequence[str], dtype: torch.dtype) -> dict[str, nn.Parameter]:
    return {name: nn.Parameter(_values(0, name, dtype) / 4) for name in names}


def _groups(params: dict[str, nn.Parameter]) -> list[dict[str, Any]]:
    return [{"params": [(name, p)], "view": PARAMETERS[name][1]} for name, p in params.items()]


def _gradients(names: Sequence[str], dtype: torch.dtype) -> Gradient:
    return lambda rank, step, number: _values(1 + 10 * rank + step, names[number], dtype)


def _train(
    rank: int, world_size: int, names: Sequence[str], dtype: torch.dtype, options: dict[str, Any]
) -> dict[str, Tensor]:
    """The masters, whole."""
    params = _parameters(names, dtype)
    opt = ShardedMuon(_groups(params), **OPTIONS, bucket_cap_mb=0.02, **options)
    for step in range(STEPS):
        step_on_rank(opt, [*params.values()], _gradients(names, dtype), rank, step)
    masters = masters_of(opt, [*params.values()])
    opt.close()
    return dict(zip(names, masters, strict=True))


def _alone(world_size: int, names: Sequence[str], dtype: torch.dtype) -> dict[str, Tensor]:
    """One rank that is given the averages."""
    params = _parameters(names, dtype)
    opt = ShardedMuon(_groups(params), **OPTIONS)
    masters = masters_alone(opt, [*params.values()], _gradients(names, dtype), world_size, range(STEPS))
    return dict(zip(names, masters, strict=True))


# -- by hand ----------------------------------------------------------------------------------------------------------


def _cut(tensor: Tensor, view: dict[str, Any] | None) -> list[Tensor]:
    """The matrices of a contiguous ``tensor`` one by one, views of it."""
    stack = [*tensor] if tensor.dim() == 3 else [tensor.view(len(tensor), -1)]
    if view is None:
        return stack
    ((cut, blocks),) = view.items()
    dim = 0 if cut == "rows" else 1
    found, length = [], stack[0].shape[dim]
    lengths = [length // blocks] * blocks if isinstance(blocks, int) else blocks
    for matrix in stack:
        start = 0
        for size in lengths:
            found.append(matrix.narrow(dim, start, size))
            start += size
    return found


def _by_torch(name: str, **options: Any) -> Tensor:
    """torch's Muon of each matrix as a parameter of its own."""
    whole = (_values(0, name, torch.float32) / 4).contiguous()
    parts = _cut(whole, PARAMETERS[name][1])
    masters = [nn.Parameter(part.clone()) for part in parts]
    opt = torch.optim.Muon(masters, **OPTIONS, **options)
    for step in range(STEPS):
        gradient = _values(1 + step, name, torch.float32).contiguous()
        for master, part in zip(masters, _cut(gradient, PARAMETERS[name][1]), strict=True):
            master.grad = part.clone()
        opt.step()
    for part, master in zip(parts, masters, strict=True):
        part.copy_(master.detach())
    return whole


@pytest.mark.parametrize("scale", [None, "match_rms_adamw"])
def test_each_matrix_is_torchs(scale: str | None) -> None:
    """The scale is that of the matrix, and not of the parameter."""
    found = _train(0, 1, [*PARAMETERS], torch.float32, {"adjust_lr_fn": scale, **AS_TORCH})
    for name, master in found.items():
        torch.testing.assert_close(master, _by_torch(name, adjust_lr_fn=scale), rtol=0, atol=2e-7, msg=name)


# -- ranks ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("world_size", "stage"), [(2, 0), (3, 1), (4, 2)])
def test_ranks_make_no_difference(world_size: int, stage: int) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        expected = _alone(world_size, [*PARAMETERS], dtype)
        for masters in run_ranks(world_size, _train, [*PARAMETERS], dtype, {"stage": stage}):
            assert all(torch.equal(masters[name], expected[name]) for name in PARAMETERS)


# -- together ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(17, 17), (64, 64), (24, 40), (130, 20), (17, 40), (64, 300)])
def test_together_or_alone(shape: tuple[int, int]) -> None:
    """To the bit, with any number of threads: what several parameters have in one product rests on it."""
    assert min(shape) >= LEAST_TOGETHER
    before = torch.get_num_threads()
    matrices = torch.randn(7, *shape, generator=torch.Generator().manual_seed(0))
    try:
        for gram in (False, True):
            alone = [orthogonalized(matrix, QUINTIC, 5, 1e-7, gram) for matrix in matrices]
            for threads, count in product((1, 2), (1, 2, 3, 7)):
                torch.set_num_threads(threads)
                together = orthogonalized(matrices[:count], QUINTIC, 5, 1e-7, gram)
                assert all(map(torch.equal, together, alone))
    finally:
        torch.set_num_threads(before)


def _updated(numbers: Sequence[int], shape: tuple[int, int]) -> list[Tensor]:
    params = [nn.Parameter(torch.full(shape, 0.5)) for _ in numbers]
    opt = ShardedMuon(params, **OPTIONS)
    for number, parameter in zip(numbers, params, strict=True):
        parameter.grad = torch.randn(shape, generator=torch.Generator().manual_seed(number))
    opt.step()
    opt.close()
    return [parameter.detach() for parameter in params]


@pytest.mark.parametrize("shape", [(16, 16), (5, 60), (24, 40)])
def test_what_lies_beside_makes_no_difference(shape: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Small matrices of several parameters are not made orthogonal together: their bits would depend on how many."""
    alone = [_updated([number], shape)[0] for number in range(30)]
    assert all(map(torch.equal, _updated(range(30), shape), alone))
    monkeypatch.setattr(muon, "ON_A_PROCESSOR", 5 * shape[0] * shape[1])
    assert all(map(torch.equal, _updated(range(30), shape), alone))


def test_few_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """A parameter of more matrices than are made orthogonal together. All have 17 rows and columns or more."""
    together = _alone(1, [*PARAMETERS], torch.float32)
    monkeypatch.setattr(muon, "ON_A_PROCESSOR", 1000)
    few = _alone(1, [*PARAMETERS], torch.float32)
    assert all(torch.equal(few[name], together[name]) for name in PARAMETERS)


def test_the_host_reads_nothing() -> None:
    """In a step, whatever the views."""
    params = _parameters([*PARAMETERS], torch.bfloat16)
    opt = ShardedMuon(_groups(params), **OPTIONS, telemetry_every=1)
    for step in range(2):  # the first makes what stays
        for name, parameter in params.items():
            parameter.grad = _values(1 + step, name, torch.bfloat16)
        with no_host_reads() if step else nullcontext():
            opt.step()
    opt.close()


# -- saved and loaded -------------------------------------------------------------------------------------------------


def test_a_view_stays_through_a_load(tmp_path: Path) -> None:
    """The momentum is elementwise, and means the same whatever the view is: that of the optimizer stays."""
    saved: list[tuple[Any, Any]] = []
    for view in ({"rows": 4}, {"rows": (40, 32)}, None):
        model = nn.ParameterDict(_parameters(["heads"], torch.float32))
        opt = ShardedMuon([{"params": [*model.named_parameters()], "view": view}], **OPTIONS)
        for state, whole in saved:
            opt.load_state_dict(state)
            assert opt.param_groups[0]["view"] == view
            zero_optim.load_full_state_dict(opt, whole)
            assert opt.param_groups[0]["view"] == view
        for folder in [path for path in tmp_path.iterdir() if saved]:
            zero_optim.checkpoint.load(folder, model, opt)
            assert opt.param_groups[0]["view"] == view
            buffer = zero_optim.full_state_dict(opt)["state"][0]["momentum_buffer"]
            assert torch.equal(buffer, saved[-1][1]["state"][0]["momentum_buffer"])
        if not saved:
            model["heads"].grad = _values(1, "heads", torch.float32)
            opt.step()
            saved.append((copy.deepcopy(opt.state_dict()), zero_optim.full_state_dict(opt)))
            zero_optim.checkpoint.save(tmp_path / "saved", model, opt)
        opt.close()


# -- what is refused --------------------------------------------------------------------------------------------------


def _of(shape: tuple[int, ...], view: Any) -> Callable[[], ShardedMuon]:
    return lambda: ShardedMuon([{"params": [("w", nn.Parameter(torch.zeros(shape)))], "view": view}])


@pytest.mark.parametrize(
    ("make", "error", "says"),
    [
        (
            _of((72, 8), {"rows": 5}),
            ParameterError,
            r"'w' has 72 rows by its shape \(72, 8\), .*'rows': 5.*divides 72",
        ),
        (_of((72, 8), {"rows": (40, 30)}), ParameterError, r"'w' has .* give lengths that add up to 72"),
        (_of((8, 72), {"columns": 7}), ParameterError, r"72 columns by .* give a number that divides 72"),
        (_of((8, 3, 3, 3), {"columns": 4}), ParameterError, "27 columns by"),
        (_of((3, 8, 6), {"columns": 4}), ParameterError, "6 columns by"),
        (_of((), None), ParameterError, "has 0 dimensions, and Muon makes matrices"),
        (_of((2,) * 6, None), ParameterError, "has 6 dimensions, and Muon makes matrices"),
        (_of((72, 8), "rows"), ValueError, "view of parameter group 0 must be None, {'rows': blocks} or"),
        (_of((72, 8), {"heads": 4}), ValueError, "view of parameter group 0 must be None"),
        (_of((72, 8), {"rows": 4, "columns": 2}), ValueError, "view of parameter group 0 must be None"),
        (_of((72, 8), {"rows": True}), ValueError, "view of parameter group 0 must be None"),
        (_of((72, 8), {"rows": ()}), ValueError, "view of parameter group 0 must be None"),
        (_of((72, 8), {"rows": (72, 0)}), ValueError, "view of parameter group 0 must be None"),
    ],
)
def test_errors(make: Callable[[], ShardedMuon], error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=says):
        make()


def test_a_view_that_is_set_later() -> None:
    """It holds from the next step on; one that does not fit changes nothing."""
    params = _parameters(["heads"], torch.float32)
    opt = ShardedMuon(params.items(), **OPTIONS)
    params["heads"].grad = _values(1, "heads", torch.float32)
    opt.param_groups[0]["view"] = {"rows": 5}
    before = params["heads"].detach().clone()
    with pytest.raises(ValueError, match="72 rows by .* give a number that divides 72"):
        opt.step()
    assert torch.equal(params["heads"], before)
    opt.param_groups[0]["view"] = {"rows": 4}
    opt.step()
    opt.close()
    viewed = _parameters(["heads"], torch.float32)
    opt = ShardedMuon(_groups(viewed), **OPTIONS)
    viewed["heads"].grad = _values(1, "heads", torch.float32)
    opt.step()
    opt.close()
    assert torch.equal(params["heads"], viewed["heads"])


# -- who takes what ---------------------------------------------------------------------------------------------------


class _Vision(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, 8, 4)
        self.places = nn.Parameter(torch.zeros(1, 9, 8))
        self.convolution = nn.Conv2d(8, 8, 3)
        self.series = nn.Conv1d(8, 8, 3)
        self.up = nn.ConvTranspose2d(8, 8, 2)
        self.experts = nn.Parameter(torch.zeros(4, 8, 16))
        self.head = nn.Linear(8, 5)


def test_split_takes_convolutions_and_experts() -> None:
    """But not the first convolution, which embeds, and no kernel of one dimension, nor one of positions."""
    matrices, others = ShardedMuon.split(_Vision())
    assert [name for name, _ in matrices] == ["experts", "convolution.weight"]
    weights = {"places", "patches.weight", "series.weight", "up.weight", "head.weight"}
    biases = {f"{module}.bias" for module in ("patches", "convolution", "series", "up", "head")}
    assert {name for name, _ in others} == weights | biases


@pytest.mark.parametrize("view", [None, {"rows": 4}, {"rows": (3, 9)}, {"columns": 5}, {"columns": [1, 9]}])
@pytest.mark.parametrize("shape", [(12, 10), (3, 12, 10), (12, 2, 5, 1)])
def test_shapes_are_those_of_the_blocks(shape: tuple[int, ...], view: dict[str, Any] | None) -> None:
    blocks = blocks_of(torch.empty(matrices_of(shape)), view)
    assert shapes_of(shape, view) == [tuple(block.shape[1:]) for block in blocks]
