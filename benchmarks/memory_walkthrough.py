"""Memory of a rank, phase by phase, at every stage and with smaller state, of the model of the ZeRO tutorials.

    python benchmarks/memory_walkthrough.py --ranks 2 --dtype bf16

After each phase a row has the bytes that a rank has allocated, ``after``, and the most it had in it, ``peak``, of the
rank that has most; ``bytes`` is ``after`` over the number of parameters. Each way runs in fresh processes.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from contenders import FORMS
from counted_bytes import LiveMemory, watch
from lab import parser_of, progress, run_script, show
from ranks import on_ranks
from torch import nn
from zero_optim import ShardedAdamW, shard_module
from zero_optim.bench.cases import DTYPES, HYPER
from zero_optim.bench.record import Result
from zero_optim.bench.run import find_device

BATCH = 20
LAYERS, WIDTH = 8, 2048
BEFORE, STEP = ("model", "optimizer", "data"), ("forward", "backward", "step")
SHOWN_STEPS = (1, 3)  # the first lays the buckets out; from the third on all steps are alike
PHASES = (*BEFORE, *(f"{phase} {number}" for number in SHOWN_STEPS for phase in STEP))

Readings = dict[str, tuple[int, int]]
"""By phase: bytes after it, and the peak within it."""


PLAIN: Mapping[str, Mapping[str, Any]] = {f"stage{stage}": {"stage": stage} for stage in range(4)}
SMALL: Mapping[str, Mapping[str, Any]] = {
    **{f"stage{n}{end}": {"stage": n, **FORMS[end]} for end in ("_fp32", "_int8", "_smallest") for n in (2, 3)},
}
"""The optimizer's options by the name of a row; smaller state is of bf16 parameters alone."""


class Walk:
    """The phases of a training, one method each, of ``layers`` of nn.Linear(width, width), each a unit at stage 3.

    At stage 3 the model is built on the meta device and gets values a unit at a time, as one too large for a rank does.
    """

    def __init__(
        self, layers: int, width: int, options: Mapping[str, Any], dtype: torch.dtype, device: torch.device
    ) -> None:
        self._layers, self._width, self._options, self._dtype, self._device = layers, width, options, dtype, device

    def model(self) -> None:
        with torch.device("meta" if self._options["stage"] == 3 else self._device):
            layers = [nn.Linear(self._width, self._width, dtype=self._dtype) for _ in range(self._layers)]
        self._model: nn.Module = nn.Sequential(*layers)
        if self._options["stage"] == 3:
            shard_module(self._model, (nn.Linear,), device=self._device)

    def optimizer(self) -> None:
        self.opt = ShardedAdamW(self._model.named_parameters(), **self._options, **HYPER)

    def data(self) -> None:
        shape = (BATCH, self._width)
        self._inputs, self._targets = (torch.randn(shape, dtype=self._dtype, device=self._device) for _ in range(2))

    def forward(self) -> None:
        self.opt.zero_grad()
        self._loss = nn.functional.mse_loss(self._model(self._inputs), self._targets)

    def backward(self) -> None:
        self._loss.backward()
        self._loss = self._loss.detach()

    def step(self) -> None:
        self.opt.step()

    def readings(self, memory: LiveMemory) -> Readings:
        found = {phase: memory.after(getattr(self, phase)) for phase in BEFORE}
        for number in range(1, SHOWN_STEPS[-1] + 1):
            found |= {f"{phase} {number}": memory.after(getattr(self, phase)) for phase in STEP}
        return {phase: found[phase] for phase in PHASES}


def walk_on_rank(layers: int, width: int, options: Mapping[str, Any], dtype: torch.dtype, device: str) -> Readings:
    with watch(torch.device(device)) as memory:
        return Walk(layers, width, options, dtype, torch.device(device)).readings(memory)


def run(parsed: Any) -> None:
    device, dtype = find_device(parsed.device), DTYPES[parsed.dtype]
    result = Result(device, parsed.out, parsed.write, "memory_walkthrough")
    numel = LAYERS * WIDTH * (WIDTH + 1)
    for name, options in {**PLAIN, **(SMALL if parsed.dtype == "bf16" else {})}.items():
        progress(f"memory_walkthrough: {name}")
        of_ranks = on_ranks(parsed.ranks, walk_on_rank, LAYERS, WIDTH, options, dtype, device.type, device=device.type)
        about = {"op": "memory_walkthrough", "backend": name, "dtype": parsed.dtype, "numel": numel}
        for phase in PHASES:
            after, peak = (max(readings[phase][part] for readings in of_ranks) for part in range(2))
            per = {"bytes": round(after / numel, 2)}
            result.add([{**about, "ranks": parsed.ranks, "phase": phase, "after": after, "peak": peak, **per}])
    show(result)


def main(arguments: Sequence[str] | None = None) -> int:
    about = "Shows what a rank has allocated, phase by phase, at every stage."
    return run_script(parser_of(__file__, about, device=None, dtype="bf16", ranks=2), run, arguments)


if __name__ == "__main__":
    sys.exit(main())
