"""The whole optimizer state on one rank, in torch's own format: for jobs that move in or out."""

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
from .params.tensor_slice import is_distributed
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

    return [
        {key: of if key == "params" else tree_map_only(Tensor, copied, of) for key, of in group.items()}
        for group in groups
    ]


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
