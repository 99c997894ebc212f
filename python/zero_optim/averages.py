"""Averages of the parameters that an optimizer keeps: as a state dict, and in place of the parameters for a while."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from .checkpoint.state_dict import Groups, state_keys
from .engine import Engine
from .mode import Mode


@torch.inference_mode(False)  # pages that are fetched are written later
@torch.no_grad()
def state_dict(engine: Engine, groups: Groups, which: int, rank: int | None) -> dict[str | int, Tensor]:
    """See ``ShardedOptimizer.ema_state_dict``. The caller has settled the engine."""
    name, savers, keys = name_of(engine, which), engine.sharding.savers, state_keys(groups)
    with engine.sharding.everyone.raising_together("ema_state_dict"):
        if rank is not None and rank not in range(savers.world_size):
            raise ValueError(f"rank must be None or one of {savers.world_size} ranks, got {rank!r}")
        engine.shardings.check_whole("ema_state_dict")
    wanted = rank is None or rank == savers.rank
    engine.begin_averages()
    found: dict[str | int, Tensor] = {}
    for index, _, whole in engine.states.whole_tensors(only=name):
        if wanted:
            found[keys[index]] = whole.to("cpu", copy=True)
    return found


@contextmanager
def swapped(engine: Engine, which: int) -> Iterator[None]:
    """See ``ShardedOptimizer.swap_to_ema``. The caller has settled the engine."""
    name = name_of(engine, which)
    if engine.sharded_model is not None:
        engine.sharded_model.schedule.check_not_gathered("swap_to_ema")
    with torch.inference_mode(False), torch.no_grad():
        engine.begin_averages()
        engine.states.set_aside()
    engine.mode.now = Mode.AVERAGE
    try:
        with torch.inference_mode(False), torch.no_grad():
            engine.states.show(name)
            engine.param_gather.wait()
        yield
    finally:
        if engine.mode.now is Mode.AVERAGE:  # else the optimizer was closed within
            _put_back(engine)


def _put_back(engine: Engine) -> None:
    try:
        engine.settle()  # units that a forward has gathered are resharded
    finally:
        with torch.inference_mode(False), torch.no_grad():
            engine.states.put_back()
            engine.param_gather.wait()
        engine.mode.now = Mode.OWN


def name_of(engine: Engine, which: int) -> str:
    """Find the name of average number ``which``. Raises ValueError where there is none."""
    names = engine.rules.averages
    if not 0 <= which < len(names):
        raise ValueError(
            f"there is no average {which}: the optimizer was made with {len(names)}; give it ema_decay=0.999"
        )
    return names[which]
