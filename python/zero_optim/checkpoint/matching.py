"""Match each tensor of model and optimizers with the saved one that it is loaded from, and list what does not fit.

Names alone decide: nothing is read or changed here, and every rank finds the same.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ..errors import StateMismatchError
from ..figures import count
from ..rules.options import EMA
from .contents import Names
from .index import BUFFER, PARAMETER, Index, Key, SavedOptimizer, SavedTensor, TensorSpec
from .safetensors_file import Entry

_NAMED = 5  # names in a message; the others are counted


@dataclass(frozen=True)
class Wanted:
    """The state that an optimizer takes from a checkpoint.

    Attributes:
        specs: its tensors.
        groups: of each parameter group, the names.
        master: the kind of tensor that parameters are rounded from; None: they have no master.
        averages: kinds of tensors that average parameters; one that was not saved begins at the parameters.
        takes: names of the optimizer classes whose state it can use; None: of any, if the tensors fit.
        spared: names of parameters that may be without state in the checkpoint: they are frozen.
    """

    specs: Sequence[TensorSpec]
    groups: Sequence[Sequence[str]]
    master: str | None = None
    averages: Sequence[str] = ()
    spared: frozenset[str] = frozenset()
    takes: frozenset[str] | None = None


@dataclass
class Match:
    """The match of a checkpoint with a model and its optimizers.

    Attributes:
        saved_name: of each parameter here, what the checkpoint calls it.
        source: by kind and name, the saved tensor that one here is loaded from; the others are not loaded.
        fresh: names of parameters whose state starts fresh.
        begun: averages that were not saved, and begin at the parameters.
        steps: updates that each parameter has had, where that was counted.
        groups: of each optimizer, of each of its groups, the number of the saved one; None: it keeps its options.
        misfits: a sentence each. ``notes``: sentences on what is no misfit, but worth a note.
    """

    saved_name: Mapping[str, str]
    source: dict[Key, SavedTensor] = field(default_factory=dict)
    fresh: set[str] = field(default_factory=set)
    begun: set[Key] = field(default_factory=set)
    steps: Mapping[str, float] = field(default_factory=dict)
    groups: list[list[int | None]] = field(default_factory=list)
    misfits: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def match(
    index: Index, names: Names, saved_name: Mapping[str, str], model: Sequence[TensorSpec], optimizers: Sequence[Wanted]
) -> Match:
    """Match all tensors and groups. ``model``: parameters and buffers. ``saved_name``: what ``saved_names`` gave.
    Raises StateMismatchError for a tensor of another shape, kind of numbers, or order of rows: none is ever loaded."""
    matched = Match(saved_name=saved_name)
    _match_model(index, names, model, matched)
    if optimizers:
        for number, wanted in enumerate(optimizers):
            _match_state(index, wanted, matched)
            matched.groups.append(_match_groups(number, wanted, index.optimizers, matched))
        # State of parameters that were never updated does not count.
        used = {(source.spec.kind, source.spec.name) for source in matched.source.values()}
        updated = index.updated()
        unused: dict[str, list[str]] = {}
        for kind, name in index.tensors:
            if index.is_state(kind) and (kind, name) not in used and name in updated:
                unused.setdefault(name, []).append(kind)
        if unused:
            averages = all(kind.startswith(EMA) for kinds in unused.values() for kind in kinds)
            remedy = " (averages: make the optimizer with ema_decay=, as it was)" if averages else ""
            there = "left over in the checkpoint, and not trained or not kept here"
            matched.misfits.append(f"{there}: {_state_of(unused)}{remedy}")
        if len(index.optimizers) > len(optimizers):
            there = count(len(index.optimizers), "optimizer")
            matched.misfits.append(f"the checkpoint has {there}, and {len(optimizers)} are given here")
    steps = index.steps()
    matched.steps = {name: steps[saved] for name, saved in saved_name.items() if saved in steps}
    _check_shapes([*model, *(spec for wanted in optimizers for spec in wanted.specs)], matched)
    return matched


def saved_names(index: Index, names: Names) -> dict[str, str]:
    """Find what the checkpoint calls each parameter: tied ones may be saved under another of their names."""
    found = {}
    for name in names.parameters:
        there = (index.aliases.get(known, known) for known in names.equal_to(name))
        found[name] = next((known for known in there if (PARAMETER, known) in index.tensors), name)
    return found


# -- tensors -----------------------------------------------------------------------------------------------------------


def _match_model(index: Index, names: Names, model: Sequence[TensorSpec], matched: Match) -> None:
    missing: dict[str, list[str]] = {PARAMETER: [], BUFFER: []}
    used: set[Key] = set()
    for spec in model:
        name = matched.saved_name.get(spec.name, spec.name) if spec.kind == PARAMETER else spec.name
        saved = index.tensors.get((spec.kind, name))
        if saved is None:
            missing[spec.kind].append(spec.name)
            continue
        used.add((spec.kind, name))
        if spec.kind == PARAMETER and saved.spec.dtype != spec.dtype:
            saved = index.precise(name) or saved  # rounded once, from the master
        matched.source[spec.key] = saved
    unused: dict[str, list[str]] = {PARAMETER: [], BUFFER: []}
    for kind, name in index.tensors:
        if kind in unused and (kind, name) not in used:
            unused[kind].append(name if name not in names.aliases else f"{name} (tied to {names.aliases[name]} here)")
    for what, by_kind in (("missing in", missing), ("left over in", unused)):
        for kind, those in by_kind.items():
            if those:
                matched.misfits.append(f"{what} the checkpoint: {count(len(those), kind)}, {listed(those)}")


def _match_state(index: Index, wanted: Wanted, matched: Match) -> None:
    lacking: dict[str, list[str]] = {}
    averages: set[str] = set()
    for spec in wanted.specs:
        name = matched.saved_name[spec.name]
        saved = index.precise(name) if spec.kind == wanted.master else index.tensors.get((spec.kind, name))
        if saved is None and spec.kind in wanted.averages:
            saved = index.precise(name)  # the master, so that the average is not of rounded values
            averages.add(spec.kind)
            matched.begun.add(spec.key)
        if saved is not None:
            matched.source[spec.key] = saved
        else:
            lacking.setdefault(spec.name, []).append(spec.kind)
    matched.fresh |= set(lacking)
    if averages:
        matched.notes.append(f"not in the checkpoint: {', '.join(sorted(averages))}: averages begin at the parameters")
    # Without all of its state a parameter starts fresh; its master is loaded all the same.
    for spec in wanted.specs:
        if spec.name in lacking and spec.kind != wanted.master:
            matched.source.pop(spec.key, None)
    known = {name for optimizer in index.optimizers for group in optimizer.groups for name in group["params"]}
    trained = [name for name in lacking if name not in wanted.spared]
    not_updated = known - index.updated()  # their state was not made yet when they were saved
    if never := [name for name in trained if matched.saved_name[name] in not_updated]:
        matched.notes.append(f"never updated before: {count(len(never), PARAMETER)}, {listed(never)}")
    if missed := [name for name in trained if name not in never]:
        matched.misfits.append(f"missing in the checkpoint: {_state_of({name: lacking[name] for name in missed})}")


def _check_shapes(specs: Sequence[TensorSpec], matched: Match) -> None:
    wrong, remedy = [], ""
    for spec in specs:
        if (source := matched.source.get(spec.key)) is None:
            continue
        if source.spec.stacked != spec.stacked:
            wrong.append(f"{spec.label} is {_whole_or_slices(spec)} here, and {_whole_or_slices(source.spec)} there")
            remedy = ". Plain slices load on as many tensor-parallel ranks as saved them: their whole is not known"
        elif (differs := shape_differs(spec, source.spec)) is not None:
            wrong.append(differs)
        elif source.spec.rows_of != spec.rows_of:
            wrong.append(
                f"{spec.label} is of rows of the slices that tensor-parallel ranks have, which are others here: "
                "load it on as many of them as saved it"
            )
        elif source.spec.order != spec.order and (spec.is_of_rows or source.spec.is_of_rows):
            wrong.append(
                f"{spec.label} is of rows of elements as they lie in memory, and the parameter lies in another order "
                "here: bring the model to the memory format that it was saved in"
            )
    if wrong:
        raise StateMismatchError(
            f"{len(wrong)} of the tensors in the checkpoint cannot be loaded: {listed(wrong)}{remedy}"
        )


def _whole_or_slices(spec: TensorSpec) -> str:
    return f"whole, {list(spec.shape)}" if spec.stacked is None else f"{spec.stacked} slices of {list(spec.shape[1:])}"


def shape_differs(here: TensorSpec, there: TensorSpec | Entry) -> str | None:
    """Find why a saved tensor of this shape and dtype cannot be loaded; None: it can."""
    # Floating types are cast into one another. Any other dtype loads from its own alone.
    casts = there.dtype == here.dtype or (there.dtype.is_floating_point and here.dtype.is_floating_point)
    if there.shape == here.shape and casts:
        return None
    stack = f", {here.stacked} slices, each on a rank of tensor_parallel," if here.stacked else ""
    own = f"{here.label} has shape {list(here.shape)} of {here.dtype}{stack} here"
    return f"{own}, and {list(there.shape)} of {there.dtype} there"


# -- groups ------------------------------------------------------------------------------------------------------------


def _match_groups(
    number: int, wanted: Wanted, optimizers: Sequence[SavedOptimizer], matched: Match
) -> list[int | None]:
    """Find the saved group for each group: the one with the same parameters."""
    if number >= len(optimizers):
        matched.misfits.append(f"the checkpoint holds no options of optimizer {number}: it has fewer optimizers")
        return [None] * len(wanted.groups)
    saved = optimizers[number]
    if wanted.takes is not None and saved.name not in wanted.takes:
        matched.misfits.append(f"optimizer {number} was saved by a {saved.name}, whose state it has no use for here")
    there = [frozenset(group["params"]) for group in saved.groups]
    here = [frozenset(matched.saved_name[name] for name in group) for group in wanted.groups]
    found: list[int | None] = [there.index(group) if group in there else None for group in here]
    for place, group in enumerate(here):
        if not group:  # groups without parameters differ in their places alone
            found[place] = place if place < len(there) and not there[place] else None
    if None not in found and len(here) == len(there):
        return found
    place_here = {name: place for place, group in enumerate(here) for name in group}
    place_there = {name: place for place, group in enumerate(there) for name in group}
    moved = [
        f"{name!r} is in group {place} here and in group {place_there[name]} there"
        for name, place in place_here.items()
        if name in place_there and here[place] != there[place_there[name]] and place != place_there[name]
    ]
    new = [f"{name!r} is in no group there" for name in place_here if name not in place_there]
    old = [f"{name!r} is in no group here" for name in place_there if name not in place_here]
    sizes = f"sizes {[len(group) for group in here]} here, {[len(group) for group in there]} there"
    matched.misfits.append(f"the parameter groups differ ({sizes}): {listed([*moved, *new, *old] or ['their number'])}")
    return found


def _state_of(kinds: Mapping[str, Sequence[str]]) -> str:
    """Name state in a message. ``kinds``: of each parameter, which tensors of its state are meant."""
    all_kinds = list(dict.fromkeys(kind for own in kinds.values() for kind in own))
    return f"the state ({', '.join(all_kinds)}) of {count(len(kinds), PARAMETER)}, {listed([*kinds])}"


def listed(those: Sequence[str]) -> str:
    """List the first few, and count the others."""
    more = f", and {len(those) - _NAMED} more" if len(those) > _NAMED else ""
    return f"{', '.join(sorted(those)[:_NAMED])}{more}"
