"""The order in which the checkpoints of a folder were saved, and from which each came. The step does not decide it.

A job that goes back to an older checkpoint and trains on leaves a branch. What it saves may have lower steps than the
branch that was left::

    saved as number     1       2       3       4
    step                4 ----- 8       |       |
                        `-------------- 6 ----- 7      the newest is 7. It came from 6, that from 4; 8 was left

So each index has a number, which is one more than the highest in its folder when it was saved. It also names the
checkpoint that the training went on from. No clock is asked. Checkpoints of earlier versions have neither number nor
name: they count as saved before all others, in the order of their steps.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from torch import nn


class Stamp(NamedTuple):
    """The place of a checkpoint in the order of saving."""

    number: int
    step: int


@dataclass(frozen=True)
class Lineage:
    """The place of a checkpoint in the order of saving, as its index has it.

    Attributes:
        number: one more than the highest in the folder when it was saved; 0: not known.
        after: the stamp of the checkpoint that the training went on from; None: not known: the one saved before.
    """

    number: int = 0
    after: Stamp | None = None


@dataclass(frozen=True)
class Standing:
    """A checkpoint among those of its folder.

    ``lives``: whether it is the newest, or the newest came from it, as far as is known.
    """

    folder: Path
    stamp: Stamp
    lives: bool


def standings(steps: Mapping[Path, int], lineages: Mapping[Path, Lineage | None]) -> list[Standing]:
    """Order checkpoints: the newest, those that it came from, then those of branches that were left.

    ``lineages``: None for one that cannot be read. It counts as saved after the newest of a lower step.
    """
    known = 0
    stamps: dict[Path, Stamp] = {}
    for folder, step in sorted(steps.items(), key=lambda item: item[1]):
        lineage = lineages[folder]
        known = max(known, lineage.number if lineage is not None else 0)
        stamps[folder] = Stamp(known if lineage is None else lineage.number, step)
    wanted: Stamp | None = None
    found: list[Standing] = []
    for folder in sorted(stamps, key=stamps.__getitem__, reverse=True):
        lives = wanted is None or stamps[folder] <= wanted
        found.append(Standing(folder, stamps[folder], lives))
        if lives:
            lineage = lineages[folder]
            wanted = None if lineage is None else lineage.after
    return sorted(found, key=lambda one: not one.lives)


# -- what a model came from --------------------------------------------------------------------------------------------

_came_from: weakref.WeakKeyDictionary[nn.Module, dict[Path, Stamp]] = weakref.WeakKeyDictionary()
"""By model and folder: the stamp of the checkpoint that the model was last loaded from, or saved to."""


def came_from(model: nn.Module, path: Path) -> Stamp | None:
    """Give the checkpoint in ``path`` that ``model`` goes on from; None: not known."""
    return _came_from.get(_plain(model), {}).get(path.resolve())


def note_saved(model: nn.Module, path: Path, stamp: Stamp) -> None:
    _came_from.setdefault(_plain(model), {})[path.resolve()] = stamp


def note_loaded(model: nn.Module, folder: Path, number: int, step: int | None) -> None:
    """Note a load; earlier notes of the model are forgotten. ``step``: None for a folder with another name."""
    _came_from[_plain(model)] = {} if step is None else {folder.parent: Stamp(number, step)}


def _plain(model: nn.Module) -> nn.Module:
    """Take off torch.compile's wrapper: the one may be saved, and the other loaded."""
    return getattr(model, "_orig_mod", model)


# -- as the index has it -----------------------------------------------------------------------------------------------


def to_json(lineage: Lineage) -> dict[str, Any]:
    return {"number": lineage.number, "after": lineage.after}


def from_json(read: Any) -> Lineage:
    """Read what ``to_json`` gave. Raises ValueError for anything else."""
    after = read["after"] if isinstance(read, dict) and read.keys() == {"number", "after"} else ()
    counts = [*after, read["number"]] if isinstance(after, list) else [0, 0, read["number"]] if after is None else []
    if len(counts) != 3 or any(type(count) is not int or not 0 <= count < 2**63 for count in counts):
        raise ValueError(f"its lineage cannot be {str(read)[:100]}")
    return Lineage(counts[2], None if after is None else Stamp(counts[0], counts[1]))
