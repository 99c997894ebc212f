"""``ShardedMuon`` at stage 3: matrices that are cut over ranks are made whole, each on one of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import zero_optim
from cells import slow
from harness import run_ranks
from sharded_cases import ON_DISK
from torch import Tensor, nn
from zero_optim import ParameterError, rules
from zero_optim.params.layout import WholeParameters
from zero_optim.rules import homes
from zero_optim.rules.homes import _homes

STEPS = 3


class Block(nn.Module):
    """Matrices of several shapes, some of whose rows no number of ranks divides; views, experts, a convolution."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.qkv = nn.Parameter(torch.randn(3 * width, width) / width**0.5)
        self.out = nn.Linear(width, width, bias=False)
        self.up = nn.Linear(width, 2 * width + 3, bias=False)
        self.down = nn.Linear(2 * width + 3, width)
        self.experts = nn.Parameter(torch.randn(3, width, 5) / width**0.5)
        self.norm = nn.LayerNorm(width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (self.norm(x) @ self.qkv.T).chunk(3, dim=-1)
        x = x + self.out(q * k + v)
        x = x + self.down(torch.relu(self.up(x)))
        return x + torch.einsum("bi,eij->bj", x, self.experts).repeat(1, x.shape[1] // 5 + 1)[:, : x.shape[1]]


class Model(nn.Sequential):
    def __init__(self, dtype: torch.dtype) -> None:
        torch.manual_seed(0)
        super().__init__(*(Block(20) for _ in range(3)), nn.Linear(20, 7))
        self.to(dtype)


def groups_of(model: nn.Module) -> list[dict[str, Any]]:
    named = [*model.named_parameters()]
    fused = [(name, p) for name, p in named if "qkv" in name]
    hidden = [(name, p) for name, p in named if p.dim() > 1 and "qkv" not in name and not name.startswith("3.")]
    chosen = {name for name, _ in (*fused, *hidden)}
    others = [(name, p) for name, p in named if name not in chosen]
    return [
        {"params": hidden},
        {"params": fused, "view": {"rows": (20, 20, 20)}, "lr": 0.03},
        {"params": others, "rule": rules.AdamW(lr=1e-2)},
    ]


def make(
    stage: int,
    dtype: torch.dtype,
    mesh: dist.DeviceMesh | None = None,
    param_offload: str | None = None,
    **options: Any,
) -> tuple[Model, zero_optim.ShardedMuon]:
    model = Model(dtype)
    if stage == 3:
        zero_optim.shard_module(model, (Block,), mesh=mesh, param_offload=param_offload)
    return model, zero_optim.ShardedMuon(groups_of(model), lr=0.02, stage=stage, mesh=mesh, **options)


def train(model: nn.Module, opt: zero_optim.ShardedMuon, steps: int, *, overflow: bool = False) -> None:
    for step in range(steps):
        generator = torch.Generator().manual_seed(100 * step + dist.get_rank() % 2)
        x = torch.randn(6, 20, generator=generator).to(next(model.parameters()).dtype)
        loss = model(x).float().square().mean()
        (loss * torch.inf if overflow and dist.get_rank() == 0 else loss).backward()
        opt.step()
        opt.zero_grad()


def everything(model: nn.Module, opt: zero_optim.ShardedMuon) -> dict[str, Tensor]:
    """Weights and state by name, on rank 0."""
    state = zero_optim.full_state_dict(opt)
    with zero_optim.gather_parameters(model):
        found = {name: p.detach().clone() for name, p in model.named_parameters()}
    names = [name for group in groups_of(model) for name, _ in group["params"]]
    for index, of_parameter in (state or {"state": {}})["state"].items():
        found |= {f"{names[index]}/{key}": torch.as_tensor(value) for key, value in of_parameter.items()}
    return found


def assert_same(ours: Mapping[str, Tensor], theirs: Mapping[str, Tensor]) -> None:
    assert ours.keys() == theirs.keys()
    assert [name for name in ours if not torch.equal(ours[name], theirs[name])] == []


def _as_at_stage_2(rank: int, world_size: int, dtype: torch.dtype, options: dict[str, Any]) -> None:
    found, numbers = [], []
    for stage in (2, 3):
        model, opt = make(stage, dtype, **options)
        train(model, opt, STEPS)
        if "telemetry_every" in options:
            numbers.append(opt.telemetry(over_ranks=True).floats())
        found.append(everything(model, opt))
        opt.close()
    assert_same(*found)
    if numbers:
        assert numbers[0] and numbers[1] == pytest.approx(numbers[0], rel=1e-5)


@pytest.mark.parametrize(
    ("world_size", "dtype", "options"),
    [
        (1, torch.bfloat16, {"max_grad_norm": 0.1}),
        pytest.param(2, torch.float32, {"ema_decay": 0.9}, marks=slow),
        (3, torch.bfloat16, {"master": "split", "state_dtype": "int8", "telemetry_every": 1}),
        (5, torch.bfloat16, {"state_dtype": "bf16", "ema_decay": 0.5}),
    ],
)
def test_it_has_the_bits_of_stage_2(world_size: int, dtype: torch.dtype, options: dict[str, Any]) -> None:
    run_ranks(world_size, _as_at_stage_2, dtype, options)


@pytest.mark.parametrize("options", [{}, {"state_offload": "cpu"}])
def test_parameters_in_host_memory_without_a_process_group(options: dict[str, Any]) -> None:
    found = []
    for stage, where in ((2, None), (3, "cpu")):
        model, opt = make(stage, torch.bfloat16, param_offload=where, **options)
        for _ in range(STEPS):
            model(torch.ones(6, 20, dtype=torch.bfloat16)).float().square().mean().backward()
            opt.step()
            opt.zero_grad()
        found.append(everything(model, opt))
        opt.close()
    assert_same(*found)


def _saves(rank: int, world_size: int, folder: str) -> dict[str, Tensor]:
    model, opt = make(3, torch.bfloat16)
    train(model, opt, STEPS)
    zero_optim.checkpoint.save(folder, model, opt)
    train(model, opt, 1)
    return everything(model, opt)


def _goes_on(rank: int, world_size: int, folder: str, stage: int) -> dict[str, Tensor]:
    model, opt = make(stage, torch.bfloat16)
    zero_optim.checkpoint.load(folder, model, opt)
    train(model, opt, 1)
    return everything(model, opt)


def test_a_checkpoint_goes_on_at_other_ranks_and_stages(tmp_path: Path) -> None:
    """Four ranks have the batches of two, twice: averages are the same."""
    expected = run_ranks(2, _saves, str(tmp_path))[0]
    for world_size, stage in ((4, 3), (4, 2), (2, 1)):
        assert_same(expected, run_ranks(world_size, _goes_on, str(tmp_path), stage)[0])


def _sends(rank: int, world_size: int) -> tuple[int, int, dict[str, int]]:
    model, opt = make(3, torch.bfloat16)
    train(model, opt, STEPS)
    planned = zero_optim.memory.plan_of(opt).traffic
    return opt.stats()["collectives"]["all_to_all"]["bytes"], sum(p.numel() for p in _matrices(model)), planned


def _matrices(model: nn.Module) -> list[nn.Parameter]:
    return [p for group in groups_of(model)[:2] for _, p in group["params"]]


def test_ranks_send_their_parts_there_and_back() -> None:
    found = run_ranks(3, _sends)
    _, matrices, planned = found[0]
    assert sum(sent for sent, *_ in found) == STEPS * (2 + 2) * matrices
    assert planned["all_to_all"] == pytest.approx((2 + 2) * matrices / 3, rel=0.05)


def test_the_dearest_come_first_and_go_to_who_has_least() -> None:
    assert _homes([1, 8, 3, 3, 5], 3) == [1, 0, 2, 2, 1]
    assert _homes([4], 3) == [0]
    assert _homes([], 2) == []


class ByWholes(rules.UpdateRule):
    """A rule that needs whole parameters, and does not make them whole."""

    layout = WholeParameters()


def test_a_rule_that_does_not_join_parts_stays_below() -> None:
    model = Model(torch.float32)
    zero_optim.shard_module(model, (Block,))
    with pytest.raises(ParameterError, match="ByWholes needs whole parameters, and stage 3 cuts them at rows"):
        zero_optim.ShardedOptimizer(model.named_parameters(), ByWholes())


STORES = {
    "cpu": {"state_offload": "cpu"},
    "paged": {"state_offload": "paged", "device_budget": 0},
    "nvme": {"state_offload": "nvme"},
    "parameters": {"param_offload": "cpu"},
    "parameters on a disk": {"param_offload": ON_DISK, "state_offload": "cpu"},
    "all on the host": {"param_offload": "cpu", "state_offload": "cpu", "master": "split", "state_dtype": "int8"},
    "nvme, small": {"state_offload": "nvme", "state_dtype": "bf16", "ema_decay": 0.5},
}


def _eventful(parameters: int, options: dict[str, Any]) -> tuple[dict[str, Tensor], dict[str, int]]:
    """A skipped step and an edit between two others. ``parameters``: of a rank in a batch, at least."""
    with mock.patch.multiple(homes, JOINED_ON_A_PROCESSOR=1, PARAMETERS_A_RANK=parameters):
        model, opt = make(3, torch.bfloat16, max_grad_norm=0.1, **options)
        train(model, opt, 1)
        train(model, opt, 1, overflow=True)
        with torch.no_grad(), zero_optim.gather_parameters(model, writeback=True):
            next(model.parameters()).mul_(1.5)
        train(model, opt, 1)
        found = everything(model, opt)
        sent = opt.stats()["collectives"].get("all_to_all", {"bytes": 0, "calls": 0})
        opt.close()
    return found, sent


def _stored(
    rank: int, world_size: int, names: Sequence[str], folder: str
) -> list[tuple[dict[str, int], dict[str, int]]]:
    """Against the same of everything on the device. Each unit is a batch of its own, as those of large models are."""
    sent, on_the_device = [], {}
    for options in (STORES[name] for name in names):
        here = {name: value for name, value in options.items() if "offload" not in name and name != "device_budget"}
        folders = {"state_offload": f"nvme:{folder}"} if options.get("state_offload") == "nvme" else {}
        at_once = on_the_device.get(str(here)) or on_the_device.setdefault(str(here), _eventful(100, here))
        in_batches = _eventful(1, {**options, **folders})
        assert_same(at_once[0], in_batches[0])
        sent.append((at_once[1], in_batches[1]))
    return sent


# Those that are slow are among the others in another form, and all are on one rank below.
@pytest.mark.parametrize(
    "names",
    [
        ("paged", "parameters", "nvme, small", "parameters on a disk"),
        pytest.param(("cpu", "nvme", "all on the host"), marks=slow),
    ],
    ids=", ".join,
)
def test_state_and_parameters_off_the_device(names: Sequence[str], tmp_path: Path) -> None:
    ranks, steps = run_ranks(3, _stored, names, str(tmp_path), timeout=180), 3
    for number in range(len(names)):
        at_once, in_batches = zip(*(of_rank[number] for of_rank in ranks), strict=True)
        assert sum(sent["bytes"] for sent in in_batches) == sum(sent["bytes"] for sent in at_once)
        assert [sent["calls"] for sent in in_batches] == [2 * steps * 3] * 3
        assert [sent["calls"] for sent in at_once] == [2 * steps] * 3


def test_state_and_parameters_off_the_device_of_one_rank(tmp_path: Path) -> None:
    run_ranks(1, _stored, list(STORES), str(tmp_path))


def _in_host_memory(rank: int, world_size: int) -> tuple[int, int]:
    _, opt = make(3, torch.bfloat16, state_offload="cpu")
    held, planned = opt.stats()["state_offload"]["host"], zero_optim.memory.plan_of(opt).host
    opt.close()
    return held, planned


def test_the_planner_knows_that_matrices_are_not_updated_ahead() -> None:
    """Their update needs other ranks, so there is no spare state for it."""
    for held, planned in run_ranks(2, _in_host_memory):
        assert held == planned
