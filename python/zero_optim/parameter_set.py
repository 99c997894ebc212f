"""Which parameters an optimizer has, by index over all its groups: what they are called, which are trained."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterable, Sequence
from typing import Any

from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from .errors import ParameterError

# The set that a parameter is in, for every live optimizer of the process.
_set_of: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


class ParameterSet:
    """The parameters of ``groups``, which is the optimizer's live list.

    Attributes:
        all: every parameter, by index.
        labels: what messages call each: by name where one was given, else by place and shape.
        group_of: the number of each one's group.
        trained: those that have a place in a bucket, by index.
    """

    def __init__(self, groups: list[dict[str, Any]]) -> None:
        self.groups = groups
        self.all: list[Tensor] = []
        self.labels: list[str] = []
        self.group_of: list[int] = []
        self.trained: dict[int, Tensor] = {}
        self._frozen: dict[int, Tensor] = {}
        self._model: weakref.ref[nn.Module] | None = None

    def name(self, index: int) -> str:
        """The bare name, or the label of a parameter without one."""
        return self.labels[index].strip("'")

    def read_groups(self) -> list[int]:
        """Take in what the groups have gained. Returns the indices; none of them is trained yet."""
        before = len(self.all)
        self.all[:] = [parameter for group in self.groups for parameter in group["params"]]
        self.group_of[:] = [number for number, group in enumerate(self.groups) for _ in group["params"]]
        self.relabel()
        self._frozen = {index: p for index, p in enumerate(self.all) if index not in self.trained}
        return list(range(before, len(self.all)))

    def relabel(self) -> None:
        self.labels[:] = [label for number, group in enumerate(self.groups) for label in _labels(number, group)]

    def thawed(self) -> list[int]:
        """Parameters that require a gradient and are not trained."""
        return [index for index, parameter in self._frozen.items() if parameter.requires_grad]

    def untrained(self) -> Iterable[Tensor]:
        return self._frozen.values()

    def train(self, indices: Iterable[int]) -> None:
        for index in indices:
            self.trained[index] = self._frozen.pop(index)

    def indices_of(self, parameters: Tensor | Iterable[Tensor]) -> list[int]:
        """Raises ParameterError for a parameter that is not in the set."""
        parameters = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        index_of = {id(parameter): index for index, parameter in enumerate(self.all)}
        for parameter in parameters:
            if id(parameter) not in index_of:
                raise ParameterError(
                    f"a parameter of shape {tuple(parameter.shape)} is not in this optimizer: clip it with its own"
                )
        return sorted({index_of[id(parameter)] for parameter in parameters})

    def take_names(self, model: nn.Module) -> None:
        """Call parameters what ``model.named_parameters()`` does. Raises ParameterError where it lacks one."""
        names = _names(model)
        for group in self.groups:
            missing = [tuple(p.shape) for p in group["params"] if id(p) not in names]
            if missing:
                raise ParameterError(f"the model has no parameters of shapes {missing}, which this optimizer holds")
            group["param_names"] = [names[id(parameter)] for parameter in group["params"]]
        self._model = weakref.ref(model)
        self.relabel()

    def with_names(self, group: dict[str, Any]) -> dict[str, Any]:
        """``group`` as torch wants a new one to be beside groups with names: named by the model of ``take_names``.

        Raises ParameterError where that model does not have a parameter.
        """
        if not any("param_names" in other for other in self.groups):
            return group
        params = [group["params"]] if isinstance(group["params"], Tensor) else list(group["params"])
        if any(isinstance(entry, tuple) for entry in params):
            return {**group, "params": params}
        model = self._model() if self._model is not None else None
        names = _names(model) if model is not None else {}
        unknown = [tuple(parameter.shape) for parameter in params if id(parameter) not in names]
        if unknown:
            raise ParameterError(
                f"the other groups have names, these parameters of shapes {unknown} have none: give (name, parameter) "
                "pairs, or add them to the model before"
            )
        return {**group, "params": [(names[id(parameter)], parameter) for parameter in params]}

    # -- one live optimizer a parameter --------------------------------------------------------------------------

    def check_free(self, indices: Sequence[int]) -> None:
        """Raise ParameterError for a parameter that another live optimizer has."""
        if any(self._other_of(index) for index in indices):
            gc.collect()  # one that was dropped may wait in a cycle
        for index in indices:
            if self._other_of(index):
                raise ParameterError(
                    f"{self.labels[index]} is in another ShardedAdamW already: both would reduce its gradient. close() "
                    "that one first, or give each its own parameters"
                )

    def _other_of(self, index: int) -> ParameterSet | None:
        other: ParameterSet | None = _set_of.get(self.all[index], lambda: None)()
        return other if other is not self else None

    def claim(self, indices: Iterable[int]) -> None:
        for index in indices:
            _set_of[self.all[index]] = weakref.ref(self)

    def release(self) -> None:
        for parameter in self.all:
            if _set_of.get(parameter, lambda: None)() is self:
                del _set_of[parameter]


def plain_name(name: str) -> str:
    """Without what ``torch.compile`` puts in: a state is to load with and without it."""
    return name.replace("_orig_mod.", "")


def _names(model: nn.Module) -> dict[int, str]:
    return {id(parameter): plain_name(name) for name, parameter in model.named_parameters()}


def _labels(number: int, group: dict[str, Any]) -> list[str]:
    names = group.get("param_names")
    if names:
        return [repr(name) for name in names]
    return [f"parameter {i} of group {number}, shape {tuple(p.shape)}" for i, p in enumerate(group["params"])]
