"""A rule that nobody has thought of: everything beside the arithmetic goes by its list of state tensors."""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import torch
from harness import run_ranks
from torch import Tensor, nn
from zero_optim.rules import Begins, Flag, Number, Per, StateTensor, UpdateRule

from zero_kernels import ROW

SHAPES = ((300,), (7, 19), (2, 128), (5,))
LR = 0.25


class Scaled(UpdateRule):
    """Momentum over the largest gradient that its row has seen: one value an element in fp32, and one a row in fp16."""

    options = (Number("lr", LR, rate=True),)
    tensors = (
        StateTensor("precise", Begins.PARAMETER),
        StateTensor("momentum"),
        StateTensor("peak", dtype=torch.float16, per=Per.ROW),
    )
    own_columns = ("lr",)

    def update_rows(
        self, g: Tensor, p: Tensor, state: Mapping[str, Tensor], c: Mapping[str, Tensor]
    ) -> tuple[Tensor, Mapping[str, Tensor]]:
        p, momentum, peak = momentums(p, state["momentum"], state["peak"], g, c["lr"])
        return p, {"momentum": momentum, "peak": peak}


def momentums(p: Tensor, m: Tensor, peak: Tensor, g: Tensor, lr: Any) -> tuple[Tensor, Tensor, Tensor]:
    """The formula, for rows [n, 128]; used by the rule and by the oracle, on different layouts."""
    peak = torch.maximum(peak.float(), g.abs().amax(1, keepdim=True)).half()
    m = m * 0.5 + g
    return p - lr * (m / (1 + peak.float())), m, peak


class Oracle:
    """One parameter, padded to whole rows, in one process."""

    def __init__(self, parameter: Tensor) -> None:
        rows = -(-parameter.numel() // ROW)
        self.p, self.m = torch.zeros(2, rows, ROW)
        self.p.view(-1)[: parameter.numel()] = parameter.detach().float().reshape(-1)
        self.peak = torch.zeros(rows, 1, dtype=torch.float16)

    def step(self, gradient: Tensor) -> None:
        g = torch.zeros_like(self.p)
        g.view(-1)[: gradient.numel()] = gradient.reshape(-1)
        self.p, self.m, self.peak = momentums(self.p, self.m, self.peak, g, LR)

    def state(self) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """By element, and by row."""
        return {"momentum": self.m}, {"peak": self.peak}


def _gradient(index: int, shape: tuple[int, ...], step: int) -> Tensor:
    n = torch.Size(shape).numel()
    return (((torch.arange(n) * 5 + 3 * index + 7 * step) % 17 - 8) / 16).reshape(shape)


def _make(dtype: torch.dtype) -> list[nn.Parameter]:
    return [nn.Parameter(_gradient(index, shape, 9).to(dtype)) for index, shape in enumerate(SHAPES)]


def _train(params: list[nn.Parameter], opt: Any, steps: range, factor: int) -> None:
    """``factor``: rank 0 has all ranks' gradients, so that their average is exact."""
    for step in steps:
        terms = [(p * (factor * _gradient(i, SHAPES[i], step)).to(p.dtype)).float().sum() for i, p in enumerate(params)]
        sum(terms[1:], terms[0]).backward()
        opt.step()
        opt.zero_grad()


class Counting(UpdateRule):
    """No master, so that bf16 parameters are rounded at each step; and how often a row has had a gradient of some size,
    an integer a row. It steps by the sign, less often where it has counted much."""

    options = (Number("lr", LR, rate=True),)
    tensors = (StateTensor("seen", dtype=torch.int64, per=Per.ROW), StateTensor("sum", dtype=torch.bfloat16))
    own_columns = ("lr",)

    def update_rows(
        self, g: Tensor, p: Tensor, state: Mapping[str, Tensor], c: Mapping[str, Tensor]
    ) -> tuple[Tensor, Mapping[str, Tensor]]:
        return counted(g, p, state["seen"], state["sum"], c["lr"])


def counted(g: Tensor, p: Tensor, seen: Tensor, total: Tensor, lr: Any) -> tuple[Tensor, dict[str, Tensor]]:
    seen = seen + (g.abs().amax(1, keepdim=True) > 0.2) * 2**40  # more than fp32, or a double of fp32, would keep
    return p - lr * torch.sign(g) / (seen >> 40).clamp(min=1), {"seen": seen, "sum": total.float() + g}


class CountingOracle:
    """As ``Oracle``. The parameter is its own master."""

    def __init__(self, parameter: Tensor) -> None:
        rows = -(-parameter.numel() // ROW)
        self.p, self.total = torch.zeros(2, rows, ROW, dtype=parameter.dtype)
        self.p.view(-1)[: parameter.numel()] = parameter.detach().reshape(-1)
        self.seen = torch.zeros(rows, 1, dtype=torch.int64)

    def step(self, gradient: Tensor) -> None:
        g = torch.zeros(self.p.shape)
        g.view(-1)[: gradient.numel()] = gradient.reshape(-1)
        p, changed = counted(g, self.p.float(), self.seen, self.total, LR)
        self.p, self.seen, self.total = p.bfloat16(), changed["seen"], changed["sum"].bfloat16()

    def state(self) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        return {"sum": self.total}, {"seen": self.seen}


def _life(rank: int, world_size: int, rule: UpdateRule, dtype: torch.dtype, place: dict[str, Any], folder: str) -> Any:
    """Train, save in three ways, train on; and from each of them train on again, in a new optimizer. A full state is
    loaded at another stage."""
    import zero_optim
    from zero_optim import checkpoint

    factor = world_size if rank == 0 else 0
    if place.get("state_offload") == "nvme":
        place = {**place, "state_offload": f"nvme:{folder}"}

    def make(values: list[Tensor], **given: Any) -> tuple[nn.ParameterList, Any]:
        model = nn.ParameterList([nn.Parameter(value.detach().clone()) for value in values])
        return model, zero_optim.ShardedOptimizer(model, rule, bucket_cap_mb=0.001, **{**place, **given})

    model, opt = make([*_make(dtype)])
    _train([*model], opt, range(3), factor)
    memory, full, own = (
        opt.stats()["memory"],
        zero_optim.full_state_dict(opt, rank=None),
        copy.deepcopy(opt.state_dict()),
    )
    checkpoint.save(f"{folder}/saved", model, opt)
    middle = [p.detach().clone() for p in model]
    _train([*model], opt, range(3, 5), factor)
    opt.close()
    again = []
    for load, given in (
        (lambda model, opt: checkpoint.load(f"{folder}/saved", model, opt), {}),
        (lambda model, opt: opt.load_state_dict(own), {}),
        (
            lambda model, opt: zero_optim.load_full_state_dict(opt, full if rank == 0 else None),
            {"stage": 2 if place["stage"] == 0 else 0},
        ),
    ):
        other, new = make(middle, **given)
        load(other, new)
        _train([*other], new, range(3, 5), factor)
        again.append([p.detach().clone() for p in other])
        new.close()
    if isinstance(rule, Counting):
        halves = copy.deepcopy(full)
        halves["state"][0]["seen"] = halves["state"][0]["seen"].float() + 0.5
        _, new = make(middle)
        with pytest.raises(zero_optim.StateMismatchError, match="seen of .*int64"):
            zero_optim.load_full_state_dict(new, halves if rank == 0 else None)
        new.close()
    return [[p.detach().clone() for p in model], *again], full["state"], memory


@pytest.mark.parametrize(
    ("rule", "dtype", "world_size", "place"),
    [
        (Scaled(), torch.float32, 1, {"stage": 2}),
        (Scaled(), torch.bfloat16, 2, {"stage": 0}),
        (Scaled(), torch.float32, 2, {"stage": 1}),
        (Scaled(), torch.bfloat16, 3, {"stage": 2}),
        (Counting(), torch.bfloat16, 1, {"stage": 2}),
        (Counting(), torch.bfloat16, 2, {"stage": 0, "state_offload": "paged"}),
        (Counting(), torch.bfloat16, 2, {"stage": 2, "state_offload": "cpu"}),
        (Counting(), torch.bfloat16, 3, {"stage": 1, "state_offload": "nvme"}),
    ],
    ids=lambda of: type(of).__name__ if isinstance(of, UpdateRule) else str(of),
)
def test_state_of_any_rule_is_kept_saved_moved_and_counted(
    rule: UpdateRule, dtype: torch.dtype, world_size: int, place: dict[str, Any], tmp_path: Path
) -> None:
    oracles = [(Oracle if isinstance(rule, Scaled) else CountingOracle)(parameter) for parameter in _make(dtype)]
    for step in range(3):
        for index, oracle in enumerate(oracles):
            oracle.step(_gradient(index, SHAPES[index], step).to(dtype).float())
    states = [oracle.state() for oracle in oracles]
    for step in range(3, 5):
        for index, oracle in enumerate(oracles):
            oracle.step(_gradient(index, SHAPES[index], step).to(dtype).float())
    by_rank = run_ranks(world_size, _life, rule, dtype, place, str(tmp_path))
    for trained, full, _ in by_rank:
        for params in trained:
            for p, oracle in zip(params, oracles, strict=True):
                assert torch.equal(p.reshape(-1), oracle.p.reshape(-1)[: p.numel()].to(dtype))
        for index, (by_element, by_row) in enumerate(states):
            numel = torch.Size(SHAPES[index]).numel()
            for name, value in by_element.items():
                assert full[index][name].shape == SHAPES[index]
                assert torch.equal(full[index][name].reshape(-1), value.reshape(-1)[:numel])
            for name, value in by_row.items():
                assert full[index][name].dtype == value.dtype and torch.equal(full[index][name], value.reshape(-1))
            assert ("precise" in full[index]) is (isinstance(rule, Scaled) and dtype is torch.bfloat16)
    if isinstance(rule, Scaled):
        sizes = [torch.Size(shape).numel() for shape in SHAPES]
        holders = world_size if place["stage"] == 0 else 1
        assert sum(memory["momentum"] for *_, memory in by_rank) == holders * 4 * sum(sizes)
        assert sum(memory["peak"] for *_, memory in by_rank) == holders * 2 * sum(-(-size // ROW) for size in sizes)
        assert "exp_avg" not in by_rank[0][2]


def _convolution(order: torch.memory_format) -> tuple[nn.Module, Any]:
    import zero_optim

    torch.manual_seed(0)
    model = nn.Conv2d(16, 24, 3).to(memory_format=order)
    return model, zero_optim.ShardedOptimizer(model.named_parameters(), Scaled())


def _rows_between(rank: int, world_size: int, folder: str) -> list[str]:
    """State for rows of a channels_last parameter goes to one that lies so, and is refused by one that does not."""
    import zero_optim
    from zero_optim import checkpoint

    raised = []
    model, opt = _convolution(torch.channels_last)
    model(torch.randn(2, 16, 5, 5)).square().sum().backward()
    opt.step()
    checkpoint.save(folder, model, opt)
    full, own = zero_optim.full_state_dict(opt, rank=None), copy.deepcopy(opt.state_dict())
    for order in (torch.channels_last, torch.contiguous_format):
        other, its = _convolution(order)
        values = [p.detach().clone() for p in other.parameters()]
        loads = (
            lambda its=its: zero_optim.load_full_state_dict(its, full if rank == 0 else None),
            lambda its=its: its.load_state_dict(own),
            lambda its=its, other=other: checkpoint.load(folder, other, its),
        )
        for load in loads:
            if order is torch.channels_last:
                load()
                again = zero_optim.full_state_dict(its, rank=None)["state"]
                for index, entry in full["state"].items():
                    assert all(torch.equal(entry[kind], again[index][kind]) for kind in ("peak", "momentum"))
            else:
                with pytest.raises(zero_optim.StateMismatchError) as error:
                    load()
                raised.append(str(error.value))
                assert zero_optim.full_state_dict(its, rank=None)["state"] == {}
                assert all(torch.equal(*pair) for pair in zip(values, other.parameters(), strict=True))
        its.close()
    return raised


@pytest.mark.parametrize("world_size", [1, 2])
def test_rows_of_another_order_are_refused(tmp_path: Any, world_size: int) -> None:
    for raised in run_ranks(world_size, _rows_between, str(tmp_path)):
        assert len(raised) == 3
        assert all("rows" in told and "the memory format that it was saved in" in told for told in raised)
        assert all("weight" in told for told in raised)


# ---- the rule of docs/rules.md ---------------------------------------------------------------------------------------


def test_the_rule_of_the_docs_is_adagrad() -> None:
    import zero_optim

    page = (Path(__file__).resolve().parents[2] / "docs" / "rules.md").read_text()
    blocks = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    (code,) = (block for block in blocks if "class Adagrad" in block)
    names: dict[str, Any] = {}
    exec(compile(code, "docs/rules.md", "exec"), names)
    assert len(code.splitlines()) <= 60
    names["optimizer"].close()
    params, theirs = _make(torch.float32), _make(torch.float32)
    options = {"lr": 0.05, "lr_decay": 0.1, "weight_decay": 0.01}
    opt = zero_optim.ShardedOptimizer(params, names["Adagrad"](**options), max_grad_norm=1e9)
    torchs = torch.optim.Adagrad(theirs, **options)
    for step in range(5):
        for index, (p, q) in enumerate(zip(params, theirs, strict=True)):
            q.grad = _gradient(index, SHAPES[index], step)
            p.grad = q.grad.clone()
        opt.step()
        torchs.step()
    full = zero_optim.full_state_dict(opt)["state"]
    for index, (p, q) in enumerate(zip(params, theirs, strict=True)):
        assert torch.allclose(p, q, rtol=1e-6, atol=1e-7)
        assert torch.allclose(full[index]["sum"], torchs.state[q]["sum"], rtol=1e-6)


def test_a_rule_that_is_compiled_updates_as_it_is() -> None:
    """By a compiler that counts its graphs, and runs them as they are."""
    import zero_optim

    graphs = []

    def compiler(graph: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        graphs.append(graph)
        return graph.forward

    class Compiled(Scaled):
        compiled = MappingProxyType({"backend": compiler, "dynamic": True})

    seen = []
    for rule in (Scaled(), Compiled()):
        params = _make(torch.bfloat16)
        opt = zero_optim.ShardedOptimizer(params, rule, bucket_cap_mb=0.001)
        _train(params, opt, range(3), 1)
        seen.append([p.detach().clone() for p in params])
        opt.close()
    assert 0 < len(graphs) < 5, "it is compiled once, and not for each shard"
    for one, other in zip(*seen, strict=True):
        assert torch.equal(one, other)


def test_a_rule_with_maximize_turns_the_gradient() -> None:
    import zero_optim

    class Up(Scaled):
        options = (*Scaled.options, Flag("maximize"))

    seen = []
    for rule, factor in ((Scaled(), 1), (Up(), 1), (Up(maximize=True), -1)):
        params = _make(torch.float32)
        opt = zero_optim.ShardedOptimizer(params, rule)
        _train(params, opt, range(2), factor)
        seen.append([p.detach().clone() for p in params])
        opt.close()
    for one, *others in zip(*seen, strict=True):
        assert all(torch.equal(one, other) for other in others)
