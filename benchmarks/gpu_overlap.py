"""The share of communication and of copies that computation hides: two NCCL ranks, on two GPUs or on one.

    python benchmarks/gpu_overlap.py

At each stage, and at stage 3 with parameters in host memory, rank 0's kernels come from the profiler. A collective or
a copy is hidden while a kernel that is no collective runs on the same rank. Ranks on one GPU take turns: times are
longer, but kernels run in the same order. Exit codes: 0; 1 where a rank fails or takes more than SECONDS; 77 where NCCL
takes one rank a GPU.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import lab
import torch
import torch.distributed as dist
from gpu_ranks import join, run_both
from torch.profiler import ProfilerActivity, profile
from zero_optim import ShardedAdamW, shard_module
from zero_optim.bench.record import Result
from zero_optim.bench.run import find_device
from zero_optim.train.model import GPT, VOCAB, Block, ModelConfig, next_byte_loss

WAYS: Mapping[str, Mapping[str, Any]] = {
    **{f"stage{stage}": {"stage": stage} for stage in range(4)},
    "stage3_offload": {"stage": 3, "param_offload": "cpu"},
}
MODELS = {"cuda": ModelConfig(8, 1024, 8, 512), "cpu": ModelConfig(2, 32, 2, 16)}
BATCH, WARM_UP, STEPS = 8, 4, 2
SECONDS = 45
NCCL = {"reductions": ("ReduceScatter", "AllReduce", "Reduce_"), "gathers": ("AllGather",)}
COPIES = {"to the device": "HtoD", "to the host": "DtoH"}

Span = tuple[float, float]


def length(spans: Iterable[Span]) -> float:
    """Sum the time that the spans cover together."""
    total = reached = 0.0
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total


def shares(events: Iterable[Mapping[str, Any]]) -> dict[str, dict[str, float]]:
    """Compute, by kind of collective and of copy in a trace: their number, milliseconds, and the hidden share."""
    timed = [(of["cat"], of["name"], (of["ts"], of["ts"] + of["dur"])) for of in events if "dur" in of and "cat" in of]
    kernels = [(name, span) for category, name, span in timed if category == "kernel"]
    computing = [span for name, span in kernels if "nccl" not in name.lower()]
    spans = {
        kind: [span for name, span in kernels if "nccl" in name.lower() and any(word in name for word in words)]
        for kind, words in NCCL.items()
    }
    for direction, word in COPIES.items():
        spans[direction] = [span for category, name, span in timed if category == "gpu_memcpy" and word in name]
    return {kind: _figures(found, computing) for kind, found in spans.items() if found}


def _figures(spans: Sequence[Span], computing: Sequence[Span]) -> dict[str, float]:
    together = length(spans) + length(computing) - length([*spans, *computing])
    return {"count": len(spans), "ms": round(length(spans) / 1e3, 4), "hidden": round(together / length(spans), 4)}


def train(stage: int, device: torch.device, **sharded: Any) -> dict[str, dict[str, float]]:
    """Train at a stage. Returns the shares of STEPS steps, after WARM_UP others."""
    torch.manual_seed(0)
    with device:
        model = GPT(MODELS[device.type], torch.bfloat16)
    if stage == 3:
        shard_module(model, (Block,), **sharded)
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
    on_gpu = [ProfilerActivity.CUDA] if device.type == "cuda" else []
    with profile(activities=[ProfilerActivity.CPU, *on_gpu]) as profiler:
        for _ in range(STEPS):
            step()
        if on_gpu:
            torch.cuda.synchronize()
    opt.close()
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder, "trace.json")
        profiler.export_chrome_trace(str(trace))
        return shares(json.loads(trace.read_text())["traceEvents"])


def rank(device: str, out: str, store: str, number: int) -> None:
    where = join(number, device, store, SECONDS)
    result = Result(where, Path(out) if out else None, write=number == 0, about="overlap")
    for name, options in WAYS.items():
        found = train(device=where, **options)
        if number == 0:
            result.add([{"op": "overlap", "backend": name, "ranks": 2, "gpus": torch.cuda.device_count(), **found}])
            hidden = (f"{of['count']:.0f} {kind}, {of['hidden']:.0%} hidden" for kind, of in found.items())
            print(f"{name}: {'; '.join(hidden) or 'no kernels on this device'}", flush=True)
    dist.destroy_process_group()


def main(options: Any) -> int:
    device = find_device(options.device).type
    return run_both([sys.executable, __file__, "rank", device, str(options.out or "")], device, SECONDS)


if __name__ == "__main__":
    if sys.argv[1:2] == ["rank"]:
        sys.exit(rank(*sys.argv[2:5], int(sys.argv[5])))
    about = "Measures the share of communication that computation hides, by stage."
    sys.exit(lab.run_script(lab.parser_of(__file__, about, device=None), main))
