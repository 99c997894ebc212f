"""The fused Adams of other packages in turns with ``adam_step``: those of DeepSpeed, apex and TransformerEngine.

    python benchmarks/bench_other_adams.py --numel 64Mi

Each updates the fp32 master in place, between the passes that widen the gradient and cast the parameter back.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import importlib.util
import sys
from collections.abc import Sequence

import torch
from lab import parser_of, progress, run_script, show
from zero_optim.bench.cases import HYPER, Maker, Setting, adam_step, choose_backends
from zero_optim.bench.record import Result
from zero_optim.bench.run import COLUMNS, find_device
from zero_optim.bench.timing import interleaved, make_clock
from zero_optim.doctor import version_of

OTHERS = {
    "deepspeed": ("deepspeed.ops.adam", "deepspeed"),
    "apex": ("apex.optimizers", "apex"),
    "te": ("transformer_engine.pytorch.optimizers", "transformer-engine"),
}
"""Module and distribution, by name in the rows."""


def usable(name: str, device_type: str) -> Maker | str:
    """Try one step: the first use may compile for a minute. Returns the optimizer, or why there is none."""
    module, on_cpu = OTHERS[name][0], device_type == "cpu"
    if on_cpu and name != "deepspeed":
        return "not for cpu"
    if importlib.util.find_spec(module.split(".")[0]) is None:
        return "not installed"
    mode = {"adamw_mode": True} if on_cpu else {"adam_w_mode": True}
    try:
        adam = getattr(importlib.import_module(module), "DeepSpeedCPUAdam" if on_cpu else "FusedAdam")
        make = functools.partial(adam, **mode, **HYPER)
        parameter = torch.nn.Parameter(torch.ones(256, device=device_type))
        parameter.grad = torch.ones_like(parameter)
        make([parameter]).step()
    except Exception as error:  # a failed build or a missing library, by whatever type the package reports it
        return f"does not work: {' '.join(str(error).split())[:200]}"
    return make


def work(parsed: argparse.Namespace) -> None:
    device = find_device(parsed.device)
    found = {name: usable(name, device.type) for name in OTHERS}
    states = {of: made if isinstance(made, str) else version_of(OTHERS[of][1]) or "?" for of, made in found.items()}
    result = Result(device, parsed.out, parsed.write, "other_adams", baselines=states)
    setting = Setting(device, parsed.dtype, parsed.numel, choose_backends(device, None))
    progress(f"adam_step, {parsed.dtype}, {parsed.numel:,} elements")
    case = adam_step(setting, {name: made for name, made in found.items() if not isinstance(made, str)})
    times = interleaved(case.jobs, make_clock(device), parsed.rounds)
    result.add(case.rows({name: [sum(laps) for laps in of_job] for name, of_job in times.items()}))
    show(result, COLUMNS)


def main(arguments: Sequence[str] | None = None) -> int:
    about = "Times fused Adams of other packages and adam_step."
    return run_script(parser_of(__file__, about, device=None, dtype="bf16", numel=2**26, rounds=None), work, arguments)


if __name__ == "__main__":
    sys.exit(main())
