"""Averages of the parameters that an optimizer keeps: as a state dict, and in place of the parameters for a while."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .checkpoint.state_dict import state_keys
from .engine import Engine, Weights

if TYPE_CHECKING:
    from .optimizer import ShardedOptimizer


@torch.no_grad()
def state_dict(opt: ShardedOptimizer, which: int, rank: int | None) -> dict[str | int, Tensor]:
    """See ``ShardedOptimizer.ema_state_dict``."""
    opt.check_usable()
    engine = opt.engine
    name = _name_of(engine, which)
    opt.settle()
    with engine.sharding.everyone.raising_together("ema_state_dict"):
        engine.shardings.check_whole("ema_state_dict")
    wanted = rank is None or engine.sharding.everyone.rank == rank
    keys = state_keys(opt.param_groups)
    found: dict[str | int, Tensor] = {}
    for index, kind, whole in engine.states.whole_tensors(only=name):
        if wanted and kind == name:
            found[keys[index]] = whole.to("cpu", copy=True)
    return found


@contextmanager
def swapped(opt: ShardedOptimizer, which: int) -> Iterator[None]:
    """See ``ShardedOptimizer.swap_to_ema``."""
    opt.check_usable()
    engine = opt.engine
    name = _name_of(engine, which)
    opt.settle()
    with torch.no_grad():
        kept = engine.states.show(name)
        engine.param_gather.wait()
    engine.weights = Weights.AVERAGE
    try:
        yield
    finally:
        engine.settle()  # units that a forward has gathered are resharded
        with torch.no_grad():
            engine.states.show_again(kept)
            engine.param_gather.wait()
        engine.weights = Weights.OWN


def _name_of(engine: Engine, which: int) -> str:
    names = engine.rule.averages
    if not 0 <= which < len(names):
        raise ValueError(
            f"there is no average {which}: the optimizer was made with {len(names)}; give it ema_decay=0.999"
        )
    return names[which]
