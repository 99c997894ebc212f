"""Stage 3 for the user: ``shard_module``, ``gather_parameters``, ``register_forward_method``."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from . import validate
from .comm.collectives import Comm, make_comm
from .comm.sharding import Sharding, make_expert_shardings, make_sharding, of_each_size
from .comm.together import check_same
from .comm.topology import (
    STATE_OVER,
    ExpertRanks,
    Topology,
    exchange_columns,
    group_of,
    read_experts_of_model,
    read_row,
    read_rows,
    read_topology,
)
from .errors import ParameterError, ShardAccessError
from .params.flat_params import FlatParams
from .params.param_shard import ParamShard, plain_parameter
from .params.parameter_set import check_free, plain_name
from .params.storage_order import described
from .params.tensor_slice import is_cut, local_of, marked, mesh_of
from .rules.options import check_choice
from .stores.disk_pages import DiskBacking
from .stores.host_memory import HostMemory, Lanes
from .stores.offload import Offload, Tier, param_buffers, read_param_offload
from .stores.paged_store import HostBacking
from .units.hooks import watch_part
from .units.schedule import UnitSchedule, in_backward
from .units.sharded_model import ShardedModel, flatten, sharded_model_of
from .units.unit import Registration, Unit, UnitState

Model = TypeVar("Model", bound=nn.Module)
Kind = type[nn.Module] | str
"""Of modules: a class, its name, or the name of a module."""


@torch.inference_mode(False)  # shards are trained, or loaded into, outside of it
def shard_module(
    model: Model,
    units: Sequence[Kind],
    *,
    process_group: dist.ProcessGroup | None = None,
    mesh: dist.DeviceMesh | None = None,
    state_over: str = "shard",
    tensor_parallel: dist.DeviceMesh | dist.ProcessGroup | None = None,
    experts: Mapping[Kind, dist.DeviceMesh | dist.ProcessGroup] | None = None,
    reshard_after_forward: bool | int = True,
    prefetch: int = 1,
    device: torch.device | str | None = None,
    init_fn: Callable[[nn.Module], object] | None = None,
    param_offload: str | None = None,
) -> Model:
    """Collective. Shard the parameters of ``model`` over the ranks, in place: stage 3. Returns the model.

    A unit's parameters are gathered before its forward and freed after, gathered again for its backward, and its
    gradients reduced when that is through. Give ``model.parameters()`` to ``ShardedAdamW`` afterwards, as ever; to run
    the model forward alone, no optimizer is needed. Rank 0's values count. On one rank nothing changes,
    unless ``param_offload`` moves the parameters.

    Args:
        units: which modules are units: classes, their names, or names of modules, as ``(Block, "lm_head")``. What no
            unit holds, and what several use, belongs to the root, ``model``: unsharded from the start of its forward to
            the end of backward.
        process_group: the ranks; None: the default group where ``torch.distributed`` is initialised, else one rank.
        mesh: a DeviceMesh, instead of ``process_group``. If it has two dimensions, ("replicate", "shard"), ranks along
            the second shard, and ranks along the first replicate. For a model that ``parallelize_module`` has cut,
            give the mesh of the data-parallel ranks alone, as ``mesh["dp"]``.
        state_over: "all": with a mesh of two dimensions the optimizer shards gradients and state over all of its ranks
            (HFSDP), and parameters are still sharded along the second. "shard": all of it along the second.
        tensor_parallel: for a model of plain slices, as Megatron's: the ranks that hold the other slices. See
            ``ShardedOptimizer``, which takes it from the model.
        experts: by kind of module, as in ``units``, the ranks that have the same experts: a mesh of one dimension, or a
            process group, as ``{"experts": mesh["edp"]}``. Each such module is a unit of these ranks, of which the
            first one's values count. It may have modules, or packed tensors [experts of this rank, ...]. A rank whose
            experts get no tokens need not call it. In the first forward it has to, unless modules are called in the
            order in which the model lists them. Give the optimizer these parameters in a group with ``grad_divisor``.
        reshard_after_forward: True: free a unit after its forward, but for the last one, with which backward begins; a
            step communicates 3 times the parameters. False: keep it until its backward; 2 times. An int k, a divisor of
            the number of ranks that shard: k consecutive ranks, as of a node, keep 1/k of it each, and gather it again
            among them. It has to divide the number of ranks with the same experts, too.
        prefetch: how many units are gathered ahead of the one that computes, beside experts that come next.
        device: where units compute. None: where the parameters are; for those on ``meta``, the current GPU or the CPU.
        init_fn: gives values to a module whose parameters or buffers were on ``meta``, and have memory now. It is
            called with each such module; None calls the module's ``reset_parameters()``. Units are initialised and
            sharded one after another, so no rank ever holds the whole model.
        param_offload: "cpu": shards rest in host memory, pinned for a GPU, and units are copied from there. They are
            updated there with ``ShardedAdamW(..., state_offload="cpu")``, else on the device. "nvme:DIR": in a file in
            DIR, on a fast local disk; host memory has buffers for ``prefetch + 1`` shards of units, 3 at least.
            ``state_dict()`` has copies then, and ``.local`` of a parameter raises ShardAccessError.

    Where something fails later than the checks below, as in ``init_fn``, create the model again.

    Raises, on every rank:
        ParameterError: a parameter that cannot be sharded; no such unit; a model that is sharded already.
        ValueError: an argument out of range.
        RankMismatchError: ranks disagree on model or arguments, or one of them failed.
        OffloadError: of this rank's folder or disk; RankMismatchError on the others. A disk that fails later makes the
            next ``step``, or the forward without gradients that is under way, raise OffloadError on every rank.
    """
    kinds = [*experts] if isinstance(experts, Mapping) else []
    row = read_row(tensor_parallel, mesh_of(_without_experts(model, kinds)))
    group, topology = read_topology(group_of(process_group, mesh), row, explicit_tp=tensor_parallel is not None)
    nearest = None  # where units compute, as far as that is known before anything is checked
    with suppress(RuntimeError, AssertionError):  # raised below, on all ranks, where there is no such ``device``
        nearest = _device(model.parameters(), device)
    comm = make_comm(group, nearest)
    plans: list[UnitPlan] = []
    with comm.raising_together("shard_module"):
        validate.check_group(process_group, mesh)
        check_choice("state_over", state_over, STATE_OVER)
        topology = replace(topology, rows=read_rows(mesh), over_all=state_over == "all")
        if experts is not None and not isinstance(experts, Mapping):
            raise TypeError(f'experts is a {type(experts).__name__}: give a dict, as {{"experts": mesh["edp"]}}')
        expert_ranks = read_experts_of_model(experts or {})
        shard_counts = [topology.shard_count(comm), *(len(of.ranks) for of in expert_ranks.values())]
        _check_arguments(reshard_after_forward, prefetch, shard_counts)
        offload = read_param_offload(param_offload)
        plans = plan_units(model, units, kinds)
        _check_plans(plans, topology, alone=comm.world_size == 1)
        if not expert_ranks:  # else once the ranks of all experts are known
            _check_slices(plans, topology, {})
        if comm.world_size == 1:
            validate.check_private([*model.parameters()], [repr(name) for name, _ in model.named_parameters()])
        target = _device((p for plan in plans for p in plan.parameters.values()), device)
        validate.check_backend(comm, target)
    options = {"reshard_after_forward": reshard_after_forward, "prefetch": prefetch, "device": target.type}
    options |= {"param_offload": offload.tier.value, "state_over": state_over, **topology.described()}
    options["experts"] = {str(kind): len(of.ranks) for kind, of in expert_ranks.items()}
    check_same(comm, _describe(plans, options), "shard_module", "shard_module the same model")
    if expert_ranks:
        expert_ranks = exchange_columns(expert_ranks, comm, "shard_module")
        with comm.raising_together("shard_module"):
            _check_slices(plans, topology, expert_ranks)
    process_group = comm.group
    comm.label = "a sharded model"
    comm.take_own_group("shard_module")  # gathers run while reductions are in flight in another group
    comm.connect(target)
    # Units are gathered from a row, also where the optimizer's shards, of its topology, are parts of those in a row.
    sharding = replace(make_sharding(comm, 3, target, replace(topology, over_all=False)), topology=topology)
    of_experts = make_expert_shardings(sharding, expert_ranks)
    nodes = _make_nodes([of.shard_group for of in (sharding, *of_experts.values())], reshard_after_forward, target)
    shardings = [sharding if plan.experts is None else of_experts[plan.experts] for plan in plans]
    keep = reshard_after_forward is not True and reshard_after_forward <= 1
    made = _make_units(plans, [nodes[of.shard_group] for of in shardings], keep=keep)
    lanes = None if offload.tier is Tier.DEVICE else Lanes(target)
    backing: HostBacking | DiskBacking | None = None
    try:
        for unit, plan, own in zip(made, plans, shardings, strict=True):
            with comm.raising_together("shard_module", target):
                backing = backing or _backing(offload, prefetch, comm.rank, target)
                _materialise(plan, target, init_fn)
            _fill(unit, plan, own, backing, lanes)
        _connect([flat for unit in made for flat in unit.flats], nodes, target)
    except BaseException:
        comm.close()
        if backing is not None:
            backing.close()
        raise
    schedule = UnitSchedule(made, sharding, prefetch, keep_evaluating=keep)
    ShardedModel(model, made, sharding, schedule, process_group, backing, lanes)
    return model


def _connect(flats: Sequence[FlatParams], nodes: Mapping[Comm, Comm | None], device: torch.device) -> None:
    """Collective. Make groups, and connect the ranks, for the gathers of these parameters. ``nodes``: by shard group,
    the ranks of a node."""
    for ranks, node in nodes.items():
        own = [flat for flat in flats if flat.sharding.shard_group is ranks]
        sizes = dict.fromkeys(flat.full.nbytes for flat in own)
        ranks.take_channels([*sizes][1:], device, "shard_module")  # the first size uses the group that is there
        for numel, dtype in of_each_size((flat.layout.numel, flat.dtype) for flat in own):
            for gathering in filter(None, (ranks, node)):
                gathering.connect_for("all_gather", numel, dtype, device)


def _backing(offload: Offload, prefetch: int, rank: int, device: torch.device) -> HostBacking | DiskBacking | None:
    if offload.tier is Tier.DEVICE:
        return None
    memory = HostMemory(pinned=device.type == "cuda", device=device)
    if offload.folder is None:
        return HostBacking(memory)
    return DiskBacking(offload.folder, rank, memory, argument="param_offload", buffers=param_buffers(prefetch))


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
    if in_backward() or model.schedule.calls.in_root:
        raise ShardAccessError("gather_parameters was entered in a forward or backward: enter it between steps")
    model.schedule.check_awake("gather_parameters")
    wanted = {id(plain_parameter(parameter)) for parameter in module.parameters()}
    units = [unit for unit in model.units if any(id(parameter) in wanted for parameter in unit.parameters)]
    # A root without parameters is marked GATHERED, too, so that its forward is free.
    called = set(module.modules())
    units += [unit for unit in model.units if not unit.parameters and unit.module in called]
    fresh = [unit for unit in units if unit.state is not UnitState.GATHERED]
    if writeback and len(fresh) < len(units):
        raise ShardAccessError("gather_parameters(writeback=True) was entered within another: write in that one")
    if fresh:
        model.schedule.reshard_all()
    try:
        for unit in fresh:
            unit.gather()
        with model.sharding.world.raising_together("gather_parameters") if writeback else nullcontext():
            yield
            for unit in fresh if writeback else ():
                unit.take_replaced()
        written = [label for unit in fresh for label in unit.written()]
        if written and not writeback:
            raise ShardAccessError(
                f"{', '.join(written)} was written within gather_parameters(model), which has dropped the new values: "
                "to keep them, give it writeback=True on every rank"
            )
        for unit in fresh if writeback else ():
            unit.write_back()
    finally:
        for unit in fresh:
            unit.drop()


def register_forward_method(module: nn.Module, name: str) -> None:
    """Let a method of a sharded model, or of a module in it, read the module's own parameters, as its ``forward`` does.

    A method that only calls modules, as ``generate`` does, works without. Registered, it has the module's unit gathered
    once for all its calls. Call it on every rank, as a forward, and use what it returns in the loss. A module that is
    not sharded is left as it is.

    Raises AttributeError where the module's class has no such method.
    """
    if not callable(getattr(type(module), name, None)):
        raise AttributeError(f"{type(module).__name__} has no method {name!r} to register")
    for model in sharded_model_of(module.parameters()):
        unit = next((unit for unit in model.units if module in unit.modules), None)
        if model.sharded and unit is not None:
            watch_part(module, name, unit, model.schedule)


# -- which parameters are gathered together, and how they come to be sharded ------------------------------------------


@dataclass
class UnitPlan:
    """The plan of a unit. ``parameters`` and ``registrations`` are by the parameter's id.

    ``experts``: the key of the ranks that have the same experts; None: it has none.
    """

    name: str
    module: nn.Module
    experts: Kind | None = None
    enclosing: set[int] = field(default_factory=set)
    modules: list[nn.Module] = field(default_factory=list)
    parameters: dict[int, nn.Parameter] = field(default_factory=dict)
    # The places that register a parameter: module, name there, full name.
    registrations: dict[int, list[tuple[nn.Module, str, str]]] = field(default_factory=dict)


def plan_units(model: nn.Module, kinds: Sequence[Kind], experts: Sequence[Kind] = ()) -> list[UnitPlan]:
    """Plan the units of ``model``, the root first. Raises ParameterError where there are none."""
    kinds = [kinds] if isinstance(kinds, type | str) else list(kinds)
    plans = [UnitPlan("", model)]
    number_of: dict[nn.Module, int] = {model: 0, _within(model): 0}
    users: dict[int, set[int]] = {}  # of each parameter, by id, the units that reach it
    registrations: dict[int, list[tuple[nn.Module, str, str]]] = {}
    parameters: dict[int, nn.Parameter] = {}
    seen: set[tuple[int, int]] = set()

    def walk(module: nn.Module, name: str, number: int) -> None:
        kind = _kind_of(module, (*experts, *kinds), plain_name(name))
        if module not in number_of and kind is not None:
            number_of[module] = number_of[_within(module)] = len(plans)
            plans.append(UnitPlan(plain_name(name), module, kind if kind in experts else plans[number].experts))
        inner = number_of.get(module, number)
        if inner != number:
            plans[inner].enclosing |= {number, *plans[number].enclosing}
        if (id(module), inner) in seen:
            return
        seen.add((id(module), inner))
        plans[inner].modules.append(module)
        for own, parameter in module._parameters.items():
            if parameter is not None:
                parameters[id(parameter)] = parameter
                users.setdefault(id(parameter), set()).add(inner)
                place = (module, own, plain_name(f"{name}.{own}" if name else own))
                known = registrations.setdefault(id(parameter), [])
                if all(there[:2] != place[:2] for there in known):
                    known.append(place)
        for own, child in module.named_children():
            walk(child, f"{name}.{own}" if name else own, inner)

    walk(model, "", 0)
    missing = [kind for kind in experts if all(plan.experts != kind for plan in plans)]
    if missing or (len(plans) == 1 and _kind_of(model, kinds) is None):
        names = sorted({type(_within(module)).__name__ for module in model.modules()})
        raise ParameterError(f"no module of the model is a unit of {missing or kinds}: it has {names}")
    for key, of in users.items():
        if len(of) > 1 and any(plans[number].experts is not None for number in of):
            raise ParameterError(
                f"{registrations[key][0][2]!r} is used by several modules, one of which has experts: all ranks would "
                "gather it, and other ranks have others. Give these modules a parameter each, or name as experts one "
                "module that has them all"
            )
        owner = plans[next(iter(of))] if len(of) == 1 else plans[0]
        owner.parameters[key], owner.registrations[key] = parameters[key], registrations[key]
    return _without_empty(plans)


def _without_empty(plans: Sequence[UnitPlan]) -> list[UnitPlan]:
    """Leave out units that hold no parameters themselves, such as a container of others."""
    kept = [number for number, plan in enumerate(plans) if plan.parameters or number == 0]
    new = {number: place for place, number in enumerate(kept)}
    for number, plan in enumerate(plans):
        if number not in new:
            plans[0].modules += plan.modules
        plan.enclosing = {new[outer] for outer in plan.enclosing if outer in new}
    return [plans[number] for number in kept]


def _within(module: nn.Module) -> nn.Module:
    """Take out of a compiled module what it runs."""
    return module._orig_mod if isinstance(module, torch._dynamo.OptimizedModule) else module


def _kind_of(module: nn.Module, kinds: Sequence[Kind], name: str | None = None) -> Kind | None:
    inner = _within(module)
    names = (type(inner).__name__, name)
    return next((kind for kind in kinds if (kind in names if isinstance(kind, str) else isinstance(inner, kind))), None)


def _without_experts(model: nn.Module, experts: Sequence[Kind]) -> list[nn.Parameter]:
    modules = [module for name, module in model.named_modules() if _kind_of(module, experts, plain_name(name))]
    within = {id(parameter) for module in modules for parameter in module.parameters()}
    return [parameter for parameter in model.parameters() if id(parameter) not in within]


def _make_nodes(groups: Iterable[Comm], ranks: bool | int, device: torch.device) -> dict[Comm, Comm | None]:
    """Collective. Make, by group, the comm of this rank's part of it, in parts of so many ``ranks``; None: it has none.
    ``ranks``: True and False are 1."""
    nodes: dict[Comm, Comm | None] = dict.fromkeys(groups)
    for group in [group for group in nodes if 1 < ranks < group.world_size]:
        starts = range(0, group.world_size, ranks)
        nodes[group] = node = group.part([group.ranks[start : start + ranks] for start in starts], "by nodes")
        node.connect(device)
    return nodes


def _make_units(plans: Sequence[UnitPlan], nodes: Sequence[Comm | None], *, keep: bool) -> list[Unit]:
    """Make the units, without their parameters. The root, the first, stays unsharded until its backward."""
    made = [Unit(of.name, of.module, of.modules, node, keep=keep) for of, node in zip(plans, nodes, strict=True)]
    made[0].node, made[0].keep = None, True
    for unit, plan in zip(made, plans, strict=True):
        unit.enclosing = {made[outer] for outer in plan.enclosing}
    return made


def _describe(plans: Sequence[UnitPlan], options: Mapping[str, object]) -> list[str]:
    description = [f"{name}={value}" for name, value in options.items()]
    for plan in plans:
        for key, parameter in plan.parameters.items():
            kind = f"{described(parameter)}{marked(parameter)}{'' if parameter.requires_grad else ', frozen'}"
            of = "" if plan.experts is None else " of experts"
            description.append(f"{plan.registrations[key][0][2]!r}: {kind} in unit {plan.name!r}{of}")
    return description


def _check_arguments(reshard_after_forward: bool | int, prefetch: int, shard_counts: Sequence[int]) -> None:
    """``shard_counts``: of the model, and of each kind of experts."""
    for ranks in shard_counts if type(reshard_after_forward) is not bool else ():
        whole = ranks == 1 < max(shard_counts)  # experts that one rank has: it keeps them
        if (
            type(reshard_after_forward) is not int
            or reshard_after_forward < 1
            or (ranks % reshard_after_forward and not whole)
        ):
            of = "" if ranks == shard_counts[0] else " that have the same experts"
            raise ValueError(
                f"reshard_after_forward must be True, False or a divisor of {ranks} ranks{of}, got "
                f"{reshard_after_forward!r}"
            )
    if type(prefetch) is not int or prefetch < 0:
        raise ValueError(f"prefetch must be a number of units, 0 or more, got {prefetch!r}")


def _check_plans(plans: Sequence[UnitPlan], topology: Topology, *, alone: bool) -> None:
    parameters = [parameter for plan in plans for parameter in plan.parameters.values()]
    labels = [repr(plan.registrations[key][0][2]) for plan in plans for key in plan.parameters]
    of_experts = {key for plan in plans if plan.experts is not None for key in plan.parameters}
    if not parameters:
        raise ParameterError("the model has no parameters")
    if any(isinstance(parameter, ParamShard) for parameter in parameters) or sharded_model_of(parameters):
        raise ParameterError(
            "the model, or a part of it, was given to shard_module before: shard each model once. "
            "Where that has failed, create the model again"
        )
    for parameter, label in zip(parameters, labels, strict=True):
        validate.check_kind(parameter, label, parameter, label, meta=True)
        if not alone and id(parameter) not in of_experts and getattr(parameter, "allreduce", True) is False:
            raise ParameterError(
                f"{label} has allreduce = False, which marks experts, and would be sharded over all ranks: give "
                "shard_module the module that has it, and the ranks that have the same experts, as "
                'experts={"experts": mesh["edp"]}'
            )
    real = [(p, label) for p, label in zip(parameters, labels, strict=True) if not p.is_meta]
    validate.check_memory([p for p, _ in real], [label for _, label in real])
    check_free(parameters, labels)
    dense = [(p, label) for p, label in zip(parameters, labels, strict=True) if id(p) not in of_experts]
    validate.check_marks([p for p, _ in dense], [label for _, label in dense], topology)
    validate.check_any_marked(parameters, labels, topology)


def _check_slices(plans: Sequence[UnitPlan], topology: Topology, experts: Mapping[Kind, ExpertRanks]) -> None:
    for plan in plans:
        parameters, labels = [*plan.parameters.values()], [repr(of[0][2]) for of in plan.registrations.values()]
        ranks = None if plan.experts is None else experts[plan.experts]
        by_place = {} if ranks is None else dict.fromkeys(range(len(parameters)), ranks)
        validate.check_slices(parameters, labels, topology, by_place)


def _device(parameters: Iterable[Tensor], device: torch.device | str | None) -> torch.device:
    default = "cuda" if torch.cuda.is_available() else "cpu"
    there = next((parameter.device for parameter in parameters if not parameter.is_meta), default)
    target = torch.device(there if device is None else device)
    return torch.device("cuda", torch.cuda.current_device()) if str(target) == "cuda" else target


@torch.no_grad()
def _materialise(plan: UnitPlan, device: torch.device, init_fn: Callable[[nn.Module], object] | None) -> None:
    """Bring the unit's parameters, and the buffers of its modules, to ``device``; give those on ``meta`` values."""
    empty: dict[nn.Module, None] = {}
    for key, parameter in plan.parameters.items():
        if parameter.is_meta:
            empty |= dict.fromkeys(module for module, _, _ in plan.registrations[key])
            made = nn.Parameter(torch.empty_like(parameter, device=device), parameter.requires_grad)
            vars(made).update(vars(parameter))  # Megatron's marks, with all other attributes
            plan.parameters[key] = made
            for module, name, _ in plan.registrations[key]:
                module._parameters[name] = made
        else:
            local = local_of(parameter)
            local.data = local.data.to(device)
    for module in plan.modules:
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.is_meta:
                empty[module] = None
                module._buffers[name] = torch.empty_like(buffer, device=device)
            elif buffer is not None:
                module._buffers[name] = buffer.to(device)
    for module in empty:
        initialise = init_fn or getattr(type(module), "reset_parameters", None)
        if initialise is None:
            raise ParameterError(
                f"{type(module).__name__} in unit {plan.name!r} is on the meta device and has no reset_parameters(): "
                "give shard_module an init_fn(module) that gives it values"
            )
        initialise(module)


def _fill(
    unit: Unit, plan: UnitPlan, sharding: Sharding, backing: HostBacking | DiskBacking | None, lanes: Lanes | None
) -> None:
    """Collective. Shard the unit's parameters, of rank 0's values, in a flat tensor for each kind."""
    shard_of: dict[int, ParamShard] = {}
    kinds: dict[tuple[torch.dtype, bool, bool], list[nn.Parameter]] = {}
    for key, parameter in plan.parameters.items():
        kinds.setdefault((parameter.dtype, is_cut(parameter), parameter.requires_grad), []).append(parameter)
        places = plan.registrations[key]
        empty = torch.empty(0, dtype=parameter.dtype, device=parameter.device)
        shard_of[id(parameter)] = shard = ParamShard(empty, 0, parameter, places[0][2])
        unit.registrations += [Registration(module, name, parameter, shard) for module, name, _ in places]
    splits = sharding.shard_count > 1 or backing is not None
    for (_, _, trained), parameters in kinds.items():
        unit.flats.append(flat := flatten(parameters, sharding, trained=trained))
        sharding.alike(cut=flat.cut).broadcast(flat.full)
        if splits:
            own = [shard_of[id(parameter)] for parameter in parameters]
            flat.split(own, backing=backing, lanes=lanes)
    if splits:
        unit.show(plain=False)
