"""The order programs, on the ranks of a simulation."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from order_programs import OrderProgram, Trained, check, train

from . import switch


def train_all(rank: int, world_size: int, programs: Sequence[OrderProgram]) -> list[Trained]:
    """On the simulated GPU; on the CPU where none is simulated."""
    chosen = switch.chosen()
    on_gpu = chosen is not None and chosen.kind == "streams"
    device = torch.device("cuda", 0) if on_gpu else torch.device("cpu")
    return [train(rank, world_size, program, device) for program in programs]


def wrong(by_rank: Sequence[Sequence[Trained]], programs: Sequence[OrderProgram]) -> list[str]:
    """What is wrong with the results of ``train_all`` on every rank, a text for each program that is not right."""
    results = zip(*by_rank, strict=True)
    found = [check(of, program) for program, of in zip(programs, results, strict=True)]
    return [text for text in found if text]
