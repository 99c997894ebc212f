"""The optimizer's state dict: what it looks like, and whether one fits."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from .errors import StateMismatchError

Groups = Sequence[dict[str, Any]]


def state_keys(groups: Groups) -> list[str | int]:
    """The key of each parameter in a state dict: its name where one is known, else its index over all groups."""
    keys: list[str | int] = []
    for group in groups:
        keys += group.get("param_names") or range(len(keys), len(keys) + len(group["params"]))
    return keys


def make_state_dict(groups: Groups, state: Mapping[int, dict[str, Tensor]], steps: Tensor) -> dict[str, Any]:
    """Put ``state`` (by parameter index) and ``steps`` [parameters] into torch's format, in the order of ``state``."""
    keys = state_keys(groups)
    packed: list[dict[str, Any]] = []
    start = 0
    for group in groups:
        options = {name: value for name, value in group.items() if name != "params"}
        packed.append({**options, "params": list(range(start, start + len(group["params"])))})
        start += len(group["params"])
    by_key = {keys[index]: {**tensors, "step": steps[index].clone()} for index, tensors in state.items()}
    return {"state": by_key, "param_groups": packed}


def match_state(
    state_dict: Mapping[str, Any], groups: Groups, trained: Mapping[int, Tensor], labels: Sequence[str]
) -> dict[int, Mapping[str, Any]]:
    """The saved state by parameter index, in its own order. Raises StateMismatchError where it does not fit."""
    missing = {"state", "param_groups"} - set(state_dict)
    if missing:
        raise StateMismatchError(f"no optimizer state: {sorted(missing)} missing, found {sorted(map(str, state_dict))}")
    sizes = [len(group["params"]) for group in state_dict["param_groups"]]
    expected = [len(group["params"]) for group in groups]
    if sizes != expected:
        raise StateMismatchError(f"the state has parameter groups of sizes {sizes}, this optimizer {expected}")
    index_of: dict[Any, int] = {index: index for index in trained}
    index_of |= {key: index for index, key in enumerate(state_keys(groups)) if index in trained}
    unknown = [key for key in state_dict["state"] if key not in index_of]
    if unknown:
        raise StateMismatchError(f"the state holds {unknown[:5]}, which this optimizer does not train")
    saved = {index_of[key]: entry for key, entry in state_dict["state"].items()}
    for index, entry in saved.items():
        if "step" not in entry:
            raise StateMismatchError(f"the state of {labels[index]} has no 'step', but {sorted(entry)}")
    return saved


def load_groups(groups: Groups, saved: Groups) -> None:
    """Take over the options of saved parameter groups; the parameters and their names stay."""
    for group, options in zip(groups, saved, strict=True):
        kept = {name: value for name, value in options.items() if name not in ("params", "param_names")}
        group.update(copy.deepcopy(kept))
