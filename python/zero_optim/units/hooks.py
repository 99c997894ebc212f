"""Hooks by which modules and autograd drive the schedule: a unit's forward begins or ends; a gradient comes into it.

A *part* of a unit is a module within it, or a method other than ``forward``. Called while no forward of the unit runs,
it counts as one: the unit is gathered before, and gradients come back into it through what the part returns.
So a model runs whichever of its modules is called first: an embedding alone, modules that a method calls, or a model
that has lost the sharded wrapper, as when ``peft`` merges adapters.
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import fields, is_dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import _get_sequence_nr

from ..callers import DCP_STATE_DICT, locals_of_callers
from ..errors import ShardAccessError, ZeroOptimError
from ..params.param_shard import plain_parameter
from .schedule import UnitSchedule, in_backward
from .unit import StandIn, Unit, UnitState

_MODULES_OWN = frozenset(vars(nn.Module()))
_FEW = 64
_SYNCED = "synced_gpus"  # an argument of ``generate`` in transformers


def register_hooks(units: Sequence[Unit], schedule: UnitSchedule) -> None:
    units[0].module.register_state_dict_post_hook(_WholeStateDict(schedule, units[0]))  # before those of one module
    for unit in units:
        module = unit.module
        module.register_forward_pre_hook(BeforeForward(schedule, unit), prepend=True, with_kwargs=True)
        module.register_forward_hook(ForwardEnded(schedule, unit), always_call=True)
        module.register_forward_hook(AfterForward(schedule, unit), with_kwargs=True)
        for module in {place.module: None for place in unit.registrations}:
            module.register_state_dict_pre_hook(_BeforeStateDict(schedule, unit))
            module.register_state_dict_post_hook(_AfterStateDict(schedule, unit))
            module.register_load_state_dict_pre_hook(_BeforeLoad(schedule, unit))


class _Hook:
    """A hook of one unit. A copy of its module gets one that does nothing.

    ``part``: what is called is not the unit's module, but one within it.
    """

    def __init__(self, schedule: UnitSchedule, unit: Unit, *, part: bool = False) -> None:
        self.schedule, self.unit, self.part = schedule, unit, part

    def __reduce__(self) -> tuple[Any, ...]:
        return partial, (_ignore,)


class BeforeForward(_Hook):
    @torch.compiler.disable
    def __call__(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        torch_func = torch._C._functorch
        if self.unit.state is not UnitState.GATHERED and torch_func.maybe_current_level() is not None:
            # A gather can be a part of ``vmap`` without gradients, as parameters are not mapped.
            vmap = torch_func.TransformType.Vmap
            if torch.is_grad_enabled() or any(level.key() != vmap for level in torch_func.get_interpreter_stack()):
                raise ShardAccessError(
                    f"{self.unit.label} was called within a transform of torch.func, such as grad, jvp or vmap, while "
                    "it is sharded: gathers cannot be a part of one. Enter zero_optim.gather_parameters(model) around "
                    "the transform, on every rank"
                )
        made = list(_made_by_autograd(self.unit, args, kwargs))
        caller = None if in_backward() else self.schedule.calls.caller_of(self.unit)
        if caller is not None:
            for node in dict.fromkeys(tensor.grad_fn for tensor in made):
                if node is not None and node._sequence_nr() >= caller.began:
                    node.register_prehook(_BackIn(self.schedule, caller))  # from this unit into the one that calls it
        self.unit.given = {id(tensor): (weakref.ref(tensor), tensor._version) for tensor in made}
        self.unit.began = _get_sequence_nr()
        self.schedule.before_forward(self.unit, part=self.part)


class _BackIn(_Hook):
    """Visits a unit that has called another, as backward comes back into it."""

    def __call__(self, grads: Any) -> None:
        # A unit within it may have returned the same tensor: then both are here already.
        if self.unit not in self.schedule.cycle.open:
            self.schedule.before_backward(self.unit)


class AfterForward(_Hook):
    """Hooks the nodes of autograd by which a gradient can come into the unit: of what its forward returned, of those
    of its arguments that it changed in place, and of what it left in attributes of its modules."""

    @torch.compiler.disable
    def __call__(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        # A view of parameters must not outlive them. The root's parameters stay until its backward, where one follows.
        root = self.unit is self.schedule.units[0]
        if self.unit.state is UnitState.UNSHARDED and not (root and torch.is_grad_enabled()):
            own = {flat.full.untyped_storage()._cdata for flat in self.unit.split}
            for tensor in tensors_in(output):
                plain = type(tensor) in (Tensor, nn.Parameter) and tensor.layout is torch.strided
                if not plain or torch._C._functorch.is_functorch_wrapped_tensor(tensor):
                    continue
                if tensor.untyped_storage()._cdata in own:
                    raise ZeroOptimError(
                        f"the forward of {self.unit.label} returned a parameter, or a view of one, of shape "
                        f"{tuple(tensor.shape)}: its memory is about to be freed. Return a .clone(), or make no unit "
                        "of it"
                    )
        nodes = set()
        for tensor in _made_by_autograd(self.unit, output, args, kwargs):
            given, version = self.unit.given.get(id(tensor), (None, 0))
            # A tensor that is gone may have left its id to this one.
            as_given = given is not None and given() is tensor and version == tensor._version
            node = tensor.grad_fn
            if not as_given and node is not None and node._sequence_nr() >= self.unit.began:
                nodes.add(node)
        for node in nodes:
            node.register_prehook(lambda grads: self.schedule.before_backward(self.unit))
        self.schedule.after_forward(self.unit, requires_grad=bool(nodes), part=self.part)


class ForwardEnded(_Hook):
    @torch.compiler.disable
    def __call__(self, *_: Any) -> None:
        if not in_backward():
            self.schedule.forward_ended(self.unit, part=self.part)


class _BeforeStateDict(_Hook):
    """Lets state dicts hold shards, also of an unsharded unit: its memory is about to be freed."""

    def __call__(self, module: nn.Module, *_: Any) -> None:
        if self.unit.state is UnitState.UNSHARDED:
            self.unit.keep_edits()
            self.unit.show(module, plain=False)


class _AfterStateDict(_Hook):
    def __call__(self, module: nn.Module, *_: Any) -> None:
        if self.unit.state is UnitState.UNSHARDED:
            self.unit.show(module, plain=True)


class _WholeStateDict(_Hook):
    """Puts whole tensors into the state dict of ``get_model_state_dict`` with ``full_state_dict=True``: collective."""

    @torch.no_grad()
    def __call__(self, model: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
        info: Any = next(locals_of_callers("info", DCP_STATE_DICT), None)
        if not getattr(info, "full_state_dict", False):
            return
        self.schedule.owner.check_whole(
            "torch.distributed.checkpoint", {id(plain_parameter(p)) for p in model.parameters()}
        )
        self.schedule.reshard_all()
        names: dict[int, list[str]] = {}
        for name, parameter in model.named_parameters(remove_duplicate=False):
            names.setdefault(id(plain_parameter(parameter)), []).append(prefix + name)
        on_rank_0 = info.cpu_offload and dist.is_initialized()  # torch then drops those of the others
        wanted = not on_rank_0 or dist.get_rank() == 0
        for flat in (flat for unit in self.schedule.units for flat in unit.flats):
            for plain, whole in zip(flat.params, flat.wholes(flat.gathered()), strict=True):
                kept = [name for name in names.get(id(plain), ()) if name in state] if wanted else []
                if kept:
                    state |= dict.fromkeys(kept, whole.to("cpu" if info.cpu_offload else flat.device, copy=True))


class _BeforeLoad(_Hook):
    def __call__(self, module: nn.Module, state: Any, prefix: str, metadata: Any, *_: Any) -> None:
        if metadata.get("assign_to_params_buffers"):
            raise ZeroOptimError(
                "load_state_dict(assign=True) would replace parameters that are sharded: without assign it copies into "
                "each rank's shard; or load before zero_optim.shard_module"
            )
        self.schedule.reshard_all()  # unsharded or arriving parameters would be used as they were before the load


def _ignore(*_: Any) -> None:
    pass


# -- calls of parts --------------------------------------------------------------------------------------------


def watch_parts(units: Sequence[Unit], schedule: UnitSchedule) -> None:
    """Watch the modules that may be called first: those that register parameters, or have all units in them.

    Any other module calls one of these, or has no use for parameters.
    """
    for unit in units:
        holders = [place.module for place in unit.registrations]
        around = [module for module in unit.modules if unit is units[0] and _has_all(module, units)]
        for module in dict.fromkeys([*holders, *around]):
            if module is not unit.module:
                watch_part(module, "forward", unit, schedule)


def watch_part(module: nn.Module, name: str, unit: Unit, schedule: UnitSchedule) -> None:
    """Let a call of a method of ``module`` gather ``unit``, which it is in."""
    whole = _has_all(module, schedule.units)  # a call of it is a forward of the root
    inner = schedule.units[1:] if whole else []
    before = BeforeForward(schedule, unit, part=not whole)
    ended = ForwardEnded(schedule, unit, part=not whole)
    after = AfterForward(schedule, unit, part=not whole)

    def call_gathered(method: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        if (
            torch.compiler.is_compiling()
            or unit in schedule.calls.running
            or unit.state is UnitState.GATHERED
            # The modules of the root itself within it are parts of their own.
            or (inner and all(of.state is UnitState.GATHERED for of in inner))
            or (in_backward() and unit.state is UnitState.UNSHARDED)  # a checkpoint within it computes again
        ):
            return method(*args, **kwargs)
        try:
            before(module, args, kwargs)
            output = method(*args, **kwargs)
        finally:
            ended()
        after(module, args, kwargs, output)
        return output

    part = StandIn(module, name, call_gathered)
    unit.parts.append(part)
    part.watch()


def _has_all(module: nn.Module, units: Sequence[Unit]) -> bool:
    within = set(module.modules())
    return units[0].module in within or (len(units) > 1 and all(unit.module in within for unit in units[1:]))


def sync_generation(model: nn.Module, units: Sequence[Unit], ranks: Iterable[int]) -> None:
    """Give ``generate`` of transformers ``synced_gpus=True``, in every module of ``model`` that has it.

    Each token is a forward, in which all ranks gather. A rank whose sequences have ended must go on calling the model
    for as long as any rank has not, or the others deadlock. ``generate`` does that by itself for DeepSpeed's and FSDP's
    models only. It communicates over all ranks of the job, so the model has to be sharded over these ``ranks``.
    """
    several = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
    if not several or {*ranks} != {*range(dist.get_world_size())}:
        return
    for module in model.modules():
        method, own = getattr(type(module), "generate", None), vars(module).get("generate")
        copied = isinstance(own, partial) and own.func is method  # by ``StandIn.__reduce__``
        if (own is None or copied) and callable(method) and _SYNCED in inspect.signature(method).parameters:
            within = {*module.modules()}
            held = [unit for unit in units if any(place.module in within for place in unit.registrations)]
            StandIn(module, "generate", partial(_generate, held)).watch()


def _generate(units: Sequence[Unit], method: Callable[..., Any], /, *args: Any, **options: Any) -> Any:
    if all(unit.state is UnitState.GATHERED for unit in units):  # a rank may generate alone
        return method(*args, **options)
    given = inspect.signature(method).bind_partial(*args, **options)
    given.arguments[_SYNCED] = True  # also in place of False, which ``Seq2SeqTrainer`` gives to models it doesn't know
    return method(*given.args, **given.kwargs)


# -- tensors that a forward is given, and makes ----------------------------------------------------------------


def tensors_in(thing: Any, seen: set[int] | None = None) -> Iterator[Tensor]:
    """Yield every tensor in nested lists, tuples, dicts and other objects, such as dataclasses and distributions."""
    if isinstance(thing, Tensor):
        yield thing
        return
    seen = set() if seen is None else seen
    if isinstance(thing, dict):
        values: Iterable[object] = thing.values()
    elif isinstance(thing, list | tuple):
        values = thing
    elif is_dataclass(thing) and not isinstance(thing, type):
        values = [getattr(thing, field.name) for field in fields(thing)]
    elif hasattr(thing, "__dict__") and not isinstance(thing, type | nn.Module) and not callable(thing):
        values = vars(thing).values()
    else:
        return
    if id(thing) not in seen:
        seen.add(id(thing))
        for value in values:
            if isinstance(value, Tensor):
                yield value
            else:
                yield from tensors_in(value, seen)


def _made_by_autograd(unit: Unit, *things: Any) -> Iterator[Tensor]:
    """Yield the tensors in ``things`` and in attributes of the unit's modules that have a graph, and the bases of views
    among them: a view that is changed in place gets another node, and its base keeps the one it has."""
    in_attributes = [  # as a mixture of experts' balance loss; large ones are left out
        value
        for module in unit.modules
        for values in (vars(module), module._buffers)
        for name, value in values.items()
        if name not in _MODULES_OWN
        and (isinstance(value, Tensor) or (isinstance(value, list | tuple | dict) and len(value) <= _FEW))
    ]
    for tensor in tensors_in((*things, in_attributes)):
        for made in (tensor, tensor._base):
            if made is not None and made.grad_fn is not None:
                yield made
