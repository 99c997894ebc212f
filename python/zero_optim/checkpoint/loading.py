"""``load``: every rank reads the index, finds what of each file it needs, and reads that.

It does not matter how many ranks saved, nor at which stage. This rank holds a flat range of each tensor, and so does
each file. The rank reads where the two intersect::

    saved by 3 ranks   |----- rank-0 -----|----- rank-1 -----|----- rank-2 -----|
    needed on rank 1                 |-------- of 2 ranks ---------|
    read                             [....|..................|.....]
"""

from __future__ import annotations

import contextlib
import os
import warnings
from collections.abc import Mapping, Sequence
from contextlib import ExitStack as Undo
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from torch import nn

from ..comm.collectives import Comm
from ..comm.spans import span
from ..comm.together import on_rank_0, together
from ..errors import CheckpointError, StateMismatchError
from . import folder as folders
from .background import wait
from .contents import Names, TensorContents
from .index import Index, crc32c, decode
from .matching import Match
from .optimizers import Contents, OptimizerPart, ShardedPart
from .rank_file import Files, check_headers
from .subject import LoadPlan, Subject, make_subject, read_random_states, set_random_states

_WHERE = "checkpoint.load"


@dataclass(frozen=True)
class Loaded:
    """A checkpoint that was loaded.

    Attributes:
        folder: the checkpoint.
        step: of the training, as it was given to ``save``.
        extra: what the user had added.
        notes: what was not loaded, and what started fresh, one sentence each. Empty where all of it fits.
    """

    folder: Path
    step: int
    extra: Any
    notes: Sequence[str] = ()


def load(
    path: str | os.PathLike[str],
    model: nn.Module,
    opt: Any = None,
    *,
    scaler: Any = None,
    scheduler: Any = None,
    data: Any = None,
    strict: bool = True,
) -> Loaded:
    """Collective. Load what ``save`` wrote, on any number of ranks, at any stage, with any buckets and dtype.

    Each rank reads what it holds. A parameter with another dtype than the saved one gets the master's values, rounded
    once. Random states, and those of ``data``, are taken over where as many ranks load as saved.

    Args:
        path: a checkpoint, or the folder of several: then the newest whole one, which is the one that was saved last.
            Where that is damaged, a warning names it, and the one that was saved before it is loaded.
        model: sharded or not.
        opt: as it was given to ``save``: a ``ShardedOptimizer``, one of torch's, or several; None: the model alone.
        scaler, scheduler, data: objects with a ``load_state_dict``, which gets what ``save`` was given of them.
        strict: True: raise StateMismatchError, before anything is changed, where a tensor is missing in the checkpoint
            or left over in it, or where parameter groups differ. False: load what fits, and list the rest in ``notes``.

    Raises, on every rank:
        CheckpointError: there is no whole checkpoint.
        StateMismatchError: naming what does not fit, such as a scheduler that refuses its state.

    After an error model and optimizer are as they were. For that, values that overwrite others are read twice: all are
    checked before the first tensor is written. The state of an optimizer that has not stepped yet is read once, since
    it can be reset; that may drop gradients. There is one exception: a disk may fail at the second reading alone.
    Then the checkpoint before it is loaded. If there is none, model and optimizer are a mixture: re-create them.
    """
    wait()
    subject = make_subject(model, opt, _WHERE, scaler=scaler, scheduler=scheduler, data=data)
    subject.check_same_call({"path": str(path), "strict": strict}, _WHERE)
    subject.come_to_rest()
    together(subject.comm, lambda: _check_subject(subject), _WHERE)
    problems: list[str] = []
    for folder in on_rank_0(subject.comm, lambda: folders.candidates(Path(path)), _WHERE):
        try:
            with span(_WHERE, folder):
                loaded = _load(folder, subject, strict=strict)
        # All ranks come here, or none: see ``together``. So all go on to the same next one.
        except CheckpointError as error:
            problems.append(str(error))
            continue
        if problems:
            warnings.warn(f"{folder} was loaded, and none that is newer: {'; '.join(problems)}", stacklevel=2)
        return loaded
    raise CheckpointError("; ".join(problems) or f"{path} holds no checkpoint")


def _check_subject(subject: Subject) -> None:
    crc32c(b"")  # its package may be missing
    subject.check_not_gathered(_WHERE)
    subject.contents(Names(subject.model), stored=False)  # raises here what is no fault of a checkpoint


def _load(folder: Path, subject: Subject, *, strict: bool) -> Loaded:
    """Load one checkpoint: check what is going to be overwritten, load what can be undone, and then overwrite."""
    comm = subject.comm
    index = together(comm, lambda: _read_index(folder, comm), _WHERE)
    plan = together(comm, lambda: _plan(folder, index, subject, strict=strict), _WHERE)
    own = together(comm, lambda: _own_of(folder, index, subject), _WHERE)
    matched = plan.matched
    new = [part for part in plan.optimizers if part.is_new]
    old = [part for part in plan.optimizers if not part.is_new]
    # Damage, or an object that refuses its state, is found before the first tensor is overwritten.
    together(comm, lambda: _verify(folder, comm, plan.model, old, matched), _WHERE)
    with Undo() as undo:
        together(comm, lambda: subject.load_others(plan, own, undo), _WHERE)
        for part, saved in zip(plan.optimizers, plan.saved, strict=True):
            if isinstance(part, ShardedPart):
                part.use_order(saved, matched)  # collective, as parts are the same on all ranks
                if part.is_new:
                    undo.callback(part.reset)
        together(comm, lambda: _read(folder, [part.to_fill(matched) for part in new], matched), _WHERE)
        undo.pop_all()  # from here on tensors are overwritten: there is no way back
    together(comm, lambda: _read(folder, [plan.model, *(part.to_fill(matched) for part in old)], matched), _WHERE)
    together(comm, lambda: subject.take_over(plan), _WHERE)
    notes = [*matched.misfits, *matched.notes]
    # Last: what was done before may have drawn random numbers.
    if own is not None:
        set_random_states(own["random"], subject.device)
    else:
        what = "random states" if subject.data is None else "random states and positions in data"
        notes.append(f"{what} were saved by {len(index.ranks)} ranks, and are not loaded by {comm.world_size}")
    return Loaded(folder, index.step, decode(index.extra), tuple(notes))


def _read_index(folder: Path, comm: Comm) -> Index:
    index = folders.read_index(folder)
    check_headers(folder, index, comm.rank, comm.world_size)  # the ranks split this work
    return index


def _own_of(folder: Path, index: Index, subject: Subject) -> Mapping[str, Any] | None:
    """Decode random states and position in the data of this rank; None where more or fewer ranks saved than load."""
    if len(index.ranks) != subject.comm.world_size:
        return None
    own = cast(Mapping[str, Any], decode(index.ranks[subject.comm.rank]))
    before = read_random_states(subject.device)
    # A generator that does not take its state has to raise before anything is overwritten.
    try:
        set_random_states(own["random"], subject.device)
    except Exception as error:
        raise CheckpointError(
            f"{folder}: a random number generator does not take the state that rank {subject.comm.rank} has saved: "
            f"{type(error).__name__}: {error}"
        ) from error
    finally:
        set_random_states(before, subject.device)
    return own


def _verify(folder: Path, comm: Comm, model: TensorContents, old: Sequence[OptimizerPart], matched: Match) -> None:
    """Check that tensors can be overwritten, and read what is going to overwrite them. The ranks split this work."""
    model.check_writable()
    keys = [spec.key for part in (model, *old) for spec in part.specs]
    saved = [matched.source[key] for key in keys if key in matched.source]
    with Files(folder) as files:
        for error in files.damage(saved, comm.rank, comm.world_size):
            raise error


def _plan(folder: Path, index: Index, subject: Subject, *, strict: bool) -> LoadPlan:
    try:
        return subject.plan(index, strict=strict)
    except StateMismatchError as error:
        raise StateMismatchError(f"{folder} does not fit: {error}") from None


def _read(folder: Path, parts: Sequence[Contents], matched: Match) -> None:
    """Fill this rank's holdings of ``parts``."""
    with Files(folder) as files:
        for part in parts:
            # Closed at once where reading fails: until then a page of offloaded state is on the device.
            with contextlib.closing(part.values()) as values:
                # ``strict`` asks once more after the last tensor: only then is that one copied to where it belongs.
                for of, flat in zip(part.holdings, values, strict=True):
                    saved = matched.source.get(of.spec.key)
                    if saved is not None and of.length:
                        files.read_into(flat, saved, of.start, of.spec.arrangement)
