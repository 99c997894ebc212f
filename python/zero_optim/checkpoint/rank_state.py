"""One rank's state: what ``state_dict`` gives, and how ``load_state_dict`` takes it back."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from ..engine import Engine
from ..errors import StateMismatchError
from ..rules.update_rule import tensors_for
from ..step.saved_state import Copy, plan_load
from .state_dict import (
    Groups,
    index_by_key,
    load_groups,
    make_state_dict,
    match_state,
    saved_order,
    saved_state_of,
    with_torch_options,
)

PLACE = "place"
"""The key of a state dict, beside torch's two, where other ranks have other parameters under the same names."""
PARTS = "parts"
"""The key that says how many parameters, in the order of the state, were laid out together. It is there from when
parameters are thawed or added until the buckets are laid out anew."""


def save(engine: Engine, groups: Groups, *, as_torch: bool) -> dict[str, Any]:
    """Make the state dict, of views of the live state. ``as_torch``: with options of torch's counterpart, no names."""
    engine.keep_edits()
    if as_torch:
        engine.shardings.check_whole("torch.distributed.checkpoint")
        engine.shardings.check_joined("torch.distributed.checkpoint")
        groups = _as_torch(engine, groups)
    exported = engine.states.export()
    # A load lays out the same buckets by this order. Within a bucket parameters may lie in another.
    in_order = {index: exported[index] for index in engine.reducer.layout.order}
    state_dict = make_state_dict(groups, in_order, engine.hyper.steps.float())
    if as_torch:
        return state_dict
    parts = engine.reducer.layout.parts
    if len(parts) > 1 and engine.sharded_model is None and saved_order(exported):
        state_dict[PARTS] = [len(part) for part in parts]
    if place := _place(engine):
        state_dict[PLACE] = place
    return state_dict


def gather(engine: Engine, *, wanted: bool, device: torch.device) -> dict[int, dict[str, Tensor]]:
    """Collective. Gather the whole logical state on ``device``, by parameter index, where it is ``wanted``. Every rank
    goes through all tensors, whatever fails on it."""
    state: dict[int, dict[str, Tensor]] = {index: {} for index in engine.parameters.trained} if wanted else {}
    failure: Exception | None = None
    for index, name, whole in engine.states.whole_tensors():
        if wanted and failure is None:
            try:
                state[index][name] = whole.to(device, copy=True)
            except (MemoryError, RuntimeError) as error:
                failure = error
    if failure is not None:
        raise failure
    return state


def save_whole(engine: Engine, groups: Groups, *, on_rank_0: bool) -> dict[str, Any]:
    """Collective. Make the state dict of whole tensors, as ``get_optimizer_state_dict(full_state_dict=True)`` has it.

    ``on_rank_0``: rank 0 alone gets the state, on the CPU; else all ranks do, on the device.
    """
    everyone = engine.sharding.everyone
    with everyone.raising_together("get_optimizer_state_dict"):
        engine.shardings.check_whole("torch.distributed.checkpoint")
        engine.shardings.check_joined("torch.distributed.checkpoint")
    device = torch.device("cpu") if on_rank_0 else engine.sharding.device
    with everyone.raising_together("get_optimizer_state_dict"):
        state = gather(engine, wanted=not on_rank_0 or everyone.ranks[everyone.rank] == 0, device=device)
    return make_state_dict(_as_torch(engine, groups), state, engine.hyper.steps.float())


def to_load_whole(engine: Engine, groups: Groups) -> dict[str, Any]:
    """Make the state dict in which ``set_optimizer_state_dict(full_state_dict=True)`` puts whole tensors. Those that it
    does not have stay marked: a load ignores them."""
    state: dict[int, dict[str, Tensor]] = {}
    for index, parameter in engine.parameters.trained.items():
        names = [tensor.name for tensor in tensors_for(engine.rules.of(index), parameter.dtype)]
        state[index] = {name: torch.empty(0, device=parameter.device) for name in names}
        for tensor in state[index].values():
            tensor.zero_optim_absent = True  # type: ignore[attr-defined]
    made = make_state_dict(_as_torch(engine, groups), state, engine.hyper.steps.float())
    for entry in made["state"].values():
        entry["step"].zero_optim_absent = True
    return made


def _as_torch(engine: Engine, groups: Groups) -> Groups:
    """Give the groups the options of torch's counterpart, without names of parameters."""
    groups = [{name: value for name, value in group.items() if name != "param_names"} for group in groups]
    return with_torch_options(groups, engine.rules.by_group)


STAGE = "stage"


def _place(engine: Engine) -> dict[str | int, list[int]]:
    """Give what tells this rank's state from others': the number of its pipeline stage, and by parameter index of its
    slice or expert, each with how many there are. Empty where it is the same on all ranks."""
    place: dict[str | int, list[int]] = {}
    if engine.pipeline is not None:
        place[STAGE] = [engine.pipeline.stage, engine.pipeline.stages]
    for index in range(len(engine.parameters.labels)):
        number, count = engine.shardings.slice_of(index)
        if count > 1:
            place[index] = [number, count]
    return place


def _check_place(engine: Engine, saved: Mapping[str, Any]) -> None:
    """Raise StateMismatchError where a state dict is of another stage, slice or expert. Where one of the two says
    nothing, as an optimizer without ``pipeline=``, any fits."""
    own = _place(engine)
    for what, (number, count) in saved.get(PLACE, {}).items():
        if (here := own.get(what, [number, count])) != [number, count]:
            name = "the stage of a pipeline" if what == STAGE else f"the slice of {engine.parameters.labels[what]}"
            raise StateMismatchError(
                f"the state is of another rank: {name} is number {number} of {count} there, and {here[0]} of {here[1]} "
                "here. Each rank loads what itself has saved; zero_optim.checkpoint.save and load do that on any "
                "number of ranks"
            )


def load(engine: Engine, groups: Groups, state_dict: Mapping[str, Any]) -> None:
    """Collective. Nothing is changed on any rank unless the state fits on all. The caller has settled the engine."""
    everyone, parameters = engine.sharding.everyone, engine.parameters
    saved: dict[int, Mapping[str, Any]] = {}
    copies: list[Copy] = []
    own_parts: list[list[int]] = []
    with everyone.raising_together("load_state_dict"):
        saved = match_state(state_dict, parameters, engine.rules)
        _check_place(engine, state_dict)
        own_parts = _saved_parts(groups, state_dict, saved)
    # Keys stand in the order of the layout, unless they were sorted by group, as torch.distributed.checkpoint does.
    # A sorted state that fits needs no other layout.
    planned = _plan(engine, saved)
    every = everyone.gather_objects((planned is not None, own_parts), "load_state_dict")
    fits, parts = zip(*every, strict=True)
    if parts[0] and not (all(fits) and all(part == sorted(part) for part in parts[0])):
        planned = None
        engine.reducer.restore_order(*parts[0])
    with everyone.raising_together("load_state_dict"):
        copies = plan_load(engine.states.shards, saved, parameters.labels) if planned is None else planned
    state = saved_state_of(saved, parameters, engine.rules)
    engine.begin_load(state)
    engine.states.load(copies)
    engine.states.raise_lost_together()
    engine.end_load(state)
    load_groups(groups, state_dict["param_groups"], engine.rules.by_group)


def _saved_parts(
    groups: Groups, state_dict: Mapping[str, Any], saved: Mapping[int, Mapping[str, Any]]
) -> list[list[int]]:
    """Give the order of the layout that shards were saved in, by ``PARTS``; none for full tensors, which fit any.

    ``saved``: by parameter index, without those that are not loaded.
    """
    if not saved_order(saved):
        return []
    index_of = index_by_key(state_dict["param_groups"], groups)
    order = iter([index_of[key] for key in state_dict["state"]])
    parts = [[*islice(order, length)] for length in state_dict.get(PARTS, ())]
    loaded = [[index for index in part if index in saved] for part in (*parts, [*order])]
    return [part for part in loaded if part]


def _plan(engine: Engine, saved: Mapping[int, Mapping[str, Any]]) -> list[Copy] | None:
    """Plan the load by the present layout; None where the saved ranges are not those that this rank has."""
    try:
        return plan_load(engine.states.shards, saved, engine.parameters.labels)
    except StateMismatchError:
        return None
