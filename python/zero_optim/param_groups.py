"""``param_groups``: options of parameters by their names."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Mapping
from fnmatch import fnmatchcase
from typing import Any

from torch import Tensor, nn

from .params.param_shard import plain_parameter
from .params.parameter_set import plain_name
from .rules import RULES
from .rules.group_rules import RULE
from .rules.options import EMA_DECAY

Override = tuple[str | Callable[[str, Tensor], bool], Mapping[str, Any]]


def param_groups(
    model: nn.Module | Iterable[tuple[str, Tensor]], overrides: Iterable[Override], strict: bool = True, **defaults: Any
) -> list[dict[str, Any]]:
    """Make parameter groups, by overrides of options, for an optimizer of ``zero_optim`` or ``torch.optim``.

    All overrides that match a parameter apply: the last value of an option wins, and multipliers multiply. With
    ``lr_mult=0.5`` the group's ``lr`` is half of what it would be, and torch's schedulers scale it from there.

    Args:
        model: or pairs (name, parameter), to leave some out.
        overrides: pairs (pattern, options), or a dict. A pattern is a function of name and parameter, or for the whole
            name, as ``fnmatch`` takes it ("*" matches dots, too). A tied parameter is matched by any of its names.
        strict: False: an override may match no parameter, as on one stage of a pipeline.
        defaults: options of all parameters, except those that an override gives a ``rule``, which has its own.

    Returns one group for equal options, with pairs (name, parameter), frozen ones too, in the model's order.

    Raises ValueError for an override that matches nothing, an unknown option, and a multiplier of one without a value.
    """
    overrides = [*(overrides.items() if isinstance(overrides, Mapping) else overrides)]
    of_rules = [getattr(rule, "options", ()) for rule in (*RULES.values(), *(own.get(RULE) for _, own in overrides))]
    known = {RULE, EMA_DECAY, "mesh", "process_group", "grad_divisor", *(o.name for own in of_rules for o in own)}
    unknown = [k for _, own in overrides for k in own if k.removesuffix("_mult") not in {*known, *defaults}]
    if unknown:
        near = difflib.get_close_matches(unknown[0], known, n=1, cutoff=0)
        raise ValueError(f"unknown option {unknown[0]!r}: is {near[0]!r} meant? An option of your own needs a default")
    held: dict[int, tuple[list[str], Tensor]] = {}
    named = [*model.named_parameters(remove_duplicate=False)] if isinstance(model, nn.Module) else [*model]
    if any(isinstance(entry, Tensor) for entry in named):
        raise TypeError("param_groups takes a model, or pairs (name, parameter), as of model.named_parameters()")
    for name, parameter in named:
        held.setdefault(id(plain_parameter(parameter)), ([], parameter))[0].append(plain_name(name))
    groups, unused = list[dict[str, Any]](), {*range(len(overrides))}
    for names, parameter in held.values():
        own: dict[str, Any] = {}
        for number, (pattern, options) in enumerate(overrides):
            if any(fnmatchcase(n, pattern) if isinstance(pattern, str) else pattern(n, parameter) for n in names):
                unused.discard(number)
                own |= {k: own.get(k, 1) * value if k.endswith("_mult") else value for k, value in options.items()}
        group = {**getattr(own.get(RULE), "defaults", defaults), **own}
        for key in [key for key in own if key.endswith("_mult")]:
            if group.get(option := key.removesuffix("_mult")) is None:
                raise ValueError(f"{key} of {names[0]!r} multiplies {option}, which has no value: give {option}=, too")
            group[option] = group[option] * group.pop(key)
        equal = next((other for other in groups if other == {**group, "params": other["params"]}), None)
        if equal is None:
            groups.append(equal := {**group, "params": []})
        equal["params"].append((names[0], parameter))
    for number in sorted(unused) if strict else ():
        pattern, every = overrides[number][0], [name for names, _ in held.values() for name in names]
        near = difflib.get_close_matches(str(pattern), every, cutoff=0)
        raise ValueError(f"override {number}, {pattern!r}, matches no parameter: there are {', '.join(near)}")
    return groups
