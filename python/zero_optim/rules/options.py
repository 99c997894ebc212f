"""Options of an update rule: names, defaults, ranges, and the numbers that a parameter group gives for them."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Real
from operator import itemgetter
from typing import Any, ClassVar

from torch import Tensor

EMA = "ema"
"""The name of an average of the master; of several, they are ``ema_0``, ``ema_1`` and so on."""

EMA_DECAY = "ema_decay"
"""The option that asks for averages."""

# The largest positive number that is 0 in fp32.
SMALLEST = 2.0**-150


@dataclass(frozen=True)
class Option:
    """An argument of a rule. A parameter group may have a value of its own.

    ``stays``: whether a load leaves it as it is, whatever was saved: it describes a parameter, or how something is
    computed.
    """

    optional: ClassVar[bool] = False
    """Whether a group may be without, as those of older checkpoints, and has the default then."""

    name: str
    default: Any
    stays: bool = field(default=False, kw_only=True)

    @property
    def coefficients(self) -> tuple[str, ...]:
        """Names of the numbers that it consists of, in their order."""
        return (self.name,)

    def read(self, groups: Sequence[Mapping[str, Any]]) -> list[list[Any]]:
        """Read the numbers of groups: for each coefficient a list of floats, or tensors of one element."""
        if self.optional:
            return [[group.get(name, self.default) for group in groups] for name in self.coefficients]
        return [[*map(itemgetter(name), groups)] for name in self.coefficients]

    def allows(self, values: Sequence[Any]) -> bool:
        """Whether all are sure to be in range, which takes less than to ``check`` each. False: some may not be."""
        return False

    def check(self, value: Any, owner: str) -> None:
        """Raise ValueError where ``value``, of ``owner``, is out of range. Tensors are not read."""


@dataclass(frozen=True)
class Number(Option):
    """A number from ``least`` on and below ``below``.

    ``rate``: it may also be a tensor of one element, of any size: 0 in fp32 does no harm.
    """

    least: float = 0.0
    below: float = math.inf
    rate: bool = False

    def allows(self, values: Sequence[Any]) -> bool:
        plain = self.rate and {float, int}.issuperset(map(type, values))
        return plain and all(self.least <= value < self.below for value in values)

    def check(self, value: Any, owner: str) -> None:
        if self.rate and isinstance(value, Tensor):
            return check_single(value, self.name, owner)
        if not is_number(value):
            raise ValueError(f"{self.name} of {owner} must be a number, got {value!r}")
        if not self.least <= value < self.below:
            taken = f"{self.least:g} or more" if self.below == math.inf else f"in [{self.least:g}, {self.below:g})"
            raise ValueError(f"{self.name} of {owner} must be {taken}, got {value!r}")
        if not self.rate and 0 < abs(value) <= SMALLEST:
            raise ValueError(f"{self.name} of {owner} is {value!r}, which is 0 in fp32: give 0, or 1e-45 or more")


@dataclass(frozen=True)
class Betas(Option):
    """Two numbers in [0, 1), or tensors of one element: ``beta1`` and ``beta2``."""

    @property
    def coefficients(self) -> tuple[str, ...]:
        return ("beta1", "beta2")

    def read(self, groups: Sequence[Mapping[str, Any]]) -> list[list[Any]]:
        return [[*map(itemgetter(place), map(itemgetter(self.name), groups))] for place in (0, 1)]

    def check(self, value: Any, owner: str) -> None:
        for beta in value:
            if isinstance(beta, Tensor):
                check_single(beta, self.name, owner)
        if len(value) != 2 or any(not isinstance(beta, Tensor) and not 0 <= beta < 1 for beta in value):
            raise ValueError(f"{self.name} of {owner} must be two numbers in [0, 1), got {value!r}")


@dataclass(frozen=True)
class Flag(Option):
    """A bool: 0 or 1 among the numbers. A group of an older checkpoint may be without."""

    default: bool = False
    optional = True

    def check(self, value: Any, owner: str) -> None:
        if value not in (False, True):
            raise ValueError(f"{self.name} of {owner} must be True or False, got {value!r}")


@dataclass(frozen=True)
class Fixed(Option):
    """An option that is the same for all groups: a bool that decides what state there is, or a way to calculate. It is
    no number of a group."""

    default: Any = False
    optional = True
    coefficients = ()

    def same(self, value: Any, other: Any) -> bool:
        """Whether two values mean the same. A checkpoint has lists for tuples."""
        return _listed(value) == _listed(other)


@dataclass(frozen=True)
class Differentiable(Option):
    """``differentiable``, an option of torch's: only False is taken."""

    name: str = "differentiable"
    default: bool = False
    optional = True
    coefficients = ()

    def check(self, value: Any, owner: str) -> None:
        if value:
            raise ValueError(f"{self.name} of {owner}: step cannot be differentiated; leave it out")


@dataclass(frozen=True)
class Decays(Option):
    """One number in [0, 1], or as many as ``default`` has: the fraction of an average that stays in each update."""

    default: tuple[float, ...] = ()
    optional = True

    @property
    def coefficients(self) -> tuple[str, ...]:
        return (EMA,) if len(self.default) == 1 else tuple(f"{EMA}_{n}" for n in range(len(self.default)))

    def read(self, groups: Sequence[Mapping[str, Any]]) -> list[list[Any]]:
        decays = [listed_decays(group.get(self.name, self.default)) for group in groups]
        return [[*map(itemgetter(place), decays)] for place in range(len(self.default))]

    def check(self, value: Any, owner: str) -> None:
        decays = listed_decays(value)
        if not decays or len(decays) != len(self.default) or not all(0 <= decay <= 1 for decay in decays):
            wanted = "a number in [0, 1]" if len(self.default) < 2 else f"{len(self.default)} numbers in [0, 1]"
            raise ValueError(f"{self.name} of {owner} must be {wanted}, as the optimizer was made, got {value!r}")


def is_average(kind: str) -> bool:
    """Whether a state tensor of that name is an average of the master."""
    return re.fullmatch(rf"{EMA}(_\d+)?", kind) is not None


def is_number(value: Any) -> bool:
    """Whether ``value`` can be compared with a number: numpy's numbers and tensors, too."""
    return type(value) is float or (isinstance(value, (Real, Tensor)) and not isinstance(value, bool))


def _listed(value: Any) -> Any:
    return [*map(_listed, value)] if isinstance(value, list | tuple) else value


def listed_decays(value: Any) -> tuple[Any, ...]:
    """``ema_decay``, one number or several, or None, as a tuple."""
    if value is None:
        return ()
    return tuple(value) if isinstance(value, Sequence) else (value,)


def check_single(value: Tensor, name: str, owner: str) -> None:
    """Raise ValueError for a tensor of several elements."""
    if value.numel() != 1:
        raise ValueError(
            f"{name} of {owner} must be a number, or a tensor of one element; its shape is {tuple(value.shape)}: give "
            "each rate a group of its own"
        )


def check_choice(name: str, value: Any, choices: Sequence[Any]) -> None:
    """Raise ValueError where ``value`` of the option ``name`` is none of ``choices``."""
    if value not in choices:
        raise ValueError(f"{name} must be one of {', '.join(map(repr, choices))}, got {value!r}")
