"""``load``: every rank reads the index, finds what of each file it needs, and reads that.

Which ranks saved, and at which stage, does not matter: what this rank holds of a tensor is a flat range, and so are the
pieces; what is read is where they meet::

    saved by 3 ranks   |----- rank-0 -----|----- rank-1 -----|----- rank-2 -----|
    needed on rank 1                 |-------- of 2 ranks ---------|
    read                             [....|..................|.....]
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..comm.collectives import Comm
from ..errors import CheckpointError, StateMismatchError
from . import folder as folders
from .background import wait
from .contents import Contents, Names
from .index import Index
from .matching import Match
from .plain import decode
from .random_states import set_random_states
from .rank_file import Files, crc32c
from .subject import LoadPlan, Subject, each, make_subject
from .together import check_agreed, on_rank_0, together

_WHERE = "checkpoint.load"


@dataclass(frozen=True)
class Loaded:
    """What was loaded.

    Attributes:
        folder: the checkpoint.
        step: of the training, as ``save`` was told.
        extra: what the user had added.
        notes: what was not loaded, and what began afresh, one sentence each. Empty where all of it fits.
    """

    folder: Path
    step: int
    extra: Any
    notes: Sequence[str] = field(default_factory=tuple)


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

    Each rank reads what it holds. Where the dtype of a parameter is not the saved one, its values are those of the
    master, rounded once. Random states, and those of ``data``, are taken over by as many ranks as saved them.

    Args:
        path: a checkpoint, or the folder of several: then the newest whole one. That one is damaged is said in a
            warning, and the one before it is taken.
        model: sharded or not.
        opt: as it was given to ``save``: a ``ShardedAdamW``, one of torch's, or several; None: the model alone.
        scaler, scheduler, data: whose ``load_state_dict`` gets what was saved of them.
        strict: raise StateMismatchError, before anything is changed, where a tensor is missing in the checkpoint or
            left over in it, or where parameter groups differ; False: go on without them, and say so in ``notes``.

    Raises, on every rank: CheckpointError where there is no whole checkpoint; StateMismatchError, naming what does not
    fit. Where a checksum shows damage in the midst of reading, model and optimizer are a mixture: load another
    checkpoint, or make them anew.
    """
    wait()
    subject = make_subject(model, opt, _WHERE)
    others = _Others(each(scaler), each(scheduler), data)
    given = {"path": str(path), "strict": strict, "scaler": len(others.scalers), "scheduler": len(others.schedulers)}
    check_agreed(subject.comm, {**subject.described(), **given, "data": data is not None}, _WHERE)
    subject.settle()
    together(subject.comm, lambda: _check_subject(subject), _WHERE)
    problems: list[str] = []
    for folder in on_rank_0(subject.comm, lambda: folders.candidates(Path(path)), _WHERE):
        try:
            loaded = _load(folder, subject, others, strict=strict)
        except CheckpointError as error:
            problems.append(str(error))
            continue
        if problems:
            message = f"{folder} was loaded, and none that is newer: {'; '.join(problems)}"
            warnings.warn(message, stacklevel=2)
        return loaded
    raise CheckpointError("; ".join(problems) or f"{path} holds no checkpoint")


def _check_subject(subject: Subject) -> None:
    crc32c(b"")  # its package may be missing
    subject.check_not_gathered(_WHERE)
    subject.contents(Names(subject.model))  # what cannot be loaded at all is no fault of a checkpoint


@dataclass(frozen=True)
class _Others:
    """What is loaded beside model and optimizers."""

    scalers: Sequence[Any]
    schedulers: Sequence[Any]
    data: Any

    def misfits(self, index: Index) -> list[str]:
        """Where there is none to give, or nobody to take."""
        pairs = {"scaler": (self.scalers, index.scalers), "scheduler": (self.schedulers, index.schedulers)}
        told = [
            f"the checkpoint has the state of {len(there)} {what}(s), and {len(here)} given here"
            for what, (here, there) in pairs.items()
            if len(here) != len(there)
        ]
        has_data = any(of_rank["data"] is not None for of_rank in index.ranks)
        if has_data != (self.data is not None):
            told.append(f"the checkpoint has {'positions' if has_data else 'no positions'} in data")
        return told

    def load(self, index: Index) -> None:
        for here, there in ((self.scalers, index.scalers), (self.schedulers, index.schedulers)):
            for one, state in zip(here, map(decode, there), strict=False):
                if state != {}:  # of a scaler that was not enabled
                    one.load_state_dict(state)


def _load(folder: Path, subject: Subject, others: _Others, *, strict: bool) -> Loaded:
    comm = subject.comm
    index = together(comm, lambda: folders.read_index(folder), _WHERE)
    plan = together(comm, lambda: _plan(folder, index, subject, others, strict=strict), _WHERE)
    subject.use_order(plan)
    together(comm, lambda: _read(folder, subject.to_fill(plan), plan.matched), _WHERE)
    together(comm, lambda: subject.take_over(plan), _WHERE)
    together(comm, lambda: others.load(index), _WHERE)
    own = together(comm, lambda: _take_own(index, comm, subject.device, others.data), _WHERE)
    notes = [*plan.matched.misfits, *plan.matched.notes, *own]
    return Loaded(folder, index.step, decode(index.extra), tuple(notes))


def _plan(folder: Path, index: Index, subject: Subject, others: _Others, *, strict: bool) -> LoadPlan:
    try:
        plan = subject.plan(index)
    except StateMismatchError as error:
        raise StateMismatchError(f"{folder} does not fit: {error}") from None
    misfits = plan.matched.misfits
    if subject.optimizers:
        misfits.extend(others.misfits(index))
    if strict and misfits:
        raise StateMismatchError(
            f"{folder} does not fit: {'; '.join(misfits)}. With strict=False what fits is loaded, and state that is "
            "missing begins anew"
        )
    return plan


def _read(folder: Path, parts: Sequence[Contents], matched: Match) -> None:
    with Files(folder) as files:
        wanted = [(holding, matched.source.get(holding.spec.key)) for part in parts for holding in part.holdings]
        files.expect((source, of.start, of.length) for of, source in wanted if source is not None)
        values = (flat for part in parts for flat in part.values())
        # ``strict`` asks once more after the last: only then is that one copied to where it belongs.
        for (holding, source), flat in zip(wanted, values, strict=True):
            if source is not None and holding.length:
                files.read_into(flat, source, holding.start, holding.spec.order)


def _take_own(index: Index, comm: Comm, device: torch.device, data: Any) -> list[str]:
    """What each rank had of its own goes to as many ranks as there were."""
    there = len(index.ranks)
    if there != comm.world_size:
        what = "random states" if data is None else "random states and positions in data"
        return [f"{what} were saved by {there} ranks, and are not loaded by {comm.world_size}"]
    own = decode(index.ranks[comm.rank])
    set_random_states(own["random"], device)
    if data is not None and own["data"] is not None:
        data.load_state_dict(own["data"])
    return []
