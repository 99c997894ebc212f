"""Training a GPT on one GPU by the stages and by the AMP recipe: tokens a second, memory, and waits of the host.

    python benchmarks/gpu_stages.py --out stages.json
    python benchmarks/gpu_stages.py --device cpu --out stages.json

There is one NCCL rank, so a stage shows its own work and no messages. All train in turns, from the same weights. Then
stage 3 trains with its parameters in host memory, and the profiler shows the share of their copies that computation
hides. Exit codes: 0; 1 where a loss or the memory is not what it has to be, or a step waits for the device.
"""

from __future__ import annotations

import argparse
import copy
import gc
import json
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from bench_gpt_step import TRAINING, amp_recipe
from gpu_memory import TOLERANCE, held_by
from gpu_overlap import Span, hidden, length, traced
from torch import Tensor
from zero_optim import ShardedAdamW, memory, shard_module
from zero_optim.bench.contenders import model_config
from zero_optim.bench.live_memory import LiveMemory, watch
from zero_optim.bench.timing import Spread, TimedRounds, interleaved, make_clock
from zero_optim.train.model import GPT, VOCAB, Block, next_byte_loss

AMP = "the AMP recipe"
STAGES = (0, 1, 2, 3)
NUMEL = {"cuda": 1e9, "cpu": 2e6}
BYTES_OF_ALL = 120  # of the device for each parameter of a model: all contenders are in memory at once
BATCH, MAX_NORM = 4, 1.0
WARM_UP, PROFILED = 3, 2
CLOSE = 1e-3  # relative difference of losses between recipe and stage, which sum in other orders; 4e-5 on an H200
SECONDS = 60

Step = Callable[[], Tensor]


@dataclass(frozen=True)
class Trained:
    """Losses, memory and waits in the first steps of one way to train.

    Attributes:
        losses: of the first WARM_UP steps.
        held, planned: bytes after a step, gradients included. No plan is made for the recipe.
        peak: bytes in a step, activations included.
        waits: torch's error at a step's first wait for the device; None: the step has none.
    """

    name: str
    losses: Sequence[float]
    held: int
    peak: int
    planned: int | None = None
    waits: str | None = None

    def __str__(self) -> str:
        planned = "" if self.planned is None else f", {self.planned / 1e9:.3f} planned"
        return (
            f"{self.held / 1e9:.3f} GB held{planned}, {self.peak / 1e9:.3f} at the peak; "
            f"{f'WAITS: {self.waits}' if self.waits else 'nothing waits'}"
        )


@dataclass(frozen=True)
class Timed:
    """Times of whole training steps, tokens a second at the median, and the AMP recipe's time over the median."""

    ms: float
    p20: float
    p80: float
    rounds: int
    tokens_per_s: float
    speed: float

    def __str__(self) -> str:
        return (
            f"{self.ms:.1f} ms a step ({self.p20:.1f} to {self.p80:.1f}), {self.tokens_per_s:,.0f} tokens/s, "
            f"{self.speed:.2f} times the recipe's speed"
        )


def sharded(model: GPT, stage: int, windows: Tensor, **options: Any) -> tuple[ShardedAdamW, Step]:
    if stage == 3:
        shard_module(model, (Block,), **options)
    opt = ShardedAdamW(model.named_parameters(), **TRAINING, stage=stage, max_grad_norm=MAX_NORM)

    def step() -> Tensor:
        opt.zero_grad()
        loss = next_byte_loss(model, windows)
        loss.backward()
        opt.step()
        return loss.detach()

    return opt, step


def recipe(model: GPT, windows: Tensor) -> Step:
    """Make a step of the AMP recipe. It drops old gradients first, so that there are gradients after a step."""
    laps = amp_recipe(model, windows).laps

    def step() -> Tensor:
        laps["zero_grad"]()
        loss = next_byte_loss(model, windows)
        loss.backward()
        for name in ("unscale", "clip", "update"):
            laps[name]()
        return loss.detach()

    return step


def train_first(
    name: str, make: Callable[[], tuple[ShardedAdamW | None, Step]], live: LiveMemory, device: torch.device
) -> tuple[Trained, Step]:
    before, _ = live.after(lambda: None)
    opt, step = make()
    losses = [float(step()) for _ in range(WARM_UP)]
    held, peak = live.after(step)
    planned = None if opt is None else held_by(memory.plan_of(opt))
    return Trained(name, losses, held - before, peak - before, planned, waits(step, device)), step


def time_in_turns(steps: Mapping[str, Step], tokens: int, device: torch.device) -> dict[str, Timed]:
    """Time the steps in turns. ``tokens``: of a step."""
    rounds = TimedRounds(seconds=8.0) if device.type == "cuda" else TimedRounds.exactly(2)
    times = interleaved({name: [step] for name, step in steps.items()}, make_clock(device), rounds)
    spreads = {name: Spread.of([sum(laps) for laps in of_one]) for name, of_one in times.items()}
    return {
        name: Timed(**asdict(of), tokens_per_s=round(1e3 * tokens / of.ms, 1), speed=round(spreads[AMP].ms / of.ms, 4))
        for name, of in spreads.items()
    }


def waits(step: Step, device: torch.device) -> str | None:
    if device.type == "cpu":
        return None
    mode = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    except RuntimeError as error:
        return str(error).splitlines()[0]
    finally:
        torch.cuda.set_sync_debug_mode(mode)
    return None


def hidden_copies(events: Iterable[Mapping[str, Any]]) -> dict[str, dict[str, float]]:
    """Compute, by direction of copies in a trace: their number, milliseconds, and the share that kernels hide."""
    events = list(events)

    def spans(chosen: Callable[[Mapping[str, Any]], bool]) -> list[Span]:
        return [(of["ts"], of["ts"] + of["dur"]) for of in events if chosen(of)]

    kernels = spans(lambda of: of.get("cat") == "kernel")
    found = {}
    for direction in ("HtoD", "DtoH"):
        copies = spans(lambda of, word=direction: of.get("cat") == "gpu_memcpy" and word in of["name"])
        if copies:
            figures = {"copies": len(copies), "ms": length(copies) / 1e3, "hidden": hidden(copies, kernels)}
            found[direction] = {name: round(value, 4) for name, value in figures.items()}
    return found


def join(device: torch.device) -> dict[str, int]:
    """Make the process group of this rank alone. Returns the device's bytes for its context and its communicator."""

    def taken() -> int:
        if device.type == "cpu":
            return 0
        torch.cuda.synchronize()
        free, total = torch.cuda.mem_get_info()
        return total - free - torch.cuda.memory_reserved()

    x = torch.ones(256, 256, device=device, dtype=torch.bfloat16)
    torch.mm(x, x)  # cuBLAS allocates its workspace now, so that it is not counted for the first contender
    context = taken()
    backend = "nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1, timeout=timedelta(seconds=SECONDS))
    dist.all_reduce(x)
    return {"context": context, "communicator": taken() - context}


def problems(trained: Sequence[Trained], device: torch.device) -> list[str]:
    first = trained[0]
    found = []
    for of in trained:
        if any(abs(a / b - 1) > CLOSE for a, b in zip(of.losses, first.losses, strict=True)):
            found.append(f"{of.name}: losses {of.losses}, where {first.name} has {first.losses}")
        if of.planned is not None and abs(of.held / of.planned - 1) > TOLERANCE[device.type]:
            found.append(f"{of.name}: {of.held:,} bytes held, {of.planned:,} planned")
        if of.waits and of.name != AMP:
            found.append(f"{of.name} waits: {of.waits}")
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="training on one GPU by the stages and by the AMP recipe")
    parser.add_argument("--device", default="cuda", choices=NUMEL)
    parser.add_argument("--out", type=Path, required=True, help="JSON file to write")
    options = parser.parse_args(arguments)
    device = torch.device(options.device)
    numel = NUMEL[device.type]
    if device.type == "cuda":
        numel = min(numel, torch.cuda.get_device_properties(device).total_memory / BYTES_OF_ALL)
    shares = join(device)
    torch.manual_seed(0)
    with device:
        model = GPT(model_config(int(numel), device), torch.bfloat16)
        windows = torch.randint(VOCAB, (BATCH, model.config.seq + 1))
    parameters = sum(parameter.numel() for parameter in model.parameters())
    print(f"{parameters:,} parameters; context {shares['context'] / 1e6:.0f} MB, ", end="")
    print(f"communicator {shares['communicator'] / 1e6:.0f} MB", flush=True)
    makers: dict[str, Callable[[], tuple[ShardedAdamW | None, Step]]] = {
        AMP: lambda: (None, recipe(copy.deepcopy(model), windows)),
        **{f"stage {n}": (lambda n=n: sharded(copy.deepcopy(model), n, windows)) for n in STAGES},
    }
    with watch(device) as live:
        found = [train_first(name, make, live, device) for name, make in makers.items()]
    tokens = windows.numel() - len(windows)
    timed = time_in_turns({of.name: step for of, step in found}, tokens, device)
    trained = [of for of, _ in found]
    for of in trained:
        print(f"{of.name}: {timed[of.name]}; {of}", flush=True)
    found.clear()  # free the models before the next one is made
    gc.collect()
    _, step = sharded(model, 3, windows, param_offload="cpu")
    for _ in range(WARM_UP):
        step()
    copies = hidden_copies(traced(step, PROFILED, device))
    told = (f"{of['copies']:.0f} copies {way}, {of['hidden']:.0%} hidden" for way, of in copies.items())
    print(f"parameters on the host: {'; '.join(told) or 'no copies on this device'}", flush=True)
    wrong = problems(trained, device)
    ways = [{**asdict(of), **asdict(timed[of.name])} for of in trained]
    record = {"parameters": parameters, "tokens": tokens, **shares, "ways": ways}
    options.out.write_text(json.dumps({**record, "copies": copies, "problems": wrong}, indent=1) + "\n")
    dist.destroy_process_group()
    print("\n".join(wrong) or "losses, memory and waits are what they have to be", flush=True)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
