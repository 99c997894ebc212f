"""The folder of checkpoints: ``step-N``, each published whole by one rename, and which of them is the newest.

::

    CHECKPOINTS/step-100/index.json  rank-0.safetensors  rank-1.safetensors
    CHECKPOINTS/.writing-step-200/   one that is being written, or that a job has died in
    CHECKPOINTS/.replaced-step-100/  one that a new one of the same step takes the place of
    CHECKPOINTS/.removing-step-50/   one that is being removed

Where a step is saved again, the old one is put aside by one rename, and the new one takes its place by a second. A job
may die between the two. So a reader takes ``.replaced-step-N`` for a ``step-N`` that is missing, and the next save puts
it back.
"""

from __future__ import annotations

import itertools
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ..errors import CheckpointError
from ..figures import size
from . import index
from .index import BUFFER, PARAMETER, Index, SavedTensor, decode, dtype_name, from_json, read_number, to_json
from .rank_file import Files, check_headers

_STEP = re.compile(r"(?:\.replaced-)?step-(0|[1-9][0-9]*)")
_UNFINISHED = re.compile(r"\.(writing|replaced|removing)-step-[0-9]+")
_WRITING, _REPLACED, _REMOVING = ".writing-", ".replaced-", ".removing-"


def step_folder(path: Path, step: int) -> Path:
    return path / f"step-{step}"


def step_of(folder: Path) -> int | None:
    """Read the step off the name of a checkpoint's folder; None for another folder."""
    match = _STEP.fullmatch(folder.name)
    return int(match[1]) if match else None


def checkpoints(path: Path) -> list[Path]:
    """List the checkpoints in ``path``, whole or not, the last save first. A ``.replaced-step-N`` counts where
    ``step-N`` is missing."""
    return [folder for _, _, folder in _numbered(path)]


def _numbered(path: Path) -> list[tuple[int, int, Path]]:
    """List save number, step and folder of each checkpoint, in the order of ``checkpoints``. Number 0: unreadable."""
    try:
        found = {at: step for at in path.iterdir() if (step := step_of(at)) is not None and at.is_dir()}
    except FileNotFoundError:
        return []
    except NotADirectoryError as error:
        raise CheckpointError(f"{path} is no folder: give that of a checkpoint, or one that holds some") from error
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror}") from error
    replaced = {at for at in found if _in_place(at) != at and _in_place(at) in found}
    there = [(read_number(at / index.NAME), step, at) for at, step in found.items() if at not in replaced]
    # One whose number cannot be read comes before all others, so that a load names it.
    return sorted(there, key=lambda one: (one[0] == 0, *one), reverse=True)


def _in_place(folder: Path) -> Path:
    """Give the path that a folder was put aside from."""
    return folder.with_name(folder.name.removeprefix(_REPLACED))


def candidates(path: Path) -> list[Path]:
    """List what to load where a user names ``path``, one after another: that itself, or the checkpoints in it."""
    try:
        if (path / index.NAME).exists():
            return [path]
    except OSError as error:  # the system refuses to look
        raise CheckpointError(f"{path}: {error.strerror}") from error
    if step_of(path) is not None and not path.exists() and (aside := path.with_name(_REPLACED + path.name)).is_dir():
        return [aside]  # a job died between the two renames of ``publish_folder``
    return checkpoints(path) or ([path] if step_of(path) is not None else [])


# -- writing -----------------------------------------------------------------------------------------------------------


def writing_folder(path: Path, step: int) -> Path:
    return path / f"{_WRITING}step-{step}"


def begin(path: Path, step: int) -> None:
    """Make the folder to write a checkpoint in, and clear away those that a job has died in."""
    try:
        path.mkdir(parents=True, exist_ok=True)
        left = [at for at in path.iterdir() if _UNFINISHED.fullmatch(at.name)]
        for unfinished in sorted(left, reverse=True):
            if unfinished.name.startswith(_REPLACED) and not os.path.lexists(_in_place(unfinished)):
                # It may be the only checkpoint of its step, so it stays, whether or not it can be read just now.
                unfinished.rename(_in_place(unfinished))
            else:
                shutil.rmtree(unfinished, ignore_errors=True)
        writing_folder(path, step).mkdir()
        there = step_folder(path, step)
        if os.path.lexists(there) and not _is_checkpoint(there):
            raise CheckpointError(f"{there} is there already, and is no checkpoint: remove it, or give another step")
    except OSError as error:
        raise CheckpointError(f"no checkpoint can be written to {path}: {error.strerror} ({error.filename})") from error


def _is_checkpoint(folder: Path) -> bool:
    """True for a checkpoint, whole or not. Nothing else is removed: no link, and no folder without an index."""
    return not folder.is_symlink() and (folder / index.NAME).exists()


def publish(writing: Path, written: Index) -> Path:
    """Number the index, write it, and give the folder its name: from then on the checkpoint is there, and whole."""
    folder = step_folder(writing.parent, written.step)
    number = max((number for number, _, _ in _numbered(writing.parent)), default=0) + 1
    try:
        write_synced(writing / index.NAME, to_json(replace(written, number=number)))
        publish_folder(writing, folder)
    except OSError as error:
        raise gone(writing) or CheckpointError(f"{folder} could not be published: {error.strerror}") from error
    return folder


def gone(writing: Path) -> CheckpointError | None:
    """Make the error of a folder that somebody has removed while a checkpoint was written in it; None: it is there."""
    if writing.is_dir():
        return None
    return CheckpointError(
        f"{writing} was removed while a checkpoint was written in it: another job saves into {writing.parent}, too. "
        "Give each job a folder of its own"
    )


def write_synced(path: Path, content: bytes) -> None:
    """Write a small file, which is on the disk when this returns."""
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def write_atomically(path: Path, content: str) -> None:
    """Write a file of which readers see the old content or all of the new, whenever this process dies."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        temporary.write_text(content)
        os.replace(temporary, path)  # atomic, as both are in one folder
    finally:
        temporary.unlink(missing_ok=True)


def publish_folder(writing: Path, folder: Path) -> None:
    """Give ``writing``, whose files are synced, the name ``folder``."""
    # At every instant the old one or the new one is there and whole; see above.
    _sync_folder(writing)  # the names of its files are on the disk before the folder has its name
    replaced = _rename_away(folder, _REPLACED) if folder.exists() else None
    try:
        # Between the two renames nothing has the name: ``candidates`` and ``checkpoints`` find the old one.
        writing.rename(folder)
    except OSError:
        if replaced is not None:
            replaced.rename(folder)
        raise
    _sync_folder(folder.parent)  # the rename is on the disk before the old one goes
    if replaced is not None:
        shutil.rmtree(replaced, ignore_errors=True)


@contextmanager
def given_up_on_failure(writing: Path, rank: int = 0) -> Iterator[None]:
    """Remove ``writing`` where something raises within, on rank 0 alone: all ranks see the same folder."""
    try:
        yield
    except BaseException:
        if rank == 0:
            shutil.rmtree(writing, ignore_errors=True)
        raise


def keep_newest(path: Path, step: int, count: int) -> None:
    """Keep the ``count`` whole checkpoints that were saved last. Remove those of lower steps saved before them."""
    there = sorted(_numbered(path), reverse=True)
    whole = (number for number, _, folder in there if _is_whole(folder))
    kept = list(itertools.islice(whole, count))
    for number, of, folder in there if len(kept) == count else ():
        # Those of higher steps are of a branch that somebody has left, and may want.
        if number < kept[-1] and of < step and _is_checkpoint(folder):
            remove(folder)


def remove(folder: Path) -> None:
    """Remove a checkpoint. Raises CheckpointError."""
    try:
        shutil.rmtree(_rename_away(folder, _REMOVING), ignore_errors=True)
    except OSError as error:
        raise CheckpointError(f"{folder} cannot be removed: {error.strerror}") from error


def _rename_away(folder: Path, prefix: str) -> Path:
    """Take its name from a checkpoint that has to go."""
    # One rename before ``rmtree``: under its name a checkpoint is never half there.
    aside = folder.with_name(prefix + _in_place(folder).name)
    shutil.rmtree(aside, ignore_errors=True)
    return folder.rename(aside)


def _sync_folder(path: Path) -> None:
    file = os.open(path, os.O_RDONLY)
    try:
        os.fsync(file)
    finally:
        os.close(file)


# -- reading -----------------------------------------------------------------------------------------------------------


def read_index(folder: Path) -> Index:
    """Read the index of a checkpoint, and check the lengths of its files. Raises CheckpointError."""
    path = folder / index.NAME
    try:
        read = from_json(path.read_bytes(), path)
        sizes = {name: (folder / name).stat().st_size for name in read.files}
    except FileNotFoundError as error:
        if Path(error.filename) == path:
            why = "holds no checkpoint" if folder.is_dir() else "is not there"
            raise CheckpointError(f"{folder} {why}: {path.name} is missing") from error
        raise CheckpointError(
            f"{error.filename} is missing. Every rank has to see the whole checkpoint: is its folder shared by all "
            "nodes?"
        ) from error
    except OSError as error:
        raise CheckpointError(f"{error.filename or path}: {error.strerror}") from error
    for name, nbytes in read.files.items():
        if (there := sizes[name]) != nbytes:
            what = "was cut off" if there < nbytes else "is another file"
            raise CheckpointError(f"{folder / name} has {there:,} bytes, and was written with {nbytes:,}: it {what}")
    return read


def latest(path: str | os.PathLike[str]) -> Path | None:
    """Find the newest whole checkpoint in ``path``, the one that was saved last; None: there is none.

    Whole as far as the index and the lengths of files show. Where the last is not, the one saved before it counts.
    """
    return next(filter(_is_whole, checkpoints(Path(path))), None)


def _is_whole(folder: Path) -> bool:
    with suppress(CheckpointError):
        read_index(folder)
        return True
    return False


def newest(path: Path) -> tuple[Path, Index, list[str]]:
    """Find the checkpoint that ``path`` is, or the newest whole one in it. Returns its folder, its index, and what is
    wrong with newer ones, as sentences. Raises CheckpointError where there is none."""
    problems: list[str] = []
    for folder in candidates(path):
        try:
            return folder, read_index(folder), problems
        except CheckpointError as error:
            problems.append(str(error))
    raise CheckpointError("; ".join(problems) or f"{path} holds no checkpoint")


@dataclass(frozen=True)
class Info:
    """The description of a checkpoint, for which no model is needed.

    Attributes:
        folder: where it is.
        step: of the training, as it was given to ``save``.
        extra: what the user had added.
        configuration, versions: the ranks and stages, and the packages, that saved it.
    """

    folder: Path
    step: int
    extra: Any
    configuration: Mapping[str, Any]
    versions: Mapping[str, str]


def info(path: str | os.PathLike[str]) -> Info:
    """Read the index of a checkpoint, or of the newest whole one in a folder of several. Not collective.

    Whole by the lengths of files: no checksum of a tensor is looked at. Raises CheckpointError where there
    is none.
    """
    folder, index, _ = newest(Path(path))
    return Info(folder, index.step, decode(index.extra), index.configuration, index.versions)


# -- a checkpoint as a table, and a check of every checksum ------------------------------------------------------------


def _describe(folder: Path, index: Index) -> str:
    """Write a line for each parameter and buffer, and the rest below."""
    rows = [["name", "shape", "dtype", "state", "updates", "size"], *_rows(index)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [f"{folder}: step {index.step}, {size(sum(index.files.values()))} in {len(index.files)} file(s)"]
    lines += [f"  {name}: {value}" for name, value in (*index.configuration.items(), *index.versions.items())]
    lines += [f"  saved: as number {index.number} in its folder", ""]
    for row in rows:
        cells = [value.ljust(width) for value, width in zip(row, widths, strict=True)]
        cells[-2:] = [value.rjust(width) for value, width in zip(row[-2:], widths[-2:], strict=True)]
        lines.append("  ".join(cells))
    lines += ["", *(f"{alias} is tied to {first}" for alias, first in index.aliases.items())]
    for number, optimizer in enumerate(index.optimizers):
        for place, group in enumerate(optimizer.groups):
            options = {name: decode(value) for name, value in group.items() if name != "params"}
            lines.append(f"optimizer {number}, group {place} of {len(group['params'])} parameters: {options}")
    lines += [f"scaler: {decode(state)}" for state in index.scalers]
    lines += [f"scheduler: {decode(state)}" for state in index.schedulers]
    lines += [] if index.extra is None else [f"extra: {decode(index.extra)}"]
    return "\n".join(lines)


def _rows(index: Index) -> Iterator[list[str]]:
    steps = index.steps()
    state: dict[str, list[SavedTensor]] = {}
    for (kind, name), tensor in index.tensors.items():
        if kind not in (PARAMETER, BUFFER):
            state.setdefault(name, []).append(tensor)
    for (kind, name), tensor in index.tensors.items():
        dtype = dtype_name(tensor.spec.dtype)
        if kind == PARAMETER:
            own = state.get(name, [])
            kept = ", ".join(f"{of.spec.kind} {dtype_name(of.spec.dtype)}" for of in own)
            updates = f"{abs(steps[name]):g}" if name in steps else ""
            nbytes = sum(of.spec.nbytes for of in (tensor, *own))
            yield [name, str(list(tensor.spec.shape)), dtype, kept, updates, size(nbytes)]
        elif kind == BUFFER:
            yield [name, str(list(tensor.spec.shape)), f"{dtype}, buffer", "", "", size(tensor.spec.nbytes)]


def inspect(path: Path, *, quick: bool) -> tuple[str, list[str]]:
    """Describe a checkpoint, or the newest whole one of several. Returns the text, and what is wrong, a line each.
    ``quick``: without reading the tensors. Raises CheckpointError where there is none."""
    folder, index, problems = newest(path)
    try:
        if not quick:
            check_headers(folder, index, 0, 1)
            with Files(folder) as files:
                problems += [str(error) for error in files.damage(index.tensors.values(), 0, 1)]
    except CheckpointError as error:
        problems.append(str(error))
    return _describe(folder, index), problems
