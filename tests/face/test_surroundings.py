"""What surrounds the optimizer's calls changes nothing: torch's modes, its default device and dtype, its compiler."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator

import pytest
import torch
import zero_optim
from harness import run_ranks
from torch import Tensor, nn

STEPS = 3
WIDTH = 8


@contextlib.contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


SURROUNDINGS: dict[str, Callable[[], contextlib.AbstractContextManager[None]]] = {
    "nothing": contextlib.nullcontext,
    "inference_mode": torch.inference_mode,
    "default_device": lambda: torch.device("meta"),  # nothing that was made there could be read
    "default_dtype": lambda: _default_dtype(torch.bfloat16),
}


def _model(stage: int, surrounding: str = "nothing") -> tuple[nn.Sequential, zero_optim.ShardedAdamW]:
    """``surrounding``: of the constructor."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(3)))
    if stage == 3:
        zero_optim.shard_module(model, (nn.Sequential,))
    with SURROUNDINGS[surrounding]():
        return model, zero_optim.ShardedAdamW(model.parameters(), lr=0.1, stage=stage, telemetry_every=1)


def _input(rank: int, step: int) -> Tensor:
    return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(10 * step + rank))


def _whole(model: nn.Module) -> list[Tensor]:
    return [parameter.clone() for _, parameter in zero_optim.iter_full_parameters(model)]


def _trained(
    rank: int, world_size: int, stage: int, surrounding: str
) -> tuple[list[Tensor], list[float], dict[str, float]]:
    """Parameters, norms, and what was measured of the last step."""
    model, opt = _model(stage, surrounding)
    norms = []
    for step in range(STEPS):
        loss = model(_input(rank, step)).square().sum()
        loss.backward()
        with SURROUNDINGS[surrounding]():
            norm = opt.clip_grad_norm_(0.5, norm_type="inf" if step == 1 else 2.0)
            opt.step()
            measured = opt.telemetry(over_ranks=True).floats()
            opt.zero_grad()
            opt.load_state_dict(copy.deepcopy(opt.state_dict()))
        norms.append(float(norm))
    return _whole(model), norms, measured


@pytest.mark.parametrize("stage", [0, 2, 3])
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_step_is_the_same_in_any_surrounding(ranks, stage):
    usual = run_ranks(ranks, _trained, stage, "nothing")
    assert usual[0][2]
    for surrounding in [*SURROUNDINGS][1:]:
        for own, expected in zip(run_ranks(ranks, _trained, stage, surrounding), usual, strict=True):
            assert own[1:] == expected[1:], surrounding
            assert all(torch.equal(a, b) for a, b in zip(own[0], expected[0], strict=True)), surrounding


def _evaluated(rank: int, world_size: int, stage: int, compiled: bool) -> list[float]:
    """Losses. Evaluates between ``step`` and ``zero_grad``, so that gradients are there as the forward is compiled."""
    torch._dynamo.reset()
    model, opt = _model(stage)
    run = torch.compile(model, backend="aot_eager") if compiled else model
    losses = []
    for step in range(STEPS):
        opt.zero_grad()
        for _ in range(2):  # the second one finds gradients that were reduced
            run(_input(rank, step)[: 1 + step]).square().sum().backward()
        opt.step()
        with torch.no_grad():
            losses.append(float(run(_input(0, STEPS)).square().sum()))
    return losses


@pytest.mark.slow
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_forward_is_compiled_while_gradients_are_shards(stage):
    compiled, eager = (run_ranks(2, _evaluated, stage, way) for way in (True, False))
    assert compiled[0] == compiled[1]
    assert compiled[0] == pytest.approx(eager[0], rel=1e-5)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"max_norm": -1.0}, "max_norm must be a number >= 0, got -1.0"),
        ({"max_norm": float("nan")}, "max_norm must be a number >= 0, got nan"),
        ({"norm_type": 0}, 'norm_type must be positive, or "inf", got 0'),
        ({"norm_type": "two"}, "norm_type must be positive, or \"inf\", got 'two'"),
        ({"norm_type": None}, 'norm_type must be positive, or "inf", got None'),
    ],
)
def test_clipping_by_what_is_no_norm_is_refused(arguments, message):
    opt = zero_optim.ShardedAdamW([nn.Parameter(torch.ones(3))])
    with pytest.raises(ValueError) as caught:
        opt.clip_grad_norm_(**{"max_norm": 1.0, **arguments})
    assert message in str(caught.value)
    opt.close()
