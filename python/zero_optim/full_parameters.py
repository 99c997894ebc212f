"""Whole parameters, one after another: to write them out, or to feed inference, without a whole model's memory."""

from __future__ import annotations

from collections.abc import Container, Iterator, Sequence

import torch
from torch import Tensor, nn

from .checkpoint.contents import Names
from .comm.streams import deallocate
from .engine import check_whole
from .errors import ShardAccessError
from .optimizer import ShardedOptimizer
from .params.flat_params import FlatParams
from .params.param_shard import plain_parameter
from .params.tensor_slice import whole_of
from .units.schedule import in_backward
from .units.sharded_model import ShardedModel, sharded_model_of


def iter_full_parameters(
    model: nn.Module, opt: ShardedOptimizer | None = None, dtype: torch.dtype | None = None
) -> Iterator[tuple[str, Tensor]]:
    """Collective. Yield every parameter's name and whole value, in an order that is the same on every rank.

    A rank needs extra memory for one unit, or for one bucket of masters, and for the tensor that is yielded. That may
    be the parameter itself, if it is whole here: copy what is to be kept. A tied parameter comes once, under its first
    name. All ranks have to go through to the end, or to the same place. Call it between steps, not within a forward or
    backward.

    Args:
        opt: an optimizer, whose masters are read where ``dtype`` is not that of a 16-bit parameter, and rounded once.
        dtype: of the values; None: the parameters' own.

    Raises ShardAccessError within a forward or backward; ParameterError for experts that are plain tensors;
    ClosedError.
    """
    if opt is not None and not isinstance(opt, ShardedOptimizer):
        raise TypeError(f"opt is a {type(opt).__name__}: only a ShardedOptimizer has masters")
    if opt is not None:
        opt.check_usable()
        opt.settle()
    sharded = resharded_between_steps(model, "iter_full_parameters")
    return _parameters(model, sharded, opt, dtype)


def resharded_between_steps(model: nn.Module, what: str) -> list[ShardedModel]:
    """Collective. List the sharded models that have parameters of ``model``, with every unit resharded.

    Raises ShardAccessError where ``what`` was called within a forward, a backward or ``gather_parameters``;
    ParameterError for experts that are plain tensors.
    """
    check_whole(what, {id(parameter) for parameter in model.parameters()})
    sharded = sharded_model_of(model.parameters())
    if in_backward() or any(of.schedule.running for of in sharded):
        raise ShardAccessError(f"{what} was called in a forward or backward: call it between steps")
    for of in sharded:
        of.schedule.check_not_gathered(what)
        of.schedule.reshard_all()
    return sharded


@torch.no_grad()
def gathered_one_by_one(
    sharded: Sequence[ShardedModel], wanted: Container[int], dtype: torch.dtype | None = None
) -> Iterator[tuple[Tensor, Tensor]]:
    """Collective. Yield each plain parameter whose id is in ``wanted``, and its whole value, a tensor of its own.

    It takes memory for one unit. Flat tensors without such a parameter are not gathered.
    """
    for flat in (flat for of in sharded if of.sharded for unit in of.units for flat in unit.flats):
        yield from _copies(flat, [parameter for parameter in flat.params if id(parameter) in wanted], dtype)


@torch.no_grad()
def _parameters(
    model: nn.Module, sharded: list[ShardedModel], opt: ShardedOptimizer | None, dtype: torch.dtype | None
) -> Iterator[tuple[str, Tensor]]:
    names = Names(model)
    given: set[int] = set()  # ids of plain parameters
    if opt is not None and dtype is not None:
        for parameter, master in _masters(opt, dtype):
            given.add(id(parameter))
            yield names.of(parameter, "a parameter"), master
    left = {id(plain_parameter(parameter)) for parameter in names.parameters.values()} - given
    for parameter, whole in gathered_one_by_one(sharded, left, dtype):
        given.add(id(parameter))
        yield names.of(parameter, "a parameter"), whole
    for name, parameter in names.parameters.items():
        if id(plain_parameter(parameter)) not in given:
            yield name, whole_of(parameter.detach()).to(dtype or parameter.dtype)


def _copies(flat: FlatParams, wanted: Sequence[Tensor], dtype: torch.dtype | None) -> Iterator[tuple[Tensor, Tensor]]:
    """Collective. Yield these parameters of ``flat``, whole. The gathered memory is freed before the last of them."""
    if not wanted:
        return
    gathered = flat.gathered()
    views = dict(zip(map(id, flat.params), flat.wholes(gathered), strict=True))
    for parameter in wanted[:-1]:
        yield parameter, views[id(parameter)].to(dtype or parameter.dtype, copy=True)
    last = views[id(wanted[-1])].to(dtype or flat.dtype, copy=True)
    deallocate(gathered)  # gloo's threads may have it for a while
    yield wanted[-1], last


def _masters(opt: ShardedOptimizer, dtype: torch.dtype) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the masters, in ``dtype``, of parameters that have one and are not of that dtype."""
    parameters = opt.engine.parameters.all
    for masters in opt.engine.states.whole_masters():
        wanted = [index for index in masters if parameters[index].dtype != dtype]
        for index in wanted:
            yield parameters[index], masters[index].to(dtype, copy=True)
