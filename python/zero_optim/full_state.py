"""The whole optimizer state on one rank, in torch's own format: for jobs that move in or out, or change to Muon."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from .checkpoint.rank_state import gather, load_groups, match_state, pack_groups, saved_state_of, with_torch_options
from .comm.together import gathered
from .engine import Engine
from .errors import StateMismatchError
from .optimizer import ShardedOptimizer
from .params.flat_shard import FlatShard
from .params.parameter_set import own_names
from .params.tensor_slice import is_distributed
from .rules.codec import Begins, StateTensor, saved_codec
from .rules.muon import BUFFER, Muon
from .rules.update_rule import tensors_for
from .step.hyper_table import was_updated
from .step.saved_state import SavedState, call_load_hooks, check_rows, state_tensor, tensors_of


def full_state_dict(opt: ShardedOptimizer, rank: int | None = 0) -> dict[str, Any]:
    """Collective. Return the state as ``state_dict()`` of torch's counterpart does, so that the counterpart loads it.

    For AdamW ``{"state": {index: {"step": [] fp32, "exp_avg", "exp_avg_sq"}}, "param_groups": [...]}``: tensors in
    their own dtype, fp32, and in the parameter's shape, on the CPU. A 16-bit parameter has a ``master`` too, and with
    ``ema_decay`` there is ``ema``, which torch does not use. Parameters that never stepped are left out, as in torch.
    Options that only torch's groups have get torch's defaults.

    Args:
        rank: the rank, in the optimizer's group, that gets it, while the others get ``{}``; None: all get it. With
            plain slices each tensor-parallel rank has a state of its own, and ``rank`` is a data-parallel rank.

    Beside the result a rank needs memory for two buckets of one tensor. Hooks of ``state_dict`` are not called. Raises
    ValueError for a rank that is not there, ParameterError for experts that are plain tensors, and ClosedError, on
    every rank.
    """
    engine = _engine_of(opt)
    world, savers = engine.sharding.world, engine.sharding.savers
    opt.settle()
    with world.raising_together("full_state_dict"):
        opt.check_usable()
        if rank is not None and rank not in range(savers.world_size):
            raise ValueError(f"rank must be None or one of {savers.world_size} ranks, got {rank!r}")
        engine.shardings.check_whole("full_state_dict")
    wanted = rank is None or rank == savers.rank
    with world.raising_together("full_state_dict"):  # memory may be short on one rank
        tensors = gather(engine, wanted=wanted, device=torch.device("cpu"))
    if not wanted:
        return {}
    steps = torch.tensor(engine.hyper.steps.tolist(), dtype=torch.float32, device="cpu")  # the host waits
    state = {i: {"step": steps[i].clone(), **tensors[i]} for i in was_updated(steps).nonzero().flatten().tolist()}
    groups = pack_groups(with_torch_options(opt.param_groups, engine.rules.by_group))
    return {"state": state, "param_groups": _on(torch.device("cpu"), groups)}


def _engine_of(opt: ShardedOptimizer) -> Engine:
    if not isinstance(getattr(opt, "engine", None), Engine):
        raise TypeError(f"opt is a {type(opt).__name__}: give a ShardedOptimizer. One of torch's has state_dict()")
    return opt.engine


def _on(device: torch.device, groups: Any) -> Any:
    """Copy the tensors of ``groups`` to a device. One that several groups have is copied once."""
    copies: dict[int, Tensor] = {}

    def copied(tensor: Tensor) -> Tensor:
        if id(tensor) not in copies:
            copies[id(tensor)] = tensor.detach().to(device, copy=True)
        return copies[id(tensor)]

    return tree_map_only(Tensor, copied, groups)


@torch.no_grad()
def load_full_state_dict(opt: ShardedOptimizer, state: Mapping[str, Any] | None) -> None:
    """Collective. Load what ``state_dict()`` of torch's counterpart or ``full_state_dict`` gave; parameters stay.

    Rank 0's ``state`` is read, and other ranks may pass None. With plain slices the first data-parallel rank of each
    slice reads its own. Tensors may have any floating dtype and device. Parameters are matched by their place in the
    groups, or by name where the state has names for keys. Parameters without state start afresh, and state of frozen
    ones is left out with a warning. Masters come from ``master``, else from the parameters. A master that does not
    round to its parameter at the next step is taken from it again: load the model before that step. Options of the
    groups are taken over.

    Beside the state a rank needs memory for two buckets of one tensor. Hooks given to
    ``register_load_state_dict_post_hook`` are called. Raises StateMismatchError on every rank, before anything is
    changed, naming what does not fit; ParameterError for experts that are plain tensors; ClosedError.
    """
    engine = _engine_of(opt)
    world, savers = engine.sharding.world, engine.sharding.savers
    tensors: dict[int, Mapping[str, Any]] = {}  # they stay on the rank that reads them

    def read() -> tuple[SavedState, list[dict[str, Any]]] | None:
        opt.check_usable()
        engine.shardings.check_whole("load_full_state_dict")
        if savers.rank != 0:  # with plain slices the first rank of each slice reads
            return None
        if state is None:
            raise StateMismatchError("rank 0 was given None: it is the rank whose state is loaded")
        tensors.update(match_state(state, engine.parameters, engine.rules))
        for index, entry in tensors.items():
            _check_whole(engine, index, entry)
        groups = _on(torch.device("cpu"), [dict(group) for group in state["param_groups"]])
        return saved_state_of(tensors, engine.parameters, engine.rules), groups

    opt.settle()
    every = gathered(world, read, "load_full_state_dict")
    of_rank_0 = every[world.ranks.index(savers.ranks[0])]
    assert of_rank_0 is not None
    saved, read_groups = of_rank_0
    engine.begin_load(saved)
    engine.states.distribute(saved.tensors, tensors)  # collective, one bucket of one tensor at a time
    engine.end_load(saved)
    load_groups(opt.param_groups, _on(opt.device, read_groups), engine.rules.by_group)
    call_load_hooks(opt)


def _check_whole(engine: Engine, index: int, entry: Mapping[str, Any]) -> None:
    """Raise StateMismatchError unless ``entry`` has whole tensors of numbers that are not encoded."""
    parameter, label = engine.parameters.trained[index], engine.parameters.labels[index]
    brought = tensors_of(entry, engine.rules.of(index), parameter.dtype)
    bucket, _, slot = engine.reducer.layout.slot_of[index]
    check_rows([tensor for tensor, _ in brought], entry, bucket.flat.orders[slot], label)
    for tensor, codec in brought:
        if codec is not None:
            raise StateMismatchError(
                f"{tensor.name} of {label} is stored by the codec {codec.name!r}: load it with opt.load_state_dict, or "
                "save by full_state_dict"
            )
        shape = tensor.shape(parameter.shape, parameter.numel())
        saved = state_tensor(entry, tensor, shape, label)
        if isinstance(saved, FlatShard) or is_distributed(saved):
            raise StateMismatchError(
                f"{tensor.name} of {label} is one rank's shard: load it with opt.load_state_dict, or save by "
                "full_state_dict"
            )


# -- from one recipe to another in mid-training: AdamW's or SGD's state for ShardedMuon --------------------------------


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
