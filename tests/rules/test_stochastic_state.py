"""``state_dtype="bf16"``: the same bits on any ranks, at any stage, in any store, from a checkpoint on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from harness import run_ranks
from oracle import rounded_by_noise
from torch import Tensor, nn
from zero_optim.rules import SGD, AdamW, Bf16, UpdateRule

import zero_kernels
from zero_kernels import ROW, RULES, codecs

STEPS, MORE = 4, 3
SHAPES = ((300,), (41, 128), (7, 19), (5,))
SKIPPED = (2, 1)  # a parameter, and the step in which it has no gradient


class Part(nn.Module):
    def __init__(self, first: int) -> None:
        super().__init__()
        self.first = first
        generator = torch.Generator().manual_seed(first)
        start = [torch.randn(shape, generator=generator).bfloat16() for shape in SHAPES[first : first + 2]]
        self.parts = nn.ParameterList(start)

    def forward(self, x: Tensor, step: int) -> Tensor:
        for number, p in enumerate(self.parts, self.first):
            if (number, step) != SKIPPED:
                x = x + (p.float() * _gradient(number, step).float()).sum()
        return x


def _gradient(number: int, step: int) -> Tensor:
    """Of few bits, so that sums over ranks and their mean are exact."""
    generator = torch.Generator().manual_seed(100 * step + number)
    return (torch.randint(-15, 16, SHAPES[number], generator=generator) / 8).bfloat16()


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.units = nn.ModuleList([Part(0), Part(2)])

    def forward(self, x: Tensor, step: int) -> Tensor:
        for unit in self.units:
            x = unit(x, step)
        return x


class InTorch(UpdateRule):
    """Two moments, and an update that no kernel has."""

    options, own_columns = AdamW.options, ("lr",)
    tensors = AdamW().tensors

    def update_rows(self, g: Tensor, p: Tensor, state: Any, c: Any) -> Any:
        m = state["exp_avg"] * 0.75 + g * 0.25
        v = state["exp_avg_sq"] * 0.75 + g * g * 0.25
        return p - c["lr"] * m, {"exp_avg": m, "exp_avg_sq": v}


FORM: dict[str, Any] = {"state_dtype": "bf16"}

JOBS: dict[str, tuple[str, dict[str, Any]]] = {
    "adamw": ("ShardedAdamW", {"lr": 2.0**-7, "weight_decay": 0.125, **FORM}),
    "amsgrad": ("ShardedAdamW", {"lr": 2.0**-7, "weight_decay": 0.125, "amsgrad": True, "master": "split", **FORM}),
    "lion": ("ShardedLion", {"lr": 2.0**-7, "master": "split8", **FORM}),
    "sgd": ("ShardedSGD", {"lr": 2.0**-7, "momentum": 0.875, **FORM}),
}

WAYS: dict[int, list[tuple[str, dict[str, Any]]]] = {
    1: [(job, {"stage": 2}) for job in JOBS],
    2: [
        ("adamw", {"stage": 0}),
        ("amsgrad", {"stage": 1, "state_offload": "paged", "device_budget": 0}),
        ("lion", {"stage": 2, "bucket_cap_mb": 0.1}),
        ("adamw", {"stage": 2, "state_offload": "cpu"}),
        ("sgd", {"stage": 3}),
    ],
    3: [
        ("adamw", {"stage": 3}),
        ("amsgrad", {"stage": 2}),
        ("lion", {"stage": 1, "state_offload": "nvme"}),
        ("sgd", {"stage": 0, "bucket_cap_mb": 0.1}),
    ],
}


def _made(job: str, stage: int, folder: str = "", **given: Any) -> tuple[nn.Module, Any]:
    import zero_optim

    model = Model()
    if stage == 3:
        zero_optim.shard_module(model, units=(Part,))
    name, options = JOBS[job]
    if given.get("state_offload") == "nvme":
        given["state_offload"] = f"nvme:{folder}"
    options = {"bucket_cap_mb": 0.001, **options, **given}
    return model, getattr(zero_optim, name)(model.named_parameters(), stage=stage, **options)


def _train(model: nn.Module, opt: Any, steps: range, factor: float) -> None:
    for step in steps:
        (model(torch.zeros(()), step) * factor).backward()
        opt.step()
        opt.zero_grad()


def _run(rank: int, world_size: int, folder: str) -> Any:
    """By way: all state, whole. On two ranks AdamW is saved, and trained on; on three it is loaded, and trained on."""
    import zero_optim
    from zero_optim import checkpoint

    factor, found = world_size if rank == 0 else 0, []
    for job, given in WAYS[world_size]:
        model, opt = _made(job, folder=folder, **given)
        _train(model, opt, range(STEPS), factor)
        kinds = [kind for kind in opt.stats()["memory"] if kind.endswith("_bf16")]
        state = zero_optim.full_state_dict(opt, rank=None)["state"]
        found.append((state, kinds))
        if world_size == 2 and given["stage"] == 0:
            checkpoint.save(f"{folder}/saved", model, opt)
        opt.close()
    on = None
    if world_size == 3:
        model, opt = _made("adamw", 2)
        checkpoint.load(f"{folder}/saved", model, opt)
        _train(model, opt, range(STEPS, STEPS + MORE), factor)
        on = zero_optim.full_state_dict(opt, rank=None)["state"]
        opt.close()
    return found, on


def _expected(job: str, steps: int) -> list[dict[str, Tensor]]:
    """Each parameter alone, updated by the reference backend, with keys of its own rows."""
    name, options = JOBS[job]
    rule = "amsgrad" if "amsgrad" in options else name.removeprefix("Sharded").lower()
    of = RULES[rule]
    given = {"beta1": 0.9, "beta2": 0.99 if rule == "lion" else 0.999, "eps": 1e-8, "decoupled": 1.0, "maximize": 0.0}
    given |= {"weight_decay": 0.0, "dampening": 0.0, "nesterov": 0.0, **options}
    coefficients = torch.tensor([[float(given[each])] for each in of.coefficients], dtype=torch.float64)
    found = []
    for number, shape in enumerate(SHAPES):
        parameter = Model().units[number // 2].parts[number % 2].detach().reshape(-1).clone()
        numel = parameter.numel()
        rows = torch.zeros(-(-numel // ROW), dtype=torch.int32)
        keys, made = codecs.row_keys(number, 0, len(rows)), 0
        low = {"split": torch.int16, "split8": torch.int8}[options.get("master", "split")]
        stored = torch.zeros(numel, dtype=low)
        states = [torch.zeros(numel, dtype=torch.bfloat16) for _ in of.states]
        for step in range(steps):
            if (number, step) == SKIPPED:
                continue
            made, table = made + 1, torch.empty(1, len(of.columns))
            of.fill_table(coefficients, None, torch.tensor([float(made)], dtype=torch.float64), None, table)
            lists = ([_gradient(number, step).view(-1)], [stored], states, [parameter], [rows], table)
            with zero_kernels.use_backend("reference"):
                zero_kernels.foreach_step(rule, *lists, row_keys=[keys])
        whole = codecs.join_master(parameter, stored)
        found.append(
            {"master": whole.view(shape)}
            | {kind: state.float().view(shape) for kind, state in zip(of.states, states, strict=True)}
        )
    return found


def _check(state: Any, expected: list[dict[str, Tensor]], *case: Any) -> None:
    for number, entry in enumerate(expected):
        for kind, values in entry.items():
            assert torch.equal(state[number][kind], values), (kind, number, *case)


def test_the_bits_are_those_of_each_parameter_alone_on_any_ranks(tmp_path: Path) -> None:
    """At each stage, in each store, with each master and rule; and from a checkpoint of two ranks on three."""
    expected = {job: _expected(job, STEPS) for job in JOBS}
    for world_size, ways in WAYS.items():
        for found, on in run_ranks(world_size, _run, str(tmp_path)):
            for (job, given), (state, kinds) in zip(ways, found, strict=True):
                _check(state, expected[job], job, given, world_size)
                assert kinds == [f"{name}_bf16" for name in RULES[job].states]
            if on is not None:
                _check(on, _expected("adamw", STEPS + MORE), "from a checkpoint on")


# ---- in torch --------------------------------------------------------------------------------------------------------


def _state(rule: UpdateRule, steps: int = 3, **options: Any) -> list[dict[str, Tensor]]:
    import zero_optim

    model = Model()
    opt = zero_optim.ShardedOptimizer(model.named_parameters(), rule, **options)
    _train(model, opt, range(steps), 1)
    state = zero_optim.full_state_dict(opt)["state"]
    opt.close()
    return [state[number] for number in range(len(SHAPES))]


def test_a_rule_in_torch_rounds_by_the_same_noise() -> None:
    """One step: both moments are a quarter of what was given."""
    form = {"exp_avg": Bf16(), "exp_avg_sq": Bf16()}
    for number, entry in enumerate(_state(InTorch(lr=0.25).with_codecs(form), steps=1)):
        g = _gradient(number, 0).float()
        exact = {"exp_avg": (g * 0.25, 0), "exp_avg_sq": (g * g * 0.25, 1)}
        for kind, (values, state) in exact.items():
            assert torch.equal(entry[kind], rounded_by_noise(values, number, 1, state)), (kind, number)


# ---- between forms ---------------------------------------------------------------------------------------------------


def test_sgd_without_momentum_has_nothing_to_round() -> None:
    import zero_optim

    model = Model()
    opt = zero_optim.ShardedOptimizer(model.named_parameters(), SGD(lr=0.25), state_dtype="bf16")
    _train(model, opt, range(2), 1)
    assert all(shard.row_keys is None for shard in opt.engine.states.shards)
    opt.close()
