"""`adam_step` on CPU against what people run today, and against the memory.

    python benchmarks/bench_adam_step.py

All jobs work on the same tensors, in the same process, in interleaved rounds:
    cpu        this package: one pass
    torch      widen the gradient, unscale it, AdamW(fused=True) on fp32 masters, cast the parameter back
    deepspeed  the same around DeepSpeedCPUAdam, when deepspeed can be imported
    stream     the reads and writes of `adam_step` with nothing computed, on the same threads: the ceiling
"""

import argparse
import os
from collections.abc import Callable
from dataclasses import dataclass

import torch
from common import Row, interleaved, spread, write
from torch import Tensor

import zero_kernels
from zero_kernels import ROW, compiled

LR, BETAS, EPS, WEIGHT_DECAY = 1e-3, (0.9, 0.999), 1e-8, 0.01
BYTES = 28  # gradient 2; master, exp_avg, exp_avg_sq 12 read and 12 written; parameter 2
DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}


@dataclass(frozen=True)
class Shard:
    """What one update works on. All jobs share it, so that none has the better memory."""

    grad: Tensor  # [numel] 16-bit
    grad_scale: Tensor  # [] fp32
    wide_grad: Tensor  # [numel] fp32, which only the pipelines of several passes need
    master: Tensor  # [numel] fp32
    exp_avg: Tensor  # [numel] fp32
    exp_avg_sq: Tensor  # [numel] fp32
    param: Tensor  # [numel] 16-bit


def make_shard(numel: int, dtype: torch.dtype) -> Shard:
    generator = torch.Generator().manual_seed(0)
    master = torch.randn(numel, generator=generator)
    grad = torch.randn(numel, generator=generator).to(dtype)
    zeros = [torch.zeros(numel) for _ in range(3)]
    return Shard(grad, torch.tensor(0.5), zeros[0], master, zeros[1], zeros[2], master.to(dtype))


def ours(shard: Shard) -> Callable[[], None]:
    table = zero_kernels.hyper_table(LR, BETAS, EPS, WEIGHT_DECAY, 10)
    row_slot = torch.zeros(-(-shard.grad.numel() // ROW), dtype=torch.int32)
    state = (shard.master, shard.exp_avg, shard.exp_avg_sq)
    return lambda: zero_kernels.adam_step(shard.grad, *state, shard.param, row_slot, table, shard.grad_scale)


def stream(shard: Shard) -> Callable[[], None]:
    state = (shard.master, shard.exp_avg, shard.exp_avg_sq)
    return lambda: torch.ops.zero_kernels_C.stream(shard.grad, *state, shard.param)


def pipeline(shard: Shard, optimizer: torch.optim.Optimizer) -> Callable[[], None]:
    """Widen and unscale, step, cast back. `copy_` then `mul_` is the fastest way torch has to do the first."""
    scale = float(shard.grad_scale)

    def run() -> None:
        shard.wide_grad.copy_(shard.grad).mul_(scale)
        optimizer.step()
        shard.param.copy_(shard.master)

    return run


def on_shard(shard: Shard, make: Callable[[list[Tensor]], torch.optim.Optimizer], step: Tensor | int) -> Callable:
    """The pipeline around an optimizer whose state is the shard's."""
    parameter = torch.nn.Parameter(shard.master)
    parameter.grad = shard.wide_grad
    optimizer = make([parameter])
    optimizer.state[parameter] = {"step": step, "exp_avg": shard.exp_avg, "exp_avg_sq": shard.exp_avg_sq}
    return pipeline(shard, optimizer)


def baselines(shard: Shard) -> dict[str, Callable[[], None]]:
    settings = {"lr": LR, "betas": BETAS, "eps": EPS, "weight_decay": WEIGHT_DECAY}
    jobs = {"torch": on_shard(shard, lambda p: torch.optim.AdamW(p, fused=True, **settings), torch.tensor(9.0))}
    try:
        from deepspeed.ops.adam import DeepSpeedCPUAdam
    except ImportError:
        return jobs
    jobs["deepspeed"] = on_shard(shard, lambda p: DeepSpeedCPUAdam(p, adamw_mode=True, **settings), 9)
    return jobs


def deepspeed_version() -> str | None:
    try:
        import deepspeed
    except ImportError:
        return None
    return deepspeed.__version__


def measure(name: str, numel: int, rounds: int) -> list[Row]:
    shard = make_shard(numel, DTYPES[name])
    jobs = {"stream": stream(shard), "cpu": ours(shard), **baselines(shard)}
    medians = {job: spread(times) for job, times in interleaved(jobs, rounds).items()}
    ceiling, torch_ms = medians["stream"][0], medians["torch"][0]
    deepspeed_ms = medians["deepspeed"][0] if "deepspeed" in medians else None

    def gbps(ms: float) -> float:
        return BYTES * numel / ms / 1e6

    return [
        Row(
            "adam_step",
            job,
            name,
            numel,
            *(round(value, 3) for value in (ms, p20, p80)),
            gbps=round(gbps(ms), 2),
            copy_gbps=round(gbps(ceiling), 2),
            fraction=round(ceiling / ms, 3),
            vs_torch=round(torch_ms / ms, 3),
            vs_deepspeed=round(deepspeed_ms / ms, 3) if deepspeed_ms else None,
        )
        for job, (ms, p20, p80) in medians.items()
    ]


def show(rows: list[Row]) -> None:
    print(f"{'dtype':6}{'backend':11}{'ms':>8}{'p20':>8}{'p80':>8}{'GB/s':>7}{'fraction':>10}", end="")
    print(f"{'vs torch':>10}{'vs deepspeed':>14}")
    for row in rows:
        deepspeed = f"{row.vs_deepspeed:.2f}" if row.vs_deepspeed else "-"
        print(f"{row.dtype:6}{row.backend:11}{row.ms:8.1f}{row.p20:8.1f}{row.p80:8.1f}{row.gbps:7.1f}", end="")
        print(f"{row.fraction:10.2f}{row.vs_torch:10.2f}{deepspeed:>14}")


def main() -> None:
    parser = argparse.ArgumentParser(description="adam_step on CPU against torch, DeepSpeed and the memory")
    parser.add_argument("--numel", type=int, default=64 * 2**20, help="elements of the shard (default 64 Mi)")
    parser.add_argument("--rounds", type=int, default=21)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=list(DTYPES))
    parser.add_argument("--no-write", action="store_true", help="print only")
    options = parser.parse_args()
    status = compiled.status()
    if not status.loaded:
        parser.error(f"the compiled library is needed: {status.load_error}")
    torch.set_num_threads(options.threads)
    rows = [row for name in options.dtypes for row in measure(name, options.numel, options.rounds)]
    show(rows)
    if options.no_write:
        return
    path = write(rows, threads=options.threads, isa=status.isa, rounds=options.rounds, deepspeed=deepspeed_version())
    print(path)
    try:
        from plot import plot
    except ImportError as error:
        print(f"no plot: {error}")
    else:
        print(plot(path))


if __name__ == "__main__":
    main()
