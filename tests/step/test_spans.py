"""Ranges in a trace, and the log: what is there, with which names, and that nothing is made where nothing profiles."""

from __future__ import annotations

import logging
from collections import Counter
from typing import Any
from unittest import mock

import pytest
import torch
import zero_optim
from harness import run_ranks
from torch import nn
from torch.profiler import ProfilerActivity, profile
from zero_optim.comm import spans

PREFIX = "zero_optim::"
STEP = {"step.finish": 1, "step.exchange": 1, "step.coefficients": 1}


class Block(nn.Linear):
    """A unit."""


def _make(stage: int) -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    model = nn.Sequential(*(Block(64, 64, bias=False) for _ in range(3)))
    if stage == 3:
        zero_optim.shard_module(model, units=(Block,))
    return model, zero_optim.ShardedAdamW(model.named_parameters(), stage=stage, bucket_cap_mb=0.02)


def _step(model: nn.Module, opt: Any, factor: float = 1.0) -> None:
    (model(torch.ones(2, 64)).square().mean() * factor).backward()
    opt.step()
    opt.zero_grad()


def _ranges(rank: int, world_size: int, stage: int) -> list[str]:
    """Of the fourth step."""
    model, opt = _make(stage)
    for _ in range(3):
        _step(model, opt)
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        _step(model, opt)
    opt.close()
    return [e.name.removeprefix(PREFIX) for e in profiler.events() if e.name.startswith(PREFIX)]


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_each_phase_is_a_range(stage: int) -> None:
    buckets = [f"'{n}.weight'" for n in range(3)]
    # From stage 2 on these buckets, of one matrix each, are reduced as they are.
    phases = ("pack", "reduce_scatter") if stage == 0 else ("reduce_scatter",)
    expected = {f"{what} {bucket}": 1 for what in phases for bucket in buckets} | STEP
    if stage == 2:
        expected |= {f"step.all_gather {bucket}": 1 for bucket in buckets}
    if stage == 3:
        for unit, count in {"unit '0'": 2, "unit '1'": 2, "unit '2'": 1, "the root unit": 1}.items():
            expected |= {f"{what} {unit}": count for what in ("unshard", "wait for", "reshard")}
    for found in run_ranks(2, _ranges, stage):
        updates = [name for name in found if name.startswith("step.update")]
        assert updates and all(name.endswith(("weight'", "more")) for name in updates)  # neighbours are one batch
        assert Counter(name for name in found if name not in updates) == expected


def test_nothing_is_named_where_nothing_profiles() -> None:
    model, opt = _make(2)
    with mock.patch.object(spans, "record_function", side_effect=AssertionError):
        _step(model, opt)
    opt.close()


def _logged(rank: int, world_size: int) -> list[tuple[str, str]]:
    """Two steps, of which the second is skipped, and one that raises."""
    records: list[logging.LogRecord] = []
    handler, logger = logging.Handler(), logging.getLogger("zero_optim")
    handler.emit = records.append  # type: ignore[method-assign]
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        model, opt = _make(2)
        _step(model, opt)
        _step(model, opt, float("inf") if rank == 1 else 1.0)
        opt.close()
    finally:
        logger.removeHandler(handler)
        logger.setLevel(logging.NOTSET)
    return [(record.levelname, record.getMessage()) for record in records]


def test_the_log_says_what_was_decided() -> None:
    for records in run_ranks(2, _logged):
        (learned, skipped) = records
        assert learned == ("INFO", "learned when gradients become ready: 3 buckets leave in that order")
        assert skipped[0] == "INFO" and skipped[1].startswith("step 2 was skipped, not finite: ")
        assert ".weight" in skipped[1]
