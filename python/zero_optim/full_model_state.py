"""The whole ``state_dict()`` of a model, as a client saves it."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from .comm.collectives import Comm
from .engine import savers_of
from .full_parameters import gathered_one_by_one, resharded_between_steps
from .params.param_shard import plain_parameter
from .params.tensor_slice import is_distributed, whole_of


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
    everyone = sharded[0].sharding.everyone if sharded else None
    here, ranks = _place(sharded[0].sharding.savers if sharded else savers_of({*map(id, model.parameters())}))
    if rank is not None and rank not in range(ranks):
        raise ValueError(f"rank must be None or one of {ranks} ranks, got {rank!r}")
    wanted = rank is None or rank == here
    state = _chosen(model, trained_only)
    ids = {id(plain_parameter(value)) for value in state.values() if isinstance(value, Tensor)}
    wholes: dict[int, Tensor] = {}
    failure: Exception | None = None
    every = itertools.chain(gathered_one_by_one(sharded, ids), _put_together(state))
    for parameter, whole in every:  # to the end, whatever fails here: the other ranks take part in each gather
        try:
            if wanted and failure is None:
                wholes[id(parameter)] = whole.to("cpu")
        except (MemoryError, RuntimeError) as error:
            failure = error
    with everyone.raising_together("full_model_state_dict") if everyone is not None else nullcontext():
        if failure is not None:
            raise failure
    return {key: _whole(value, wholes) for key, value in state.items()} if wanted else {}


def _place(ranks: Comm | None) -> tuple[int, int]:
    """Find this rank among ``ranks``, and how many there are. None: those of the default group."""
    if ranks is not None:
        return ranks.rank, ranks.world_size
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


def _chosen(model: nn.Module, trained_only: bool) -> dict[str, Any]:
    """Choose the entries of the state dict, with parameters as modules hold them."""
    state = model.state_dict(keep_vars=True)
    trained = {id(parameter) for parameter in model.parameters() if parameter.requires_grad}
    return {key: value for key, value in state.items() if not trained_only or id(value) in trained}


def _put_together(state: dict[str, Any]) -> Iterator[tuple[Tensor, Tensor]]:
    """Collective. Yield each ``DTensor`` that modules hold, and the whole of it."""
    cut = {id(value): value for value in state.values() if is_distributed(value)}
    for value in cut.values():
        yield value, whole_of(value.detach())


def _whole(value: Any, wholes: dict[int, Tensor]) -> Any:
    """Find the gathered tensor for ``value``; else copy it. A tensor that comes again gives the same one."""
    if not isinstance(value, Tensor):
        return copy.deepcopy(value)
    key = id(plain_parameter(value))
    if key not in wholes:
        wholes[key] = value.detach().to("cpu", copy=True)
    return wholes[key]
