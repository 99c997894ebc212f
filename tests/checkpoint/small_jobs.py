"""A network with its optimizer, for tests of one question each."""

from __future__ import annotations

from typing import Any

import torch
import zero_optim
from torch import Tensor, nn

INDEX, FIRST, SECOND = "index.json", "rank-0.safetensors", "rank-1.safetensors"  # files of a checkpoint
MIB = 1 << 20


def network(seed: int, dtype: torch.dtype = torch.bfloat16) -> nn.Module:
    """Large enough that the state of each of three ranks has elements of several parameters."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(30, 40), nn.BatchNorm1d(40), nn.Linear(40, 9)).to(dtype)


def trained(seed: int, steps: int = 1, dtype: torch.dtype = torch.bfloat16) -> tuple[nn.Module, Any]:
    model = network(seed, dtype)
    opt = zero_optim.ShardedAdamW(model.named_parameters(), lr=1e-2)
    train(model, opt, steps)
    return model, opt


def train(model: nn.Module, opt: Any, steps: int) -> None:
    for step in range(steps):
        inputs = torch.randn(6, 30, generator=torch.Generator().manual_seed(step))
        model(inputs.to(next(model.parameters()).dtype)).float().pow(2).mean().backward()
        opt.step()
        opt.zero_grad()


def all_of(model: nn.Module, opt: Any) -> dict[str, Tensor]:
    """Collective. Copies of the parameters, the buffers and the state: of all slices, but for plain ones."""
    found = {name: value.clone() for name, value in zero_optim.full_model_state_dict(model, rank=None).items()}
    for index, entry in zero_optim.full_state_dict(opt, rank=None)["state"].items():
        found |= {f"{index}: {kind}": value.clone() for kind, value in entry.items()}
    return found


class Stateful:
    """A scaler, a scheduler or a loader: it has a state, and takes another one, or ``refuses`` it."""

    def __init__(self, state: Any = None, refuses: bool = False) -> None:
        self.state, self.refuses = state, refuses

    def state_dict(self) -> Any:
        return self.state

    def load_state_dict(self, state: Any) -> None:
        if self.refuses:
            raise KeyError("last_epoch")
        self.state = state
