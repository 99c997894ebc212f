"""Plain values and schedulers come back from a checkpoint as they were."""

from __future__ import annotations

import collections
import fractions
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from compare import same
from small_jobs import INDEX, MIB, all_of, network, train, trained
from torch import nn
from torch.optim import lr_scheduler
from zero_optim import checkpoint

PLAIN: dict[str, Any] = {
    "constants": [None, True, False, 0, -1, 10**30, "", "ü \ud800 \0 😀", b"", b"\xff\0"],
    "floats": [math.inf, -math.inf, math.nan, -0.0, 5e-324, 1e308],
    "nested": {"a": [1, (2, [b"x", {"k": ()}], ((),))], "b": {}},
    "keys": {1: "int", "1": "str", 2.5: "float", (1, "a"): "tuple", None: "none", b"b": "bytes", False: "bool"},
    "counter": collections.Counter("abca"),
    "tensors": [
        torch.randn(3, 4).bfloat16(),
        torch.tensor(1.5, dtype=torch.float16),
        torch.zeros(0, 3),
        torch.tensor([True, False]),
        torch.tensor(-3),
        torch.randn(4, 5).t(),
        torch.randn(2, dtype=torch.complex64),
        torch.tensor([math.nan, -0.0]),
        torch.zeros(MIB // 4),
        torch.zeros(10_000_000)[:2],
    ],
    "what looks like the writing of others": [
        {"$tuple": [1]},
        {"$tensor": "AA"},
        {"$bytes": "AA=="},
        {"$dict": []},
        {"$counter": []},
        {"$float": "nan"},
        {"__tuple__": [1]},
    ],
    "much": [list(range(3000)), "x" * 100_000, b"x" * 100_000],
}


@pytest.mark.parametrize("name", PLAIN)
def test_plain_values_come_back_as_they_were(tmp_path, name):
    checkpoint.save(tmp_path, network(0), step=1, extra=PLAIN[name])
    assert same(checkpoint.load(tmp_path, network(1)).extra, PLAIN[name])


def test_what_the_index_writes_is_a_plain_value_too(tmp_path):
    """A value is written, and what was written is a value again, and so on: no two of them are mixed up."""
    model = network(0)
    value: Any = {name: PLAIN[name] for name in ("floats", "nested", "keys", "counter")}
    for step in range(3):
        path = checkpoint.save(tmp_path, model, step=step, extra=value)
        assert same(checkpoint.load(path, model).extra, value)
        value = json.loads((path / INDEX).read_text())["contents"]["extra"]


def _cyclic() -> list[Any]:
    value: list[Any] = []
    value.append(value)
    return value


NOT_PLAIN: dict[str, Callable[[], Any]] = {
    "a function": lambda: network,
    "a set": lambda: {1},
    "a path": lambda: Path("a"),
    "an array": lambda: numpy.zeros(3),
    "a dtype": lambda: torch.float32,
    "a complex number": lambda: 1j,
    "a large tensor": lambda: torch.zeros(MIB // 4 + 1),
    "a sparse tensor": lambda: torch.eye(2).to_sparse(),
    "a tensor without values": lambda: torch.empty(2, device="meta"),
    "a fraction": lambda: fractions.Fraction(1, 3),
    "an ordered dict": lambda: collections.OrderedDict(a=1),
    "a defaultdict": lambda: collections.defaultdict(int, a=1),
    "a bytearray": lambda: bytearray(b"a"),
    "a list in itself": _cyclic,
    "a tensor of quantized numbers": lambda: torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8),
    "a conjugate view": lambda: torch.ones(3, dtype=torch.complex64).conj(),
    "a number of many digits": lambda: 10**5000,
}


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
@pytest.mark.parametrize("name", NOT_PLAIN)
def test_what_is_not_plain_raises_or_comes_back(tmp_path, name):
    """TypeError, which says where it is, and nothing is written; or what comes back is of the same type and equal."""
    value = NOT_PLAIN[name]()
    if name in ("an ordered dict", "a bytearray", "a conjugate view"):
        checkpoint.save(tmp_path, network(0), step=1, extra={"a": [value]})
        assert same(checkpoint.load(tmp_path, network(0)).extra, {"a": [value]})
        return
    with pytest.raises(TypeError, match=r"extra\['a'\]\[0\]"):
        checkpoint.save(tmp_path, network(0), step=1, extra={"a": [value]})
    assert checkpoint.latest(tmp_path) is None


class _Decay:
    def __init__(self, factor: float = 0.9) -> None:
        self.factor = factor

    def __call__(self, epoch: int) -> float:
        return self.factor**epoch


SCHEDULERS: dict[str, Callable[[Any], Any]] = {
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, lambda epoch: 0.9**epoch),
    "LambdaLR of an object": lambda o: lr_scheduler.LambdaLR(o, _Decay()),
    "StepLR": lambda o: lr_scheduler.StepLR(o, 2),
    "MultiStepLR": lambda o: lr_scheduler.MultiStepLR(o, [1, 3, 3, 4]),
    "CosineAnnealingWarmRestarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 2),
    "ReduceLROnPlateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=1),
    "CyclicLR": lambda o: lr_scheduler.CyclicLR(o, 0.01, 0.1, 2),
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, 0.1, 20),
    "SequentialLR": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.ConstantLR(o, 0.1, 2), lr_scheduler.MultiStepLR(o, [1, 2])], [2]
    ),
    "ChainedScheduler": lambda o: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ConstantLR(o), lr_scheduler.ExponentialLR(o, 0.9)]
    ),
    "SWALR": lambda o: torch.optim.swa_utils.SWALR(o, 0.05),
}


def _go_on(model: nn.Module, opt: Any, scheduler: Any, steps: int) -> list[Any]:
    rates = []
    for _ in range(steps):
        train(model, opt, 1)
        scheduler.step(*((1.0,) if isinstance(scheduler, lr_scheduler.ReduceLROnPlateau) else ()))
        rates.append([(float(group["lr"]), tuple(group["betas"])) for group in opt.param_groups])
    return rates


@pytest.mark.parametrize("name", SCHEDULERS)
def test_a_scheduler_goes_on(tmp_path, name):
    model, opt = trained(0, steps=0)
    scheduler = SCHEDULERS[name](opt)
    _go_on(model, opt, scheduler, 3)
    checkpoint.save(tmp_path, model, opt, scheduler=scheduler)
    expected = _go_on(model, opt, scheduler, 4), all_of(model, opt)
    other, its_opt = trained(1, steps=0)
    its_scheduler = SCHEDULERS[name](its_opt)
    _go_on(other, its_opt, its_scheduler, 1)
    checkpoint.load(tmp_path, other, its_opt, scheduler=its_scheduler)
    assert same((_go_on(other, its_opt, its_scheduler, 4), all_of(other, its_opt)), expected)
