"""Conversion of AdamW's or SGD's state for ``ShardedMuon``: from one recipe to another in mid-training."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from .checkpoint.rank_state import pack_groups
from .errors import StateMismatchError
from .optimizer import ShardedOptimizer
from .params.flat_shard import FlatShard
from .params.parameter_set import own_names
from .rules.codec import Begins, StateTensor, saved_codec
from .rules.muon import BUFFER, Muon
from .rules.update_rule import tensors_for


def state_for_muon(opt: ShardedOptimizer, state: Mapping[str, Any]) -> dict[str, Any]:
    """Convert ``state`` for ``load_full_state_dict(opt, ...)``. Not collective: only rank 0 needs it.

    Muon's momentum is an exponential average of gradients. So is the ``exp_avg`` of Adam, AdamW and Lion, which becomes
    it. The ``momentum_buffer`` of SGD is a sum, and becomes an average as it is multiplied by
    (1 - momentum) / (1 - dampening). Where ``opt`` updates a parameter by another rule, the state of that rule stays;
    state that was not saved starts fresh. Masters stay. Groups and their options are those of ``opt``.

    Args:
        opt: a ``ShardedMuon``, with other rules in some groups perhaps. Parameters are matched by name.
        state: what ``full_state_dict`` gave, or ``state_dict()`` of the optimizers of torch.

    Raises StateMismatchError for parameters without names, tensors that are not whole, and a state of ``maximize``.
    """
    saved = _by_name(state)
    converted: dict[int, dict[str, Any]] = {}
    for index, name in enumerate(own_names(opt.param_groups)):
        if name is None:
            raise StateMismatchError(_unnamed(f"parameter {index} of the optimizer", "opt"))
        if name not in saved:
            continue
        group, entry = saved[name]
        rule = opt.engine.rules.of(index)
        tensors = tensors_for(rule, opt.engine.parameters.all[index].dtype)
        made = {tensor.name: entry[tensor.name] for tensor in tensors if entry.get(tensor.name) is not None}
        momentum = entry.get("exp_avg", entry.get(BUFFER))
        if isinstance(rule, Muon) and momentum is not None:
            made[BUFFER] = momentum
            if "exp_avg" not in entry and "dampening" in group:
                # SGD keeps a sum of gradients, Muon their exponential average.
                made[BUFFER] = momentum * ((1 - float(group["momentum"])) / (1 - float(group["dampening"])))
        lacking = [tensor for tensor in tensors if tensor.begins is Begins.ZERO and tensor.name not in made]
        whole = next(value for kind, value in entry.items() if kind != "step" and isinstance(value, Tensor))
        for tensor in lacking:
            shape = tensor.shape(whole.shape, whole.numel())
            made[tensor.name] = torch.zeros(shape, dtype=tensor.dtype, device=whole.device)
        # Bias corrections start with state that starts at zero.
        converted[index] = {**made, "step": 0.0 if lacking else float(entry.get("step", 1))}
    return {"state": converted, "param_groups": pack_groups(opt.param_groups)}


def _by_name(state: Mapping[str, Any]) -> dict[str, tuple[Mapping[str, Any], Mapping[str, Any]]]:
    """Find by name the saved group of each parameter that has state, and that state."""
    groups = state["param_groups"]
    names, keys = own_names([*groups]), [(group, key) for group in groups for key in group["params"]]
    found = {}
    for name, (group, key) in zip(names, keys, strict=True):
        entry = state["state"].get(key) or state["state"].get(name) or {}
        if not any(isinstance(value, Tensor) for kind, value in entry.items() if kind != "step"):
            continue
        if name is None:
            raise StateMismatchError(_unnamed(f"parameter {key} of the state", "the optimizer that saves"))
        if group.get("maximize"):
            raise StateMismatchError(
                f"{name} was trained with maximize=True: Muon minimizes, and cannot use its momentum"
            )
        problems = [f"{kind} of {name} is a part" for kind, value in entry.items() if isinstance(value, FlatShard)]
        encoded = [kind for kind in ("exp_avg", BUFFER) if saved_codec(StateTensor(kind), entry, {}) is not None]
        problems += [f"{kind} of {name} is in fewer bits than fp32" for kind in encoded]
        if problems:
            raise StateMismatchError(f"{problems[0]}: give the state that zero_optim.full_state_dict gave")
        found[name] = group, entry
    return found


def _unnamed(which: str, optimizer: str) -> str:
    return f"{which} has no name of its own, by which states are matched: give {optimizer} model.named_parameters()"
