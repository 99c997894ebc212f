"""``param_groups``: options of parameters by their names."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

from torch import Tensor, nn

from .params.param_shard import plain_parameter
from .params.parameter_set import plain_name
from .rules import RULES
from .rules.group_rules import RULE
from .rules.options import EMA_DECAY

Override = tuple[str | Callable[[str, Tensor], bool], Mapping[str, Any]]
_MULT = "_mult"


def param_groups(
    model: nn.Module | Iterable[tuple[str, Tensor]], overrides: Iterable[Override], strict: bool = True, **defaults: Any
) -> list[dict[str, Any]]:
    """Make parameter groups for an optimizer of ``zero_optim`` or ``torch.optim``.

    Every override that matches a parameter applies: the last value of an option wins, and multipliers multiply each
    other and the final value. ``lr_mult=0.5`` halves the group's ``lr``, from which torch's schedulers start.

    Args:
        model: or pairs (name, parameter), to leave some out.
        overrides: pairs (pattern, options), or a dict. A pattern is a function of name and parameter, or for the whole
            name, as ``fnmatch`` takes it ("*" matches dots, too). A tied parameter is matched by any of its names.
        strict: False: an override may match no parameter, as on one stage of a pipeline.
        defaults: options of all parameters, except those that an override gives a ``rule``, which has its own.

    Returns one group for equal options, with pairs (name, parameter), in the model's order. Frozen parameters are
    included, as in ``ShardedAdamW(model)``.

    Raises ValueError for an override that matches no parameter, an unknown option (``defaults`` make one known), or a
    multiplier of an option that has no value.
    """
    overrides = [*(overrides.items() if isinstance(overrides, Mapping) else overrides)]
    for number, (_, options) in enumerate(overrides):
        of_rules = [getattr(rule, "options", ()) for rule in (*RULES.values(), options.get(RULE))]
        known = {RULE, EMA_DECAY, "mesh", "process_group", "grad_divisor", *(o.name for own in of_rules for o in own)}
        for key in options:
            if key.removesuffix(_MULT) not in known.union(defaults):
                near = difflib.get_close_matches(key, known, n=1, cutoff=0)
                raise ValueError(f"override {number} has the unknown option {key!r}: is {near[0]!r} meant?")
    held: dict[int, tuple[list[str], Tensor]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False) if isinstance(model, nn.Module) else model:
        held.setdefault(id(plain_parameter(parameter)), ([], parameter))[0].append(plain_name(name))
    matchers = [p if callable(p) else lambda name, _, p=p: fnmatchcase(name, p) for p, _ in overrides]
    groups, unused = list[dict[str, Any]](), {*range(len(overrides))}
    for names, parameter in held.values():
        found = [number for number, matches in enumerate(matchers) if any(matches(name, parameter) for name in names)]
        unused.difference_update(found)
        own = _merged(names[0], [overrides[number][1] for number in found], defaults)
        group = next((group for group in groups if group == {**own, "params": group["params"]}), None)
        if group is None:
            groups.append(group := {**own, "params": []})
        group["params"].append((names[0], parameter))
    for number in sorted(unused) if strict else ():
        every, pattern = [name for names, _ in held.values() for name in names], overrides[number][0]
        near = difflib.get_close_matches(pattern, every, cutoff=0) if isinstance(pattern, str) else every[:3]
        raise ValueError(f"override {number}, {pattern!r}, matches no parameter: there are {', '.join(near)}")
    return groups


def _merged(name: str, found: Sequence[Mapping[str, Any]], defaults: Mapping[str, Any]) -> dict[str, Any]:
    own: dict[str, Any] = {}
    for options in found:
        own |= {key: own.get(key, 1) * value if key.endswith(_MULT) else value for key, value in options.items()}
    merged = {**getattr(own.get(RULE), "defaults", defaults), **own}
    for key in [key for key in own if key.endswith(_MULT)]:
        if merged.get(option := key.removesuffix(_MULT)) is None:
            raise ValueError(f"{key} of {name!r} multiplies {option}, which has no value: give {option}=, too")
        merged[option] = merged[option] * merged.pop(key)
    return merged
