"""Whole parameters of a model, gathered one unit at a time: to save them, or to feed inference."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Container, Iterator, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from .checkpoint.contents import Names
from .checkpoint.rank_state import collect
from .comm.collectives import make_comm
from .comm.streams import deallocate
from .engine import check_whole, savers_of
from .errors import ShardAccessError
from .optimizer import ShardedOptimizer
from .params.param_shard import plain_parameter
from .params.tensor_slice import is_distributed, whole_of
from .rules.codec import Begins
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
        opt.settle()  # parameters of the last step may be in flight
    sharded = resharded_between_steps(model, "iter_full_parameters")
    return _parameters(model, sharded, opt, dtype)


def full_model_state_dict(model: nn.Module, rank: int | None = 0, *, trained_only: bool = False) -> dict[str, Any]:
    """Collective. The model's ``state_dict()`` with every tensor whole and on the CPU, under its usual names.

    It has parameters, persistent buffers and extra state, and loads into an ordinary model. All names of a tied
    parameter have the same tensor. At stage 3 units are gathered one after another, so a rank takes memory for one unit
    beside the result. Below stage 3 only tensor-parallel ranks communicate. Buffers are those of the rank that gets the
    result.

    Args:
        rank: the rank that gets it, in the group that the model is sharded over, else in the default group. The others
            get ``{}``. None: all ranks get it. With plain slices each tensor-parallel rank has a model of its own, and
            ``rank`` is a data-parallel rank.
        trained_only: leave out buffers, and parameters that need no gradient: they are not gathered. Adapters are
            saved so.

    Raises ValueError for a rank that is not there; ShardAccessError within a forward, a backward or
    ``gather_parameters``; ParameterError for experts that are plain tensors. An error of one rank, such as MemoryError,
    is raised on all.
    """
    sharded = resharded_between_steps(model, "full_model_state_dict")
    savers = sharded[0].sharding.savers if sharded else savers_of({*map(id, model.parameters())}) or make_comm()
    if rank is not None and rank not in range(savers.world_size):
        raise ValueError(f"rank must be None or one of {savers.world_size} ranks, got {rank!r}")
    wanted = rank is None or rank == savers.rank
    trained = {id(parameter) for parameter in model.parameters() if parameter.requires_grad}
    state = model.state_dict(keep_vars=True)  # with parameters as modules hold them
    state = {key: value for key, value in state.items() if not trained_only or id(value) in trained}
    ids = {id(plain_parameter(value)) for value in state.values() if isinstance(value, Tensor)}
    cut = {id(value): value for value in state.values() if is_distributed(value)}
    every = itertools.chain(
        ((id(parameter), whole) for parameter, whole in gathered_one_by_one(sharded, ids)),
        ((key, whole_of(value.detach())) for key, value in cut.items()),
    )
    with sharded[0].sharding.world.raising_together("full_model_state_dict") if sharded else nullcontext():
        wholes = collect(every, torch.device("cpu"), wanted=wanted, copy=False)
    return {key: _whole(value, wholes) for key, value in state.items()} if wanted else {}


def _whole(value: Any, wholes: dict[int, Tensor]) -> Any:
    """Find the gathered tensor for ``value``; else copy it. A tensor that comes again gives the same one."""
    if not isinstance(value, Tensor):
        return copy.deepcopy(value)
    key = id(plain_parameter(value))
    if key not in wholes:
        wholes[key] = value.detach().to("cpu", copy=True)
    return wholes[key]


def resharded_between_steps(model: nn.Module, what: str) -> list[ShardedModel]:
    """Collective. List the sharded models that have parameters of ``model``, with every unit resharded.

    Raises ShardAccessError where ``what`` was called within a forward, a backward or ``gather_parameters``;
    ParameterError for experts that are plain tensors.
    """
    check_whole(what, model.parameters())
    sharded = sharded_model_of(model.parameters())
    if in_backward() or any(of.schedule.calls.in_root for of in sharded):
        raise ShardAccessError(f"{what} was called in a forward or backward: call it between steps")
    for of in sharded:
        of.schedule.check_not_gathered(what)
        of.schedule.reshard_all()  # gathers below start from shards, on all ranks
    return sharded


@torch.no_grad()
def gathered_one_by_one(
    sharded: Sequence[ShardedModel], wanted: Container[int], dtype: torch.dtype | None = None
) -> Iterator[tuple[Tensor, Tensor]]:
    """Collective. Yield each plain parameter whose id is in ``wanted``, and its whole value, a tensor of its own.

    It takes memory for one unit. Flat tensors without such a parameter are not gathered.
    """
    for flat in (flat for of in sharded for unit in of.units for flat in unit.split):
        own = [parameter for parameter in flat.params if id(parameter) in wanted]
        if not own:
            continue
        gathered = flat.gathered()
        views = dict(zip(map(id, flat.params), flat.wholes(gathered), strict=True))
        for parameter in own[:-1]:
            yield parameter, views[id(parameter)].to(dtype or parameter.dtype, copy=True)
        last = views[id(own[-1])].to(dtype or flat.dtype, copy=True)
        deallocate(gathered)  # before the last is used: gloo's threads may keep the memory for a while
        yield own[-1], last


@torch.no_grad()
def _parameters(
    model: nn.Module, sharded: list[ShardedModel], opt: ShardedOptimizer | None, dtype: torch.dtype | None
) -> Iterator[tuple[str, Tensor]]:
    names = Names(model)
    given: set[int] = set()  # ids of plain parameters
    if opt is not None and dtype is not None:
        for index, _, master in opt.engine.states.whole_tensors(lambda tensor: tensor.begins is Begins.PARAMETER):
            parameter = opt.engine.parameters.all[index]
            if parameter.dtype != dtype:
                given.add(id(parameter))
                yield names.of(parameter, "a parameter"), master.to(dtype, copy=True)
    left = {id(plain_parameter(parameter)) for parameter in names.parameters.values()} - given
    for parameter, whole in gathered_one_by_one(sharded, left, dtype):
        given.add(id(parameter))
        yield names.of(parameter, "a parameter"), whole
    for name, parameter in names.parameters.items():
        if id(plain_parameter(parameter)) not in given:
            yield name, whole_of(parameter.detach()).to(dtype or parameter.dtype)
