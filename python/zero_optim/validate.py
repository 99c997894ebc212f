"""Checks of what one rank was given: at construction, and where parameters or options come later."""

from __future__ import annotations

import difflib
import functools
import itertools
import os
import warnings
from collections.abc import Container, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parameter import is_lazy

import zero_kernels

from .comm.collectives import Comm
from .comm.topology import ExpertRanks, RowRanks, Rows, Topology, own_row
from .comm.transport import backends, used
from .errors import GradientError, ParameterError
from .params.param_shard import plain_parameter
from .params.parameter_set import ParameterSet, check_free
from .params.storage_order import storage_order
from .params.tensor_slice import (
    AVERAGED,
    SLICE,
    TERM,
    is_cut,
    is_distributed,
    is_plain_slice,
    is_shared,
    is_slice,
    is_term,
    local_of,
    marked,
    mesh_of,
    placed,
    refuse_partition,
    slice_of,
)
from .rules import RULES
from .rules.group_rules import GroupRules
from .rules.options import is_number
from .rules.update_rule import UpdateRule
from .units.sharded_model import ShardedModel, sharded_model_of
from .units.unit import Unit

PARAMETER_DTYPES = (torch.float16, torch.bfloat16, torch.float32)


def read_clip_arguments(max_norm: object, norm_type: object) -> float:
    """Read the p of a p-norm, a number or, as torch takes it, "inf"; raises ValueError for any other. Raises TypeError
    unless ``max_norm`` is one number, ValueError where it is negative."""
    if not is_number(max_norm) or (isinstance(max_norm, Tensor) and max_norm.numel() != 1):
        shape = f" of shape {[*max_norm.shape]}" if isinstance(max_norm, Tensor) else ""
        got = repr(max_norm) if isinstance(max_norm, str) else f"a {type(max_norm).__name__}{shape}"
        raise TypeError(
            f"clip_grad_norm_: max_norm must be a number, got {got}. Call opt.clip_grad_norm_(1.0), for all, or "
            "opt.clip_grad_norm_(1.0, parameters=some)"
        )
    # A tensor's value may be on the device: to read it, the host would wait.
    if not isinstance(max_norm, Tensor) and not max_norm >= 0:  # type: ignore[operator]  # a number, by the check above
        raise ValueError(f"clip_grad_norm_: max_norm must be a number >= 0, got {max_norm}")
    try:
        read = float(norm_type)  # type: ignore[arg-type]  # it raises
    except (TypeError, ValueError):
        read = -1.0
    if not read > 0:
        raise ValueError(f'norm_type must be positive, or "inf", got {norm_type!r}')
    return read


def check_group(process_group: dist.ProcessGroup | None, mesh: dist.DeviceMesh | None) -> None:
    """Raise ValueError where both are given."""
    if mesh is not None and process_group is not None:
        raise ValueError("give either process_group or mesh, not both")


def check_backend(comm: Comm, device: torch.device) -> None:
    """Raise ValueError where the group has no back-end that serves the parameters' device."""
    if comm.world_size > 1 and not serves(comm, device):
        backend = backend_of(comm, device) or "no back-end"
        raise ValueError(
            f"the parameters are on {device}, for which the process group has {backend}: it takes NCCL for a GPU and "
            'gloo for the CPU, as init_process_group("cpu:gloo,cuda:nccl") gives'
        )
    if comm.world_size > 1 and backend_of(comm, device) == "nccl":
        _warn_of_blocking_wait()


@functools.cache  # once: stage 3 makes a model and an optimizer
def _warn_of_blocking_wait() -> None:
    if os.environ.get("TORCH_NCCL_BLOCKING_WAIT", "").lower() in ("1", "y", "yes", "t", "true"):
        warnings.warn(
            "TORCH_NCCL_BLOCKING_WAIT is set: the host waits for each collective, also in hooks of the backward, and "
            "nothing overlaps. Unset it; the group's timeout still ends a rank that waits in vain",
            stacklevel=3,
        )


def backend_of(comm: Comm, device: torch.device) -> str | None:
    """The name of the back-end that serves tensors on ``device``; None: there is none, or one rank alone."""
    return backends(comm.group).get(device.type) if comm.group is not None else None


def serves(comm: Comm, device: torch.device) -> bool:
    """True if the group has the back-end for tensors on ``device``: NCCL for those on a GPU, gloo for the CPU's."""
    backend = backend_of(comm, device)
    return used() is not None or (backend is not None and not (device.type == "cuda" and backend == "gloo"))


def check_rule(rule: object, where: str = "") -> None:
    """Raise TypeError unless ``rule`` is an update rule. ``where``: whose it is, for the message."""
    if not isinstance(rule, UpdateRule):
        raise TypeError(
            f"rule{where} must be an instance of zero_optim.rules.UpdateRule, such as rules.Lion(), got {rule!r}"
        )
    if type(rule) is not RULES.get(rule.name, type(rule)):
        raise TypeError(
            f"the rule{where} is a {type(rule).__module__}.{rule.name}, and checkpoints would take it for the "
            f"{rule.name} of zero_optim.rules: give its class another name"
        )


def check_rules_take(
    rules: GroupRules, parameters: ParameterSet, indices: Sequence[int], stage: int, state_offload: str | None = None
) -> None:
    """Raise ParameterError for the first of ``indices`` that its rule cannot update.

    ``state_offload``: where the state is, as it was given to the optimizer.
    """
    for rule in rules.all if stage >= 3 else ():
        if not rule.layout.cuts and not rule.joins_parts:
            raise ParameterError(
                f"{rule.name} needs whole parameters, and stage 3 cuts them at rows: take stage=2, without shard_module"
            )
    for index in indices:
        parameter = parameters.all[index]
        state_on = torch.device("cpu") if state_offload == "cpu" else parameter.device
        if (reason := _refuse(parameter, rules.of(index), parameters.group(index), state_on)) is not None:
            raise ParameterError(f"{parameters.labels[index]} {reason}")


def _refuse(parameter: Tensor, rule: UpdateRule, group: Mapping[str, Any], state_on: torch.device) -> str | None:
    """Return why ``rule`` cannot update this parameter of ``group``, and what to do. None: it can."""
    if (reason := rule.refuse_device(state_on)) is not None:
        return f"cannot be updated by {rule.name}: {reason}"
    if parameter.dtype == torch.float16 and any(codec.reads_parameter for codec in rule.codecs.values()):
        return (
            "is fp16, and a split master is a bf16 parameter and the rest: make the model bf16, or make the optimizer "
            'with master="fp32"'
        )
    if not rule.layout.cuts and is_cut(parameter):
        if not rule.joins_parts:
            return (
                f"is cut over the tensor-parallel ranks, and {rule.name} needs whole parameters: give it to a group "
                'with another rule, as {"params": others, "rule": rules.AdamW()}'
            )
        if rule.plain_slices > 1 and is_plain_slice(parameter) and (reason := refuse_partition(parameter)) is not None:
            return reason
    return rule.refuse_parameter(parameter, group)


def warn_of_meaningless(name: str, keywords: Mapping[str, bool | None]) -> None:
    """Warn of torch's keywords that change nothing here. ``name``: of the optimizer."""
    if given := [keyword for keyword, value in keywords.items() if value]:
        warnings.warn(f"{', '.join(given)}: has no effect, {name} is always fused and capturable", stacklevel=3)


def check_groups(rules: Sequence[UpdateRule], groups: Sequence[Mapping[str, Any]], first: int = 0) -> None:
    """Raise ValueError for an option out of range; tensors are not read. ``rules``: of each group. ``first``: the
    number of the first group."""
    for number, (rule, group) in enumerate(zip(rules, groups, strict=True), first):
        rule.check_group(number, group)


def check_described(rules: Sequence[UpdateRule], groups: Sequence[Mapping[str, Any]]) -> None:
    """Raise ValueError for the first parameter that is not what its group describes. ``rules``: of each group."""
    for rule, group in zip(rules, groups, strict=True):
        if not rule.describe(group):
            continue
        names = group.get("param_names") or [f"parameter {n} of a group" for n in range(len(group["params"]))]
        for name, parameter in zip(names, group["params"], strict=True):
            if (reason := rule.refuse_parameter(parameter, group)) is not None:
                raise ValueError(f"{name} {reason}")


# The least ratio of ``difflib`` that is warned of: "weigth_decay" has more, torch's "max_momentum" less.
NEARLY = 0.85


def warn_of_misspelt(rule: UpdateRule, number: int, group: Mapping[str, Any]) -> None:
    """Warn of a group's key that looks like an option of its rule. Groups may have other keys of the user's."""
    options = [option.name for option in rule.options]
    for key in group:
        near = [] if key in options else difflib.get_close_matches(str(key), options, n=1, cutoff=NEARLY)
        if near:
            message = f"parameter group {number} has {key!r}, which is not read: is {near[0]!r} meant?"
            warnings.warn(message, stacklevel=2)


def check_parameters(parameters: ParameterSet, indices: Sequence[int]) -> None:
    """Raise ParameterError for the first of ``indices`` that the optimizer cannot hold; BackendError where no kernel
    can run on them."""
    everything, labels = parameters.all, parameters.labels
    if not everything:
        raise ParameterError("no group has a parameter: give the optimizer at least one")
    first: dict[int, str] = {}
    for parameter, label in zip(everything, labels, strict=True):
        if first.setdefault(id(parameter), label) != label:
            raise ParameterError(
                f"{label} is {without_shape(first[id(parameter)])} given again: give each parameter once"
            )
    check_kinds(parameters, indices)
    if not sharded_model_of(everything):  # else they have no memory, or each its own
        check_memory(parameters.all, parameters.labels)
    check_free([everything[index] for index in indices], [labels[index] for index in indices], parameters)
    zero_kernels.check_backend(everything[0].device)


def check_sharded(
    parameters: ParameterSet,
    indices: Sequence[int],
    experts: Mapping[int, ExpertRanks],
    stage: int,
    comm: Comm,
    topology: Topology,
    row: RowRanks | None,
) -> None:
    """Raise unless the parameters are, at stage 3, those of one sharded model, and below stage 3, of none.

    ``experts``: the ranks of parameter groups, by number. ``topology``: the optimizer's. ``row``: its tensor-parallel
    ranks; None: it was given none.
    """
    models = sharded_model_of(parameters.all)
    if not models:
        if stage >= 3:
            raise ParameterError(
                "stage 3 shards parameters unit by unit: call zero_optim.shard_module(model, units=(Block,)) before "
                "making the optimizer"
            )
        return
    if stage != 3:
        raise ValueError(f"stage must be 3, or left out, for a model given to shard_module; got {stage}")
    held = models[0].shardings()
    other = next((i for i in indices if id(parameters.all[i]) not in held), None)
    if len(models) > 1 or other is not None:
        odd = "several sharded models" if len(models) > 1 else f"{parameters.labels[other or 0]}, which is in none"
        raise ParameterError(f"an optimizer's parameters must be those of one sharded model; they are of {odd}")
    ranks = models[0].sharding.world.ranks
    if ranks != comm.ranks:
        raise ValueError(f"the model was sharded over ranks {ranks}, the optimizer is of {comm.ranks}")
    for index in indices:
        number, ranks = parameters.group_of[index], held[id(parameters.all[index])].shard_group.ranks
        of_group = list(experts[number].ranks) if number in experts else models[0].sharding.shard_group.ranks
        if of_group != ranks:
            remedy = (
                'give shard_module the modules of experts, as experts={"experts": mesh["edp"]}, and the optimizer '
                "their parameters in a group of their own, with grad_divisor, and with the same mesh or none"
            )
            if number not in experts and len(ranks) == models[0].sharding.world_size:
                remedy = "all ranks have the same, so they are no experts: leave their modules out of experts="
            raise ValueError(
                f"{parameters.labels[index]} is sharded over ranks {ranks} by shard_module, and parameter group "
                f"{number}, which has it, is of ranks {of_group}: {remedy}"
            )
    of_model = models[0].sharding.topology
    if of_model.rows != topology.rows:
        raise ValueError(
            f"the model was sharded over a mesh of {_shape(of_model.rows)}, the optimizer is given one of "
            f"{_shape(topology.rows)}: give it the same mesh, or none"
        )
    if row is not None and row.ranks != of_model.slices:
        raise ValueError(
            f"{row.source}, and the model was sharded with slices on ranks {of_model.slices}: give the optimizer the "
            "same tensor_parallel as shard_module, or none"
        )
    own = {id(parameter) for parameter in parameters.all}
    for unit in models[0].units:
        for flat in unit.flats:
            left_out = [p for p in flat.params if id(p) not in own]
            if flat.trained and 0 < len(left_out) < len(flat.params):
                given = next(p for p in flat.params if id(p) in own)
                raise ParameterError(_parted(models[0], unit, own, given, left_out[0]))


def _shape(rows: Rows | None) -> str:
    return "one dimension" if rows is None else f"{len(rows)} x {len(rows[0])} ranks, {[list(row) for row in rows]}"


def _parted(model: ShardedModel, unit: Unit, own: Container[int], given: Tensor, left_out: Tensor) -> str:
    """Word the error where an optimizer has ``given`` of a unit, not ``left_out``. ``own``: ids of all that it has."""
    named = {id(place.plain): place.shard.label for place in unit.registrations}
    has = named[id(given)]
    text = (
        f"{named[id(left_out)]} is in {unit.label} with {has}, and the optimizer has {has} alone: give it all of the "
        "unit that the model trains, or call requires_grad_(False) on the others before shard_module"
    )
    for name, module in model.model.named_modules():  # the outermost first
        held = {id(p): p for p in map(plain_parameter, module.parameters())}
        within = set(module.modules())
        alone = all(place.module in within for place in unit.registrations if id(place.plain) in held)
        if id(given) in held and alone and all(key in own or not p.requires_grad for key, p in held.items()):
            kind = type(module).__name__
            return f"{text}; or, for several optimizers, make a unit of {name!r}: add {kind!r} to units="
    return text


def check_kinds(parameters: ParameterSet, indices: Sequence[int]) -> None:
    """Raise ParameterError for the first of ``indices`` whose kind of tensor the optimizer cannot hold."""
    for index in indices:
        check_kind(parameters.all[index], parameters.labels[index], parameters.all[0], parameters.labels[0])


def check_memory(parameters: Sequence[Tensor], labels: Sequence[str]) -> None:
    """Raise ParameterError for the first parameter that shares memory with another.

    Each gets a place of its own: parameters that were tied through their memory would silently come apart.
    """
    spans = []
    for local, label in zip(map(local_of, parameters), labels, strict=True):
        # A tensor with gaps counts by its first element alone, as others may lie in the gaps.
        numel = local.numel() if local.is_contiguous() or storage_order(local) else 1
        if local.numel():
            spans.append((local.data_ptr(), local.data_ptr() + numel * local.itemsize, label))
    for (_, end, label), (start, _, other) in itertools.pairwise(sorted(spans)):
        if start < end:
            raise ParameterError(
                f"{label} and {without_shape(other)} share memory, which would end: tie them by giving both modules "
                "the same Parameter"
            )


def check_private(parameters: Sequence[Tensor], labels: Sequence[str]) -> None:
    """Raise ParameterError for the first parameter on a CPU whose memory other processes have, too. For one rank alone:
    of several, each gets rank 0's values and averages gradients, wherever its parameters were before."""
    for parameter, label in zip(parameters, labels, strict=True):
        if parameter.device.type == "cpu" and parameter.untyped_storage().is_shared():
            raise ParameterError(
                f"{label} is in shared memory, as share_memory() leaves it. The optimizer would move it into memory of "
                "its own, and each process would train a private copy. Start the processes as ranks of "
                "torch.distributed, or train copy.deepcopy(model) in this process alone"
            )


def check_kind(parameter: Tensor, label: str, first: Tensor, label_of_first: str, *, meta: bool = False) -> None:
    """Raise ParameterError for a kind of tensor that cannot be held, GradientError for one whose gradients cannot be.
    ``meta``: it may be on the meta device."""
    if is_lazy(parameter):
        raise ParameterError(f"{label} has no shape yet: run a forward of the model before making the optimizer")
    if parameter.device.type == "meta" and not meta:
        raise ParameterError(f"{label} is on the meta device and has no values: materialise the model first")
    if parameter.is_inference():
        raise ParameterError(
            f"{label} was made under torch.inference_mode, so that it cannot be trained: make the model outside of it"
        )
    slice_of(parameter, label)
    if parameter.layout is not torch.strided:
        raise ParameterError(f"{label} is {parameter.layout}; only dense parameters can be sharded: .to_dense() it")
    if parameter.dtype not in PARAMETER_DTYPES:
        raise ParameterError(f"{label} is {parameter.dtype}; parameters must be float16, bfloat16 or float32: cast it")
    if (grad_dtype := parameter.grad_dtype) not in (None, parameter.dtype, torch.float32):
        raise GradientError(f"grad_dtype of {label} must be {parameter.dtype} or torch.float32, got {grad_dtype}")
    if parameter.device != first.device and not meta:
        raise ParameterError(
            f"{label} is on {parameter.device}, but {label_of_first} is on {first.device}; "
            "move the whole model to one device before making the optimizer"
        )


def check_marks(parameters: Sequence[Tensor], labels: Sequence[str], topology: Topology) -> None:
    """Raise ParameterError for the first with a mark that cannot be honoured. ``tensor_slice`` lists the marks."""
    plain, explicit_tp = topology.plain, topology.explicit_tp
    alone = not dist.is_initialized() or dist.get_world_size() == 1
    for parameter, label in zip(parameters, labels, strict=True):
        if not (listed := marked(parameter)):
            continue
        marks = f"{label} has{listed.removeprefix(',')}"
        if is_slice(parameter) and is_term(parameter):
            raise ParameterError(
                f"{marks}: the gradient of a slice is no term of a sum over tensor-parallel ranks, which have other "
                "slices. Set one of the two to False"
            )
        if getattr(parameter, AVERAGED, False) and (plain or not explicit_tp) and not alone:
            raise ParameterError(
                f"{marks}: the mean of a gradient over the tensor-parallel ranks is not made here. Divide it by their "
                "number in a hook of the parameter, and mark it with sequence_parallel = True, which adds up"
            )
        if is_distributed(parameter) and is_term(parameter):
            raise ParameterError(f"{marks}, and is a DTensor, whose gradient has that in its placement: unmark it")
        if plain or is_distributed(parameter) or not (is_slice(parameter) or is_term(parameter)):
            continue
        if topology.columns is not None:
            raise ParameterError(
                f"{marks}, and other parameters are DTensors: of those who have slices, all have to be of one kind"
            )
        if not explicit_tp and not alone:
            raise ParameterError(
                f"{marks}, and which ranks have the other slices is not known: give the optimizer, or shard_module, "
                "tensor_parallel=world_mesh['tp'], or a process group: of one rank, where nothing is cut"
            )


def check_any_marked(parameters: Sequence[Tensor], labels: Sequence[str], topology: Topology) -> None:
    """Raise ParameterError where tensor-parallel ranks are given for plain slices, and no parameter has a mark."""
    if topology.plain and not any(hasattr(p, SLICE) or hasattr(p, TERM) for p in parameters):  # of copies, too
        raise ParameterError(
            f"tensor_parallel is given, and none of the parameters has a mark, {labels[0]} for one: all would get the "
            "values of rank 0. Set tensor_model_parallel = True on slices, and to False on copies"
        )


def check_other_marks(
    parameters: ParameterSet,
    indices: Sequence[int],
    experts: Container[int],
    ranks: int,
    stages: int,
    rules: GroupRules,
) -> None:
    """Raise ParameterError for the first of ``indices`` with a mark that has no meaning where it is.

    ``experts``: numbers of the groups of experts. ``ranks``: how many train one of the ``stages`` together.
    """
    for index in indices:
        parameter, label, rule = parameters.all[index], parameters.labels[index], rules.of(index)
        in_experts = parameters.group_of[index] in experts
        if ranks > 1 and not in_experts and getattr(parameter, "allreduce", True) is False:
            raise ParameterError(
                f"{label} has allreduce = False, which marks experts: averaged over all ranks, it would be lost. Give "
                "it a parameter group that says which ranks have the same experts: "
                '{"params": experts, "process_group": those_ranks, "grad_divisor": data_parallel_size}'
            )
        if is_shared(parameter) and stages == 1:
            raise ParameterError(
                f"{label} has shared = True, which marks a second copy of what another stage counts, and there is no "
                "other stage: it would count in no norm. Give the optimizer pipeline=world_mesh['pp'], or unmark it"
            )
        if is_term(parameter) and in_experts:
            raise ParameterError(
                f"{label} has sequence_parallel = True, and is in a group of experts, of which tensor-parallel ranks "
                "are not known: set it to False, and sum its gradient in a hook of the parameter where it is a term"
            )
        if in_experts and is_plain_slice(parameter) and rule.plain_slices > 1 and not rule.layout.cuts:
            raise ParameterError(
                f"{label} has tensor_model_parallel = True, and is in a group of experts, of which tensor-parallel "
                f"ranks are not known, and {rule.name} needs whole parameters: set it to False where this rank has all "
                "of it, or give it to a group with another rule"
            )


def check_slices(
    parameters: Sequence[Tensor], labels: Sequence[str], topology: Topology, experts: Mapping[int, ExpertRanks]
) -> None:
    """Raise ParameterError for the first of ``parameters`` that is cut over other ranks than ``topology`` has.

    ``experts``: the ranks of those parameters that are experts, by their place in ``parameters``.
    """
    for place, (parameter, label) in enumerate(zip(parameters, labels, strict=True)):
        if not is_distributed(parameter):
            continue
        mesh, of_experts = mesh_of([parameter]), experts.get(place)
        wanted = topology.slices if of_experts is None else own_row(of_experts.columns)
        if mesh is None or (not wanted and mesh.size() == 1):
            continue
        ranks = mesh.mesh.flatten().tolist()
        if of_experts is not None and not (ranks == wanted and is_cut(parameter)):
            raise ParameterError(
                f"{label} is a DTensor over ranks {ranks}{placed(parameter)}, and by its parameter group the experts "
                f"are spread over ranks {wanted}: make it over these, cut, as Shard(0) over mesh['ep']"
            )
        if ranks != wanted:
            raise ParameterError(
                f"{label} is a DTensor over ranks {ranks}, and the first one that was given is over "
                f"{wanted or 'none'}: all have to be over the same tensor-parallel ranks"
            )


def without_shape(label: str) -> str:
    """Leave the shape out of the label of a parameter without a name."""
    return label.partition(" (shape ")[0]
