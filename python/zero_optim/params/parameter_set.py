"""The parameters of an optimizer, by index over all its groups: names, which are trained, and who shards each."""

from __future__ import annotations

import gc
import warnings
import weakref
from collections import Counter
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from types import GeneratorType
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils.weak import WeakTensorKeyDictionary

from ..comm.sharding import Sharding
from ..errors import ParameterError
from .param_shard import plain_parameter
from .tensor_slice import is_cut, is_distributed

# The set that a parameter is in, for every live optimizer of the process.
_set_of: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


class ParameterSet:
    """The parameters of ``groups``, which is the optimizer's live list.

    Attributes:
        all: every parameter, by index.
        names: of each parameter; None where none was given, or another has the same.
        labels: of each parameter, in messages: its name where it has one, else place and shape.
        group_of: the number of each parameter's group.
        trained: the parameters that have a place in a bucket, by index.
        frozen: the others, by index.
    """

    def __init__(self, groups: list[dict[str, Any]], model: nn.Module | None = None) -> None:
        self.groups = groups
        self.all: list[Tensor] = []
        self.names: list[str | None] = []
        self.labels: list[str] = []
        self.group_of: list[int] = []
        self.trained: dict[int, Tensor] = {}
        self.frozen: dict[int, Tensor] = {}
        self._sizes: list[int] = []  # of the groups
        self._model = None if model is None else weakref.ref(model)
        self._of_model: set[int] = set()  # indices of those that the model had when it, or they, became known
        self._used = b""  # of the last step, as ``warn_of_replaced`` was given it
        self._found_unused: set[int] = set()

    def name(self, index: int) -> str:
        """The name, or the label of a parameter without one."""
        return self.names[index] or self.labels[index]

    def group(self, index: int) -> dict[str, Any]:
        """The parameter group that it is in."""
        return self.groups[self.group_of[index]]

    def read_groups(self) -> list[int]:
        """Take in parameters that the groups have gained. Returns their indices; none of them is trained yet."""
        before = len(self.all)
        self.all[:] = [plain_parameter(parameter) for group in self.groups for parameter in group["params"]]
        self._sizes = [len(group["params"]) for group in self.groups]
        self.group_of[:] = [number for number, group in enumerate(self.groups) for _ in group["params"]]
        self.relabel()
        self.frozen = {index: p for index, p in enumerate(self.all) if index not in self.trained}
        new = list(range(before, len(self.all)))
        if self._model is not None and (model := self._model()) is not None:
            names = _names(model)
            self._of_model.update(index for index in new if id(self.all[index]) in names)
        return new

    def relabel(self) -> None:
        self.names[:] = own_names(self.groups)
        unnamed = []  # of each, a description that differs from all others
        for number, group in enumerate(self.groups):
            named = [f" {name!r}" for name in group.get("param_names") or ()] or [""] * len(group["params"])
            for place, (name, parameter) in enumerate(zip(named, group["params"], strict=True)):
                shape = "unknown" if is_lazy(parameter) else tuple(parameter.shape)
                unnamed.append(f"parameter {place}{name} of group {number} (shape {shape})")
        self.labels[:] = [text if name is None else repr(name) for name, text in zip(self.names, unnamed, strict=True)]

    def thawed(self) -> list[int]:
        """Parameters that are to be trained from now on: they require a gradient, or have one."""
        return [index for index, p in self.frozen.items() if p.requires_grad or p.grad is not None]

    def indices_of(self, parameters: Tensor | Iterable[Tensor]) -> list[int]:
        """Find the indices, sorted. Raises ParameterError for a parameter that is not in the set."""
        parameters = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        index_of = {id(parameter): index for index, parameter in enumerate(self.all)}
        if odd := [type(entry).__name__ for entry in parameters if not isinstance(entry, Tensor)]:
            raise TypeError(f"parameters holds a {odd[0]}: give tensors, as model.parameters() does")
        parameters = [plain_parameter(parameter) for parameter in parameters]
        for parameter in parameters:
            if id(parameter) not in index_of:
                raise ParameterError(
                    f"a parameter of shape {tuple(parameter.shape)} is not in this optimizer: clip it with its own"
                )
        return sorted({index_of[id(parameter)] for parameter in parameters})

    def take_names(self, model: nn.Module) -> None:
        """Name parameters as ``model.named_parameters()`` does. Raises ParameterError where the model lacks one."""
        names = _names(model)
        for group in self.groups:
            missing = [tuple(p.shape) for p in group["params"] if id(plain_parameter(p)) not in names]
            if missing:
                first = ", ".join(map(str, missing[:3])) + (", ..." if missing[3:] else "")
                raise ParameterError(
                    f"the model lacks {len(missing)} parameters that this optimizer holds, of shapes {first}"
                )
            group["param_names"] = [names[id(plain_parameter(p))] for p in group["params"]]
        self._model = weakref.ref(model)
        self._of_model.update(index for index, parameter in enumerate(self.all) if id(parameter) in names)
        self.relabel()

    def with_names(self, group: dict[str, Any]) -> dict[str, Any]:
        """Name the parameters of a new group by the model of ``take_names``, as torch wants it beside named groups.

        Raises ParameterError where that model does not have a parameter.
        """
        if not any("param_names" in other for other in self.groups):
            return group
        params = [group["params"]] if isinstance(group["params"], Tensor) else list(group["params"])
        if not all(isinstance(entry, Tensor) for entry in params):  # named ones, or what torch refuses
            return {**group, "params": params}
        model = self._model() if self._model is not None else None
        names = _names(model) if model is not None else {}
        unknown = [tuple(parameter.shape) for parameter in params if id(plain_parameter(parameter)) not in names]
        if unknown:
            raise ParameterError(
                f"the other groups have names, these parameters of shapes {unknown} have none: give (name, parameter) "
                "pairs, or add them to the model before"
            )
        return {**group, "params": [(names[id(plain_parameter(p))], p) for p in params]}

    def warn_of_replaced(self, used: bytearray) -> None:
        """Warn of parameters without a gradient that the model does not have any more, where the model is known.

        Each parameter is looked for once, in the first step without its gradient. ``used``: a byte for each parameter,
        1 where this rank has a gradient for it.
        """
        # By default it is what it was in the step before: then the model is not walked.
        model = None if used == self._used or self._model is None else self._model()
        self._used = bytes(used)
        if model is None:
            return
        found = {index for index in self.trained if not used[index]} & self._of_model - self._found_unused
        self._found_unused |= found
        here = _names(model) if found else {}
        lost = [self.labels[index] for index in sorted(found) if id(self.all[index]) not in here]
        if lost:
            warnings.warn(
                f"{', '.join(lost[:5])}{f' and {len(lost) - 5} more' if lost[5:] else ''}: replaced in the model after "
                "the optimizer was made, as by resizing an embedding or by load_state_dict(assign=True). The new "
                "parameter is not trained: make a new optimizer, or write into the old parameter instead",
                stacklevel=2,
            )

    def check_groups_unedited(self, groups: Sequence[Mapping[str, Any]]) -> None:
        """Raise ParameterError where parameters were put into ``groups``, or taken out, by hand, or other groups were
        assigned to ``opt.param_groups``."""
        sizes = [len(group["params"]) for group in groups]
        edited = "" if sizes == self._sizes else f"their sizes are {sizes}, and were {self._sizes}"
        if not edited and groups is not self.groups:
            given = (plain_parameter(parameter) for group in groups for parameter in group["params"])
            if any(one is not own for one, own in zip(given, self.all, strict=True)):
                edited = "a list with other parameters, or another order, was assigned"
        if edited:
            raise ParameterError(
                f"param_groups were edited: {edited}. Add parameters with add_param_group; to move or remove some, "
                "make a new optimizer"
            )

    # -- one live optimizer a parameter --------------------------------------------------------------------------

    def claim(self, indices: Iterable[int], trained: Iterable[int]) -> None:
        """Claim these parameters, and train the ``trained`` ones from now on."""
        own = weakref.ref(self)  # a dropped optimizer must not keep its parameters claimed
        for index in indices:
            _set_of[self.all[index]] = own
        for index in trained:
            self.trained[index] = self.frozen.pop(index)

    def release(self) -> None:
        for parameter in self.all:
            if _set_of.get(parameter, lambda: None)() is self:
                del _set_of[parameter]


class Shardings:
    """The sharding of each parameter, by its group.

    Attributes:
        main: the sharding of all parameters that are no experts.
        of_groups: the shardings of groups of experts, by the group's number.
    """

    def __init__(self, parameters: ParameterSet, main: Sharding, of_groups: Mapping[int, Sharding]) -> None:
        # The user may have set the dtype of one ``.grad``. In a bucket all have the same.
        if any(p.grad_dtype == torch.float32 != p.dtype for p in parameters.all):
            main, *others = (replace(of, grad_accumulation_dtype=torch.float32) for of in (main, *of_groups.values()))
            of_groups = dict(zip(of_groups, others, strict=True))
        self._parameters, self.main, self.of_groups = parameters, main, dict(of_groups)

    def of(self, index: int) -> Sharding:
        """Find the sharding of a parameter."""
        return self.of_groups.get(self._parameters.group_of[index], self.main)

    def is_apart(self, index: int) -> bool:
        return is_apart(self._parameters.all[index], self.of(index))

    def places_of_use(self, index: int) -> tuple[int, int]:
        """Count the parameters with this index on all ranks together, and number this rank's among them."""
        sharding = self.of(index)
        return (sharding.slice_count, sharding.slice_index) if self.is_apart(index) else (1, 0)

    def slice_of(self, index: int) -> tuple[int, int]:
        """Number this rank's slice of a parameter, or of experts, and count the slices; (0, 1) for a parameter that all
        ranks have alike."""
        sharding = self.of(index)
        cut = is_cut(self._parameters.all[index]) or sharding.of_experts
        return (sharding.slice_index, sharding.slice_count) if cut else (0, 1)

    def check_joined(self, where: str) -> None:
        """Raise ParameterError for the first plain slice: ``where`` takes what ranks have under one name for parts of
        one tensor, and would keep one slice."""
        for index, parameter in enumerate(self._parameters.all) if self.main.of_plain_slices else ():
            if is_cut(parameter):
                raise ParameterError(
                    f"{self._parameters.labels[index]} is a plain slice, of which other tensor-parallel ranks have "
                    f"others under the same name: {where} would keep one of them. Save by zero_optim.checkpoint.save; "
                    "or opt.state_dict() and model.state_dict() of each tensor-parallel rank, to a folder of its own"
                )

    def check_whole(self, where: str, ids: Container[int] | None = None) -> None:
        """Raise ParameterError for the first parameter that ``where`` would keep of one rank, and lose of the others.

        ``ids``: of the parameters that matter; None: all.
        """
        for index, parameter in enumerate(self._parameters.all) if self.of_groups else ():
            if (ids is None or id(parameter) in ids) and self.is_apart(index):
                raise would_lose(self._parameters.labels[index], where)


def is_apart(parameter: Tensor, sharding: Sharding) -> bool:
    """Whether other ranks have other experts under the same name, and no whole of them is known. A ``DTensor`` of
    experts is one parameter, of which each rank has a slice: it is not apart."""
    return sharding.of_experts and sharding.slice_count > 1 and not is_distributed(parameter)


def would_lose(label: str, where: str, *, sharded: bool = False) -> ParameterError:
    """``sharded``: at stage 3, where a rank's own state dict cannot be written to a file."""
    apart = "" if sharded else "; or save opt.state_dict() and model.state_dict() of each rank to a file of its own"
    return ParameterError(
        f"{label} is an expert, of which other ranks have others under the same name: {where} would keep those of one "
        "rank and lose the rest. Keep all experts in one parameter of shape [experts, ...], a DTensor over the "
        "expert-parallel ranks, as nn.Parameter(DTensor.from_local(those_of_this_rank, mesh['ep'], [Shard(0)]))"
        f"{apart}"
    )


def check_free(parameters: Sequence[Tensor], labels: Sequence[str], own: ParameterSet | None = None) -> None:
    """Raise ParameterError for a parameter that another live optimizer than that of ``own`` has."""

    def is_claimed(parameter: Tensor) -> bool:
        return _set_of.get(parameter, lambda: None)() not in (None, own)

    if not any(map(is_claimed, parameters)):
        return
    gc.collect()  # an optimizer that was dropped may still be alive in a reference cycle
    for parameter, label in zip(parameters, labels, strict=True):
        if is_claimed(parameter):
            raise ParameterError(
                f"{label} is in another optimizer of zero_optim already: both would reduce its gradient. close() that "
                "one first, or give each its own parameters"
                if own
                else f"{label} is in an optimizer of zero_optim already: call shard_module before making the optimizer"
            )


@contextmanager
def gc_paused() -> Iterator[None]:
    """Pause Python's garbage collector while many objects are made that all stay.

    Each of its passes would walk the objects made so far: 40 us a parameter where 50,000 are made (EPYC).
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def listed(params: Any) -> Any:
    """Make a list of every iterable in an optimizer's ``params``, as each is read more than once, or of a model's named
    parameters.

    It may be an iterator, a view of a dict or an ``nn.ParameterList``. What torch refuses is left to torch.
    """
    if is_model(params):
        return list(params.named_parameters())
    if isinstance(params, Tensor | dict) or not isinstance(params, Iterable):
        return params
    groups = list(params)
    for place, group in enumerate(groups):
        given = group.get("params") if isinstance(group, dict) else None
        if isinstance(given, Iterable) and not isinstance(given, Tensor | set):
            groups[place] = {**group, "params": list(given)}
    return groups


def tensors_of(params: Any) -> list[Tensor]:
    """List the tensors among ``params`` as ``listed`` gave them; what is none is left out, for torch to refuse."""
    given = params if isinstance(params, list) else []
    groups = [entry.get("params") if isinstance(entry, dict) else [entry] for entry in given]
    entries = [entry for group in groups for entry in (group if isinstance(group, list) else [group])]
    tensors = [entry[-1] if isinstance(entry, tuple) and entry else entry for entry in entries]
    return [tensor for tensor in tensors if isinstance(tensor, Tensor)]


def check_listed(params: Any, first: int = 0) -> None:
    """Raise ParameterError for an entry of ``params`` of which torch raises KeyError or IndexError.

    ``first``: the number of the first group.
    """
    for number, entry in enumerate(params if isinstance(params, list) else (), first):
        if isinstance(entry, dict) and "params" not in entry:
            raise ParameterError(f"parameter group {number} has no 'params', but {sorted(map(str, entry))}")
        for one in entry["params"] if isinstance(entry, dict) and isinstance(entry["params"], list) else (entry,):
            if isinstance(one, tuple) and len(one) != 2:
                raise ParameterError(f"params has a tuple of {len(one)}: give pairs (name, parameter)")


def is_model(params: Any) -> TypeGuard[nn.Module]:
    """True if a model stands in place of parameters."""
    return isinstance(params, nn.Module) and not isinstance(params, nn.ParameterList)


def model_behind(params: Any) -> nn.Module | None:
    """Find the model of ``model.named_parameters()`` or ``model.parameters()``, before the generator has begun."""
    if is_model(params):
        return params
    owner = params.gi_frame.f_locals.get("self") if isinstance(params, GeneratorType) and params.gi_frame else None
    return owner if isinstance(owner, nn.Module) else None


def plain_name(name: str) -> str:
    """Strip what ``torch.compile`` puts into a name, so that a state loads with and without compilation."""
    return name.replace("_orig_mod.", "")


def _names(model: nn.Module) -> dict[int, str]:
    return {id(plain_parameter(parameter)): plain_name(name) for name, parameter in model.named_parameters()}


def own_names(groups: Sequence[dict[str, Any]]) -> list[str | None]:
    """List the names of all parameters of ``groups``; None where there is none, or where another has the same."""
    names = [name for group in groups for name in group.get("param_names") or [None] * len(group["params"])]
    uses = Counter(names)
    return [name if uses[name] == 1 else None for name in names]
