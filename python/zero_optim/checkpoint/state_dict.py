"""The optimizer's state dict: its form, and the check of one that is loaded."""

from __future__ import annotations

import copy
import itertools
import math
import warnings
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..errors import StateMismatchError
from ..params.flat_shard import FlatShard
from ..params.parameter_set import ParameterSet, own_names
from ..rules.codec import saved_codec
from ..rules.group_rules import GroupRules
from ..rules.update_rule import UpdateRule
from ..step.saved_state import SavedState, is_rounded, tensors_of
from ..validate import check_groups

Groups = Sequence[dict[str, Any]]

# Fixed by the constructor: a saved group changes none of these, nor options with ``stays``.
_FIXED_OPTIONS = ("params", "param_names", "decoupled_weight_decay")


def state_keys(groups: Groups) -> list[str | int]:
    """List the key of each parameter in a state dict: its own name, else its index over all groups."""
    return [index if name is None else name for index, name in enumerate(own_names(groups))]


def pack_groups(groups: Groups) -> list[dict[str, Any]]:
    """Put indices over all groups in place of parameters, as torch saves groups."""
    packed: list[dict[str, Any]] = []
    start = 0
    for group in groups:
        options = {name: value for name, value in group.items() if name != "params"}
        packed.append({**options, "params": list(range(start, start + len(group["params"])))})
        start += len(group["params"])
    return packed


def with_torch_options(groups: Groups, rules: Sequence[UpdateRule]) -> list[dict[str, Any]]:
    """Add every option that groups of torch's counterpart have. ``rules``: of each group."""
    return [{**rule.torch_options, **group, **rule.said} for rule, group in zip(rules, groups, strict=True)]


def make_state_dict(groups: Groups, state: Mapping[int, dict[str, Tensor]], steps: Tensor) -> dict[str, Any]:
    """Put ``state`` (by parameter index) and ``steps`` [parameters] into torch's format, in the order of ``state``."""
    keys = state_keys(groups)
    by_key = {keys[index]: {**tensors, "step": steps[index].clone()} for index, tensors in state.items()}
    return {"state": by_key, "param_groups": pack_groups(groups)}


def match_state(
    state_dict: Mapping[str, Any], parameters: ParameterSet, rules: GroupRules
) -> dict[int, Mapping[str, Any]]:
    """Give the saved state by parameter index, in its own order. Raises StateMismatchError where it does not fit.

    Groups and step counts are checked, tensors are not. State of parameters that are not trained is left out, with a
    warning.
    """
    _check_form(state_dict)
    groups, labels, saved_groups = parameters.groups, parameters.labels, state_dict["param_groups"]
    check_groups_fit(saved_groups, groups, rules.by_group)
    for number, (rule, options) in enumerate(zip(rules.by_group, saved_groups, strict=True)):
        if (refusal := rule.refuse_options(number, options)) is not None:
            raise StateMismatchError(refusal)
    index_of = index_by_key(saved_groups, groups)
    unknown = [key for key in state_dict["state"] if key not in index_of]
    if unknown:
        raise StateMismatchError(f"the state holds {unknown[:5]}, which this optimizer does not train")
    saved = {index_of[key]: _given(entry) for key, entry in state_dict["state"].items()}
    saved = {index: entry for index, entry in saved.items() if entry != {}}
    for index, entry in saved.items():
        _check_entry(entry, labels[index], rules.of(index))
    ignored = [labels[index] for index in saved if index not in parameters.trained]
    if ignored:
        warnings.warn(f"the state of {', '.join(ignored[:5])} is not loaded: frozen here", stacklevel=2)
    return {index: entry for index, entry in saved.items() if index in parameters.trained}


def saved_order(saved: Mapping[int, Mapping[str, Any]]) -> list[int]:
    """Give the order of the layout that shards were saved in; none for full tensors, which fit any."""
    sharded = any(isinstance(value, FlatShard) for entry in saved.values() for value in entry.values())
    return list(saved) if sharded else []


def saved_state_of(saved: Mapping[int, Mapping[str, Any]], parameters: ParameterSet, rules: GroupRules) -> SavedState:
    """Make the record of what ``match_state`` gave."""
    steps = [0.0] * len(parameters.labels)
    tensors, rounded = {}, set()
    for index, entry in saved.items():
        steps[index] = float(entry.get("step", 1))  # 1 for a rule that needs no count: there was an update
        rule = rules.of(index)
        forms = tensors_of(entry, rule, parameters.trained[index].dtype)
        tensors[index] = [tensor.name for tensor, _ in forms]
        rounded |= {tensor.name for tensor, codec in forms if is_rounded(tensor.name, rule, codec)}
    return SavedState(tensors, torch.tensor(steps, dtype=torch.float64, device="cpu"), frozenset(rounded))


def load_groups(groups: Groups, saved: Groups, rules: Sequence[UpdateRule] = ()) -> None:
    """Take over the options of saved parameter groups; the parameters and their names stay.

    ``rules``: of each group; empty for an optimizer of torch's. A tensor that several saved groups have, as one rate of
    all of them, is one tensor in the live groups, too.
    """
    copies: dict[int, Any] = {}
    for group, options, rule in itertools.zip_longest(groups, saved, rules):
        taken = options if rule is None else _taken(options, rule)
        kept = {name: value for name, value in taken.items() if name not in _FIXED_OPTIONS}
        group.update(copy.deepcopy(kept, copies))


def _taken(options: Mapping[str, Any], rule: UpdateRule) -> dict[str, Any]:
    """Choose what a load takes over of a saved group's ``options``."""
    stay = {option.name for option in rule.options if option.stays}
    return {name: value for name, value in options.items() if name not in stay}


def _check_form(state_dict: Any) -> None:
    if not isinstance(state_dict, Mapping):
        raise StateMismatchError(f"an optimizer state is a dict, got {type(state_dict).__name__}")
    missing = {"state", "param_groups"} - set(state_dict)
    if missing:
        raise StateMismatchError(f"no optimizer state: {sorted(missing)} missing, found {sorted(map(str, state_dict))}")
    groups = state_dict["param_groups"]
    listed = isinstance(groups, Sequence) and all(isinstance(g, Mapping) and "params" in g for g in groups)
    if not listed or not isinstance(state_dict["state"], Mapping):
        raise StateMismatchError("no optimizer state: 'state' must be a dict, 'param_groups' a list of dicts")


def check_groups_fit(saved: Groups, groups: Groups, rules: Sequence[UpdateRule]) -> None:
    """Raise StateMismatchError for saved groups of other sizes, or with options that these cannot have.

    ``rules``: of each group.
    """
    sizes, expected = [len(group["params"]) for group in saved], [len(group["params"]) for group in groups]
    if sizes != expected:
        raise StateMismatchError(f"the state has parameter groups of sizes {sizes}, this optimizer {expected}")
    for number, (rule, options) in enumerate(zip(rules, saved, strict=True)):
        if (refusal := rule.refuse_saved(number, options)) is not None:
            raise StateMismatchError(refusal)
    taken = [_taken(options, rule) for options, rule in zip(saved, rules, strict=True)]
    try:
        check_groups(rules, [{**group, **options} for group, options in zip(groups, taken, strict=True)])
    except (TypeError, ValueError) as error:
        raise StateMismatchError(f"in the state's parameter groups, {error}") from error


def index_by_key(saved: Groups, groups: Groups) -> dict[Hashable, int]:
    """Map every key that a state may use to an index: torch's own, by place in the groups, or a parameter's name."""
    ids = [key for group in saved for key in group["params"]]
    names = own_names([*saved])
    own = state_keys(groups)
    if names != own and None not in names and sorted(map(str, names)) == sorted(map(str, own)):
        first = next(name for name, other in zip(names, own, strict=True) if name != other)
        raise StateMismatchError(
            f"the state holds the same parameters in another order: {first!r} stands elsewhere. Give them in its order"
        )
    index_of: dict[Hashable, int] = {}
    for keys in (own, names, ids):
        index_of.update({key: index for index, key in enumerate(keys) if key is not None})
    return index_of


def _given(entry: Any) -> Any:
    """Drop values that are None, as torch's SGD had momentum buffers, or that ``to_load_whole`` has marked."""
    if not isinstance(entry, Mapping):
        return entry
    return {name: v for name, v in entry.items() if v is not None and not hasattr(v, "zero_optim_absent")}


def _check_entry(entry: Any, label: str, rule: UpdateRule) -> None:
    if not isinstance(entry, Mapping) or ("step" not in entry and rule.needs_steps):
        found = sorted(map(str, entry)) if isinstance(entry, Mapping) else type(entry).__name__
        raise StateMismatchError(f"the state of {label} has no 'step', but {found}")
    kept = {"step"}
    for tensor in rule.tensors:
        codec = saved_codec(tensor, entry, rule.codecs)
        kept |= {tensor.name} if codec is None else {part.name for part in codec.parts(tensor)}
    unknown = [name for name, value in entry.items() if name not in kept and isinstance(value, Tensor)]
    if unknown:
        raise StateMismatchError(
            f"the state of {label} holds {unknown[0]}, which this optimizer does not keep: it was saved by another, or "
            "with other options, such as amsgrad=True or ema_decay. Train on with that one, or drop it from the state"
        )
    step = entry.get("step", 1)
    good = isinstance(step, int | float) or (isinstance(step, Tensor) and step.numel() == 1 and not step.is_complex())
    count = float(step) if good else math.nan
    if not (0 <= count < math.inf and count.is_integer()):
        raise StateMismatchError(f"the step of {label} must be a count of updates, got {step!r}")
