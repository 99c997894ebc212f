"""The order programs, on the ranks of a simulation."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from order_programs import OrderProgram, Trained, train

from . import switch


def train_all(rank: int, world_size: int, programs: Sequence[OrderProgram]) -> list[Trained]:
    """On the simulated GPU; on the CPU where none is simulated."""
    chosen = switch.chosen()
    on_gpu = chosen is not None and chosen.kind == "streams"
    device = torch.device("cuda", 0) if on_gpu else torch.device("cpu")
    return [train(rank, world_size, program, device) for program in programs]
