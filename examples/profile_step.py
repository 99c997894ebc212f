"""Profile a step, and write a trace that https://ui.perfetto.dev opens.

    torchrun --nproc-per-node 2 examples/profile_step.py --stage 2 --out trace

Rank 0 writes ``trace.json``, and with matplotlib ``trace.png``: backward, and the ranges named ``zero_optim::``.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import zero_optim
from torch import nn
from torch.profiler import ProfilerActivity, profile

WIDTH, LAYERS, ROWS = 512, 6, 256
RANGES, BACKWARD = "zero_optim::", "autograd::engine::evaluate_function"
COLORS = {
    "backward": "#D9D9D9",
    "pack": "#8C8C8C",
    "reduce": "#0072B2",
    "step.up": "#C4003F",
    "step.all": "#E69F00",
    "unshard": "#E69F00",
}


class Block(nn.Sequential):
    """A residual block's branch."""

    def __init__(self) -> None:
        super().__init__(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))


def train_step(model: nn.Module, opt: zero_optim.ShardedOptimizer, x: torch.Tensor) -> None:
    model(x).float().square().mean().backward()
    opt.step()
    opt.zero_grad()


def main(given: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--stage", type=int, default=2, choices=(0, 1, 2, 3))
    parser.add_argument("--out", default="trace", help="where trace.json and trace.png go, without the ending (trace)")
    parsed = parser.parse_args(given)
    on_gpu = torch.cuda.is_available()
    dist.init_process_group("nccl" if on_gpu else "gloo")
    device = torch.device("cuda", dist.get_rank() % torch.cuda.device_count()) if on_gpu else torch.device("cpu")
    dtype = torch.bfloat16 if on_gpu else torch.float32  # most processors have no units for bf16
    model = nn.Sequential(*(Block() for _ in range(LAYERS))).to(device, dtype)
    if parsed.stage == 3:
        zero_optim.shard_module(model, units=(Block,))
    opt = zero_optim.ShardedAdamW(model.named_parameters(), lr=1e-4, stage=parsed.stage, bucket_cap_mb=4)
    x = torch.randn(ROWS, WIDTH, device=device, dtype=dtype)
    for _ in range(3):  # the first learns the layout
        train_step(model, opt, x)
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
    with profile(activities=activities) as profiler:
        train_step(model, opt, x)
    if dist.get_rank() == 0:
        path = Path(f"{parsed.out}.json")
        profiler.export_chrome_trace(str(path))
        draw(json.loads(path.read_text())["traceEvents"], path.with_suffix(".png"))
        print(f"wrote {path} and {path.with_suffix('.png')}")
    opt.close()
    dist.destroy_process_group()


def draw(events: Sequence[dict[str, Any]], path: Path) -> None:
    """Draw a lane for backward, and one for each kind of range. ``events``: ``ts`` and ``dur`` in microseconds."""
    from matplotlib.figure import Figure

    lane_of = {"backward": [event for event in events if event.get("name", "").startswith(BACKWARD)]}
    for event in events:
        if event.get("ph") == "X" and event["name"].startswith(RANGES):
            lane_of.setdefault(event["name"].removeprefix(RANGES).split(" ")[0], []).append(event)
    begin = min(event["ts"] for lane in lane_of.values() for event in lane)
    figure = Figure((9, 0.6 + 0.3 * len(lane_of)), dpi=110, layout="constrained")
    axes = figure.subplots()
    for height, (name, lane) in enumerate(lane_of.items()):
        color = next((color for start, color in COLORS.items() if name.startswith(start)), "#4C9A6A")
        starts = [(event["ts"] - begin) / 1e3 for event in lane]
        axes.barh([-height] * len(lane), [event["dur"] / 1e3 for event in lane], left=starts, height=0.7, color=color)
    axes.set_yticks([-height for height in range(len(lane_of))], [*lane_of])
    axes.set_xlabel("ms on the host of rank 0")
    figure.savefig(path)


if __name__ == "__main__":
    main()
