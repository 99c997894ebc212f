"""The share of the collectives' time that computation hides, by stage: two NCCL ranks, on two GPUs or on one.

    python benchmarks/gpu_overlap.py --out overlap.json

Rank 0's kernels come from the profiler. A collective's time is hidden while a kernel that is no collective runs on the
same rank. Ranks that share a GPU take turns on it: times are longer, but kernels run in the same order.
Exit codes: 0; 1 where a rank fails or takes more than SECONDS; 77 where NCCL takes one rank a GPU.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from gpu_two_ranks import join, run_both
from torch.profiler import ProfilerActivity, profile
from zero_optim import ShardedAdamW, shard_module
from zero_optim.train.model import GPT, VOCAB, Block, ModelConfig, next_byte_loss

STAGES = (0, 1, 2, 3)
MODELS = {"cuda": ModelConfig(8, 1024, 8, 512), "cpu": ModelConfig(2, 32, 2, 16)}
BATCH, WARM_UP, STEPS = 8, 4, 2
SECONDS = 75
KINDS = {"reductions": ("ReduceScatter", "AllReduce", "Reduce_"), "gathers": ("AllGather",)}

Span = tuple[float, float]


def union(spans: Iterable[Span]) -> list[Span]:
    """Join overlapping spans. Returns disjoint ones, in order."""
    joined: list[Span] = []
    for start, end in sorted(spans):
        if joined and start <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(end, joined[-1][1]))
        else:
            joined.append((start, end))
    return joined


def length(spans: Iterable[Span]) -> float:
    return sum(end - start for start, end in union(spans))


def hidden(collectives: Sequence[Span], others: Sequence[Span]) -> float:
    """Compute the share of the collectives' time in which one of the others runs, from 0 to 1."""
    together = length(collectives) + length(others) - length([*collectives, *others])
    return together / length(collectives)


def shares(events: Iterable[Mapping[str, Any]]) -> dict[str, dict[str, float]]:
    """Compute, by kind of collective in a trace: the number of kernels, their milliseconds, and the hidden share."""
    kernels = [(of["name"], (of["ts"], of["ts"] + of["dur"])) for of in events if of.get("cat") == "kernel"]
    others = [span for name, span in kernels if "nccl" not in name.lower()]
    found = {}
    for kind, words in KINDS.items():
        spans = [span for name, span in kernels if "nccl" in name.lower() and any(word in name for word in words)]
        if spans:
            figures = {"kernels": len(spans), "ms": length(spans) / 1e3, "hidden": hidden(spans, others)}
            found[kind] = {name: round(value, 4) for name, value in figures.items()}
    return found


def traced(step: Callable[[], object], count: int, device: torch.device) -> list[dict[str, Any]]:
    """Run ``count`` steps under the profiler. Returns the events of its trace."""
    on_gpu = [ProfilerActivity.CUDA] if device.type == "cuda" else []
    with profile(activities=[ProfilerActivity.CPU, *on_gpu]) as profiler:
        for _ in range(count):
            step()
        if on_gpu:
            torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder, "trace.json")
        profiler.export_chrome_trace(str(trace))
        return json.loads(trace.read_text())["traceEvents"]


def train(stage: int, device: torch.device) -> dict[str, dict[str, float]]:
    """Train at a stage. Returns the shares of STEPS steps, after WARM_UP others."""
    torch.manual_seed(0)
    with device:
        model = GPT(MODELS[device.type], torch.bfloat16)
    if stage == 3:
        shard_module(model, (Block,))
    overlapped = stage in (1, 2)  # at stage 0 nothing is gathered, and at stage 3 always within forward and backward
    opt = ShardedAdamW(
        model.named_parameters(), lr=1e-4, stage=stage, max_grad_norm=1.0, overlap_param_gather=overlapped
    )
    opt.attach(model)
    windows = torch.randint(VOCAB, (BATCH, MODELS[device.type].seq + 1), device=device)

    def step() -> None:
        next_byte_loss(model, windows).backward()
        opt.step()
        opt.zero_grad()

    for _ in range(WARM_UP):
        step()
    events = traced(step, STEPS, device)
    opt.close()
    return shares(events)


def rank(number: int, device: str, out: Path, store: str) -> None:
    where = join(number, device, store, SECONDS)
    by_stage = {}
    for stage in STAGES:
        by_stage[stage] = train(stage, where)
        if number == 0:
            told = (f"{of['kernels']:.0f} {kind}, {of['hidden']:.0%} hidden" for kind, of in by_stage[stage].items())
            print(f"stage {stage}: {'; '.join(told) or 'no kernels on this device'}", flush=True)
            out.write_text(json.dumps({"ranks": 2, "gpus": torch.cuda.device_count(), "stages": by_stage}, indent=1))
    dist.destroy_process_group()


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="the share of communication that lies under computation, by stage")
    parser.add_argument("--device", default="cuda", choices=MODELS)
    parser.add_argument("--out", type=Path, required=True, help="JSON file to write")
    options = parser.parse_args(arguments)
    command = [sys.executable, __file__, "rank", options.device, str(options.out)]
    return run_both(command, options.device, SECONDS)


if __name__ == "__main__":
    if sys.argv[1:2] == ["rank"]:
        rank(int(sys.argv[5]), sys.argv[2], Path(sys.argv[3]), sys.argv[4])
    else:
        sys.exit(main())
