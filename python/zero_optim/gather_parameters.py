"""``gather_parameters``: whole parameters of a sharded model, for the user to read and write."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext

from torch import nn

from .errors import ShardAccessError
from .params.param_shard import plain_parameter
from .units.schedule import in_backward
from .units.sharded_model import ShardedModel, sharded_model_of
from .units.unit import UnitState


@contextmanager
def gather_parameters(module: nn.Module, *, writeback: bool = False) -> Iterator[None]:
    """Collective. Make the parameters of ``module`` whole within it, on every rank: ordinary, in their own memory.

    Every rank enters and leaves it. Tensors taken out of it, as by ``module.state_dict()``, stay valid. The module's
    forward may be called in it, without communication. The units that hold parameters of ``module`` are gathered: one,
    several, or all. It does nothing for a module that is not sharded.

    Args:
        writeback: keep what is written to them: rank 0's values, on every rank. An exception on any rank is raised on
            all, and nothing is kept.

    Raises ShardAccessError where parameters were written without ``writeback``, or in a forward or backward.
    """
    with ExitStack() as stack:
        for model in sharded_model_of(module.parameters()):
            if model.sharded:
                stack.enter_context(_gather(model, module, writeback))
        yield


@contextmanager
def _gather(model: ShardedModel, module: nn.Module, writeback: bool) -> Iterator[None]:
    if in_backward() or model.schedule.running:
        raise ShardAccessError("gather_parameters was entered in a forward or backward: enter it between steps")
    model.schedule.check_awake("gather_parameters")
    wanted = {id(plain_parameter(parameter)) for parameter in module.parameters()}
    called = set(module.modules())  # a root without parameters is marked GATHERED, too, so that its forward is free
    units = [
        unit
        for unit in model.units
        if any(id(parameter) in wanted for parameter in unit.parameters)
        or (not unit.parameters and unit.module in called)
    ]
    fresh = [unit for unit in units if unit.state is not UnitState.GATHERED]
    if writeback and len(fresh) < len(units):
        raise ShardAccessError("gather_parameters(writeback=True) was entered within another: write in that one")
    if fresh:
        model.schedule.reshard_all()
    try:
        for unit in fresh:
            unit.gather()
        with model.sharding.everyone.raising_together("gather_parameters") if writeback else nullcontext():
            yield
            for unit in fresh if writeback else ():
                unit.take_replaced()
        written = [label for unit in fresh for label in unit.written()]
        if written and not writeback:
            raise ShardAccessError(
                f"{', '.join(written)} was written within gather_parameters(model), and is again what it was: to keep "
                "what is written, give it writeback=True on every rank"
            )
        for unit in fresh if writeback else ():
            unit.write_back()
    finally:
        for unit in fresh:
            unit.drop()
