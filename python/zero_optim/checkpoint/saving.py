"""``save``: every rank writes its part of a checkpoint, and rank 0 publishes it once all are on the disk.

::

    rank 0   begin: makes .writing-step-N     writes rank-0     checks that all is there once, index, rename
    rank 1                                    writes rank-1
             ------------------- all -------------------- all ------------------------------------------- all
"""

from __future__ import annotations

import os
import socket
from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from ..comm.collectives import Comm
from ..comm.groups import HostRanks
from ..comm.spans import span
from ..comm.together import Ranks, gathered, on_rank_0, together
from ..errors import CheckpointError
from . import folder as folders
from .background import SAVE_BUFFER, start, wait
from .contents import Holders, Holding, Names
from .index import FlatRange, Index, SavedTensor, TensorSpec, crc32c, encode, merge
from .optimizers import Contents
from .rank_file import write_file
from .safetensors_file import NAMES
from .subject import Subject, make_subject, read_random_states

_WHERE = "checkpoint.save"


def save(
    path: str | os.PathLike[str],
    model: nn.Module,
    opt: Any = None,
    *,
    step: int | None = None,
    scaler: Any = None,
    scheduler: Any = None,
    data: Any = None,
    extra: Any = None,
    keep_last: int | None = None,
    background: bool = False,
) -> Path:
    """Collective. Write ``path/step-N``, which ``load`` reads on any number of ranks, at any stage. Returns this path.

    Parameters, buffers (rank 0's) and the optimizer's state are written as ordinary tensors under the model's names,
    each element by one rank. When all is on the disk the folder appears, by one rename; until then an earlier
    checkpoint is the newest. Gradients are not saved.

    Args:
        path: the folder of one job's checkpoints, which all ranks see. It is made if it is missing. A relative path is
            resolved in this call.
        model: sharded or not. An optimizer's parameters have to be in it.
        opt: a ``ShardedOptimizer``, or several.
        step: the N of the name; None: the most updates that a parameter has had. A checkpoint of this name is replaced.
        scaler, scheduler: one or several. Rank 0's ``state_dict()`` is saved.
        data: an object such as a loader that knows its position. Each rank's own ``state_dict()`` is saved.
        extra: plain values of your own, rank 0's: numbers, strings, bytes, small tensors, lists, tuples, dicts.
        keep_last: keep so many whole checkpoints, this one and those saved last before it. Remove the others, if their
            step is lower than this one's.
        background: return when this rank's values are copied to host memory, and write them while training goes on. The
            memory is kept for the next save. The folder is there after ``wait()``, or the next ``save`` or ``load``:
            these wait, and raise what went wrong.

    Raises CheckpointError, on every rank, where it cannot be written, or where the ranks do not see one folder: then
    earlier checkpoints are as they were. ParameterError for an optimizer with parameters that the model lacks, and for
    experts that are plain tensors; TypeError for a value that is not plain; ClosedError; CollectiveError where a rank
    has died.
    """
    wait()
    subject = make_subject(model, opt, _WHERE, scaler=scaler, scheduler=scheduler, data=data)
    comm = subject.comm
    subject.check_same_call({"path": str(path), "step": step, "keep_last": keep_last, "background": background}, _WHERE)
    absolute = together(comm, lambda: Path(path).absolute(), _WHERE)  # a thread may write there, later
    subject.come_to_rest()
    # An error keeps what it has passed: a page of a disk would stay open until it is collected.
    with ExitStack() as opened:
        part = together(comm, lambda: _prepare(subject, step, keep_last, extra, opened), _WHERE)
        writing = _begin(comm, absolute, part.step)  # no rank writes before all see the folder
        if not background:
            with span(_WHERE, absolute):
                return _save(comm, writing, part)
        # The thread agrees with those of other ranks over a group of its own: the program's collectives go on.
        with folders.given_up_on_failure(writing, comm.rank):
            sizes = [portion.nbytes for portion in part.portions]
            copied = together(comm, lambda: SAVE_BUFFER.hold(sizes, part.values), _WHERE)
            ranks = HostRanks(comm, comm.group)
    start(comm, lambda: _save(ranks, writing, replace(part, values=copied)))
    return folders.step_folder(absolute, part.step)


@dataclass(frozen=True)
class _Part:
    """The part of a checkpoint that this rank is going to write. ``values``: the elements of each of ``portions``, read
    as they are asked for. ``specs``: of all tensors, whichever ranks write them. ``described``: the index's entries
    beside tensors. ``own``: those of this rank."""

    step: int
    specs: Sequence[TensorSpec]
    portions: Sequence[FlatRange]
    values: Iterable[Tensor]
    described: Mapping[str, Any]
    own: Mapping[str, Any]
    keep_last: int | None


@dataclass(frozen=True)
class _Written:
    """The report of a rank that has written ``nbytes`` to its file. ``header``: the checksum of the file's header."""

    file: str
    nbytes: int
    header: str
    tensors: Sequence[SavedTensor]
    own: Mapping[str, Any]


def _prepare(subject: Subject, step: int | None, keep_last: int | None, extra: Any, opened: ExitStack) -> _Part:
    data = subject.data
    crc32c(b"")  # its package may be missing
    subject.check_not_gathered(_WHERE)
    if step is not None and (isinstance(step, bool) or not isinstance(step, int) or not 0 <= step < 2**63):
        raise ValueError(f"step must be a count, got {step!r}")
    if keep_last is not None and (type(keep_last) is not int or keep_last < 1):
        raise ValueError(f"keep_last must be a number of checkpoints, 1 or more, got {keep_last!r}")
    if data is not None and not hasattr(data, "state_dict"):
        raise TypeError(f"data is a {type(data).__name__}, which has no state_dict()")
    names = Names(subject.model)
    model, optimizers = subject.contents(names, stored=True)
    parts = [model, *optimizers]
    own = {"random": read_random_states(subject.device), "data": None if data is None else data.state_dict()}
    described = {**subject.describe(names, optimizers), "extra": encode(extra, "extra")}
    counts = [count for saved in described["optimizers"] for count in saved.steps.values()]
    if step is None and not counts:
        raise ValueError("nothing here counts updates, so a checkpoint has no number: give save(..., step=)")
    holdings = [part.holdings for part in parts]
    portions = [_cut_for_rank(of_part) for of_part in holdings]
    return _Part(
        int(max(counts)) if step is None else step,
        [spec for part in parts for spec in part.specs],
        [portion for of_part in portions for portion in of_part if portion.length],
        opened.enter_context(closing(_values(parts, holdings, portions))),
        described,
        encode(own, "data"),
        keep_last,
    )


def _cut_for_rank(holdings: Sequence[Holding]) -> list[FlatRange]:
    """Choose what this rank writes of a part's holdings: of each a portion, empty where other ranks write all of it."""
    # Holdings that several ranks have alike are divided among them, by bytes.
    total: dict[Holders, int] = {}
    for holding in holdings:
        if holding.held_by.count > 1:
            total[holding.held_by] = total.get(holding.held_by, 0) + holding.nbytes
    begin = dict.fromkeys(total, 0)  # bytes of the holdings before, of the same ranks
    portions: list[FlatRange] = []
    for holding in holdings:
        spec, ranks, size = holding.spec, holding.held_by, holding.spec.dtype.itemsize
        if spec.dtype not in NAMES:
            raise CheckpointError(f"the {spec.label} has {spec.dtype}, which safetensors cannot hold")
        if ranks.count == 1:
            first, last = 0, holding.length
        elif ranks.alike:
            # Cut at whole elements, rounded up on both sides: what one rank leaves the next begins with.
            ends = (total[ranks] * number // ranks.count for number in (ranks.number, ranks.number + 1))
            first, last = (min(max(-(-(end - begin[ranks]) // size), 0), holding.length) for end in ends)
            begin[ranks] += holding.nbytes
        else:
            first, last = 0, holding.length if ranks.number == 0 else 0  # values may differ: the first rank's count
        portions.append(FlatRange(spec, holding.start + first, last - first))
    return portions


# -- writing -----------------------------------------------------------------------------------------------------------


def _begin(comm: Comm, path: Path, step: int) -> Path:
    """Collective. Make the folder to write in, and check that every rank sees it."""
    writing = folders.writing_folder(path, step)
    with folders.given_up_on_failure(writing, comm.rank):
        on_rank_0(comm, lambda: folders.begin(path, step), _WHERE)
        # Folders of one name on different disks would each get a part of the checkpoint.
        seen = gathered(comm, lambda: (writing.is_dir(), socket.gethostname()), _WHERE)
        blind = [f"rank {rank} on {host}" for rank, (there, host) in zip(comm.ranks, seen, strict=True) if not there]
        if blind:
            raise CheckpointError(
                f"{writing}, which rank {comm.ranks[0]} on {seen[0][1]} has made, is not there for "
                f"{', '.join(blind[:5])}: a checkpoint goes to one folder that all nodes share, not to one on each"
            )
    return writing


def _save(ranks: Ranks, writing: Path, part: _Part) -> Path:
    """Collective. Write this rank's file; when all ranks have written theirs, publish."""
    with folders.given_up_on_failure(writing, ranks.rank):
        # Rank 0 publishes after this gather: by then every file is synced to the disk.
        written = gathered(ranks, lambda: _write(writing, ranks.rank, part), _WHERE)
        return on_rank_0(ranks, lambda: _publish(writing, written, part), _WHERE)


def _write(writing: Path, rank: int, part: _Part) -> _Written:
    """Write this rank's file, synced to the disk."""
    file = writing / f"rank-{rank}.safetensors"
    try:
        header, tensors = write_file(file, part.portions, part.values)
        return _Written(file.name, file.stat().st_size, header, tensors, part.own)
    except (CheckpointError, FileNotFoundError) as error:
        if (removed := folders.gone(writing)) is None:
            raise
        raise removed from error


def _values(
    parts: Sequence[Contents], holdings: Sequence[Sequence[Holding]], portions: Sequence[Sequence[FlatRange]]
) -> Generator[Tensor]:
    """Give the values of each portion that is not empty."""
    for part, of_part, wanted in zip(parts, holdings, portions, strict=True):
        with closing(part.values()) as values:
            for holding, portion, flat in zip(of_part, wanted, values, strict=True):
                if portion.length:
                    yield flat.narrow(0, portion.start - holding.start, portion.length)


def _publish(writing: Path, written: Sequence[_Written], part: _Part) -> Path:
    """Check, on rank 0, that each element was written once; write the index, and give the folder its name."""
    try:
        tensors = merge(part.specs, (tensor for of_rank in written for tensor in of_rank.tensors))
    except ValueError as error:
        raise CheckpointError(f"{writing} was not written whole: {error}") from error
    files = {of_rank.file: of_rank.nbytes for of_rank in written}
    headers = {of_rank.file: of_rank.header for of_rank in written}
    ranks = [of_rank.own for of_rank in written]
    folder = folders.publish(writing, Index(part.step, tensors, files, headers, ranks=ranks, **part.described))
    if part.keep_last is not None:
        folders.keep_newest(folder.parent, part.step, part.keep_last)
    return folder
