"""A model in stages, its schedules, and what one process makes of the same batches."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import pipelining

WIDTH, MICRO, ROWS = 16, 4, 8
SCHEDULES = {  # name: stages on a rank
    "ScheduleGPipe": 1,
    "Schedule1F1B": 1,
    "ScheduleInterleaved1F1B": 2,
    "ScheduleInterleavedZeroBubble": 2,
}


class Block(nn.Module):
    """Where it is ``left_out``, its parameters have no gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.left_out = False
        self.up, self.down = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(3 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x if self.left_out else x + self.down(torch.tanh(self.up(x)))


def make_blocks(count: int, dtype: torch.dtype = torch.float32) -> list[nn.Module]:
    torch.manual_seed(0)
    return [Block().to(dtype) for _ in range(count)]


def batch(step: int, replica: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1000 * step + replica)
    x, y = torch.randn(2, ROWS, WIDTH, generator=generator)
    return x, y


def loss_of(out: Tensor, target: Tensor) -> Tensor:
    return nn.functional.mse_loss(out.float(), target)


class Pipeline:
    """This rank's stages of a model that is cut over the ranks of ``group``, and a schedule that runs them."""

    def __init__(self, schedule: str, group: dist.ProcessGroup, dtype: torch.dtype = torch.float32) -> None:
        each, ranks, rank = SCHEDULES[schedule], group.size(), group.rank()
        blocks = make_blocks(each * ranks, dtype)
        self.modules = {index: blocks[index] for index in range(rank, each * ranks, ranks)}
        stages = [
            pipelining.PipelineStage(module, index, each * ranks, torch.device("cpu"), group=group)
            for index, module in self.modules.items()
        ]
        kind: Any = getattr(pipelining, schedule)
        self.scaled = lambda loss: loss  # what the last stage makes of the loss
        scaled_loss = lambda out, target: self.scaled(loss_of(out, target))  # noqa: E731
        self._schedule = kind(stages[0] if each == 1 else stages, MICRO, loss_fn=scaled_loss)
        self._first, self._last = rank == 0, rank == ranks - 1

    def named_parameters(self) -> dict[str, nn.Parameter]:
        return {f"{index}.{name}": p for index, module in self.modules.items() for name, p in module.named_parameters()}

    def forward_backward(self, x: Tensor, target: Tensor) -> None:
        given = (x,) if self._first else ()
        self._schedule.step(*given, **({"target": target, "losses": []} if self._last else {}))
