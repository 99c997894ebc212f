"""Short trainings with `ShardedAdamW`, the same on every device: what they did comes back on the CPU."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from oracle import Hyper, MasterAdamW, averages
from torch import Tensor, nn
from training_cases import copies, linear_backward, linear_loss, make_gradients, make_parameters

# Odd sizes, one element, none, whole rows; several buckets at SMALL_CAP_MB.
SHAPES: tuple[tuple[int, ...], ...] = ((17, 9), (300,), (1,), (0,), (40, 25), (130, 257))
SMALL_CAP_MB = 0.01
HYPERS = (Hyper(lr=1e-2, weight_decay=0.1), Hyper(lr=3e-3, betas=(0.8, 0.95), eps=1e-6, weight_decay=0.0))
SCALE = 64.0  # a power of two: scaled gradients are exact


@dataclass(frozen=True)
class Program:
    """`overflow` names the step whose gradient holds an inf, `absent` the one in which parameter 1 has none; the last
    parameter requires a gradient from step `thawed` on; `store` says where the state is, as the optimizer is told."""

    dtype: torch.dtype = torch.bfloat16
    steps: int = 6
    overflow: int | None = 3
    absent: int | None = 1
    scaled: bool = False
    stage: int = 2
    thawed: int = 0
    overlap_param_gather: bool = False
    store: Mapping[str, Any] = field(default_factory=dict, hash=False)

    def lr(self, hyper: Hyper, step: int) -> float:
        return hyper.lr / (1 + step)

    def gradients(self, rank: int, step: int) -> list[Tensor | None]:
        """This rank's unscaled gradients, on the CPU. Multiples of 1/32, so that scaling loses nothing."""
        params = make_parameters(SHAPES, self.dtype)
        grads: list[Tensor | None] = [*make_gradients(params, rank, step, grid=2)]
        if step == self.overflow and rank == 0:
            grads[0].view(-1)[7] = math.inf
        if step == self.absent:
            grads[1] = None
        if step < self.thawed:
            grads[-1] = None
        return grads


@dataclass(frozen=True)
class Result:
    params: list[Tensor]
    state: dict[str, Tensor]  # by "index.name"
    skipped: int
    scales: list[float]
    non_finite: dict[str, Any] | None


def on(device: str, tensors: Sequence[Tensor | None]) -> list[Tensor | None]:
    return [None if tensor is None else tensor.to(device) for tensor in tensors]


def parameters(dtype: torch.dtype, device: str, shapes: Sequence[tuple[int, ...]] = SHAPES) -> list[nn.Parameter]:
    return [nn.Parameter(p.detach().to(device)) for p in make_parameters(shapes, dtype)]


def groups(params: Sequence[nn.Parameter]) -> list[dict[str, Any]]:
    """Every other parameter with the second set of hyper-parameters."""
    return [
        {"params": list(params[i::2]), **{k: v for k, v in dataclasses.asdict(h).items() if k != "decoupled"}}
        for i, h in enumerate(HYPERS)
    ]


class Loss(nn.Module):
    """`linear_loss` as a module that owns its parameters: its call is what `overlap_param_gather` waits in."""

    def __init__(self, params: Sequence[nn.Parameter]) -> None:
        super().__init__()
        self.params = params
        for index, parameter in enumerate(params):
            self.register_parameter(f"p{index}", parameter)

    def forward(self, grads: Sequence[Tensor | None]) -> Tensor:
        return linear_loss(self.params, grads)


def train(program: Program, device: str, rank: int = 0, process_group: Any = None) -> Result:
    import zero_optim

    params = parameters(program.dtype, device)
    params[-1].requires_grad_(program.thawed == 0)
    loss = Loss(params)
    opt = zero_optim.ShardedAdamW(
        groups(params),
        stage=program.stage,
        process_group=process_group,
        bucket_cap_mb=SMALL_CAP_MB,
        overlap_param_gather=program.overlap_param_gather,
        **program.store,
    )
    opt.attach(loss)
    scaler = zero_optim.GradScaler(init_scale=SCALE, growth_interval=3, enabled=program.scaled)
    scales = []
    for step in range(program.steps):
        for group, hyper in zip(opt.param_groups, HYPERS, strict=True):
            group["lr"] = program.lr(hyper, step)
        params[-1].requires_grad_(step >= program.thawed)
        scaler.scale(loss(on(device, program.gradients(rank, step)))).backward()
        scaler.step(opt)
        scaler.update()
        opt.zero_grad()
        scales.append(scaler.get_scale())
    opt.wait_for_parameters()
    stats = opt.stats()
    result = Result(
        [p.cpu() for p in copies(params)], state_of(opt), stats["skipped_steps"], scales, stats["non_finite"]
    )
    opt.close()
    return result


def state_of(opt: Any) -> dict[str, Tensor]:
    """Copies on the CPU of the state tensors; of a shard, its local part."""
    entries = {
        f"{index}.{name}": getattr(tensor, "local", tensor)
        for index, entry in opt.state_dict()["state"].items()
        for name, tensor in entry.items()
    }
    return {name: torch.as_tensor(tensor).detach().cpu().clone() for name, tensor in entries.items()}


def expected(program: Program, world_size: int = 1) -> list[Tensor]:
    """The parameters by the oracle. A skipped step is no step: no decay, no count."""
    params = make_parameters(SHAPES, program.dtype)
    order = [*range(0, len(params), 2), *range(1, len(params), 2)]  # as the groups hold them
    oracle = MasterAdamW([params[i] for i in order], [HYPERS[i % 2] for i in order])
    for step in range(program.steps):
        if step == program.overflow:
            continue
        oracle.hypers = [dataclasses.replace(HYPERS[i % 2], lr=program.lr(HYPERS[i % 2], step)) for i in order]
        averaged = averages([program.gradients(rank, step) for rank in range(world_size)])
        oracle.step([averaged[i] for i in order])
    back = dict(zip(order, oracle.params, strict=True))
    return [back[index] for index in range(len(params))]


def warm_up(opt: Any, params: Sequence[nn.Parameter], steps: int = 3) -> None:
    """Steady state: the first steps allocate and lay out."""
    for step in range(steps):
        linear_backward(params, on(str(params[0].device), make_gradients(params, 0, step)))
        opt.step()
        opt.zero_grad()
