"""A model given to ``shard_module``: its units, the hooks that gather and free them, and who else may ask for them."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import fields, is_dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import _get_sequence_nr
from torch.utils.weak import WeakTensorKeyDictionary

from .comm import Comm
from .errors import ZeroOptimError
from .flat_params import FlatParams
from .layout import build_layout
from .param_shard import plain_parameter
from .unit import Unit, UnitState
from .unit_schedule import UnitSchedule, in_backward

_MODULES_OWN = frozenset(vars(nn.Module()))
_FEW = 64
# Of every plain parameter of a sharded model. The model holds its ShardedModel.
_model_of: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


class ShardedModel:
    """The units of ``model``, the root first. On one rank there is nothing to shard, and no hook.

    Attributes:
        comm: of the gathers. Its group is its own: while backward runs, reductions are under way in another.
        offload: whether shards rest in host memory; such a model is not trained.
    """

    def __init__(
        self,
        model: nn.Module,
        units: Sequence[Unit],
        comm: Comm,
        schedule: UnitSchedule,
        process_group: dist.ProcessGroup | None,
        *,
        offload: bool,
    ) -> None:
        self._process_group = weakref.ref(process_group) if process_group is not None else None
        self.model, self.units, self.comm, self.schedule, self.offload = model, list(units), comm, schedule, offload
        self.sharded = comm.world_size > 1 or offload
        for unit in units:
            for parameter in unit.parameters:
                _model_of[parameter] = weakref.ref(self)
        model._zero_optim_sharded = self  # type: ignore[assignment]  # any attribute
        if self.sharded:
            self._hook()

    def __reduce__(self) -> tuple[Any, ...]:
        """A copy of the model is an ordinary model."""
        return type(None), ()

    def __del__(self) -> None:
        self.comm.close()

    # -- hooks ---------------------------------------------------------------------------------------------------

    def _hook(self) -> None:
        for unit in self.units:
            module = unit.module
            module.register_forward_pre_hook(_BeforeForward(self, unit), prepend=True, with_kwargs=True)
            module.register_forward_hook(_ForwardEnded(self, unit), always_call=True)
            module.register_forward_hook(_AfterForward(self, unit), with_kwargs=True)
            for module in {place.module: None for place in unit.places}:
                module.register_state_dict_pre_hook(_BeforeStateDict(self, unit))
                module.register_state_dict_post_hook(_AfterStateDict(self, unit))
                module.register_load_state_dict_pre_hook(_BeforeLoad(self, unit))

    # -- what the optimizer asks for -----------------------------------------------------------------------------

    def process_group(self) -> dist.ProcessGroup | None:
        """What ``shard_module`` was given, or the default group; None for one rank without any."""
        return self._process_group() if self._process_group is not None else None

    def trained_flats(self) -> list[FlatParams]:
        return [flat for unit in self.units for flat in unit.flats if flat.trained]

    def flats_to_train(self, parameters: Iterable[Tensor]) -> list[FlatParams]:
        """Those of these plain parameters, in the order in which backward is through with them.

        Collective where some were frozen when the model was sharded, or the last time: these leave the others.
        """
        wanted = {id(parameter) for parameter in parameters}
        for unit in self.units:
            for flat in list(unit.flats):
                thawed = [p for p in flat.params if id(p) in wanted and not flat.trained]
                if thawed:
                    self._part(unit, flat, thawed)
        return [
            flat
            for unit in self.schedule.over_order
            for flat in unit.flats
            if any(id(parameter) in wanted for parameter in flat.params)
        ]

    def _part(self, unit: Unit, flat: FlatParams, thawed: Sequence[Tensor]) -> None:
        """Collective. Give the thawed parameters of a frozen ``flat`` a flat tensor of their own."""
        self.schedule.settle()
        shards = dict(zip(map(id, flat.params), flat.shards, strict=False))
        whole = flat.copy_out(self.comm) if flat.sharded else flat.full  # to live until all have moved
        unit.flats.remove(flat)
        chosen = {id(parameter) for parameter in thawed}
        for trained in (False, True):
            params = [p for p in flat.params if (id(p) in chosen) is trained]
            if params:
                new = flatten(params, self.comm, trained=trained)
                if flat.sharded:
                    new.split(self.comm, [shards[id(p)] for p in params], offload=self.offload)
                unit.flats.append(new)
        del whole


def flatten(params: Sequence[Tensor], comm: Comm, *, trained: bool) -> FlatParams:
    """One flat tensor for parameters of one dtype."""
    numels = {index: parameter.numel() for index, parameter in enumerate(params)}
    kinds = dict.fromkeys(numels, 0)
    (layout,) = build_layout(numels, kinds, list(numels), {0: 2**63}, comm.world_size)
    return FlatParams(layout, params, comm.rank, trained=trained)


def sharded_model_of(parameters: Iterable[Tensor]) -> list[ShardedModel]:
    """The sharded models that hold some of these parameters, plain or as modules have them."""
    references = [_model_of.get(plain_parameter(parameter)) for parameter in parameters]
    return list(dict.fromkeys(model for of in references if of is not None and (model := of()) is not None))


class _Hook:
    """A hook of one unit. A copy of its module gets one that does nothing."""

    def __init__(self, sharded: ShardedModel, unit: Unit) -> None:
        self.sharded, self.unit = sharded, unit

    def __reduce__(self) -> tuple[Any, ...]:
        return _no_hook, ()


class _BeforeForward(_Hook):
    @torch.compiler.disable
    def __call__(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        given = (args, kwargs, _in_attributes(self.unit.modules))
        made = _made_by_autograd(given)
        self.unit.given = {id(tensor): (weakref.ref(tensor), tensor._version) for tensor in made}
        self.unit.began = _get_sequence_nr()
        self.sharded.schedule.before_forward(self.unit)


class _AfterForward(_Hook):
    """Hooks the nodes of autograd by which a gradient can come into the unit: of what its forward returned, of those
    of its arguments that it changed in place, and of what it left in attributes of its modules."""

    @torch.compiler.disable
    def __call__(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        root = self.unit is self.sharded.units[0]
        if self.unit.state is UnitState.UNSHARDED and not (root and torch.is_grad_enabled()):
            self._check_returned(output)
        nodes = {
            node
            for tensor in _made_by_autograd((output, args, kwargs, _in_attributes(self.unit.modules)))
            if not self._is_as_given(tensor)
            and (node := tensor.grad_fn) is not None
            and node._sequence_nr() >= self.unit.began
        }
        for node in nodes:
            node.register_prehook(self._before_backward)
        self.sharded.schedule.after_forward(self.unit, requires_grad=bool(nodes))

    def _is_as_given(self, tensor: Tensor) -> bool:
        given, version = self.unit.given.get(id(tensor), (None, 0))  # one that is gone may have left its id to another
        return given is not None and given() is tensor and version == tensor._version

    def _before_backward(self, grads: Any) -> None:
        self.sharded.schedule.before_backward(self.unit)

    def _check_returned(self, output: Any) -> None:
        own = {flat.full.untyped_storage()._cdata for flat in self.unit.flats}
        for tensor in tensors_in(output):
            plain = type(tensor) in (Tensor, nn.Parameter) and tensor.layout is torch.strided
            if not plain or torch._C._functorch.is_functorch_wrapped_tensor(tensor):
                continue
            if tensor.untyped_storage()._cdata in own:
                raise ZeroOptimError(
                    f"the forward of {self.unit.label} returned a parameter, or a view of one, of shape "
                    f"{tuple(tensor.shape)}: its memory is about to be freed. Return a .clone(), or make no unit of it"
                )


class _ForwardEnded(_Hook):
    @torch.compiler.disable
    def __call__(self, *_: Any) -> None:
        if not in_backward():
            self.sharded.schedule.forward_ended(self.unit)


class _BeforeStateDict(_Hook):
    """State dicts hold shards whatever is unsharded: its memory is about to be freed."""

    def __call__(self, module: nn.Module, *_: Any) -> None:
        if self.unit.state is UnitState.UNSHARDED:
            self.unit.keep_edits()
            self.unit.show_shards(module)


class _AfterStateDict(_Hook):
    def __call__(self, module: nn.Module, *_: Any) -> None:
        if self.unit.state is UnitState.UNSHARDED:
            self.unit.show_plain(module)


class _BeforeLoad(_Hook):
    def __call__(self, module: nn.Module, state: Any, prefix: str, metadata: Any, *_: Any) -> None:
        if metadata.get("assign_to_params_buffers"):
            raise ZeroOptimError(
                "load_state_dict(assign=True) would replace parameters that are sharded: without assign it copies into "
                "each rank's shard; or load before zero_optim.shard_module"
            )
        self.unit.reshard()  # what is unsharded now would be used again as it is


def _no_hook() -> Any:
    return _ignore


def _ignore(*_: Any) -> None:
    pass


def tensors_in(thing: Any, seen: set[int] | None = None) -> Iterator[Tensor]:
    """Every tensor in nested lists, tuples, dicts and other objects, such as dataclasses and distributions."""
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
            yield from tensors_in(value, seen)


def _in_attributes(modules: Iterable[nn.Module]) -> list[object]:
    """What may hold tensors, such as the balance loss of a mixture of experts. Large collections are something else."""
    return [
        value
        for module in modules
        for values in (vars(module), module._buffers)
        for name, value in values.items()
        if name not in _MODULES_OWN
        and (isinstance(value, Tensor) or (isinstance(value, list | tuple | dict) and len(value) <= _FEW))
    ]


def _made_by_autograd(thing: Any) -> Iterator[Tensor]:
    """The tensors in ``thing`` that have a graph, and the bases of views among them: when a view is changed in place
    it gets another node, and that of its base stays."""
    for tensor in tensors_in(thing):
        for made in (tensor, tensor._base):
            if made is not None and made.grad_fn is not None:
                yield made
